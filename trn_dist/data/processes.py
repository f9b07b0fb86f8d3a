"""An ordered map over processes that reads its tasks only as fast as they are done."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import TypeVar

from trn_dist.errors import TrnDistError

Task = TypeVar("Task")
Result = TypeVar("Result")


class Workers:
    """Worker processes, as a context manager; one "process" is the calling one.

    Args:
        processes: their number.
    """

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self._pool = _start_pool(processes) if processes > 1 else None

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def map(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Yields `function(task)` for each task, in order. At most two tasks a process wait or are done unread.

        Args:
            function: that can be pickled, as a module's function or a partial of one.
            tasks: that can be pickled.

        Raises:
            TrnDistError: a worker process was killed.
        """
        if self._pool is None:
            yield from map(function, tasks)
            return
        pending: deque[Future[Result]] = deque()
        try:
            for task in tasks:
                pending.append(self._pool.submit(function, task))
                if len(pending) > 2 * self.processes:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise TrnDistError(
                f"one of {self.processes} worker processes was killed, most often for want of memory: "
                "try again with fewer processes"
            ) from error


def _start_pool(processes: int) -> ProcessPoolExecutor:
    # A forked child would inherit the locks of the tokenizer's threads, held or not.
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker)
    # Children inherit the blocked signal: the parent alone answers to Ctrl-C. The pool starts its processes as tasks
    # come in, so it gets one for each now, before other threads of this process could take the signal.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for _ in range(processes):
            pool.submit(os.getpid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pool


def _start_worker() -> None:
    os.environ["RAYON_NUM_THREADS"] = "1"  # of the tokenizer: the processes are the parallelism
