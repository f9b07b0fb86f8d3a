"""Where the wall time of a training went, over all its runs: what was useful, and what was not.

A training that is stopped, killed or preempted goes on in another run. The ledger is a file beside the checkpoints that
each run adds to, so that the account covers them all; work that was done and then lost is known once the next run
starts from a checkpoint before it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trn_dist.errors import DataError

CATEGORIES = ("start", "rendezvous", "compile", "input", "step", "checkpoint", "log", "other", "lost", "down")


@dataclass
class Run:
    """One run of a training.

    Attributes:
        started: when its job was launched, seconds since 1970.
        ended: when it was last heard of.
        first_step: index of its first step.
        steps: how many of its steps still count.
        seconds: by category, where its time went.
    """

    started: float
    ended: float
    first_step: int
    steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def lose_steps_from(self, step: int) -> None:
        """Moves the time of `step` and later ones to `lost`; they are done again by a later run."""
        kept = min(max(0, step - self.first_step), self.steps)
        if kept == self.steps:
            return
        share = (self.steps - kept) / self.steps
        for category in ("input", "step", "checkpoint", "log", "other"):
            lost = share * self.seconds.get(category, 0.0)
            self.seconds[category] = self.seconds.get(category, 0.0) - lost
            self.seconds["lost"] = self.seconds.get("lost", 0.0) + lost
        self.steps = kept


class Ledger:
    """The account of a training's runs, in a JSON file that is always whole. Rank 0 keeps it.

    Args:
        path: of the file.
        first_step: index of this run's first step.
        started: when this run was launched, seconds since 1970.

    Raises:
        DataError: there is a file, and it is no ledger.
    """

    def __init__(self, path: Path, *, first_step: int, started: float) -> None:
        self.path = path
        self.runs = _read(path)
        for run in self.runs:
            run.lose_steps_from(first_step)
        self.runs.append(Run(started=started, ended=started, first_step=first_step))

    def update(self, *, steps: int, seconds: Mapping[str, float], now: float | None = None) -> None:
        """Writes what this run has come to.

        Args:
            steps: number of steps it has taken.
            seconds: by category (`start`, `rendezvous`, `compile`, `input`, `step`, `checkpoint`, `log`, `other`).
            now: seconds since 1970.
        """
        run = self.runs[-1]
        run.steps, run.seconds, run.ended = steps, dict(seconds), time.time() if now is None else now
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(f".{self.path.name}.unfinished")
        beside.write_text(json.dumps({"runs": [asdict(run) for run in self.runs]}, indent=1) + "\n", encoding="utf-8")
        beside.replace(self.path)

    def totals(self) -> dict[str, float]:
        """Returns the seconds by category over all runs; `down` is the time between two runs."""
        totals = {category: sum(run.seconds.get(category, 0.0) for run in self.runs) for category in CATEGORIES}
        ends = [run.ended for run in self.runs]
        totals["down"] = sum(max(0.0, b.started - end) for end, b in zip(ends[:-1], self.runs[1:], strict=True))
        return totals

    def time_to_train(self) -> float:
        """Returns the seconds from the launch of the first run to the last news of this one."""
        return self.runs[-1].ended - self.runs[0].started


def goodput(seconds: Mapping[str, float]) -> float:
    """Returns the share of the wall time that went into steps that count, 0 to 1."""
    total = sum(seconds.values())
    return seconds["step"] / total if total else 0.0


def launched(environment: Mapping[str, str] = os.environ) -> tuple[float, float]:
    """Returns when this process's job was launched (seconds since 1970), and how long the agent took to start it.

    Under torchelastic the job begins with the agent, which is this process's parent and starts it once the rendezvous
    is complete. After a restart by the same agent, the restart is the beginning. Without `/proc` the beginning is now.
    """
    own = _age("self")
    waited = 0.0
    if "TORCHELASTIC_RUN_ID" in environment and environment.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        waited = max(0.0, _age(str(os.getppid())) - own)
    return time.time() - own - waited, waited


def _age(process: str) -> float:
    """Seconds since a process started (proc(5): field 22 of `stat`, in clock ticks since boot)."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        uptime = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    except OSError:
        return 0.0
    ticks = int(stat.rpartition(")")[2].split()[19])  # the name in parentheses may hold anything
    return max(0.0, uptime - ticks / os.sysconf("SC_CLK_TCK"))


def _read(path: Path) -> list[Run]:
    if not path.exists():
        return []
    try:
        return [Run(**run) for run in json.loads(path.read_text(encoding="utf-8"))["runs"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no account of runs ({error}): move it away, and a new one is begun") from error
