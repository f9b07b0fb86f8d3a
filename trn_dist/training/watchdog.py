"""The watchdog: a step that hangs ends the job, with the stacks of every worker, so that it is started again.

A collective that waits for a rank that will never come waits silently; the accelerators are paid for meanwhile.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Self, TextIO

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from trn_dist.training.phases import PhaseClock
from trn_dist.training.stragglers import Pace, StragglerWatch
from trn_dist.xla import World

# EX_TEMPFAIL of sysexits.h: the same command may well succeed when it is run again.
HANG_EXIT_CODE = os.EX_TEMPFAIL

_HANGING = "hanging"


class Watchdog:
    """Watches the steps of a loop from a thread of its own. A context manager around the loop.

    When a step takes longer than `factor` times the median of the last steps, and longer than `minimum`, the ranks tell
    each other through the job's store; each writes the stacks of all its threads to stderr and to
    `<directory>/rank_<rank>.txt`, and ends with exit code 75, which the launcher may retry. The loop resumes from its
    last checkpoint. No limit holds before five steps are done (they compile) nor while a checkpoint is waited for.

    The ranks also leave their own times a step in the store, and rank 0 prints which is slower than the others, and in
    which phase. Its own time is what a rank does not spend waiting in a reduction; on Neuron, where reductions are in
    the graph, only what the host does is seen.

    Args:
        world: the job's.
        clock: of the loop, such as `RunLog.clock`.
        directory: for the stacks.
        minimum: seconds that a step may always take; more than the longest wait for a checkpoint of another rank.
        factor: how many times the median of the last steps is too long.
        every: seconds between two looks.
        stream: for the stacks and the stragglers.
        leave: ends the process, whatever its main thread is caught in.
    """

    def __init__(
        self,
        world: World,
        clock: PhaseClock,
        directory: Path,
        *,
        minimum: float = 600.0,
        factor: float = 10.0,
        every: float = 5.0,
        stream: TextIO = sys.stderr,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self.world, self.clock, self.directory = world, clock, directory
        self.minimum, self.factor, self.every = minimum, factor, every
        self.stream, self.leave = stream, leave
        self._host = socket.gethostname()
        self._stragglers = StragglerWatch()
        self._before = (0, {"input": 0.0, "step": 0.0}, 0.0)  # steps, seconds by phase, seconds waited
        self._end = threading.Event()
        self._store: Store | None = None
        self._thread = threading.Thread(target=self._watch, name="trn_dist-watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._store = _open_store(self.world)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(self.every):
            reason = self.look()
            if reason is not None:
                self._end_job(reason)
                return

    def look(self) -> str | None:
        """Looks once.

        Returns:
            Why the job has to end, or None.
        """
        overdue = self.clock.overdue(self.factor, self.minimum)
        if overdue is not None:
            taken, limit = overdue
            return self._announce(
                f"rank {self.world.rank} on {self._host}: step {self.clock.steps + 1} of this run takes {taken:.0f} s "
                f"so far, in {self.clock.phase}; the limit is {limit:.0f} s"
            )
        if self._store is None:
            return None
        try:
            if self._store.check([_HANGING]):
                return self._store.get(_HANGING).decode()
            self._exchange_paces(self._store)
        except RuntimeError as error:  # DistError and its kinds: the process that serves the store is gone
            print(f"watchdog: the job's store does not answer any more ({error})", file=self.stream, flush=True)
            self._store = None
        return None

    def _announce(self, reason: str) -> str:
        if self._store is not None:
            try:
                self._store.set(_HANGING, reason)
            except RuntimeError:
                self._store = None  # nobody to tell
        return reason

    def _exchange_paces(self, store: Store) -> None:
        """Leaves this rank's pace in the store; rank 0 reads all of them."""
        pace = self._pace()
        if pace is None:
            return
        store.set(f"pace/{self.world.rank}", pace.to_json())
        names = [f"pace/{rank}" for rank in range(self.world.size)]
        if self.world.rank == 0 and store.check(names):
            texts = store.multi_get(names)  # type: ignore[attr-defined]
            for straggler in self._stragglers.look([Pace.from_json(text) for text in texts]):
                print(f"straggler: {straggler}", file=self.stream, flush=True)

    def _pace(self) -> Pace | None:
        """Returns this rank's times a step since the last look, or None where no step ended since."""
        steps, seconds, waited = self.clock.steps, dict(self.clock.seconds), self.world.waited_seconds
        old_steps, old_seconds, old_waited = self._before
        taken = steps - old_steps
        if taken == 0:
            return None
        self._before = (steps, {"input": seconds["input"], "step": seconds["step"]}, waited)
        own = {
            "data": max(0.0, seconds["input"] - old_seconds["input"]) / taken,
            "compute": max(0.0, seconds["step"] - old_seconds["step"] - (waited - old_waited)) / taken,
        }
        return Pace(self.world.rank, self._host, steps, own)

    def _end_job(self, reason: str) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"rank_{self.world.rank:05d}.txt"
        with path.open("a", encoding="utf-8") as file:
            for stream in (file, self.stream):
                print(
                    f"watchdog: {reason}. The stacks of rank {self.world.rank} on {self._host}, in "
                    f"{self.clock.phase} after {self.clock.steps} steps (also in {path}):",
                    file=stream,
                    flush=True,
                )
                faulthandler.dump_traceback(stream, all_threads=True)
        # The launcher ends all workers as soon as one is gone: the others need time to see the key and to write theirs.
        time.sleep(2 * self.every)
        self.leave(HANG_EXIT_CODE)


def _open_store(world: World, environment: Mapping[str, str] = os.environ) -> Store | None:
    """Returns a connection of its own to the job's store, which the main thread's collectives do not hold up."""
    if world.size == 1 or "MASTER_ADDR" not in environment:
        return None
    store = TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=30),
        wait_for_workers=False,
    )
    # A restart by the same agent finds the same store: what was said before it must not be heard again.
    restart = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"trn_dist/watchdog/{restart}", store)
