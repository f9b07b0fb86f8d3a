"""The errors that trn_dist raises on purpose.

Each message says what is wrong, where (file, shard, key, rank, field) and what to do about it. A command that ends in
one of these prints the message without a traceback and exits with the class's `exit_code`.
"""

import os
import sys
from collections.abc import Callable


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
    other error is a fault and keeps its traceback.

    Args:
        main: returns None for success, or the exit code.
    """
    try:
        code = main()
    except TrnDistError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return code if isinstance(code, int) else 0
