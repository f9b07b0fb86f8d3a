"""Profiles of a few steps of a run, as files that Perfetto and TensorBoard open.

On the CPU backends a profile is a timeline in the Chrome trace-event format: the steps, PyTorch's operations on the
host and, with XLA, what the compiled graphs did. On Neuron the runtime records itself; `neuron_profile_environment`
turns that on.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

from trn_dist.errors import ConfigError
from trn_dist.xla.world import World

_NOTHING = nullcontext()
_STEP_NAME = "ProfilerStep#{}"  # as PyTorch's own profiler names a step, so that tools which look for steps find them

Trace = dict[str, Any]
"""A Chrome trace: its `traceEvents` have `ts` and `dur` in microseconds."""


def parse_steps(text: str) -> range:
    """Returns the steps that `--profile_steps a:b` asks for: from step a up to, not including, step b.

    Args:
        text: `a:b`, two indices of steps over the whole run, of which 0 is the first.

    Raises:
        ConfigError: the text is not of that form, or there is no step in it.
    """
    match = re.fullmatch(r"([0-9]{1,15}):([0-9]{1,15})", text)
    if match is None:
        raise ConfigError(f"{text!r} is no range of steps: write FIRST:END, such as 10:20 for the steps 10 to 19")
    first, end = map(int, match.groups())
    if end <= first:
        raise ConfigError(
            f"{text!r} has no step in it, END is the step after the last: for step {first} alone write "
            f"{first}:{first + 1}"
        )
    return range(first, end)


def neuron_profile_environment(
    environment: Mapping[str, str], directory: Path, *, every_rank: bool = False
) -> dict[str, str]:
    """Returns the variables to set before the Neuron runtime starts, given those that are set already.

    The runtime then records from its start to its end: the variables cannot name steps. They ask for the system profile
    (the runtime's calls and when each NeuronCore ran), which takes no device memory. A variable that is set already is
    kept; so NEURON_RT_INSPECT_DEVICE_PROFILE=session adds what the engines of a NeuronCore did, at the price of device
    memory and of files that grow with the run. `neuron-explorer view -d DIRECTORY` opens the outcome. The names and
    values are those of the pages "Neuron Explorer Environment Variables" and "Capture profiles with Neuron Explorer" of
    the AWS Neuron documentation. Not run on hardware by this project's tests.

    Args:
        environment: of this process, with RANK as torchrun sets it.
        directory: where the run's profiles go; the runtime writes to its folder `neuron`.
        every_rank: see `StepProfile`.

    Returns:
        Nothing on a rank that is not profiled.

    Raises:
        ConfigError: a variable that is set already turns off what is asked for.
    """
    if not every_rank and int(environment.get("RANK", "0")) != 0:
        return {}
    # Every choice is spelled out: the documentation and the runtime's header disagree on what is on by default.
    wanted = {
        "NEURON_RT_INSPECT_ENABLE": "1",
        "NEURON_RT_INSPECT_SYSTEM_PROFILE": "1",
        "NEURON_RT_INSPECT_DEVICE_PROFILE": "0",
        "NEURON_RT_INSPECT_OUTPUT_DIR": str(directory / "neuron"),
    }
    found = {**wanted, **environment}
    if found["NEURON_RT_INSPECT_ENABLE"] != "1":
        raise ConfigError(
            f"a profile was asked for, but the environment sets NEURON_RT_INSPECT_ENABLE="
            f"{found['NEURON_RT_INSPECT_ENABLE']}: unset it, or do not ask for a profile"
        )
    if found["NEURON_RT_INSPECT_SYSTEM_PROFILE"] == found["NEURON_RT_INSPECT_DEVICE_PROFILE"] == "0":
        raise ConfigError(
            "a profile was asked for, but the environment sets NEURON_RT_INSPECT_SYSTEM_PROFILE=0, and "
            "NEURON_RT_INSPECT_DEVICE_PROFILE is off too: unset the first, or set the second to session"
        )
    return {name: value for name, value in wanted.items() if name not in environment}


class StepProfile:
    """Records some steps of a training loop. A context manager around the loop; `step` goes around each step.

    What it writes to the directory, once the last of the steps is done, or when the loop ends before that or in an
    error; each file is written beside its place and renamed:

    - `rank_00000.steps_000010-000020.trace.json.gz`: a timeline for https://ui.perfetto.dev or chrome://tracing. On
      `cpu` and `cpu-xla` it holds the steps and PyTorch's operations on the host, on `cpu-xla` also how torch_xla
      traced, and when each operation of the compiled graphs ran; on `neuron` only when the steps were, as Unix time.
    - `plugins/profile/rank_00000.steps_000010-000020/HOST.xplane.pb`, on `cpu-xla`: XLA's own record, for TensorBoard
      with the package xprof.
    - `neuron/`, on `neuron`: what the runtime records by itself, see `neuron_profile_environment`.

    Rank 0 alone is profiled, unless asked otherwise: data-parallel ranks do the same work, and where one waits for the
    others is in its own timeline. While a rank writes its profile the others wait for it at their next reduction.

    Outside of the steps nothing is recorded and nothing waited for. Around them the device is waited for, so that the
    profile has the work of these steps and of no other; what is traced and compiled stays the same.

    Args:
        world: from `trn_dist.xla.init`.
        directory: where the profiles go; it is made where it is missing.
        steps: indices of the steps to profile, from `parse_steps`; none of them with `range(0)`.
        every_rank: profile every rank, each to files of its own.
        environment: of this process.

    Raises:
        ConfigError: at the start of the loop: the directory cannot be made, or the device is Neuron and the runtime was
            started without the variables of `neuron_profile_environment`.
        OSError: a profile could not be written. Where another error ends the loop, that one keeps its way and gets a
            note.
    """

    def __init__(
        self,
        world: World,
        directory: Path,
        steps: range,
        *,
        every_rank: bool = False,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self.world, self.directory, self.environment = world, directory, environment
        self.steps = steps if every_rank or world.rank == 0 else range(0)
        self._capture: _Capture | None = None
        self._recorded = range(0)

    def __enter__(self) -> Self:
        if not self.steps:
            return self
        if self.world.kind == "neuron" and self.environment.get("NEURON_RT_INSPECT_ENABLE") != "1":
            raise ConfigError(
                "a profile was asked for, but the Neuron runtime was started without NEURON_RT_INSPECT_ENABLE=1: "
                "set what neuron_profile_environment() returns before trn_dist.xla.init()"
            )
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot write profiles to {self.directory} ({error.strerror}): choose another directory"
            ) from error
        return self

    def step(self, step: int) -> AbstractContextManager[None]:
        """Returns the context in which the loop takes this step.

        Args:
            step: index of the step over the whole run.
        """
        return self._record(step) if step in self.steps else _NOTHING

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._capture is not None:
            try:
                # After an error the device may never be done.
                self._finish(self._capture, wait=error is None)
            except (OSError, RuntimeError) as failure:
                if error is None:
                    raise
                error.add_note(f"the profile could not be written either: {failure}")
        elif self.steps and not self._recorded and error is None:
            asked = f"{self.steps.start}:{self.steps.stop}"
            self.world.print(f"no profile was written: the run took none of the steps {asked}")

    @contextmanager
    def _record(self, step: int) -> Iterator[None]:
        capture = self._capture or self._start(step)
        self._recorded = range(self._recorded.start, step + 1)
        with capture.mark(step):
            yield
        if step == self.steps[-1]:
            self._finish(capture, wait=True)

    def _start(self, step: int) -> _Capture:
        self._wait_for_device()
        kinds: dict[str, type[_Capture]] = {"cpu": _HostCapture, "cpu-xla": _XlaCapture, "neuron": _MarksCapture}
        prefix = f".rank_{self.world.rank:05d}."
        staging = TemporaryDirectory(prefix=prefix, suffix=".partial", dir=self.directory)
        try:
            self._capture = kinds[self.world.kind](staging)
        except BaseException:  # such as another profiler that is on
            staging.cleanup()
            raise
        self._recorded = range(step, step)
        return self._capture

    def _wait_for_device(self) -> None:
        if self.world.kind != "cpu":
            import torch_xla.core.xla_model as xm

            # Waits for what was started; unlike a sync it does not end the graph that the loop may be building.
            xm.wait_device_ops()

    def _finish(self, capture: _Capture, *, wait: bool) -> None:
        self._capture = None
        with capture.staging as staging:
            if wait:
                self._wait_for_device()
            written = self._keep(Path(staging), capture.stop())
        self.world.print(self._summary(written))

    def _keep(self, staging: Path, trace: Trace) -> Path:
        """Writes the files in a directory beside them, then moves them to their places."""
        first, end = self._recorded.start, self._recorded.stop
        name = f"rank_{self.world.rank:05d}.steps_{first:06d}-{end:06d}"
        written = staging / f"{name}.trace.json.gz"
        written.write_bytes(gzip.compress(json.dumps(trace).encode(), compresslevel=3))
        for record in staging.glob("**/*.xplane.pb"):
            # Where TensorBoard looks for it; a profile has one host here, whose name the file has from torch_xla.
            place = self.directory / "plugins" / "profile" / name
            place.mkdir(parents=True, exist_ok=True)
            record.replace(place / record.name)
        return written.replace(self.directory / written.name)

    def _summary(self, written: Path) -> str:
        first, last = self._recorded.start, self._recorded.stop - 1
        lines = [
            f"profile of steps {first} to {last}: {written}",
            "  open it at https://ui.perfetto.dev (it is not uploaded) or chrome://tracing",
        ]
        if self.world.kind == "cpu-xla":
            lines += [f"  XLA's own record: pip install xprof, then tensorboard --logdir {self.directory}"]
        if self.world.kind == "neuron":
            recorded = self.environment.get("NEURON_RT_INSPECT_OUTPUT_DIR", "output")
            lines[1:] = [
                f"  it says when the steps were; the runtime's record of the whole run is complete when the run has "
                f"ended: neuron-explorer view -d {recorded}"
            ]
        return "\n".join(lines)


class _Capture(ABC):
    """A profile that is being recorded, and the directory for its files until they are whole."""

    def __init__(self, staging: TemporaryDirectory[str]) -> None:
        self.staging = staging

    @abstractmethod
    def mark(self, step: int) -> AbstractContextManager[object]:
        """Returns the context that is this step in the profile."""

    @abstractmethod
    def stop(self) -> Trace:
        """Ends the recording and returns it."""


class _MarksCapture(_Capture):
    """Notes when the steps were, and nothing else: PyTorch's profiler must not run beside the Neuron runtime's own."""

    def __init__(self, staging: TemporaryDirectory[str]) -> None:
        super().__init__(staging)
        self._events: list[Trace] = []

    @contextmanager
    def mark(self, step: int) -> Iterator[None]:
        begin = time.time_ns()
        try:
            yield
        finally:
            self._events.append(
                {
                    "ph": "X",
                    "cat": "user_annotation",
                    "name": _STEP_NAME.format(step),
                    "pid": os.getpid(),
                    "tid": threading.get_native_id(),
                    "ts": begin / 1e3,
                    "dur": (time.time_ns() - begin) / 1e3,
                    # The runtime's own events carry Unix nanoseconds, more than a double holds of `ts`.
                    "args": {"host": socket.gethostname(), "begin_unix_ns": begin},
                }
            )

    def stop(self) -> Trace:
        return {"displayTimeUnit": "ms", "traceEvents": self._events}


class _HostCapture(_Capture):
    """PyTorch's profiler: the operations that the training thread and its backward passes call."""

    def __init__(self, staging: TemporaryDirectory[str]) -> None:
        super().__init__(staging)
        # PyTorch's CUDA builds print an error for each profile on a host without a GPU; what the profiler has to say
        # besides is of no use here, since a trace that is not whole is found below.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        from torch.profiler import ProfilerActivity, profile

        self._profiler = profile(activities=[ProfilerActivity.CPU])
        self._profiler.start()

    def mark(self, step: int) -> AbstractContextManager[object]:
        from torch.profiler import record_function

        return record_function(_STEP_NAME.format(step))

    def stop(self) -> Trace:
        self._profiler.stop()
        exported = Path(self.staging.name) / "host.json"
        self._profiler.export_chrome_trace(str(exported))
        try:
            trace: Trace = json.loads(exported.read_bytes())
        except ValueError as error:
            raise OSError(f"{exported} is not whole: is the disk full?") from error
        trace.pop("traceName", None)  # the path of a file that is about to go
        return trace


class _XlaCapture(_HostCapture):
    """XLA's profiler beside PyTorch's: torch_xla's own work on the host, and the compiled graphs on XLA's threads."""

    def __init__(self, staging: TemporaryDirectory[str]) -> None:
        from torch_xla.debug import profiler as xla_profiler

        before = time.time_ns()
        xla_profiler.start_trace(Path(staging.name) / "xla")
        self._begin_ns = (before + time.time_ns()) // 2  # its clock starts within the call
        super().__init__(staging)

    def stop(self) -> Trace:
        from torch_xla.debug import profiler as xla_profiler

        try:
            trace = super().stop()
        finally:
            xla_profiler.stop_trace()  # or the process could not record another profile
        shift = (self._begin_ns - int(trace.get("baseTimeNanoseconds", 0))) / 1e3
        for path in Path(self.staging.name).glob("xla/**/*.trace.json.gz"):
            trace["traceEvents"] += _moved(json.loads(gzip.decompress(path.read_bytes())), shift)
        return trace


def _moved(trace: Trace, shift: float) -> Iterator[Trace]:
    """Yields XLA's events, `shift` microseconds later, as threads of this process."""
    for event in trace["traceEvents"]:
        # It ends with an empty event, and marks each task of a thread pool by events of a picosecond.
        if not event or event.get("dur", 1) < 1e-3 or event["name"] in ("process_name", "process_sort_index"):
            continue
        if event["name"] == "thread_name":
            event["args"]["name"] = f"XLA: {event['args']['name']}"
        if "ts" in event:
            event["ts"] += shift
        yield event | {"pid": os.getpid()}
