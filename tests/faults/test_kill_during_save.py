"""A run that is killed with SIGKILL while a checkpoint is being written goes on as if it had not been.

The points are drawn at random over the write; TRN_DIST_TEST_SEED draws others.
"""

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trn_dist.training import CheckpointStore

WORKER = Path(__file__).parents[1] / "workers" / "fault_save.py"
SEED = int(os.environ.get("TRN_DIST_TEST_SEED", "0"))
POINTS = {1: 13, 2: 12}  # by the number of checkpoints to keep; in each of the two tests

Ask = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Life:
    """What one process wrote down: the step that it began with and the loss of each of its steps, as hex."""

    start: int
    losses: dict[int, str]


@dataclass(frozen=True)
class History:
    """The lives of a run, one after the other, and the weights at its end."""

    lives: list[Life]
    weights: str | None

    @classmethod
    def read(cls, directory: Path) -> "History":
        lives, weights = [], None
        for line in (directory / "losses.txt").read_text().splitlines():
            key, value = line.split()
            if key == "from":
                lives.append(Life(int(value), {}))
            elif key == "weights":
                weights = value
            else:
                lives[-1].losses[int(key)] = value
        return cls(lives, weights)


@dataclass(frozen=True)
class Reference:
    """The uninterrupted run, and of each of its saves the file operations and the duration."""

    life: Life
    weights: str | None
    saves: list[dict[str, Any]]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Sends a request to the worker, which forks a child for it, and returns the answer."""
    with subprocess.Popen(
        [sys.executable, str(WORKER)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as worker:
        to_worker, from_worker = worker.stdin, worker.stdout
        assert to_worker is not None
        assert from_worker is not None

        def send(directory: Path, **request: object) -> dict[str, Any]:
            to_worker.write(json.dumps({"directory": str(directory), **request}) + "\n")
            to_worker.flush()
            answer: dict[str, Any] = json.loads(from_worker.readline())
            return answer

        yield send
        os.killpg(worker.pid, signal.SIGKILL)  # with a child that hangs, should there be one


@pytest.fixture(scope="module", params=POINTS, ids=["keep 1", "keep 2"])
def keep(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def reference(ask: Ask, keep: int, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    directory = tmp_path_factory.mktemp("reference")
    answer = ask(directory, keep=keep)
    assert answer["returncode"] == 0
    history = History.read(directory)
    assert len(history.lives[0].losses) == len(answer["saves"])
    return Reference(history.lives[0], history.weights, answer["saves"])


def verify_what_is_left(store: CheckpointStore) -> None:
    """Every checkpoint that is listed must verify, and so must the one that `latest` names, if there is one."""
    for step in store.steps():
        assert store.load(step).step == step
    latest = store.directory / "latest"
    if latest.exists():
        store.load(int(latest.read_text().strip().removeprefix("step_")))


def kill_and_resume(ask: Ask, reference: Reference, directory: Path, *, keep: int, **kill: float) -> set[str]:
    """Returns what the kill left in the folder of checkpoints."""
    directory.mkdir()
    killed = ask(directory, keep=keep, **kill)
    assert killed["returncode"] == -9, "the process was to be killed"
    store = CheckpointStore(directory / "checkpoints", keep=keep)
    left = {path.name for path in store.directory.iterdir()} if store.directory.exists() else set()
    verify_what_is_left(store)
    assert ask(directory, keep=keep)["returncode"] == 0, "the run does not resume"
    history = History.read(directory)
    before, after = history.lives
    # At most the save that was cut short is lost: the one before it was complete when it began.
    assert after.start >= kill["save"] - 1
    assert after.start <= len(before.losses)
    assert list(after.losses) == list(range(after.start, len(reference.life.losses)))
    for life in history.lives:
        assert life.losses == {step: reference.life.losses[step] for step in life.losses}
    assert history.weights == reference.weights
    verify_what_is_left(store)
    assert store.steps()[-keep:] == list(range(len(reference.saves) + 1 - keep, len(reference.saves) + 1))
    return left


def test_a_run_killed_at_any_file_operation_of_a_save_goes_on_bit_for_bit(
    ask: Ask, reference: Reference, keep: int, tmp_path: Path
) -> None:
    """Kills before one of the operations that open, make, rename, list or remove something."""
    chance = random.Random(f"{SEED} operation {keep}")
    for number in range(POINTS[keep]):
        save = chance.randrange(len(reference.saves)) + 1
        operations = reference.saves[save - 1]["operations"]
        operation = chance.randrange(len(operations))
        point = (
            f"seed {SEED}, keep {keep}, point {number}: save {save}, before operation {operation} of {len(operations)} "
            f"({operations[operation]})"
        )
        print(point)
        try:
            kill_and_resume(ask, reference, tmp_path / str(number), keep=keep, save=save, operation=operation)
        except Exception as error:
            raise AssertionError(f"killed at {point}: {error}") from error
        shutil.rmtree(tmp_path / str(number))


def test_a_run_killed_at_any_moment_of_a_save_goes_on_bit_for_bit(
    ask: Ask, reference: Reference, keep: int, tmp_path: Path
) -> None:
    """Kills some time after a save began, so also within a write or a flush to the disk."""
    chance = random.Random(f"{SEED} moment {keep}")
    duration = statistics.median(save["seconds"] for save in reference.saves)
    unfinished = 0
    for number in range(POINTS[keep]):
        # Not the last save: the run could be over before the kill.
        save, share = chance.randrange(1, len(reference.saves)), chance.random()
        point = (
            f"seed {SEED}, keep {keep}, point {number}: save {save}, after {share:.3f} of its usual {duration:.4f} s"
        )
        print(point)
        try:
            left = kill_and_resume(ask, reference, tmp_path / str(number), keep=keep, save=save, delay=share * duration)
        except Exception as error:
            raise AssertionError(f"killed at {point}: {error}") from error
        unfinished += any(name.startswith(".step_") for name in left)
        shutil.rmtree(tmp_path / str(number))
    assert unfinished, "no kill came while the files of a checkpoint were being written"


def test_a_removal_that_is_cut_short_is_finished_by_a_later_save(
    ask: Ask, reference: Reference, keep: int, tmp_path: Path
) -> None:
    operations = reference.saves[3]["operations"]
    kill_and_resume(
        ask, reference, tmp_path / "run", keep=keep, save=4, operation=operations.index("os.remove state.json")
    )
    kept = [f"step_{step:08d}" for step in range(len(reference.saves) + 1 - keep, len(reference.saves) + 1)]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["latest", *kept]
