"""The loop that people start their own from: it must do what it says, and stay short."""

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "custom_loop" / "train.py"


def command(out):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    return [*launcher, "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", str(SCRIPT), str(out)]


def run(out, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    return subprocess.run(command(out), env=environment, capture_output=True, text=True, timeout=280)


def losses(out):
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [
        (entry["step"], entry["loss"]) for entry in map(json.loads, (line for line in lines if line.endswith("\n")))
    ]


@pytest.mark.slow
def test_it_learns_and_resumes_bit_for_bit_after_a_sigterm(tmp_path):
    whole = run(tmp_path / "whole", tmp_path)
    assert whole.returncode == 0, whole.stderr
    curve = losses(tmp_path / "whole")
    assert [step for step, _ in curve] == list(range(200))
    assert curve[0][1] > 5.4  # ln 256 = 5.55
    assert curve[-1][1] < 1.5

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command(tmp_path / "cut"), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as job:
        while len(losses(tmp_path / "cut")) < 30 and job.poll() is None:
            time.sleep(0.02)
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=120) != 0
    done = len(losses(tmp_path / "cut"))
    assert 30 <= done < 200
    again = run(tmp_path / "cut", tmp_path)
    assert again.returncode == 0, again.stderr
    assert losses(tmp_path / "cut") == curve
    assert "nothing to do" in run(tmp_path / "cut", tmp_path).stdout


def test_the_loop_stays_short():
    (main,) = (node for node in ast.parse(SCRIPT.read_text()).body if getattr(node, "name", "") == "main")
    assert main.end_lineno - main.lineno <= 52
