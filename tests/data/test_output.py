from pathlib import Path

import pytest

from trn_dist.data.output import staged
from trn_dist.errors import ConfigError


def write(out, inputs=(), *, overwrite=False, content="new"):
    with staged(out, inputs, overwrite=overwrite) as (output, work):
        (work / "scratch").write_text("x")
        (output / "manifest.json").write_text(content)


def fail_to_write(out, error):
    with staged(out, (), overwrite=True) as (output, _):
        (output / "manifest.json").write_text("new")
        raise error


def test_output_appears_at_the_end_with_the_permissions_of_any_directory(tmp_path):
    out, plain = tmp_path / "deep" / "out", tmp_path / "plain"
    with staged(out, (), overwrite=False) as (output, _):
        (output / "file").write_text("x")
        assert not out.exists()
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert [path.name for path in out.iterdir()] == ["file"]
    plain.mkdir()
    assert out.stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_the_old_output_and_nothing_else(tmp_path, error):
    out = tmp_path / "out"
    write(out, content="old")
    with pytest.raises(error):
        fail_to_write(out, error)
    assert (out / "manifest.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_old_output_comes_back_when_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    out = tmp_path / "out"
    write(out, content="old")
    replace = Path.replace

    def fail_for_output(path, target):
        if path.name == "output":
            raise OSError("no")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", fail_for_output)
    with pytest.raises(OSError, match="no"):
        write(out, overwrite=True)
    assert (out / "manifest.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_only_a_data_set_is_overwritten_and_only_when_asked(tmp_path):
    out = tmp_path / "out"
    write(out, content="old")
    with pytest.raises(ConfigError, match="out is not empty: choose another, or pass --overwrite to replace it"):
        write(out)
    write(out, overwrite=True)
    assert (out / "manifest.json").read_text() == "new"
    (out / "manifest.json").rename(out / "thesis")
    with pytest.raises(ConfigError, match=r"out has no manifest\.json, so it is no data set to overwrite"):
        write(out, overwrite=True)
    with pytest.raises(ConfigError, match="thesis is a file: choose a directory"):
        write(out / "thesis", overwrite=True)
    assert (out / "thesis").read_text() == "new"


def test_output_and_inputs_may_not_overlap(tmp_path):
    for out, path in ((tmp_path / "text" / "out", tmp_path / "text"), (tmp_path, tmp_path / "text.txt")):
        with pytest.raises(ConfigError, match="overlap: choose another output directory"):
            write(out, (path,), overwrite=True)


def test_output_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"cannot write to .*file \(File exists\): choose another directory"):
        write(tmp_path / "file" / "out")
