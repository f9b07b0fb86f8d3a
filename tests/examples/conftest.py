"""A small data set, and the training script run as a user runs it: by torchrun, in processes of its own."""

import argparse
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trn_dist.data.instances import InstanceConfig
from trn_dist.data.prepare import PrepareConfig, prepare

TRAIN = Path(__file__).parents[2] / "examples" / "bert_phase1" / "train.py"

SMALL = ["--debug", "--batch_size", "4", "--grad_accum_usteps", "2", "--max_pred_len", "5"]
SMALL += ["--lr", "1e-3", "--warmup_steps", "5", "--max_steps", "40", "--log_every", "5"]


@dataclass(frozen=True)
class TrainingRun:
    """What a run of the script left behind."""

    returncode: int
    output: str
    directory: Path

    @property
    def losses(self) -> list[tuple[int, float]]:
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return [(line["step"], line["loss"]) for line in map(json.loads, lines)]

    @property
    def results(self) -> dict[str, Any]:
        return json.loads((self.directory / "results.json").read_text())

    def checkpoint_hashes(self, step: int) -> dict[str, str]:
        manifest = json.loads((self.directory / f"checkpoints/step_{step:08d}/manifest.json").read_text())
        return {name: entry["sha256"] for name, entry in manifest["files"].items() if name.endswith("safetensors")}


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few hundred instances of 32 tokens, from the source of one of Python's own modules."""
    folder = tmp_path_factory.mktemp("data")
    text = folder / "text.txt"
    lines = Path(argparse.__file__).read_text().splitlines()
    sentences = [line.strip() for line in lines if len(line.split()) > 4]
    documents = ["\n".join(sentences[i : i + 12]) for i in range(0, 720, 12)]
    text.write_text("\n\n".join(documents))
    instances = InstanceConfig(seq_len=32, max_predictions=5)
    config = PrepareConfig(
        inputs=(text,), out=folder / "shards", vocab_size=500, num_shards=3, processes=1, instances=instances
    )
    prepare(config, progress=False)
    return folder / "shards"


@pytest.fixture
def training_command(data_dir: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Returns the command that trains into tmp_path/NAME; later flags win over earlier ones."""

    def command(
        name: str,
        *flags: object,
        size: int = 2,
        device: str = "cpu",
        precision: str = "--enable_fp32",
        script: Path = TRAIN,
    ) -> list[str]:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(size)]
        launcher += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
        arguments = ["--data_dir", data_dir, "--output_dir", tmp_path / name, "--device", device]
        arguments += [*SMALL, precision, *flags]
        return [*launcher, str(script), *(str(argument) for argument in arguments if argument != "")]

    return command


@pytest.fixture
def run_training(training_command: Callable[..., list[str]], tmp_path: Path) -> Callable[..., TrainingRun]:
    """Trains into tmp_path/NAME and returns what that left; see `training_command` for the arguments."""

    def run(name: str, *flags: object, **options: object) -> TrainingRun:
        done = subprocess.run(
            training_command(name, *flags, **options),
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=280,
        )
        return TrainingRun(done.returncode, done.stdout, tmp_path / name)

    return run


@pytest.fixture
def train_here(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Trains in this process, into tmp_path/here, on the CPU without XLA: for what goes wrong before the first step."""
    monkeypatch.syspath_prepend(TRAIN.parent)

    def train(*flags: object) -> None:
        script = runpy.run_path(str(TRAIN))
        arguments = ["--data_dir", data_dir, "--output_dir", tmp_path / "here", "--device", "cpu", *SMALL, *flags]
        script["train"](script["parse_arguments"]([str(argument) for argument in arguments]))

    return train
