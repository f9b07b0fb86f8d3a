import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trn_dist.data.commands import register
from trn_dist.data.instances import InstanceConfig
from trn_dist.data.prepare import PrepareConfig
from trn_dist.errors import DataError


def run(*argv):
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers(required=True))
    args = parser.parse_args(["data", *map(str, argv)])
    return args.handler(args)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("A red bird. It sings.\nIt flies.\n\nA blue house.\nIt stands. It is old.\n")
    return path


def test_prepare_and_info(text, tmp_path, capsys):
    out = tmp_path / "out"
    settings = ("--processes", 1, "--vocab_size", 100, "--duplicate_factor", 2, "--num_shards", 2, "--no-lowercase")
    assert run("prepare", "--input", text, "--out", out, *settings) == 0
    summary = capsys.readouterr().out
    assert re.match(r"2 documents, 6 sentences and \d+ tokens made \d+ instances with .* in 2 shards;", summary)
    assert summary.endswith(f"written to {out}; look at it with: trn-dist data info {out}\n")

    assert run("info", out) == 0
    printed = capsys.readouterr().out
    for part in (" in 2 shards (", "128 tokens, at most 20 predictions", "2 documents, 6 sentences", "fingerprint "):
        assert part in printed
    recorded = dict(line.split() for line in printed.splitlines() if line.startswith("  ") and len(line.split()) == 2)
    assert recorded["lowercase"] == "False"
    assert recorded["duplicate_factor"] == "2"
    sample = printed[printed.index("sample 0 of corpus_training_0000.hdf5:") :].splitlines()
    assert sample[1].startswith("  text     [CLS] ")
    assert sample[1].count("[SEP]") == 2
    assert sample[3] in ("  second   from another document", "  second   the next in the document")


def test_info_of_shards_that_came_without_vocabulary(text, tmp_path, capsys):
    run("prepare", "--input", text, "--out", tmp_path / "out", "--processes", 1, "--vocab_size", 100)
    for name in ("manifest.json", "vocab.txt"):
        (tmp_path / "out" / name).unlink()
    capsys.readouterr()
    assert run("info", tmp_path / "out") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "128 tokens, at most 20 predictions" in lines[0]
    with pytest.raises(DataError, match="is not a directory"):
        run("info", tmp_path / "missing")


def config_of(monkeypatch, *argv):
    """Returns the configuration that a command line stands for, without running it."""
    configs = []

    def record(config):
        configs.append(config)
        raise DataError("stop here")

    monkeypatch.setattr("trn_dist.data.prepare.prepare", record)
    with pytest.raises(DataError, match="stop here"):
        run("prepare", *argv)
    return configs[0]


def test_defaults_are_those_of_the_library(monkeypatch):
    config = config_of(monkeypatch, "--input", "a", "--out", "b")
    assert config == PrepareConfig(inputs=(Path("a"),), out=Path("b"))


def test_every_flag(monkeypatch):
    flags = "--input a b --input c --out o --format line --vocab v --vocab_size 500 --no-lowercase --seq_len 64"
    flags += " --max_predictions 9 --duplicate_factor 3 --masked_lm_prob 0.2 --short_seq_prob 0.3 --seed 4"
    flags += " --num_shards 6 --processes 7 --overwrite"
    assert config_of(monkeypatch, *flags.split()) == PrepareConfig(
        inputs=(Path("a"), Path("b"), Path("c")),
        out=Path("o"),
        vocab=Path("v"),
        vocab_size=500,
        lowercase=False,
        text_format="line",
        duplicate_factor=3,
        num_shards=6,
        processes=7,
        overwrite=True,
        instances=InstanceConfig(seq_len=64, max_predictions=9, masked_lm_prob=0.2, short_seq_prob=0.3, seed=4),
    )


def test_missing_package_names_the_extra():
    code = (
        "import argparse, sys; from trn_dist.data.commands import register; sys.modules['h5py'] = None;"
        "parser = argparse.ArgumentParser(); register(parser.add_subparsers());"
        "args = parser.parse_args(['data', 'info', '.']); args.handler(args)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.endswith(
        "MissingDependencyError: the package 'h5py' is not installed: pip install 'trn-dist[data]'\n"
    )


def test_registering_loads_no_heavy_package():
    code = (
        "import argparse, sys; from trn_dist.data.commands import register;"
        "register(argparse.ArgumentParser().add_subparsers());"
        "print(sorted({'h5py', 'numpy', 'tokenizers', 'torch', 'tqdm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
