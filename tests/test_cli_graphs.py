"""`trn-dist graphs lock|check`, on a real training command."""

import json
import sys
from pathlib import Path

import pytest

from trn_dist.cli import main

RECIPE = Path(__file__).parent / "workers" / "lock_recipe.py"


def run(verb, file, *arguments, launcher=()):
    recipe = [sys.executable, *launcher, str(RECIPE), *map(str, arguments)]
    return main(["graphs", verb, "--file", str(file), "--", *recipe])


@pytest.fixture(scope="module")
def lock(tmp_path_factory):
    file = tmp_path_factory.mktemp("lock") / "graphs.lock"
    assert run("lock", file, "cpu-xla", 16, 0.1, 1) == 0
    return file


def test_a_lock_is_the_same_wherever_it_is_made(lock, tmp_path, monkeypatch):
    """Another seed, learning rate, folder, number of threads, hash seed; with metadata in the graphs."""
    monkeypatch.chdir(tmp_path)
    settings = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "7", "XLA_IR_DEBUG": "1", "XLA_HLO_DEBUG": "1"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert run("lock", "again.lock", "cpu-xla", 16, 0.1, 2) == 0
    assert Path("again.lock").read_bytes() == lock.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.lock"]


def test_what_a_lock_says(lock, capsys):
    content = json.loads(lock.read_text())
    assert content["key"]["device"] == "cpu-xla"
    assert content["key"]["world_size"] == 1
    assert content["key"]["versions"]["torch_xla"].startswith("2.9")
    # The start, the zeroed buckets, a micro-batch and the update; the step's graphs are executed many times.
    assert 3 <= len(content["graphs"]) <= 4
    micro_batch = next(graph for graph in content["graphs"] if "dot f32[4,16]" in graph["operations"])
    assert micro_batch["inputs"]["f32[4,8]"] == 1
    assert run("check", lock, "cpu-xla", 16, 0.1, 3) == 0
    assert "as locked: " in capsys.readouterr().out


def test_drift_is_shown_operation_by_operation(lock, capsys):
    assert run("check", lock, "cpu-xla", 24, 0.1, 1) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("graph ") and "has changed: " in line for line in lines)
    assert "  - 2 dot f32[4,16]" in lines
    assert "  + 2 dot f32[4,24]" in lines
    assert lines[-1].endswith("if that is meant, lock them again")
    assert run("check", lock, "cpu-xla", 16, 0.0, 1) == 1
    assert any("rng-bit-generator" in line for line in capsys.readouterr().out.splitlines())


@pytest.mark.slow
def test_two_workers_leave_one_record_and_are_not_compared_with_one(lock, tmp_path, capsys):
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv_backend", "c10d"]
    launcher += ["--rdzv_endpoint", "localhost:0"]
    assert run("lock", tmp_path / "two.lock", "cpu-xla", 16, 0.1, 1, launcher=launcher) == 0
    assert run("check", tmp_path / "two.lock", "cpu-xla", 16, 0.1, 1, launcher=launcher) == 0
    assert run("check", lock, "cpu-xla", 16, 0.1, 1, launcher=launcher) == 78
    assert "locked under other conditions (world size 1 -> 2)" in capsys.readouterr().err


def test_a_command_that_fails_locks_nothing(tmp_path, capsys):
    assert run("lock", tmp_path / "no.lock", "cpu-xla", 16, 0.1, 1, 5) == 5
    assert "failed with exit code 5" in capsys.readouterr().out
    assert not (tmp_path / "no.lock").exists()


def test_what_cannot_be_locked_says_why(tmp_path, capsys, monkeypatch):
    file = tmp_path / "no.lock"
    assert run("lock", file, "cpu", 16, 0.1, 1) == 78
    assert "the device 'cpu' makes no graphs; choose cpu-xla or neuron" in capsys.readouterr().err
    assert main(["graphs", "lock", "--file", str(file)]) == 78
    assert "nothing to run: write the training command after --" in capsys.readouterr().err
    assert main(["graphs", "lock", "--file", str(file), "--", str(tmp_path / "none")]) == 78
    assert "none cannot be run: No such file or directory" in capsys.readouterr().err
    assert run("check", file, "cpu-xla", 16, 0.1, 1) == 78
    assert "make it with trn-dist graphs lock" in capsys.readouterr().err
    monkeypatch.setenv("XLA_SAVE_TENSORS_FILE", str(tmp_path / "mine"))
    assert run("lock", file, "cpu-xla", 16, 0.1, 1) != 0
    assert not file.exists()
