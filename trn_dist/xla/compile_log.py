"""Where in the user's program each graph was asked for, as torch_xla itself reports it when it compiles one."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

_LEVEL, _FILE = "PT_XLA_DEBUG_LEVEL", "PT_XLA_DEBUG_FILE"
_FRAME = re.compile(r"Compilation Analysis:\s+(?P<function>\S+) \((?P<file>[^()]+):(?P<line>\d+)\)$")
_READ = "trying to access tensor value"


@dataclass(frozen=True)
class Frame:
    """A place in a Python program.

    Attributes:
        file: path of the source file.
        line: number of the line, from 1.
        function: name of the function.
    """

    file: str
    line: int
    function: str

    @property
    def source(self) -> str:
        """The line of source, or nothing where the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}: {self.source}"


@dataclass(frozen=True)
class Compilation:
    """One compiled graph.

    Attributes:
        frames: the Python stack that asked for it, the innermost frame first; torch_xla keeps eight.
        host_read: whether a value was read in the middle of a graph, and not a `sync`.
    """

    frames: tuple[Frame, ...]
    host_read: bool


class CompileLog:
    """The compilations of this process, in a file of its memory that torch_xla writes and nobody has to remove.

    torch_xla writes to it (`PT_XLA_DEBUG_LEVEL=1`, https://github.com/pytorch/xla/blob/master/docs/source/learn/
    troubleshoot.md) when it compiles and at no other time, so it costs a step nothing. It reads the two variables once,
    when the process first compiles or executes.

    Args:
        environment: gets the variables, unless the user has set any of them.
    """

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        if not environment.keys() & {"PT_XLA_DEBUG", _LEVEL, _FILE}:
            # By process number, not "self": a child process that inherits the variables must not find a file of its own
            # behind the number.
            path = f"/proc/{os.getpid()}/fd/{os.memfd_create('trn_dist-compilations')}"
            environment.update({_LEVEL: "1", _FILE: path})
        self._path = Path(environment[_FILE]) if environment.get(_FILE) else None
        self._read = 0
        self.news()

    def news(self) -> list[Compilation]:
        """Returns the compilations since the last call; none where the user sends the reports somewhere unreadable."""
        if self._path is None or not self._path.exists():
            return []
        with self._path.open(encoding="utf-8", errors="replace") as file:
            file.seek(self._read)
            text = file.read()
            self._read = file.tell()
        return parse_compilations(text)


def parse_compilations(text: str) -> list[Compilation]:
    """Reads torch_xla's reports; whatever else stands in the text is passed over."""
    found = []
    for report in text.split("Compilation Cause")[1:]:
        matches = (_FRAME.match(line.strip()) for line in report.splitlines())
        frames = tuple(Frame(m["file"], int(m["line"]), m["function"]) for m in matches if m)
        found.append(Compilation(frames, host_read=_READ in report))
    return found
