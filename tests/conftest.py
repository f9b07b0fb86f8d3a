"""Fixtures that several rooms share: real worlds of real processes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("torch_xla"):
    # PyTorch counts the devices at the process's first backward pass; a test on the CPU may come before one on XLA.
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    import torch_xla

    torch_xla.device()

WORKERS = Path(__file__).parent / "workers"


@dataclass(frozen=True)
class WorldRun:
    """What a world of processes left behind."""

    returncode: int
    output: str
    by_rank: list[Any]


@pytest.fixture
def run_world(tmp_path: Path) -> Callable[..., WorldRun]:
    """Runs a script of tests/workers in a world of torchrun processes.

    The script is called as `script OUTPUT_DIR ARGS...` and leaves its result as OUTPUT_DIR/<rank>.json. With `agent` it
    runs under the agent of `trn_dist.launcher`, whose exit code tells of the worker that failed first.
    """

    def run(
        script: str, *args: object, size: int = 2, env: dict[str, str] | None = None, agent: bool = False
    ) -> WorldRun:
        out = tmp_path / f"world-{len(list(tmp_path.glob('world-*')))}"
        out.mkdir()
        command = [sys.executable, "-m"]
        command += (
            ["trn_dist.launcher.agent", "--processes"] if agent else ["torch.distributed.run", "--nproc_per_node"]
        )
        command += [str(size)]
        command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
        command += [str(WORKERS / script), str(out), *map(str, args)]
        done = subprocess.run(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=280,
        )
        results = [out / f"{rank}.json" for rank in range(size)]
        by_rank = [json.loads(path.read_text()) if path.exists() else None for path in results]
        return WorldRun(done.returncode, done.stdout, by_rank)

    return run
