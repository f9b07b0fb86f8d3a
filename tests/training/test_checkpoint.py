import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trn_dist.errors import CheckpointError
from trn_dist.training import CheckpointStore
from trn_dist.training import checkpoint as checkpoint_module

TENSORS = {
    "model": {"a.weight": torch.arange(12.0).view(3, 4), "b": torch.ones(2, dtype=torch.bfloat16)},
    "optimizer": {"exp_avg.a.weight": torch.full((3, 4), 0.25)},
}
STATE = {"step": 3, "identity": {"seed": 1, "name": "ä"}}


def save(store, step=3, mark=3):
    return store.save(step, TENSORS, {**STATE, "step": mark})


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def test_comes_back_bit_equal(store):
    save(store)
    loaded = store.load(3)
    assert loaded.step == 3
    assert loaded.state == STATE
    for group, members in TENSORS.items():
        assert loaded.tensors[group].keys() == members.keys()
        for name, tensor in members.items():
            assert loaded.tensors[group][name].dtype == tensor.dtype
            assert torch.equal(loaded.tensors[group][name], tensor)


def test_what_is_on_disk(store):
    path = save(store)
    assert path.name == "step_00000003"
    assert sorted(p.name for p in path.iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    assert (store.directory / "latest").read_text() == "step_00000003\n"
    assert torch.equal(load_file(path / "model.safetensors")["b"], TENSORS["model"]["b"])


def test_nothing_is_there_yet(store):
    assert store.steps() == []
    assert store.newest() is None


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [4, 5]), (-1, [1, 2, 3, 4, 5])])
def test_keeps_the_newest(tmp_path, keep, left):
    store = CheckpointStore(tmp_path, keep=keep)
    for step in range(1, 6):
        save(store, step)
    assert store.steps() == left
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", *(f"step_{step:08d}" for step in left)]


def test_keeps_the_best_beside_the_newest(tmp_path):
    store = CheckpointStore(tmp_path, keep=1, keep_best=True)
    assert store.best() is None
    for step, score in ((1, 5.0), (2, 3.0), (3, float("nan")), (4, 3.5), (5, None), (6, 4.0)):
        store.save(step, TENSORS, {"step": step}, score)
    assert store.steps() == [2, 6]
    assert (store.best(), store.score(2), store.score(6)) == (2, 3.0, 4.0)
    store.save(7, TENSORS, {"step": 7}, 3.0)  # as good: the newer one
    assert store.steps() == [7]
    (store.path(7) / "manifest.json").write_text("{")
    store.save(8, TENSORS, {"step": 8}, 9.0)
    assert store.best() == 8


def test_what_a_run_left_behind_when_it_went_back_is_removed(tmp_path):
    """The newest is damaged, the run goes on from the one before it: a resume must not come back to the old branch."""
    store = CheckpointStore(tmp_path, keep=2)
    for step in (10, 20):
        save(store, step)
    truncate(store.path(20) / "model.safetensors")
    again = CheckpointStore(tmp_path, keep=1)
    assert again.newest().step == 10
    save(again, 15)
    assert again.steps() == [15]
    assert again.newest().step == 15
    assert (tmp_path / "latest").read_text() == "step_00000015\n"


def test_keep_must_make_sense(tmp_path):
    with pytest.raises(ValueError, match="keep must be at least 1, or -1 to keep all, not 0"):
        CheckpointStore(tmp_path, keep=0)


def test_the_same_step_again_replaces_it(store):
    save(store, 2)
    save(store, 3)
    save(store, 3, mark="again")
    assert store.load(3).state["step"] == "again"
    assert store.steps() == [2, 3]


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def remove(path):
    path.unlink()


FILES = ["model.safetensors", "optimizer.safetensors", "state.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("damage", "says"), [(flip_a_byte, "sha256"), (truncate, "bytes instead of"), (remove, "is missing")]
)
def test_damage_is_found_and_the_one_before_is_used(store, caplog, name, damage, says):
    save(store, 2)
    path = save(store, 3)
    damage(path / name)
    with pytest.raises(CheckpointError, match=rf"{name}.*{says}"):
        store.load(3)
    with caplog.at_level(logging.WARNING):
        assert store.newest().step == 2
    assert "passing over the checkpoint of step 3" in caplog.text
    assert name in caplog.text


def test_all_damaged_is_an_error_and_not_a_fresh_start(store):
    for step in (2, 3):
        truncate(save(store, step) / "model.safetensors")
    with pytest.raises(CheckpointError, match="no checkpoint in .* can be used: .*step_00000003.*step_00000002"):
        store.newest()


def test_a_manifest_that_is_no_json_names_the_file(store):
    (save(store) / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"manifest\.json is not JSON"):
        store.load(3)


def test_another_format_is_refused(store):
    path = save(store) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(CheckpointError, match="checkpoint format 99; this version of trn_dist reads 1"):
        store.load(3)


def test_a_missing_step_is_named(store):
    with pytest.raises(CheckpointError, match=r"step_00000007.manifest\.json is missing"):
        store.load(7)


class Killed(BaseException):
    """Stands for the death of the process: nothing catches it, nothing is cleaned up after it."""


CHANGES_THE_DISK = [
    (os, "fsync"),
    (shutil, "rmtree"),
    (checkpoint_module, "save_file"),
    (checkpoint_module, "_write_json"),
    (Path, "mkdir"),
    (Path, "rename"),
    (Path, "replace"),
    (Path, "unlink"),
]


@contextmanager
def failing_at(call, failure):
    """Makes the call with that index, among all that change the disk, raise; yields the calls made."""
    made = []

    def failing(real, name):
        def wrapped(*args, **kwargs):
            made.append(name)
            if len(made) == call + 1:
                raise failure
            return real(*args, **kwargs)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in CHANGES_THE_DISK:
            patch.setattr(owner, name, failing(getattr(owner, name), name))
        yield made


@pytest.mark.parametrize("failure", [Killed(), OSError(28, "No space left on device")], ids=["killed", "disk full"])
@pytest.mark.parametrize(
    "before", [[2], [2, 3], [3]], ids=["new step", "same step again", "the only checkpoint's step again"]
)
def test_wherever_a_save_ends_a_good_checkpoint_is_left(tmp_path, failure, before):
    for call in itertools.count():
        store = CheckpointStore(tmp_path / str(call), keep=len(before))
        for step in before:
            save(store, step, mark="old")
        with failing_at(call, failure) as made, suppress(Killed, CheckpointError, OSError):
            save(store, 3, mark="new")
        newest = store.newest()
        assert newest.step in (2, 3)
        assert newest.state["step"] in ("old", "new")
        latest = store.directory / "latest"
        # Never one that is not whole; none while the only one is being replaced.
        assert latest.exists() or before == [3]
        if latest.exists():
            assert store.load(int(latest.read_text().strip().removeprefix("step_"))).step >= 2
        # What was left unfinished does not stand in the way of the next save.
        save(store, 4)
        assert store.newest().step == 4
        assert not list(store.directory.glob(".*"))
        if len(made) <= call:
            assert newest.state["step"] == "new"
            break
    assert call > 15


def test_an_error_names_the_step_and_says_that_nothing_is_lost(store):
    save(store, 2)
    with (
        failing_at(3, OSError(28, "No space left on device")),
        pytest.raises(
            CheckpointError, match=r"of step 3 could not be written .*No space left.*Earlier checkpoints are"
        ),
    ):
        save(store, 3)
    assert store.steps() == [2]


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
import torch
from trn_dist.errors import CheckpointError
from trn_dist.training import CheckpointStore

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit then fails as on a full disk
store = CheckpointStore(Path(sys.argv[1]), keep=1)
store.save(1, {"model": {"w": torch.ones(1000)}}, {})
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
store.save_in_background(2, {"model": {"w": torch.ones(100_000)}}, {})
try:
    store.wait()
except CheckpointError as error:
    print(error)
assert store.newest().step == 1
assert sorted(path.name for path in store.directory.iterdir()) == ["latest", "step_00000001"]
"""


def test_a_write_that_the_kernel_refuses_leaves_the_one_before(tmp_path):
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the checkpoint of step 2 could not be written" in done.stdout
    assert "File too large" in done.stdout
