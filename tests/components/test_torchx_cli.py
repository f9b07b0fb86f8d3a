"""The real torchx command, whichever version is installed: `make test` runs this file on 0.7.0 and on the nightly."""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest

# Where torchx has an environment of its own, without torch, the workers run on another Python, as a user's would.
WORKER_PYTHON = os.environ.get("TRN_DIST_TEST_PYTHON", "")
needs_torch = pytest.mark.skipif(
    not WORKER_PYTHON and find_spec("torch") is None,
    reason="no torch here: name a Python that has it in TRN_DIST_TEST_PYTHON",
)
PYTHON = ["--python", WORKER_PYTHON] if WORKER_PYTHON else []

WORKER = """
import json, os, pathlib, sys
rank = int(os.environ["RANK"])
seen = {"arguments": sys.argv[1:], "size": os.environ["WORLD_SIZE"], "flags": os.environ.get("FLAGS")}
pathlib.Path(f"{rank}.json").write_text(json.dumps(seen))
restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
if rank == 1 and ("fail" in sys.argv or ("fail-once" in sys.argv and restarts == "0")):
    sys.exit(78)
pathlib.Path(f"{rank}.restarts").write_text(restarts)
"""


@pytest.fixture
def torchx(tmp_path):
    """Runs torchx in a new folder, with neither the environment's programs nor the user's settings in reach."""
    (tmp_path / "worker.py").write_text(WORKER)

    def run(*arguments):
        return subprocess.run(
            [str(Path(sys.executable).parent / "torchx"), *map(str, arguments)],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=200,
        )

    return run


def test_torchxs_own_components_are_still_there(torchx):
    listed = torchx("builtins").stdout
    for name in ("dist.ddp", "utils.echo", "utils.sh", "trn_dist.ddp"):
        assert name in listed
    # Nothing but components: helper functions must not be taken for some.
    ours = [line.split()[-1] for line in listed.splitlines() if "trn_dist" in line]
    assert ours == ["trn_dist.ddp"]


def test_torchxs_own_schedulers_are_still_there(torchx):
    listed = torchx("run", "-h").stdout
    for name in ("local_cwd", "local_docker", "slurm", "kubernetes"):
        assert name in listed


def test_torchxs_own_component_still_runs(torchx, tmp_path):
    done = torchx("run", "-s", "local_cwd", "utils.touch", "--file", tmp_path / "still-here")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "still-here").exists()


@pytest.mark.parametrize("name", ["trn_dist.components:ddp", "trn_dist.ddp"])
def test_both_names_show_the_help_and_the_request(torchx, name):
    shown = torchx("run", "-s", "local_cwd", name, "--help")
    assert "-j str" in shown.stdout
    assert "environment variables, NAME=VALUE" in shown.stdout
    made = torchx("run", "-s", "local_cwd", "--dryrun", name, "-j", "2x3", "--script", "worker.py", "--", "x y")
    assert made.returncode == 0, made.stderr
    assert "'trn_dist.launcher.agent'" in made.stdout
    assert made.stdout.count("'x y'") >= 2  # once a replica


def test_unknown_components_are_named(torchx):
    done = torchx("run", "-s", "local_cwd", "trn_dist.components:dpd", "--script", "worker.py")
    assert done.returncode != 0
    assert "dpd" in done.stdout + done.stderr


def test_defaults_from_a_torchxconfig(torchx, tmp_path):
    (tmp_path / ".torchxconfig").write_text("[component:trn_dist.components:ddp]\nj = 1x7\nenv = FLAGS=--a=b\n")
    made = torchx("run", "-s", "local_cwd", "--dryrun", "trn_dist.components:ddp", "--script", "worker.py")
    assert made.returncode == 0, made.stderr
    assert "'--processes',\n" in made.stdout
    assert "'7'" in made.stdout
    assert "'FLAGS': '--a=b'" in made.stdout


@needs_torch
@pytest.mark.parametrize(("layout", "size"), [("1x2", 2), ("2x1", 2)])
def test_a_real_run(torchx, tmp_path, layout, size):
    arguments = ["--", "--a=1", "b c", "$HOME", "$$", "*", "'", '"', "ä"]
    component = ["trn_dist.components:ddp", "-j", layout, "--script", "worker.py", "--rdzv_port", "0"]
    if layout == "2x1":
        component[-1] = str(free_port())
    done = torchx("run", "-s", "local_cwd", *component, *PYTHON, "--env", "FLAGS=--x=1 $$ $HOME,A=b", "--", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(size):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert seen == {"arguments": arguments, "size": str(size), "flags": "--x=1 $$ $HOME"}


def free_port():
    """A port that was free a moment ago: torchx takes the rendezvous port of several nodes as a number."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@needs_torch
def test_a_failing_worker_fails_the_job(torchx):
    component = ["trn_dist.ddp", "-j", "1x2", "--script", "worker.py", *PYTHON]
    done = torchx("run", "-s", "local_cwd", *component, "--", "fail")
    assert done.returncode != 0
    assert "exitcode  : 78" in done.stdout + done.stderr


@needs_torch
def test_workers_are_started_again(torchx, tmp_path):
    component = ["trn_dist.ddp", "-j", "1x2", "--script", "worker.py", "--max_restarts", "1", *PYTHON]
    done = torchx("run", "-s", "local_cwd", *component, "--", "fail-once")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(tmp_path / f"{rank}.restarts").read_text() for rank in range(2)] == ["1", "1"]


def test_importing_the_component_is_light():
    program = "import sys, trn_dist.components as c; c.ddp(script='x'); print({'torch', 'kubernetes'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ})
    assert done.stdout.strip() == "set()"


def test_entry_points():
    groups = {
        group: {p.name: p.value for p in entry_points(group=group)} for group in ("torchx.components", "torchx.file")
    }
    assert groups["torchx.components"] == {"_torchx": "torchx.components", "trn_dist": "trn_dist.components"}
    assert groups["torchx.file"] == {"get_file_contents": "trn_dist.launcher.torchx_file:get_file_contents"}
