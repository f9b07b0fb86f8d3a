"""Where the wall time of a run goes, kept as it passes."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

Phase = Literal["input", "step", "checkpoint", "log", "other", "end"]

_HISTORY = 64  # steps whose durations are remembered
_NO_PART_OF_A_STEP = ("checkpoint", "other", "end")
_KNOWN = 5  # steps after which their median says something


class PhaseClock:
    """Adds up the time spent in each phase of a training loop. One thread enters phases, others may read.

    Attributes:
        seconds: by phase, what has passed in it, the time since the last change excepted.
        steps: number of steps that are done.
        durations: seconds of the last steps, without checkpoints and other work.
    """

    def __init__(self) -> None:
        self.seconds: dict[Phase, float] = dict.fromkeys(get_args(Phase), 0.0)
        self.steps = 0
        self.durations: deque[float] = deque(maxlen=_HISTORY)
        self.phase: Phase = "step"
        self.begin = self._since = self._step_begin = self.now()

    @staticmethod
    def now() -> float:
        """Returns seconds on a clock that never goes back."""
        return time.perf_counter()

    def enter(self, phase: Phase) -> None:
        """Ends the phase that is on, and begins another."""
        now = self.now()
        self.seconds[self.phase] += now - self._since
        if self.phase in _NO_PART_OF_A_STEP:
            self._step_begin += now - self._since
        self.phase, self._since = phase, now

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Spends its body in a phase, then goes back to the one before."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def step_done(self) -> float:
        """Counts a step.

        Returns:
            When it was done.
        """
        now = self.now()
        self.steps += 1
        self.durations.append(now - self._step_begin)
        self._step_begin = now
        return now

    def overdue(self, factor: float, minimum: float) -> tuple[float, float] | None:
        """Tells whether the step that is on takes far longer than those before it.

        Args:
            factor: how many times the median of the last steps is too long.
            minimum: seconds that are never too long.

        Returns:
            Seconds that the step takes so far and the limit it has passed; None while all is well, in a checkpoint or
            other work, and before five steps are done, the first of which compile.
        """
        if self.steps < _KNOWN or self.phase in _NO_PART_OF_A_STEP:
            return None
        limit = max(minimum, factor * statistics.median(self.durations))
        taken = self.now() - self._step_begin
        return (taken, limit) if taken > limit else None
