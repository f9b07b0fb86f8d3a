import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trn_dist.data.shards import KEYS, ShardSet, write_shard
from trn_dist.errors import CheckpointError, ConfigError

TRAIN = Path(__file__).parents[2] / "examples" / "bert_phase1" / "train.py"
DISAGREE = Path(__file__).parents[1] / "workers" / "disagree.py"


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["--enable_fp32", ""], ids=["fp32", "bf16"])
def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(run_training, precision):
    """Dropout and stochastic rounding included, and one resume in the middle of an epoch."""
    flags = ["--steps_per_ckpt", 4]
    whole = run_training("whole", *flags, "--steps_this_run", 16, precision=precision, device="cpu-xla")
    first = run_training("parts", *flags, "--steps_this_run", 7, precision=precision, device="cpu-xla")
    second = run_training("parts", *flags, "--steps_this_run", 9, precision=precision, device="cpu-xla")
    assert [run.returncode for run in (whole, first, second)] == [0, 0, 0], second.output
    assert "starting from new weights" in first.output
    assert re.search(r"resumed from .*step_00000007 after step 7", second.output)
    assert [step for step, _ in second.losses] == list(range(16))
    assert second.losses == whole.losses
    assert second.checkpoint_hashes(16) == whole.checkpoint_hashes(16)


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_nothing_had_happened(run_training, training_command, tmp_path):
    whole = run_training("whole", "--steps_this_run", 16)
    with subprocess.Popen(
        training_command("killed", "--steps_this_run", 40, "--steps_per_ckpt", 3, "--log_every", 1),
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        metrics = tmp_path / "killed" / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 8:
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    resumed = run_training("killed", "--steps_this_run", 10, "--steps_per_ckpt", 3)
    assert resumed.returncode == 0, resumed.output
    assert "resumed from" in resumed.output
    common = min(len(whole.losses), len(resumed.losses))
    assert common >= 12
    assert resumed.losses[:common] == whole.losses[:common]


@pytest.mark.slow
def test_a_run_that_is_asked_to_leave_saves_first(run_training, training_command, tmp_path):
    """SIGTERM to torchrun, as a scheduler sends it; the run then goes on from the very step."""
    whole = run_training("whole", "--steps_this_run", 40)
    with subprocess.Popen(
        training_command("asked", "--steps_this_run", 40, "--steps_per_ckpt", 1000, "--log_every", 1),
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        metrics = tmp_path / "asked" / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 5:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=100)[0]
    found = re.search(r"asked to stop \(SIGTERM\): saved .*step_(\d+), leaving", output)
    assert found, output
    resumed = run_training("asked", "--steps_this_run", 40)
    assert f"after step {int(found[1])}" in resumed.output
    assert resumed.losses == whole.losses


@pytest.mark.slow
def test_two_workers_are_one_worker_with_twice_the_batch(run_training):
    flags = ["--disable_dropout", "--steps_this_run", 20, "--grad_accum_usteps", 1]
    two = run_training("two", *flags, "--batch_size", 4, device="cpu-xla")
    one = run_training("one", *flags, "--batch_size", 8, size=1, device="cpu-xla")
    assert [two.returncode, one.returncode] == [0, 0], two.output + one.output
    assert len(one.losses) == 20
    for (_, a), (_, b) in zip(one.losses, two.losses, strict=True):
        assert a == pytest.approx(b, abs=1e-6)


@pytest.mark.slow
def test_another_number_of_workers_goes_on_with_the_same_global_batch(run_training):
    flags = ["--disable_dropout"]
    whole = run_training("whole", *flags, "--steps_this_run", 12)
    run_training("elastic", *flags, "--steps_this_run", 5)
    resumed = run_training("elastic", *flags, "--steps_this_run", 7, "--grad_accum_usteps", 4, size=1)
    assert resumed.returncode == 0, resumed.output
    assert [loss for _, loss in resumed.losses] == pytest.approx([loss for _, loss in whole.losses], abs=2e-6)


@pytest.fixture
def finished(run_training):
    """A run of three steps."""
    run = run_training("run", "--steps_this_run", 3)
    assert run.returncode == 0, run.output
    return run


@pytest.mark.slow
def test_what_a_run_leaves(finished):
    assert "BERT debug, " in finished.output
    assert "2 workers, global batch 16, " in finished.output
    assert re.search(r"step 3/3  loss \d+\.\d{4}  lr 4\.000e-04", finished.output)
    assert f"-m tensorboard.main --logdir {finished.directory / 'tensorboard'}" in finished.output
    results = finished.results
    assert results["first_loss"] == finished.losses[0][1]
    assert results["final_loss"] == finished.losses[2][1]
    assert results["sequences"] == 48
    assert (results["world_size"], results["device"]) == (2, "cpu")
    events = EventAccumulator(str(finished.directory / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("loss")] == pytest.approx([loss for _, loss in finished.losses])
    state = json.loads((finished.directory / "checkpoints/step_00000003/state.json").read_text())
    assert state["versions"]["torch"].startswith("2.9")


@pytest.mark.slow
def test_what_a_resume_refuses(run_training, finished):
    for flags, message in (
        (["--batch_size", 8], "written with global_batch = 16, this run has 32"),
        (["--seed", 1], "written with seed = 12349, this run has 1"),
        (["--optimizer", "LAMB"], "written with optimizer = 'AdamW_FP32OptimParams', this run has 'LAMB'"),
    ):
        refused = run_training("run", *flags, "--steps_this_run", 2)
        assert refused.returncode != 0
        assert message in refused.output
        assert "exitcode  : 78" in refused.output
    assert finished.losses[-1][0] == 2


@pytest.mark.slow
def test_a_run_that_is_over_says_so(run_training, finished):
    again = run_training("run", "--steps_this_run", 0)
    assert again.returncode == 0
    assert "nothing to do: the run is at step 3 and ends at step 3" in again.output


@pytest.mark.slow
def test_phase_2_takes_the_weights_alone(run_training, finished):
    """The first step has a learning rate of 0, so after it the weights are still those of phase 1."""
    flags = ["--phase2", "--resume_ckpt_path", finished.directory / "checkpoints", "--seed", 5, "--batch_size", 8]
    second = run_training("phase2", *flags, "--steps_this_run", 1)
    assert second.returncode == 0, second.output
    model = "model.safetensors"
    assert second.checkpoint_hashes(1)[model] == finished.checkpoint_hashes(3)[model]
    state = json.loads((second.directory / "checkpoints/step_00000001/state.json").read_text())
    assert (state["step"], state["optimizer_steps"]) == (1, 1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seq_len", 128], r"--seq_len 128 was asked for, but the shards in .* have 32"),
        (["--max_pred_len", 20], r"--max_pred_len 20 was asked for, but the shards in .* have 5"),
        (["--batch_size", 100_000], r"has [\d,]+ samples, fewer than one global batch of 200,000"),
        (["--data_dir", "/nowhere"], "/nowhere"),
        (["--enable_pt_autocast", "--enable_fp32"], "contradict each other"),
        (["--device", "neuron"], "this host has no Neuron device"),
        (["--warmup_steps", 50], r"the warm-up \(50 steps\) must end before the schedule does \(40 steps\)"),
    ],
)
def test_bad_settings(train_here, tmp_path, flags, message):
    with pytest.raises(ConfigError, match=message):
        train_here(*flags)
    assert not (tmp_path / "here").exists(), "nothing is half-written"


@pytest.mark.parametrize("flags", [["--resume_ckpt"], ["--resume_ckpt_path", "/nowhere"]])
def test_nothing_to_resume_from(train_here, flags):
    with pytest.raises(CheckpointError, match="there is no checkpoint to resume from in /"):
        train_here(*flags)


@pytest.mark.slow
def test_an_error_is_a_message_and_an_exit_code(run_training):
    run = run_training("refused", "--seq_len", 128, size=1)
    assert "error: --seq_len 128 was asked for, but the shards in" in run.output
    assert "exitcode  : 78" in run.output
    assert not re.search(r'File ".*train\.py"', run.output), "a message, not a traceback"


def refuse(run_training, *flags, **options):
    run = run_training("refused", *flags, **options)
    assert run.returncode != 0
    assert "exitcode  : 78" in run.output
    assert not run.directory.exists(), "nothing is half-written"
    return run.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [("--seed", "1", "seed: rank 0: 12349; rank 1: 1."), ("--batch_size", "2", "batch_size: rank 0: 4; rank 1: 2.")],
)
def test_ranks_with_other_settings_are_named_before_the_first_step(run_training, flag, value, says):
    output = refuse(run_training, "--on_rank_1", flag, value, script=DISAGREE)
    assert f"the ranks do not agree on {says}" in output


@pytest.mark.slow
def test_ranks_with_other_code_are_named_before_the_first_step(run_training, tmp_path):
    """As when a host still has last week's image."""
    shutil.copytree(TRAIN.parent, tmp_path / "old")
    with (tmp_path / "old" / "arguments.py").open("a") as file:
        file.write("# last week\n")
    chooses = tmp_path / "old" / "chooses.py"
    chooses.write_text(
        "import os, sys\n"
        f"scripts = [{str(TRAIN)!r}, {str(tmp_path / 'old' / 'train.py')!r}]\n"
        "os.execv(sys.executable, [sys.executable, scripts[int(os.environ['RANK'])], *sys.argv[1:]])\n"
    )
    output = refuse(run_training, script=chooses)
    assert re.search(r"the ranks do not agree on code: rank 0: [0-9a-f]{16}; rank 1: [0-9a-f]{16}\.", output)


@pytest.mark.slow
def test_ranks_with_other_data_are_named_before_the_first_step(run_training, data_dir, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(data_dir, other)
    shards = ShardSet.open(other)
    columns = shards.read(0)
    (other / "manifest.json").unlink()
    write_shard(shards.shards[0].path, {key: columns[key][1:] for key in KEYS})
    output = refuse(run_training, "--on_rank_1", "--data_dir", other, script=DISAGREE)
    assert "the ranks do not agree on data" in output


def test_weights_of_the_tutorials_checkpoint_only_with_phase2(train_here, tmp_path):
    """The refusal comes before the file is opened; tests/models has what is in such a file."""
    (tmp_path / "ckpt_7.pt").touch()
    with pytest.raises(
        ConfigError, match=r"ckpt_7\.pt does not say enough to go on exactly; --phase2 takes its weights"
    ):
        train_here("--resume_ckpt_path", tmp_path)
