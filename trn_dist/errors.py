"""The errors that trn_dist raises on purpose.

Each message says what is wrong, where (file, shard, key, rank, field) and what to do about it. A command that ends in
one of these prints the message without a traceback and exits with the class's `exit_code`.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path


class TrnDistError(Exception):
    """Base of every error that trn_dist raises on purpose.

    Attributes:
        exit_code: what a command that ends in this error returns to its caller.
    """

    exit_code: int = 1


class ConfigError(TrnDistError):
    """What the user asked for cannot work; trying again without a change cannot help.

    The exit code is `EX_CONFIG` of sysexits.h (78), which the launcher never retries.
    """

    exit_code: int = os.EX_CONFIG


class DataError(ConfigError):
    """Input data that is missing, damaged or not what it claims to be."""


class MissingDependencyError(ConfigError):
    """A package that this feature needs is not installed; the message names the extra that brings it."""


class WorldError(TrnDistError):
    """The processes of a job do not form the world that the launcher announced."""


class RecompileError(ConfigError):
    """A step made a graph that no step before it had made; a restart would come to the same point again."""


class CheckpointError(TrnDistError):
    """A checkpoint is missing, incomplete, damaged or belongs to another run."""


def exit_code_of(main: Callable[[], object]) -> int:
    """Runs a program's main function and returns its exit code.

    An error that trn_dist raises on purpose is printed to stderr, without a traceback, and gives its class's code; any
    other error is a fault and keeps its traceback. A worker of torchelastic leaves either in its error file at once, so
    that it is known as the first failure although other workers, which lost a peer, may be gone before it.

    Args:
        main: returns None for success, or the exit code.
    """
    try:
        code = main()
    except TrnDistError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        _write_error_file(error, {"errorCode": error.exit_code}, {})
        return error.exit_code
    except Exception as error:
        _write_error_file(error, {}, {"py_callstack": traceback.format_exc()})
        raise
    return code if isinstance(code, int) else 0


def _write_error_file(error: Exception, message: dict[str, object], extra: dict[str, object]) -> None:
    """Writes what `torch.distributed.elastic.multiprocessing.errors.record` would, without torch, and the exit code."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    text = f"{type(error).__name__}: {error}"
    data = {"message": {"message": text, **message, "extraInfo": {**extra, "timestamp": str(int(time.time()))}}}
    try:
        Path(path).write_text(json.dumps(data))
    except OSError as unwritten:
        print(f"the error file {path} cannot be written: {unwritten}", file=sys.stderr, flush=True)
