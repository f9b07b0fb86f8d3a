"""The graph guard: after the warm-up a step that makes a new graph is an error that says why, or a warning."""

from __future__ import annotations

import inspect
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic, Literal, ParamSpec, TypeVar, cast, get_args

from trn_dist.errors import RecompileError
from trn_dist.xla import recompile
from trn_dist.xla.compile_log import Compilation
from trn_dist.xla.graphs import count_graphs
from trn_dist.xla.recompile import Change
from trn_dist.xla.world import EndOfTrace, World

P = ParamSpec("P")
R = TypeVar("R")

Action = Literal["raise", "warn", "allow"]
Inputs = tuple[tuple[str, str, str], ...]

_HOST_READ = "aten::_local_scalar_dense"

# Steps after the warm-up that are compared operation by operation while they are traced, before anything is compiled.
# The comparison makes tracing about a fourth slower, so it ends; later graphs are found by torch_xla's counters.
_COMPARED = 8


class RecompileWarning(UserWarning):
    """A step made a graph that no step before it had made."""


class GraphGuard(Generic[P, R]):
    """Calls a step function, and raises when it makes a new graph after its warm-up.

    A new graph means a compilation: seconds on a CPU, minutes to hours for a large model on Neuron, on every worker.
    The function's graphs are its own: what was pending before it is executed first, what it leaves pending after it.

    The first steps after the warm-up, and every later step whose inputs have a shape or dtype that no step had, are
    compared with the known graphs while they are traced, so they raise before anything is compiled. In other steps a
    new graph is found when it has been compiled; the step is then traced once more, without executing or reducing
    anything, to find the operation. (What differs only after the first sync or, on CPU XLA, the reduction is not found
    by that. A number that the step function counts itself is one further by then.)

    On a device that compiles nothing the function is called and that is all. Calls must not be nested, and no other
    thread may compute on the device during one.

    Args:
        world: the job's.
        function: a step; it must take the same way through the program every time.
        warm_up: calls that may make new graphs; at least 2, since the first call's trace is not like all others.
        action: `raise`; `warn` with a `RecompileWarning`, which knows inputs, host reads and the place of the sync but
            not the operation, since tracing the step again would change what the step changes; or `allow`.

    Raises:
        ValueError: a warm-up of less than two calls, or an unknown action.
    """

    def __init__(self, world: World, function: Callable[P, R], *, warm_up: int = 2, action: Action = "raise") -> None:
        if warm_up < 2:
            raise ValueError(f"the warm-up must be at least two calls, not {warm_up}")
        if action not in get_args(Action):
            raise ValueError(f"action must be one of {', '.join(get_args(Action))}, not {action!r}")
        self.world, self.function, self.warm_up, self.action = world, function, warm_up, action
        self.calls = 0
        self._arguments = inspect.signature(function)
        self._known_inputs: list[dict[str, str]] = []
        self._reads = 0  # values that a step of the warm-up read from the device
        self._total: int | None = None  # graphs compiled by this process when the last call ended
        if world.device.type == "xla":
            import torch_xla

            def step(*args: P.args, **kwargs: P.kwargs) -> object:
                try:
                    return function(*args, **kwargs)
                except EndOfTrace:
                    raise
                except RuntimeError as error:
                    if not recompile.is_from_detector(error):
                        raise
                    return _change_at(error)

            # Both are the same function to torch_xla's detector, the one with and the other without room for more.
            self._recorded = torch_xla.compile(step, name="step", max_different_graphs=1_000_000)
            self._compared = torch_xla.compile(step, name="step", max_different_graphs=1)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function with the arguments it takes.

        Raises:
            RecompileError: a new graph after the warm-up, with the operation, the shapes, the place and the likely
                cause; also where one was compiled between the calls, outside of `expect_graphs`.
        """
        if self.world.device.type != "xla" or self.action == "allow":
            return self.function(*args, **kwargs)
        self._check_between_calls()
        self.calls += 1
        signature = recompile.signature_of(self._arguments.bind(*args, **kwargs).arguments)
        inputs = recompile.changed_inputs(self._known_inputs, signature)
        begin, counters = count_graphs(self.world).compiled, _counters()
        if self.calls <= self.warm_up:
            if signature not in self._known_inputs:
                self._known_inputs.append(signature)
            result = self._recorded(*args, **kwargs)
            self._reads = _increase(counters).get(_HOST_READ, 0)
        elif self.action == "raise" and (inputs or self.calls <= self.warm_up + _COMPARED):
            result = self._compared(*args, **kwargs)
            if isinstance(result, Change):
                self._report(result, inputs, counters, compiled=0)
        else:
            self.world.sync()
            result = self.function(*args, **kwargs)
            self.world.sync()
        self._total = count_graphs(self.world).compiled
        compiled = self._total - begin
        if compiled and self.calls > self.warm_up:
            self._report(self._trace_again(*args, **kwargs), inputs, counters, compiled=compiled)
        if inputs and self.calls > self.warm_up:
            self._known_inputs.append(signature)
        return cast("R", result)

    @contextmanager
    def expect_graphs(self) -> Iterator[None]:
        """Allows new graphs in its body, which is not a call of the step: an evaluation, an export."""
        self._check_between_calls()
        try:
            yield
        finally:
            self._total = None
            self.world.compile_log.news()

    def _check_between_calls(self) -> None:
        """Looks at what was compiled since the last call; such as a log line that computes with a growing list."""
        if self._total is None or self.calls <= self.warm_up:
            if self.calls < self.warm_up:
                self.world.compile_log.news()
            return
        total = count_graphs(self.world).compiled
        compiled, self._total = total - self._total, total
        if compiled:
            news = self.world.compile_log.news()
            frames = recompile.users_frames(news[-1].frames) if news else ()
            place = f", asked for at {frames[0]}" if frames else ""
            self._act(
                f"{compiled} new graph{'s were' if compiled > 1 else ' was'} compiled between call {self.calls} of the "
                f"step and the next{place}. Every worker waits while one compiles: compute on values that "
                "World.host_views has read, or, if it is meant (an evaluation), do it in GraphGuard.expect_graphs()"
            )

    def _report(self, change: Change, inputs: Inputs, counters: Mapping[str, int], *, compiled: int) -> None:
        """Completes what is known about a new graph and raises it or warns of it."""
        increase = _increase(counters)
        change = replace(
            change,
            inputs=inputs,
            host_reads=max(0, increase.get(_HOST_READ, 0) - self._reads),
            sized_by_values=recompile.sized_by_values(increase),
        )
        done = f"{compiled} compiled" if compiled else "not compiled yet"
        self._act(
            f"call {self.calls} of the step made a new graph, {done} (the warm-up ended with call {self.warm_up})\n"
            f"{change}"
        )

    def _act(self, message: str) -> None:
        if self.action == "raise":
            raise RecompileError(message)
        warnings.warn(RecompileWarning(message), stacklevel=3)

    def _trace_again(self, *args: P.args, **kwargs: P.kwargs) -> Change:
        """Traces the step up to its first execution or reduction, to learn which operation made the new graph."""
        place = _change_from(self.world.compile_log.news())
        if self.action == "warn":
            return place
        with self.world.tracing_only():
            try:
                found = self._compared(*args, **kwargs)
            except (EndOfTrace, RuntimeError):
                # The end of the trace, or the detector's complaint that the step ended early: no difference until here.
                return place
        return found if isinstance(found, Change) else place


def _change_at(error: RuntimeError) -> Change:
    """Notes what the detector found, and lets go of the half-made graph so that nobody compiles it."""
    before, after = recompile.parse_detector(error)
    frames = recompile.frames_of(error.__traceback__)
    traceback.clear_frames(error.__traceback__)
    return Change(before=before, after=after, frames=frames)


def _change_from(compilations: list[Compilation]) -> Change:
    """Takes what torch_xla's own report says about the last graph: where it was asked for."""
    frames = recompile.users_frames(compilations[-1].frames) if compilations else ()
    return Change(frames=frames)


def _counters() -> dict[str, int]:
    """Returns torch_xla's counters of operations that run on the host: fallbacks, and reads of single values."""
    import torch_xla.debug.metrics as xla_metrics

    names = [name for name in xla_metrics.counter_names() if name.startswith("aten::")]  # type: ignore[no-untyped-call]
    return {name: int(xla_metrics.counter_value(name) or 0) for name in names}  # type: ignore[no-untyped-call]


def _increase(before: Mapping[str, int]) -> dict[str, int]:
    now = _counters()
    return {name: count - before.get(name, 0) for name, count in now.items() if count != before.get(name, 0)}
