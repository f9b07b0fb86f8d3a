"""Which rank keeps the others waiting, and in what."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

SLOW = 1.25  # times the median of the other ranks
_STEPS = 20  # steps after which a slow rank is reported; then again each time the number has doubled


@dataclass(frozen=True)
class Pace:
    """How a rank went through its last steps.

    Attributes:
        rank: index over the job.
        host: its host's name.
        steps: steps it has taken in all.
        seconds: of its own a step, by phase, the wait for the other ranks left out.
    """

    rank: int
    host: str
    steps: int
    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        """Seconds of its own a step."""
        return sum(self.seconds.values())

    def to_json(self) -> str:
        """Returns the pace as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Pace:
        """Reads what `to_json` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than the others.

    Attributes:
        rank: index over the job.
        host: its host's name.
        ratio: its own time a step over the median of the other ranks.
        phase: where it loses the most.
        steps: for how many steps it has been so.
    """

    rank: int
    host: str
    ratio: float
    phase: str
    steps: int

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}: {self.ratio:.1f}x, in {self.phase}, for {self.steps} steps"


class StragglerWatch:
    """Keeps in mind since when a rank has been slow, and reports it after 20 steps, then after 40, 80 and so on."""

    def __init__(self) -> None:
        self._since: dict[int, int] = {}
        self._reported: dict[int, int] = {}

    def look(self, paces: Sequence[Pace]) -> list[Straggler]:
        """Takes the newest pace of every rank and returns what is to be reported now."""
        news = []
        slow = {pace.rank: (pace, ratio, phase) for pace, ratio, phase in find_slow(paces)}
        for rank in self._since.keys() - slow.keys():
            del self._since[rank]
            self._reported.pop(rank, None)
        for rank, (pace, ratio, phase) in sorted(slow.items()):
            steps = pace.steps - self._since.setdefault(rank, pace.steps)
            if steps >= self._reported.get(rank, _STEPS):
                self._reported[rank] = 2 * steps
                news.append(Straggler(rank, pace.host, ratio, phase, steps))
        return news


def find_slow(paces: Iterable[Pace]) -> list[tuple[Pace, float, str]]:
    """Returns the ranks whose own time a step is far above the median of the others, how far, and in which phase."""
    paces = list(paces)
    found = []
    for pace in paces:
        others = [other for other in paces if other.rank != pace.rank]
        usual = statistics.median(other.total for other in others) if others else 0.0
        if not usual or pace.total < SLOW * usual:
            continue
        excess = {
            phase: seconds - statistics.median(other.seconds.get(phase, 0.0) for other in others)
            for phase, seconds in pace.seconds.items()
        }
        found.append((pace, pace.total / usual, max(excess, key=excess.__getitem__)))
    return found
