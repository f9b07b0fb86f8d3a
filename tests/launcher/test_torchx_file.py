from pathlib import Path

import pytest
import torchx.util.io

import trn_dist.components
from trn_dist.launcher.torchx_file import get_file_contents


def test_modules_of_this_package():
    assert get_file_contents("trn_dist.components") == Path(trn_dist.components.__file__).read_text()
    assert get_file_contents("trn_dist.errors").startswith('"""The errors')


@pytest.mark.parametrize(
    "name", ["trn_dist.nothing", "trn_dist.errors.nothing", "trn_distant.components", "nothing.py"]
)
def test_anything_else_is_not_there(name):
    assert get_file_contents(name) is None


@pytest.mark.parametrize("path", ["torchx/components/utils.py", "torchx/specs/api.py", "torchx/no/such/file.txt"])
def test_torchxs_own_files_are_found_as_torchx_finds_them(path):
    assert get_file_contents(path) == torchx.util.io._get_file_contents(path)


def test_a_file_of_the_user_is_still_read_by_torchx(tmp_path):
    (tmp_path / "mine.py").write_text("x = 1")
    assert torchx.util.io.read_conf_file(str(tmp_path / "mine.py")) == "x = 1"
    with pytest.raises(FileNotFoundError, match=r"other\.py does not exist and is not a builtin"):
        torchx.util.io.read_conf_file(str(tmp_path / "other.py"))
