"""This process as a member of a job: it does not outlive its launcher, and it runs the same code as the others."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # prctl(2)


def end_with_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Asks the kernel to kill this process when the torchrun agent that started it dies.

    torchrun's agent ends its workers when it can; one that is killed itself cannot. Workers that train on would write
    into the directory of the job that is started in their place. Does nothing without torchrun, or off Linux.
    """
    if "TORCHELASTIC_RUN_ID" not in environment or not sys.platform.startswith("linux"):
        return
    # Kill, not a signal that could be handled: a worker that waits in a collective would never come to it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def code_fingerprint() -> str:
    """Returns a hash of the code that a run depends on: this package and the folder of the program that runs.

    The files count, not when or where they were installed.
    """
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    folders = [Path(__file__).parents[1], *([Path(main).parent] if main else [])]
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py") if folder == folders[0] else folder.glob("*.py")):
            digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
