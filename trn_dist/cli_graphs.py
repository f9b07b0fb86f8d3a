"""The commands `trn-dist graphs lock` and `check`."""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from trn_dist.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from trn_dist.xla.lock import Lock


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command `graphs`; each of its commands sets `handler`, which takes the parsed arguments."""
    graphs = subparsers.add_parser("graphs", help="write down the graphs of a recipe, and compare them later")
    commands = graphs.add_subparsers(required=True, metavar="COMMAND")
    for name, handler, text in (
        ("lock", _lock, "run a training command and write down the graphs it compiles"),
        ("check", _check, "run it again and compare its graphs with the lock"),
    ):
        parser = commands.add_parser(
            name,
            help=text,
            description=f"{text}: a few steps are enough",
            usage=f"trn-dist graphs {name} [--file FILE] -- ...",
        )
        parser.add_argument("--file", type=Path, default=Path("graphs.lock"), help="the lock (graphs.lock)")
        parser.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM ARGUMENTS", help="what to run")
        parser.set_defaults(handler=handler)


def _lock(args: argparse.Namespace) -> int:
    code, lock = _run(args.program)
    if lock is None:
        return code
    lock.write(args.file)
    print(f"{args.file}: {_summary(lock)}")
    return 0


def _check(args: argparse.Namespace) -> int:
    lock_room = _import_lock()
    locked = lock_room.Lock.read(args.file)
    code, found = _run(args.program)
    if found is None:
        return code
    differences = lock_room.compare(locked, found)
    for line in differences:
        print(line)
    if differences:
        print(f"the graphs are not those of {args.file}; if that is meant, lock them again")
        return 1
    print(f"as locked: {_summary(found)}")
    return 0


def _run(program: list[str]) -> tuple[int, Lock | None]:
    """Runs the program and returns its exit code, and the graphs if that is 0."""
    command = program[1:] if program[:1] == ["--"] else program
    if not command:
        raise ConfigError(
            "nothing to run: write the training command after --, such as -- python train.py --max_steps 3"
        )
    lock_room = _import_lock()
    with tempfile.TemporaryDirectory(prefix="trn_dist-graphs-") as folder:
        try:
            code = subprocess.run(command, env={**os.environ, lock_room.RECORD: folder}, check=False).returncode  # noqa: S603 - the user's own command
        except OSError as error:
            raise ConfigError(f"{command[0]} cannot be run: {error.strerror}") from error
        if code != 0:
            print(f"the command failed with exit code {code}: no graphs were looked at")
            return code if code > 0 else 128 - code, None
        return 0, lock_room.read_record(Path(folder))


def _import_lock() -> ModuleType:
    try:
        from trn_dist.xla import lock
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingDependencyError("the package torch is not installed: pip install 'trn-dist[xla]'") from error
    return lock


def _summary(lock: Lock) -> str:
    number = len(lock.graphs)
    operations = sum(sum(graph.operations.values()) for graph in lock.graphs)
    return (
        f"{number} graph{'' if number == 1 else 's'}, {operations:,} operations, on {lock.key.device} with "
        f"{lock.key.world_size} worker{'' if lock.key.world_size == 1 else 's'}"
    )
