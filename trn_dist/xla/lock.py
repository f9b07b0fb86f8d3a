"""The graphs that a recipe compiles, written down: `graphs.lock`.

A lock is made by running a command and comparing it later by running the command again. The process of rank 0 records
the HLO of every graph it executes, before compilation; what says nothing about the computation (metadata, names,
numbers of instructions) is left out, so the same recipe gives the same lock on every machine with the same versions.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trn_dist.errors import ConfigError, DataError

RECORD = "TRN_DIST_RECORD_GRAPHS"  # names the folder in which rank 0 leaves its record
_FORMAT = 1
_PACKAGES = ("torch", "torch_xla", "torch-neuronx", "neuronx-cc", "libneuronxla")
_DUMP = re.compile(r"^## BEGIN_GRAPH\n(.*?)^Graph Hash: (\w+)\n\n## END_GRAPH$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"/\*.*?\*/")
_QUOTED_OR_BRACE = re.compile(r'"(?:[^"\\]|\\.)*"|[{}]')
_NAME = re.compile(r"%[\w.\-]+")
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?(?P<name>%[\w.\-]+) .*\{$")
_NEVER_TWICE = re.compile(
    r" (rng|all-[\w\-]+|reduce-scatter|collective-[\w\-]+|custom-call|send|recv|infeed|outfeed)\("
)
_PARAMETER = re.compile(r" parameter\(\d+\)")
_INSTRUCTION = re.compile(r"^%\d+ = (?P<shape>\(.*?\)|\S+) (?P<opcode>[\w\-]+)\(")
_LAYOUT = re.compile(r"(?<=\])\{[^}]*\}")
_NO_WORK = {"parameter", "tuple", "get-tuple-element"}


@dataclass(frozen=True)
class Key:
    """What must be the same for graphs to be comparable.

    Attributes:
        device: kind of device.
        world_size: number of workers.
        versions: of the packages that lower and compile, those that are installed.
    """

    device: str
    world_size: int
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Graph:
    """One graph.

    Attributes:
        sha256: of its canonical text.
        inputs: number of parameters by shape.
        operations: number of instructions by opcode and shape.
    """

    sha256: str
    inputs: Mapping[str, int]
    operations: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Graph:
        """Reads a graph from its HLO text."""
        canonical = canonical_text(text)
        inputs: Counter[str] = Counter()
        operations: Counter[str] = Counter()
        for line in canonical.splitlines():
            match = _INSTRUCTION.match(line)
            if match is None:
                continue
            shape = _LAYOUT.sub("", match["shape"])
            if match["opcode"] == "parameter":
                inputs[shape] += 1
            elif match["opcode"] not in _NO_WORK:
                operations[f"{match['opcode']} {shape}"] += 1
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        return cls(digest, dict(sorted(inputs.items())), dict(sorted(operations.items())))


@dataclass(frozen=True)
class Lock:
    """The graphs of a recipe, in the order of their first execution; graphs without an operation are left out."""

    key: Key
    graphs: Sequence[Graph]

    def write(self, path: Path) -> None:
        """Writes the lock as JSON, whole or not at all."""
        content = {"format": _FORMAT, "key": asdict(self.key), "graphs": [asdict(graph) for graph in self.graphs]}
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.unfinished")
        beside.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        beside.replace(path)

    @classmethod
    def read(cls, path: Path) -> Lock:
        """Reads what `write` wrote.

        Raises:
            ConfigError: there is no such file.
            DataError: it is no lock, or one of another version of the format.
        """
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                raise DataError(f"{path} has format {content['format']}; this version of trn_dist reads {_FORMAT}")
            lock = cls(Key(**content["key"]), [Graph(**graph) for graph in content["graphs"]])
            _require_types(lock)
            return lock
        except FileNotFoundError:
            raise ConfigError(f"there is no {path}: make it with trn-dist graphs lock") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is no lock of graphs ({error!r}): make it again") from error


def _require_types(lock: Lock) -> None:
    """Raises TypeError where a file that is JSON holds something else than a lock, such as after a bad merge."""
    graphs = lock.graphs
    counts = [counted for graph in graphs for counted in (graph.inputs, graph.operations)]
    texts = [lock.key.device, *(graph.sha256 for graph in graphs)]
    if not graphs or not isinstance(lock.key.world_size, int) or not isinstance(lock.key.versions, dict):
        raise TypeError("no graphs, or no key")
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a hash or the device is no text")
    if not all(isinstance(c, dict) and all(isinstance(n, int) for n in c.values()) for c in counts):
        raise TypeError("inputs or operations are no numbers by kind")


def record(kind: str, rank: int, size: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Has torch_xla write down every graph that this process executes, if it was asked to and is rank 0.

    Must be called before the first execution, when torch_xla reads its variables.

    Args:
        kind: of the device.
        rank: of this process.
        size: of the world.
        environment: of this process.

    Raises:
        ConfigError: the user has torch_xla write them elsewhere.
    """
    folder = environment.get(RECORD)
    if folder is None or rank != 0:
        return
    path = str(Path(folder) / "graphs")
    if environment.get("XLA_SAVE_TENSORS_FILE", path) != path:
        raise ConfigError("graphs cannot be recorded while XLA_SAVE_TENSORS_FILE is set: unset it")
    environment.update({"XLA_SAVE_TENSORS_FILE": path, "XLA_SAVE_TENSORS_FMT": "hlo"})
    key = Key(kind, size, _versions())
    (Path(folder) / "key.json").write_text(json.dumps(asdict(key)), encoding="utf-8")


def read_record(folder: Path) -> Lock:
    """Returns what the processes of a command have recorded in a folder.

    Raises:
        ConfigError: nothing, since none of them opened an XLA device, or none executed a graph.
    """
    if not (folder / "key.json").exists():
        raise ConfigError(
            "the command opened no XLA device through trn_dist.xla.init(): the device 'cpu' makes no graphs; choose "
            "cpu-xla or neuron, and a launcher that runs rank 0 on this machine"
        )
    key = Key(**json.loads((folder / "key.json").read_text(encoding="utf-8")))
    seen: set[str] = set()
    graphs: dict[str, Graph] = {}
    for path in sorted(folder.glob("graphs.*")):  # torch_xla appends the device's ordinal
        for text, executed in _DUMP.findall(path.read_text(encoding="utf-8", errors="replace")):
            if executed in seen:  # torch_xla's own hash: the same executable again
                continue
            seen.add(executed)
            graph = Graph.parse(text)
            if graph.operations:
                graphs.setdefault(graph.sha256, graph)
    if not graphs:
        raise ConfigError(
            "the command executed no graph, or executed one before trn_dist.xla.init(), after which torch_xla records "
            "none: let it take a few steps, and call init() first"
        )
    return Lock(key, list(graphs.values()))


def canonical_text(text: str) -> str:
    """Returns HLO text without what does not belong to the computation.

    The same graph is written down in another order from one execution to the next. So the instructions are put in the
    order in which the result needs them, operands first, equal ones once, and they and the parameters are numbered in
    that order; what the result does not need, metadata, comments and names go. A computation that is called is replaced
    by its hash.
    """
    computations, entry = _parse_module(text)
    return _canonical_computation(entry, computations, {}, is_entry=True) if entry else ""


@dataclass(frozen=True)
class _Instruction:
    name: str
    text: str  # what it is, behind the equals sign
    operands: tuple[str, ...]  # names of instructions of the same computation
    called: tuple[str, ...]  # names of computations


def _parse_module(text: str) -> tuple[dict[str, dict[str, _Instruction]], str]:
    """Returns the instructions of each computation by name, the root last, and the name of the entry."""
    bodies: dict[str, list[str]] = {}
    current, entry = "", ""
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            current = header["name"]
            bodies[current] = []
            entry = current if header["entry"] else entry
        elif current and line.startswith(" "):
            bodies[current].append(_without_metadata(_COMMENT.sub("", line)).strip())
    return {name: _parse_computation(lines, bodies.keys()) for name, lines in bodies.items()}, entry


def _parse_computation(lines: Iterable[str], computations: Collection[str]) -> dict[str, _Instruction]:
    pairs = [line.removeprefix("ROOT ").partition(" = ")[::2] for line in sorted(lines, key=_is_root)]
    names = {name for name, _ in pairs}
    instructions = {}
    for name, text in pairs:
        used = _NAME.findall(text)
        operands = tuple(other for other in used if other in names)
        called = tuple(other for other in used if other not in names and other in computations)
        instructions[name] = _Instruction(name, text, operands, called)
    return instructions


def _is_root(line: str) -> bool:
    return line.startswith("ROOT ")


def _canonical_computation(
    name: str, computations: Mapping[str, Mapping[str, _Instruction]], hashes: dict[str, str], *, is_entry: bool = False
) -> str:
    instructions = computations[name]
    numbers: dict[str, str] = {}
    known: dict[str, str] = {}
    parameters = 0
    for instruction in _in_order_of_need(instructions):
        for called in instruction.called:
            if called not in hashes:
                body = _canonical_computation(called, computations, hashes)
                hashes[called] = hashlib.sha256(body.encode()).hexdigest()[:16]
        text = _NAME.sub(lambda m: numbers.get(m[0]) or "%" + hashes.get(m[0], m[0][1:]), instruction.text)
        if is_entry and _PARAMETER.search(text):
            # In a computation that is called the number says which operand it is; in the entry it says nothing.
            text = _PARAMETER.sub(f" parameter({parameters})", text)
            parameters += 1
        if _NEVER_TWICE.search(text):
            text += f"  # {len(known)}"
        # torch_xla's own hash does not tell a value that is computed twice from one that is used twice.
        numbers[instruction.name] = known.setdefault(text, f"%{len(known)}")
    return "".join(f"{number} = {text}\n" for text, number in known.items())


def _in_order_of_need(instructions: Mapping[str, _Instruction]) -> Iterator[_Instruction]:
    """Yields the root and what it needs, operands first; without recursion, since graphs are deep."""
    done: set[str] = set()
    stack: list[tuple[str, bool]] = [(list(instructions)[-1], False)] if instructions else []
    while stack:
        name, operands_done = stack.pop()
        if name in done:
            continue
        if operands_done:
            done.add(name)
            yield instructions[name]
        else:
            stack.append((name, True))
            stack += [(operand, False) for operand in reversed(instructions[name].operands)]


def compare(locked: Lock, found: Lock) -> list[str]:
    """Returns what differs, as lines for a person; none where the graphs are the same.

    Raises:
        ConfigError: the locks have other keys, so their graphs cannot be compared.
    """
    _require_same_key(locked.key, found.key)
    missing = [(number, graph) for number, graph in enumerate(locked.graphs, 1)]
    new = [(number, graph) for number, graph in enumerate(found.graphs, 1)]
    same = {graph.sha256 for _, graph in missing} & {graph.sha256 for _, graph in new}
    missing, new = ([entry for entry in side if entry[1].sha256 not in same] for side in (missing, new))
    lines: list[str] = []
    for number, graph in new:
        if not missing:
            lines.append(f"graph {number} is new: {_size(graph)}")
            continue
        nearest = min(missing, key=lambda entry: _distance(entry[1], graph))
        missing.remove(nearest)
        lines += [f"graph {nearest[0]} has changed: {_size(nearest[1])} -> {_size(graph)}"]
        lines += [f"  {line}" for line in _differences(nearest[1], graph)]
    lines += [f"graph {number} is gone: {_size(graph)}" for number, graph in missing]
    return lines


def _require_same_key(locked: Key, found: Key) -> None:
    pairs = [("device", locked.device, found.device), ("world size", locked.world_size, found.world_size)]
    for package in sorted(locked.versions.keys() | found.versions.keys()):
        pairs.append((package, locked.versions.get(package, "absent"), found.versions.get(package, "absent")))
    different = [f"{name} {before} -> {after}" for name, before, after in pairs if before != after]
    if different:
        raise ConfigError(
            f"the graphs were locked under other conditions ({', '.join(different)}) and cannot be compared: lock them "
            "again, or keep a lock for each"
        )


def _differences(before: Graph, after: Graph) -> Iterator[str]:
    changes = [
        *_changes("input", before.inputs, after.inputs),
        *_changes("", before.operations, after.operations),
    ]
    if not changes:
        yield "the same operations on the same shapes, with other operands, attributes, constants or order"
    yield from changes


def _changes(name: str, before: Mapping[str, int], after: Mapping[str, int]) -> Iterable[str]:
    for kind in sorted(before.keys() | after.keys()):
        change = after.get(kind, 0) - before.get(kind, 0)
        if change:
            yield f"{'+' if change > 0 else '-'} {abs(change)} {name} {kind}".replace("  ", " ")


def _distance(one: Graph, other: Graph) -> int:
    a, b = Counter(one.operations), Counter(other.operations)
    return sum(((a - b) + (b - a)).values())


def _size(graph: Graph) -> str:
    return f"{sum(graph.operations.values()):,} operations on {sum(graph.inputs.values()):,} inputs"


def _without_metadata(line: str) -> str:
    """Cuts `, metadata={...}` out of an instruction; strings in it may hold braces."""
    begin = line.find(", metadata={")
    if begin < 0:
        return line
    depth = 0
    for match in _QUOTED_OR_BRACE.finditer(line, begin):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0 and match[0] == "}":
            return line[:begin] + line[match.end() :]
    return line[:begin]


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
