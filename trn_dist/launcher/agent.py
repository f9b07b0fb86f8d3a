"""What each replica of a job runs: torchrun, with what a launcher can only know on the spot.

    python -m trn_dist.launcher.agent --processes N [--rank0_env NAME --rdzv_port PORT] TORCHRUN ARGUMENTS

It gives each worker its share of the host's CPUs (torchrun gives one), finds the rendezvous host in the variable whose
name the scheduler gave, and hands on the exit code of the worker that failed first (torchrun itself turns every failure
into 1), so that a scheduler can tell a bad configuration (78) from what a restart may cure.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from trn_dist.errors import MissingDependencyError, exit_code_of
from trn_dist.launcher.macros import keep_dollars


def main(argv: Sequence[str] | None = None) -> int:
    """Runs torchrun in this process.

    Returns:
        0, or the exit code of the first worker that failed; 128 + N where signal N ended it, or this agent, as shells
        say it.

    Raises:
        MissingDependencyError: this Python has no torch.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    own, torchrun_arguments = _split(arguments)
    try:
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import main as torchrun
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingDependencyError(
            f"{sys.executable} has no torch to run the workers with: pip install 'trn-dist[xla]' there, or name "
            "another interpreter with --python"
        ) from error
    try:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // own.processes)))
        torchrun([*_rendezvous(own), "--nproc_per_node", str(own.processes), *map(keep_dollars, torchrun_arguments)])
    except ChildFailedError as error:
        print(error.format_msg(), file=sys.stderr, flush=True)  # type: ignore[no-untyped-call]
        code = error.get_first_failure()[1].exitcode
        return code if code >= 0 else 128 - code
    except SignalException as stopped:
        # torchrun has passed the signal on and waited for the workers to leave.
        return 128 + stopped.sigval
    return 0


def _split(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Takes the agent's own options, which come first, off torchrun's."""
    parser = argparse.ArgumentParser(prog="trn_dist.launcher.agent", add_help=False, allow_abbrev=False)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--rank0_env")
    parser.add_argument("--rdzv_port", type=int)
    own: list[str] = []
    rest = list(arguments)
    while len(rest) >= 2 and rest[0] in ("--processes", "--rank0_env", "--rdzv_port"):
        own += rest[:2]
        rest = rest[2:]
    return parser.parse_args(own), rest


def _rendezvous(own: argparse.Namespace) -> list[str]:
    if own.rank0_env is None:
        return []
    # Some schedulers leave the variable unset on rank 0's own host.
    host = os.environ.get(own.rank0_env) or "localhost"
    return ["--rdzv_endpoint", f"{host}:{own.rdzv_port}"]


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
