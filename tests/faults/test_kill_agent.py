"""A job whose torchrun agent is killed with SIGKILL: it leaves no process behind, and goes on when it is started again.

The kernel gives a SIGKILL to nobody but the process that it is for: no handler of the agent's ends its workers.
"""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.slow

TRAIN = Path(__file__).parents[2] / "examples" / "bert_phase1" / "train.py"

# The demo's model. The run is so long that no worker ends by itself before the test has looked for it.
FLAGS = ["--device", "cpu", "--model", "tiny", "--enable_fp32", "--batch_size", "4", "--grad_accum_usteps", "2"]
FLAGS += ["--max_pred_len", "5", "--lr", "1e-3", "--warmup_steps", "5", "--max_steps", "20000"]
FLAGS += ["--steps_per_ckpt", "3", "--log_every", "1"]

GRACE = 5.0  # seconds that the workers of a dead agent get to notice


@dataclass
class Job:
    """A run of the training script: agents of torchrun, which share its workers evenly.

    Attributes:
        agents: their number; there are two workers in all.
        data: shards to train on.
        output: directory of the run.
    """

    agents: int
    data: Path
    output: Path
    _starts: list[str] = field(default_factory=list)

    @property
    def losses(self) -> list[tuple[int, float]]:
        """Of each step; a line that is being written is left out."""
        path = self.output / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        read = [json.loads(line) for line in lines if line.endswith("\n")]
        return [(line["step"], line["loss"]) for line in read]

    @property
    def log(self) -> str:
        """What all processes printed, from all starts."""
        return "".join(path.read_text() for path in sorted(self.output.parent.glob(f"{self.output.name}-*.log")))

    @contextmanager
    def start(self, *flags: object) -> Iterator[list[subprocess.Popen[bytes]]]:
        """Starts the agents and yields them; they are killed at the end if they are not over."""
        name = f"{self.output.name}-{len(self._starts)}"
        self._starts.append(name)
        rendezvous = ["--rdzv_endpoint", "localhost:0"]
        if self.agents > 1:
            # The agents meet at a store of the test's, whose port the kernel chose; none of them is its host.
            store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
            rendezvous = ["--rdzv_endpoint", f"localhost:{store.port}", "--rdzv_conf", "is_host=false"]
        command = [sys.executable, "-m", "torch.distributed.run", "--rdzv_backend", "c10d", *rendezvous]
        command += ["--rdzv_id", name, "--nnodes", str(self.agents), "--nproc_per_node", str(2 // self.agents)]
        command += [str(TRAIN), "--data_dir", str(self.data), "--output_dir", str(self.output), *FLAGS]
        # A file and no pipe: workers that outlive their agent would hold a pipe open, and its reader with it.
        with (self.output.parent / f"{name}.log").open("ab") as log:
            agents = [
                subprocess.Popen(
                    [*command, *map(str, flags)],
                    env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.output.parent)},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
                for _ in range(self.agents)
            ]
        try:
            yield agents
        finally:
            for agent in agents:
                if agent.poll() is None:
                    for worker in open_workers(agent):
                        signal.pidfd_send_signal(worker, signal.SIGKILL)
                        os.close(worker)
                    agent.kill()
                    agent.wait()

    def run(self, *flags: object) -> list[int]:
        """Runs to the end and returns the agents' exit codes."""
        with self.start(*flags) as agents:
            return [agent.wait(timeout=120) for agent in agents]


@dataclass(frozen=True)
class Outcome:
    """What became of a job whose first agent was killed.

    Attributes:
        workers: number of workers that the killed agent had.
        left_behind: number of them that were still there after the grace.
        other_agents: exit codes of the other agents, which lost the killed one's workers.
        steps: number of steps in the metrics when the job was at its end.
    """

    workers: int
    left_behind: int
    other_agents: list[int]
    steps: int


def open_workers(agent: subprocess.Popen[bytes]) -> list[int]:
    """Returns a pidfd of each child of the agent: it stands for that process for good, unlike its number."""
    workers = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent == agent.pid:
                workers.append(os.pidfd_open(int(path.parent.name)))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return workers


def wait_until_gone(workers: list[int], seconds: float) -> list[int]:
    """Returns those that are still there when the time is over."""
    deadline = time.monotonic() + seconds
    left = list(workers)
    while left and (remaining := deadline - time.monotonic()) > 0:
        gone, _, _ = select.select(left, [], [], remaining)
        left = [worker for worker in left if worker not in gone]
    return left


@pytest.fixture(scope="module", params=[1, 2], ids=["one agent of two workers", "two agents of one worker each"])
def job(request: pytest.FixtureRequest, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(request.param, data_dir, tmp_path_factory.mktemp("job") / "killed")


@pytest.fixture(scope="module")
def killed(job: Job) -> Outcome:
    """Kills the first agent in the middle of training, and in the end whatever it left behind."""
    with job.start() as agents:
        while len(job.losses) < 8:
            assert all(agent.poll() is None for agent in agents), job.log
            time.sleep(0.02)
        workers = open_workers(agents[0])
        agents[0].kill()
        left = wait_until_gone(workers, GRACE)
        for worker in left:
            signal.pidfd_send_signal(worker, signal.SIGKILL)
        assert not wait_until_gone(left, 60)
        # Nobody else is killed: losing the others is what must end them.
        codes = [agent.wait(timeout=60) for agent in agents[1:]]
        for worker in workers:
            os.close(worker)
        return Outcome(len(workers), len(left), codes, len(job.losses))


def test_no_worker_outlives_an_agent_that_was_killed(killed: Outcome) -> None:
    """It would train on, beside the job that is started in its place and in the same directory."""
    assert killed.left_behind == 0


def test_agents_that_lose_the_workers_of_another_end_with_an_error(killed: Outcome, job: Job) -> None:
    assert killed.workers == 2 // job.agents
    assert len(killed.other_agents) == job.agents - 1
    assert all(code not in (0, -signal.SIGKILL) for code in killed.other_agents)


def test_a_job_whose_agent_was_killed_goes_on_bit_for_bit(killed: Outcome, job: Job) -> None:
    codes = job.run("--steps_this_run", 6)
    assert codes == [0] * job.agents, job.log
    resumed = re.search(r"resumed from .* after step (\d+)", job.log)
    assert resumed, job.log
    # At most two steps lie behind the last checkpoint, and three more where that one was cut short.
    assert killed.steps - 5 <= int(resumed[1]) <= killed.steps
    steps = int(resumed[1]) + 6
    whole = Job(job.agents, job.data, job.output.parent / "whole")
    assert whole.run("--steps_this_run", steps, "--steps_per_ckpt", 1000) == [0] * job.agents, whole.log
    assert [step for step, _ in job.losses] == list(range(steps))
    assert job.losses == whole.losses
