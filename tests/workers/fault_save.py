"""Trains and saves after every step, in a child per request, and kills children while they save.

Reads requests, one JSON object a line, and answers each with a line. PyTorch is imported once; every child is a fork of
this process as it was then, without threads and without a process group.

- `{"directory": D, "keep": N}`: trains in D to the end, from the newest checkpoint there; D is an absolute path.
- the same with `"save": S, "operation": K`: the child is killed before the K-th file operation (from 0) of its S-th
  save (from 1).
- the same with `"save": S, "delay": T`: the child is killed T seconds after its S-th save began.

The answer is `{"returncode": R, "saves": [{"operations": [...], "seconds": T}, ...]}`; a child that was killed reports
no saves. The child appends to D/losses.txt: `from STEP`, a line `STEP LOSS` for each step, and `weights SHA256`.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import trn_dist.xla as xla
from trn_dist.training import AdamW, CheckpointStore, Precision, TrainingState, TrainStep, linear_warmup_linear_decay

STEPS = 8
WIDTH = 384
FILE_OPERATIONS = ("open", "os.", "shutil.", "pathlib.")


class Saves:
    """Follows what the checkpoint's writer does to files, and ends the process where it was asked to.

    As an audit hook it sees every file operation before it happens. What happens off the main thread is the writer's,
    and each save has a thread of its own.
    """

    def __init__(self, request: dict[str, Any], tell_begun: int) -> None:
        self.directory = Path(request["directory"])
        self.save, self.operation, self.tell_begun = request.get("save"), request.get("operation"), tell_begun
        self.writers: list[threading.Thread] = []
        self.operations: list[list[str]] = []
        self.times: list[tuple[float, float]] = []

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        thread = threading.current_thread()
        if thread is threading.main_thread() or not event.startswith(FILE_OPERATIONS) or self._elsewhere(arguments):
            return
        now = time.monotonic()
        if thread not in self.writers[-1:]:
            self.writers.append(thread)
            self.operations.append([])
            self.times.append((now, now))
            if len(self.writers) == self.save:
                os.write(self.tell_begun, b"!")
        if (len(self.writers), len(self.operations[-1])) == (self.save, self.operation):
            self.operation = None  # os.kill is an event, too
            os.kill(os.getpid(), signal.SIGKILL)
        name = Path(arguments[0]).name if arguments and isinstance(arguments[0], str | os.PathLike) else ""
        self.operations[-1].append(f"{event} {name}".strip())
        self.times[-1] = (self.times[-1][0], now)

    def _elsewhere(self, arguments: tuple[object, ...]) -> bool:
        """Tells what an import reads, for one. Names within a removal are relative to an open folder."""
        path = arguments[0] if arguments else None
        if not isinstance(path, str | os.PathLike) or not Path(path).is_absolute():
            return False
        return not Path(path).is_relative_to(self.directory)

    def report(self) -> list[dict[str, Any]]:
        pairs = zip(self.operations, self.times, strict=True)
        return [{"operations": operations, "seconds": end - begin} for operations, (begin, end) in pairs]


def train(directory: Path, keep: int) -> None:
    """Trains in bf16 with stochastic rounding and dropout: a resume must draw the same random numbers."""
    with xla.init("cpu") as world:
        torch.manual_seed(0)
        precision = Precision.named("bf16")
        layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(WIDTH, WIDTH)]
        model = torch.nn.Sequential(*layers).to(precision.weights)
        optimizer = AdamW(model.named_parameters(), stochastic_rounding=precision.stochastic_rounding)
        state = TrainingState(world, model, optimizer, identity={"width": WIDTH})
        store = CheckpointStore(directory / "checkpoints", keep=keep)
        state.resume(store)
        train_step = TrainStep(
            world,
            lambda batch: (model(batch["x"]) - batch["x"].sin()).float().square().mean(),
            optimizer,
            linear_warmup_linear_decay(1e-2, 2, 2 * STEPS),
            precision=precision,
        )
        with (directory / "losses.txt").open("a", buffering=1) as losses:
            losses.write(f"from {state.step}\n")
            for step in range(state.step, STEPS):
                x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step)).to(precision.weights)
                result = train_step(step, [{"x": x}])
                state.step += 1
                losses.write(f"{step} {float(result.loss).hex()}\n")
                state.save(store)
            store.wait()
            losses.write(f"weights {state.fingerprint()}\n")


def be_child(request: dict[str, Any], tell_begun: int, tell_report: int) -> None:
    """Does what was requested and ends the process."""
    code = 1
    try:
        os.dup2(2, 1)  # gloo prints; the answers have stdout to themselves
        saves = Saves(request, tell_begun)
        sys.addaudithook(saves)
        train(Path(request["directory"]), request["keep"])
        if "delay" in request:
            signal.pause()  # the saves were faster than usual, and the kill is still to come
        os.write(tell_report, json.dumps(saves.report()).encode())
        code = 0
    except BaseException:  # noqa: BLE001 - a fork must not return into the parent's loop
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    begun, tell_begun = os.pipe()
    report, tell_report = os.pipe()
    child = os.fork()
    if child == 0:
        be_child(request, tell_begun, tell_report)
    os.close(tell_begun)
    os.close(tell_report)
    with os.fdopen(begun, "rb") as begun_file, os.fdopen(report, "rb") as report_file:
        if "delay" in request and begun_file.read(1):
            time.sleep(request["delay"])
            os.kill(child, signal.SIGKILL)
        saves = report_file.read()
    _, status = os.waitpid(child, 0)
    return {"returncode": os.waitstatus_to_exitcode(status), "saves": json.loads(saves or b"[]")}


if __name__ == "__main__":
    for line in sys.stdin:
        assert threading.active_count() == 1, "a fork takes along the calling thread alone"
        print(json.dumps(answer(json.loads(line))), flush=True)
