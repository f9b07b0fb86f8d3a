import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trn_dist.errors import WorldError
from trn_dist.launcher import agent

pytest.importorskip("torch")

WORKER = """
import json, os, pathlib, sys
out = pathlib.Path(sys.argv[1]) / (os.environ["RANK"] + ".json")
names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "MASTER_ADDR")
out.write_text(json.dumps({"arguments": sys.argv[2:], **{name: os.environ[name] for name in names}}))
"""


@pytest.fixture
def run_agent(tmp_path):
    def run(program, *arguments, processes=1, options=("--rdzv_endpoint", "localhost:0"), env=None):
        script = tmp_path / "worker.py"
        script.write_text(program)
        command = [sys.executable, "-m", "trn_dist.launcher.agent", "--processes", str(processes), *options]
        command += ["--rdzv_backend", "c10d", "--nnodes", "1", str(script), *arguments]
        clean = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, env={**clean, "TMPDIR": str(tmp_path), **(env or {})}
        )

    return run


def test_workers_and_their_arguments(run_agent, tmp_path):
    arguments = ["--a", "b c", "", "$HOME", "$$", "*", "'\"", "--a", "ä\n"]
    done = run_agent(WORKER, str(tmp_path), *arguments, processes=2)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["arguments"] == arguments
        assert (found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"]) == ("2", "2")
        assert int(found["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)


def test_the_users_number_of_threads_stands(run_agent, tmp_path):
    run_agent(WORKER, str(tmp_path), env={"OMP_NUM_THREADS": "7"})
    assert json.loads((tmp_path / "0.json").read_text())["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize("value", ["127.0.0.1", ""])
def test_the_host_of_the_rendezvous_comes_from_the_schedulers_variable(run_agent, tmp_path, value):
    options = ("--rank0_env", "FIRST_HOST", "--rdzv_port", "0")
    done = run_agent(WORKER, str(tmp_path), options=options, env={"FIRST_HOST": value})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("ending", "code"), [("sys.exit(78)", 78), ("sys.exit(3)", 3), ("1 / 0", 1), ("os.kill(os.getpid(), 9)", 137)]
)
def test_the_exit_code_is_that_of_the_worker_that_failed(run_agent, ending, code):
    done = run_agent(f"import os, sys\n{ending}\n")
    assert done.returncode == code
    assert "Root Cause (first observed failure)" in done.stderr


def test_a_signal_reaches_the_workers_and_the_exit_code(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(
        "import pathlib, signal, sys, time\n"
        "def leave(*_):\n    pathlib.Path(sys.argv[1], 'left').touch()\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "pathlib.Path(sys.argv[1], 'ready').touch()\n"
        "time.sleep(100)\n"
    )
    command = [sys.executable, "-m", "trn_dist.launcher.agent", "--processes", "1", "--rdzv_endpoint", "localhost:0"]
    with subprocess.Popen(
        [*command, "--rdzv_backend", "c10d", "--nnodes", "1", str(script), str(tmp_path)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.DEVNULL,
    ) as process:
        while not (tmp_path / "ready").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143
    assert (tmp_path / "left").exists()


def test_a_python_without_torch_is_named(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    done = subprocess.run(
        [sys.executable, "-m", "trn_dist.launcher.agent", "--processes", "1", "x.py"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 78
    assert "has no torch to run the workers with: pip install 'trn-dist[xla]'" in done.stderr


def test_a_bad_configuration_is_the_cause_whichever_worker_is_gone_first(run_agent):
    # Rank 1 finds the fault; rank 0 loses its peer and is gone before it, while rank 1 takes its time to leave.
    program = (
        "import os, signal, sys, time\n"
        "from trn_dist.errors import ConfigError, exit_code_of\n"
        "if os.environ['RANK'] == '0':\n"
        "    time.sleep(1)\n    sys.exit(exit_code_of(lambda: 1 / 0))\n"
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "def main():\n    raise ConfigError('the batch does not fit')\n"
        "code = exit_code_of(main)\ntime.sleep(100)\nsys.exit(code)\n"
    )
    done = run_agent(program, processes=2)
    assert done.returncode == 78, done.stderr
    assert "error: the batch does not fit" in done.stderr


def test_the_nodes_of_a_gang_are_numbered_by_their_index(monkeypatch):
    monkeypatch.setenv("POD_IP", "255.255.255.255")
    addresses = [agent.ordered_address(index) for index in range(1200)]
    assert sorted(addresses) == addresses
    assert addresses[0] == "255.255.255.255"
    monkeypatch.delenv("POD_IP")
    assert agent.ordered_address(0) == socket.getfqdn()


def test_a_host_that_appears_late_is_waited_for(monkeypatch, capsys):
    answers = iter([socket.gaierror(-2, "Name or service not known")] * 50 + [[]])

    def look_up(host, port):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(agent.socket, "getaddrinfo", look_up)
    slept = []
    agent.wait_for_host("job-worker-0.job", 900, sleep=slept.append)
    assert len(slept) == 50
    assert "waiting for the first node: job-worker-0.job is not known yet" in capsys.readouterr().err


def test_a_host_that_never_appears_is_an_error_that_names_it(monkeypatch):
    def look_up(host, port):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(agent.socket, "getaddrinfo", look_up)
    with pytest.raises(WorldError, match="job-worker-0.invalid was not known after 3 s .*headless service"):
        agent.wait_for_host("job-worker-0.invalid", 3, sleep=lambda seconds: None)


def test_the_termination_message_tells_of_the_first_failure(run_agent, tmp_path):
    log = tmp_path / "termination-log"
    log.touch()
    program = (
        "import os, sys\n"
        "from trn_dist.errors import ConfigError, exit_code_of\n"
        "def main():\n    raise ConfigError(sys.argv[1])\n"
        "if os.environ['RANK'] == '1':\n    sys.exit(exit_code_of(main))\n"
        "import time\ntime.sleep(100)\n"
    )
    done = run_agent(program, "the batch does not fit", processes=2, env={"TRN_TERMINATION_LOG": str(log)})
    assert done.returncode == 78
    message = json.loads(log.read_text())["message"]
    assert message["message"] == "ConfigError: the batch does not fit"
    assert (message["errorCode"], message["extraInfo"]["rank"]) == (78, "1")


@given(text=st.text(max_size=9000), calls=st.text(max_size=9000))
def test_a_termination_message_always_fits(text, calls):
    message = {"message": text, "extraInfo": {"py_callstack": calls}}
    encoded = agent.Failure(rank=3, code=1, message=message, timestamp=0).as_json(limit=4096)
    assert len(encoded) <= 4096
    found = json.loads(encoded)["message"]
    assert text.startswith(found["message"])
    assert calls.endswith(found["extraInfo"]["py_callstack"])


def test_the_termination_message_of_a_signal_and_of_a_fault(run_agent, tmp_path):
    log = tmp_path / "termination-log"
    env = {"TRN_TERMINATION_LOG": str(log)}
    run_agent("import os\nos.kill(os.getpid(), 9)\n", env=env)
    message = json.loads(log.read_text())["message"]
    assert "SIGKILL" in message["message"]
    assert message["errorCode"] == 137
    run_agent("from trn_dist.errors import exit_code_of\nexit_code_of(lambda: [][1])\n", env=env)
    message = json.loads(log.read_text())["message"]
    assert message["message"] == "IndexError: list index out of range"
    assert "Traceback" in message["extraInfo"]["py_callstack"]
