"""What each replica of a job runs: torchrun, with what a launcher can only know on the spot.

    python -m trn_dist.launcher.agent --processes N [--rank0_env NAME --rdzv_port PORT] TORCHRUN ARGUMENTS

It gives each worker its share of the host's CPUs (torchrun gives one), finds the rendezvous host in the variable whose
name the scheduler gave and waits until that name is known, orders the nodes by their index in the gang, and hands on
the exit code of the worker that failed first (torchrun itself turns every failure into 1), so that a scheduler can tell
a bad configuration (78) from what a restart may cure.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trn_dist.errors import MissingDependencyError, WorldError, exit_code_of
from trn_dist.launcher.macros import keep_dollars

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

# How long the first node of a gang may take to appear: a node that joins the cluster and pulls its image.
HOST_TIMEOUT_SECONDS = 900


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
        rank, first = error.get_first_failure()
        failure = _configuration_error(error) or Failure(
            rank, first.exitcode if first.exitcode >= 0 else 128 - first.exitcode, first.message, first.timestamp
        )
        failure.leave_for_the_scheduler()
        return failure.code
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
    arguments = ["--rdzv_endpoint", f"{host}:{own.rdzv_port}"]
    index = os.environ.get("VC_TASK_INDEX")
    if index is None:
        return arguments
    if index != "0":
        wait_for_host(host, HOST_TIMEOUT_SECONDS)
    # A host whose name is known may still be starting: that wait is the connection's own timeout.
    conf = f"is_host={'true' if index == '0' else 'false'},read_timeout={HOST_TIMEOUT_SECONDS}"
    return [*arguments, "--rdzv_conf", conf, "--local_addr", ordered_address(int(index))]


def ordered_address(index: int) -> str:
    """Returns an address that makes torchelastic number the nodes by their index in the gang.

    It sorts them by the text of their addresses, `job-10` before `job-2`, and uses no address but that of the first,
    where the workers meet: so the first gives its own, and the others a text that sorts behind every address.

    Args:
        index: this pod's number among those of its task, from 0.
    """
    return (os.environ.get("POD_IP") or socket.getfqdn()) if index == 0 else f"~{index:08d}"


def wait_for_host(host: str, timeout: float, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Waits until the name of the rendezvous host resolves: its pod may start later than this one.

    Args:
        host: name or address.
        timeout: seconds to try; a number of tries follows from it, one a second.
        sleep: waits for that many seconds.

    Raises:
        WorldError: the name is still unknown.
    """
    for attempt in range(max(1, int(timeout))):
        try:
            socket.getaddrinfo(host, None)
        except socket.gaierror as error:
            unknown = error
        else:
            return
        if attempt % 30 == 10:
            print(f"waiting for the first node: {host} is not known yet", file=sys.stderr, flush=True)
        sleep(1)
    raise WorldError(
        f"the first node's name {host} was not known after {timeout:.0f} s ({unknown}): see whether its pod runs, and "
        "whether the job's headless service exists"
    )


@dataclass(frozen=True)
class Failure:
    """What ended the workers of this node.

    Attributes:
        rank: of the worker, in the world.
        code: its exit code; 128 + N after signal N.
        message: text, or what torchelastic's error file holds under `message`: `message` and `extraInfo` with
            `py_callstack` and `timestamp`.
        timestamp: seconds since the epoch.
    """

    rank: int
    code: int
    message: object
    timestamp: int

    def leave_for_the_scheduler(self) -> None:
        """Writes the container's termination message, which a scheduler shows without a look into the logs.

        The file is named in TRN_TERMINATION_LOG; torchelastic's own variable cannot be used, because it removes the
        file first and this one is a mount. Kubernetes keeps the last 4,096 bytes, so the message is kept below that.
        """
        path = os.environ.get("TRN_TERMINATION_LOG")
        if not path:
            return
        try:
            Path(path).write_bytes(self.as_json(limit=4096))
        except OSError as error:
            print(f"the termination message {path} cannot be written: {error}", file=sys.stderr, flush=True)

    def as_json(self, limit: int) -> bytes:
        """Returns torchx's form of an error, in at most `limit` bytes: the traceback loses its beginning first."""
        data: dict[str, object] = self.message if isinstance(self.message, dict) else {"message": self.message}
        extra = data.get("extraInfo")
        calls = str(extra.get("py_callstack", "")) if isinstance(extra, dict) else ""
        text = str(data.get("message", ""))
        while True:
            about = {"timestamp": str(self.timestamp), "rank": str(self.rank), "py_callstack": calls}
            message = {"message": text, "errorCode": self.code, "extraInfo": about}
            encoded = json.dumps({"message": message}, ensure_ascii=False).encode(errors="replace")
            if len(encoded) <= limit:
                return encoded
            calls, text = calls[len(calls) // 2 + 1 :], text if calls else text[: len(text) * 3 // 4]


def _configuration_error(error: ChildFailedError) -> Failure | None:
    """Returns the failure of the worker that ended with a bad configuration, if one of this node did.

    It explains the failures of all others, which lost a peer, in whatever order torchrun saw them; torchrun may even
    have ended that worker itself while it was on its way out. The error files of a node's workers lie side by side, as
    `LOCAL_RANK/error.json`.
    """
    first_rank, first = next(iter(error.failures.items()))
    for failure in error.failures.values():
        files = Path(failure.error_file).parents[1].glob("*/error.json") if Path(failure.error_file).is_file() else ()
        for path in files:
            message = _read_error_file(path)
            if message.get("errorCode") == os.EX_CONFIG:
                rank = first_rank - first.local_rank + int(path.parent.name)
                return Failure(rank, os.EX_CONFIG, message, failure.timestamp)
    return None


def _read_error_file(path: Path) -> dict[str, object]:
    try:
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
    except (OSError, ValueError, KeyError):
        return {}
    return message if isinstance(message, dict) else {}


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
