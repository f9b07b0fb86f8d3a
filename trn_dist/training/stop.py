"""Stopping on request: what a scheduler's SIGTERM asks for before it takes the machine away."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self

SIGTERM_EXIT_CODE = 128 + signal.SIGTERM


class StopRequest:
    """Notes a SIGTERM instead of dying of it, so that the run can save before it leaves. A context manager.

    The state of a run is the same on every rank, so rank 0 alone has to act on a request: it saves at its next step
    boundary. The others go on meanwhile, since a step takes all of them, and leave when rank 0 does.

    Attributes:
        requested: whether a SIGTERM has come.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: Callable[[int, FrameType | None], object] | int | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # the only one that Python tells of signals
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.requested = True
