"""Why a graph is new: what differs, where in the program, and what usually makes it differ."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from trn_dist.xla.compile_log import Frame

# What torch_xla's detector of different graphs raises; `Got` is the new operation, `Expected` the one known so far.
_DETECTOR = "Maximum number of different graphs allowed per function exceeded"
_OPERATION = re.compile(
    r"(?:\[.*?\] )?(?P<name>[\w:]+), (?:\w+=\S+, )*?xla_shape=(?P<shape>.*?), dynamic_dims: \(.*?\)"
    r"(?:, (?P<rest>.*))?$"
)
_LIBRARIES = (sysconfig.get_paths()["stdlib"], str(Path(torch.__file__).parent))
_ROOMS = tuple(str(Path(__file__).parents[1] / room) for room in ("xla", "training"))
_READS = re.compile(r"\.(item|tolist|cpu|numpy)\(")
_SIZED_BY_VALUES = ("nonzero", "masked_select", "unique")


@dataclass(frozen=True)
class Operation:
    """An operation of a graph.

    Attributes:
        name: such as `aten::addmm`.
        shape: of its result, such as `f32[8,16]`.
        attributes: what is fixed in it, such as `shifts=(5), dims=(0)`.
    """

    name: str
    shape: str
    attributes: str = ""

    @classmethod
    def parse(cls, text: str) -> Operation:
        """Reads torch_xla's text of a node."""
        match = _OPERATION.match(text.strip())
        if match is None:
            return cls(text.strip(), "")
        return cls(match["name"], re.sub(r"\{[\d,]*\}", "", match["shape"]), match["rest"] or "")

    def __str__(self) -> str:
        text = f"{self.name} {self.shape}".strip()
        return f"{text} ({self.attributes})" if self.attributes else text


@dataclass(frozen=True)
class Change:
    """What is known about a graph that no step before had made.

    Attributes:
        inputs: arguments of the step whose shape or dtype is new: name, before, after.
        before: the operations that stood there in the known graphs; empty where none was found to differ.
        after: the new operation, or None where the graph ends now.
        frames: the Python stack at the new operation, innermost first, without PyTorch's own frames.
        host_reads: how many more values the step read from the device than the steps before.
        sized_by_values: operations in the step whose result's size depends on values.
    """

    inputs: tuple[tuple[str, str, str], ...] = ()
    before: tuple[Operation, ...] = ()
    after: Operation | None = None
    frames: tuple[Frame, ...] = ()
    host_reads: int = 0
    sized_by_values: tuple[str, ...] = ()

    def cause(self) -> str:
        """Says what usually makes such a difference, and what to do."""
        if self.inputs:
            return self._cause_of_inputs()
        if self.sized_by_values:
            return (
                f"a size that depends on values ({', '.join(self.sized_by_values)}: a boolean mask as an index, "
                "nonzero, masked_select). Use torch.where, or gather a fixed number of elements"
            )
        if self.host_reads > 0 or (self.frames and _READS.search(self.frames[0].source)):
            return (
                "a value was read in the middle of the step (.item(), float(), print(), if on a tensor), which cuts "
                "the graph there. Keep it a tensor, or read it after the step with World.host_views"
            )
        if not self.before:
            return (
                "not known. Code outside of the forward and backward pass that runs in some steps only is one; "
                "GraphGuard(action='raise') looks for the operation"
            )
        same_name = [old for old in self.before if self.after and old.name == self.after.name]
        if self.after and same_name:
            return _cause_of_same_operation(same_name[0], self.after)
        return (
            "the program took another way than before: an if on a Python value, train() or eval(), a parameter that "
            "was frozen or thawed, a list that grew"
        )

    def _cause_of_inputs(self) -> str:
        before, after = self.inputs[0][1:]
        if before.split("[")[0] != after.split("[")[0]:
            return "an input of another dtype. Convert it before the step"
        old, new = _sizes(before), _sizes(after)
        if len(old) == len(new) and old[:1] != new[:1] and old[1:] == new[1:]:
            return "a ragged last batch. Leave it out (drop_last) or fill it up to the full size"
        return "an input of another shape. Pad it to one shape, or to a few that the warm-up sees"

    def __str__(self) -> str:
        lines = [f"input {name} was {before} and is {after}" for name, before, after in self.inputs]
        if self.before:
            before = " or ".join(map(str, self.before))
            lines.append(f"operation {self.after or 'none: the graph ends'} where it was {before}")
        if self.host_reads > 0:
            lines.append(f"values read from the device in the step: {self.host_reads} more than before")
        lines += [f"{'at' if index == 0 else 'by'} {frame}" for index, frame in enumerate(self.frames)]
        lines.append(f"likely cause: {self.cause()}")
        return "\n".join(f"  {line}" for line in lines)


def is_from_detector(error: RuntimeError) -> bool:
    """Tells the error of torch_xla's detector of different graphs from any other."""
    return _DETECTOR in str(error)


def parse_detector(error: RuntimeError) -> tuple[tuple[Operation, ...], Operation | None]:
    """Returns the operations that were expected and the one that came (None where the graph ended early)."""
    after: Operation | None = None
    before: list[Operation] = []
    for line in str(error).splitlines():
        key, _, rest = line.partition(": ")
        if key == "Got":
            after = Operation.parse(rest)
        elif key == "Expected":
            before.append(Operation.parse(rest))
        elif line.startswith("  - "):
            before.append(Operation.parse(line[4:]))
    return tuple(before), after


def frames_of(trace: TracebackType | None, limit: int = 4) -> tuple[Frame, ...]:
    """Returns the user's frames of a traceback, innermost first."""
    frames = (Frame(s.filename, s.lineno or 0, s.name) for s in reversed(traceback.extract_tb(trace)))
    return users_frames(frames, limit)


def users_frames(frames: Iterable[Frame], limit: int = 4) -> tuple[Frame, ...]:
    """Leaves out the frames of Python, of installed packages, and of the rooms that call the user's code."""
    kept = [f for f in frames if "site-packages" not in f.file and not f.file.startswith((*_LIBRARIES, *_ROOMS, "<"))]
    return tuple(kept[:limit])


def signature_of(value: object) -> dict[str, str]:
    """Returns the dtype and shape of every tensor and array in nested lists and mappings: `{"[0].x": "f32[8,16]"}`."""
    return dict(_walk(value, ""))


def changed_inputs(known: Sequence[Mapping[str, str]], new: Mapping[str, str]) -> tuple[tuple[str, str, str], ...]:
    """Compares a step's inputs with those of the known steps that are most like them: name, before, after."""
    if not known or new in known:
        return ()
    nearest = min(known, key=lambda old: sum(old.get(name) != new.get(name) for name in old.keys() | new.keys()))
    names = [*nearest, *(name for name in new if name not in nearest)]
    return tuple(
        (name, nearest.get(name, "absent"), new.get(name, "absent"))
        for name in names
        if nearest.get(name) != new.get(name)
    )


def sized_by_values(counters: Iterable[str]) -> tuple[str, ...]:
    """Returns those of torch_xla's counters that stand for operations whose result's size depends on values."""
    names = {counter.split("::")[-1] for counter in counters}
    return tuple(sorted(name for name in names if name.lstrip("_").startswith(_SIZED_BY_VALUES)))


def _cause_of_same_operation(before: Operation, after: Operation) -> str:
    if before.shape == after.shape and before.attributes == after.attributes:
        return (
            "another operand of the same shape: often a Python number that has become exactly 0 or 1, which torch_xla "
            "makes a constant of the graph, or another tensor. Pass the number as a tensor"
        )
    if before.attributes != after.attributes:
        return (
            "a Python number that is fixed in the graph (an index, a size, a shift, a k) has changed. Keep it "
            "constant, or compute with a tensor instead"
        )
    return "a size that is computed from data or from the step. Keep shapes constant: pad, or mask with torch.where"


def _walk(value: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, torch.Tensor | np.ndarray):
        dtype = str(value.dtype).removeprefix("torch.")
        yield path, f"{dtype}[{','.join(map(str, value.shape))}]"
    elif isinstance(value, Mapping):
        for name, member in value.items():
            yield from _walk(member, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple):
        for index, member in enumerate(value):
            yield from _walk(member, f"{path}[{index}]")


def _sizes(text: str) -> list[str]:
    return text.partition("[")[2].rstrip("]").split(",")
