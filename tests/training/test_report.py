import dataclasses
import io
import json

import pytest
import torch

import trn_dist.xla as xla
from trn_dist.training import Utilization
from trn_dist.training import phases as phases_module
from trn_dist.training.report import RunLog
from trn_dist.training.step import StepResult
from trn_dist.training.summary import format_duration


class Memory:
    def __init__(self):
        self.steps, self.closed = [], False

    def write(self, step, values):
        self.steps.append((step, dict(values)))

    def close(self):
        self.closed = True


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(phases_module, "time", clock)
    return clock


def run(clock, world, steps, *, start=0, seconds=0.5, not_finite=(), **options):
    """Steps of half a second after two of ten seconds that compile; losses fall by one a step."""
    sink, stream = Memory(), io.StringIO()
    log = RunLog(world, [sink], global_batch=8, start=start, stop=start + steps, stream=stream, **options)
    for step in range(start, start + steps):
        clock.now += 10.0 if step - start < 2 else seconds
        loss = torch.full((), 9.0 - step, device=world.device)
        finite = torch.full((), step not in not_finite, device=world.device)
        log.record(step, StepResult(loss, loss * 0 + 2.5, finite, 1e-3))
    log.close()
    return log, sink, stream.getvalue().splitlines()


@pytest.mark.parametrize("device", ["cpu", "cpu-xla"])
def test_every_step_reaches_the_sinks_once_and_in_order(clock, device):
    with xla.init(device) as world:
        _, sink, _ = run(clock, world, 7, log_every=3)
    assert [(step, values["loss"]) for step, values in sink.steps] == [(s, 9.0 - s) for s in range(7)]
    assert sink.steps[0][1] == {"loss": 9.0, "learning_rate": 1e-3, "gradient_norm": 2.5}
    assert sink.steps[6][1]["sequences_per_second"] == 16.0  # 8 sequences in half a second
    assert sink.closed


def test_progress_lines(clock):
    with xla.init("cpu") as world:
        _, _, lines = run(clock, world, 8, log_every=4, print_gradient_norm=True)
    assert lines == [
        "step 1/8  loss 9.0000  lr 1.000e-03  grad norm 2.500",
        "step 4/8  loss 6.0000  lr 1.000e-03  grad norm 2.500  16.0 seq/s  ETA 0:02",
        "step 8/8  loss 2.0000  lr 1.000e-03  grad norm 2.500  16.0 seq/s  ETA 0:00",
    ]


@pytest.mark.parametrize("device", ["cpu", "cpu-xla"])
def test_steps_that_were_skipped_are_counted(clock, device):
    with xla.init(device) as world:
        log, sink, lines = run(clock, world, 6, log_every=3, not_finite=(1, 4))
        assert log.summary(5).skipped_steps == 2
    assert [values.get("skipped_steps") for _, values in sink.steps] == [None, 1, None, None, 2, None]
    assert "1 steps skipped (gradients not finite)" in lines[1]


def test_summary(clock, tmp_path):
    with xla.init("cpu") as world:
        log, _, _ = run(clock, world, 30, start=100)
        summary = log.summary(129)
    assert (summary.first_step, summary.last_step) == (100, 129)
    assert (summary.first_loss, summary.final_loss) == (-91.0, -120.0)
    assert summary.sequences == 240
    assert summary.seconds == pytest.approx(34.0)
    assert summary.average_throughput == pytest.approx(16.0)
    assert summary.peak_throughput == pytest.approx(16.0)
    assert (summary.world_size, summary.device, summary.graphs_compiled) == (1, "cpu", 0)
    summary.write(tmp_path / "out" / "results.json")
    assert json.loads((tmp_path / "out" / "results.json").read_text())["final_loss"] == -120.0


def test_summary_of_a_run_that_diverged_is_still_json(clock, tmp_path):
    with xla.init("cpu") as world:
        log, _, _ = run(clock, world, 3)
        summary = dataclasses.replace(log.summary(2), final_loss=float("nan"))
    summary.write(tmp_path / "results.json")
    assert json.loads((tmp_path / "results.json").read_text())["final_loss"] is None


def test_an_error_is_not_held_up_by_what_is_pending(monkeypatch):
    """On a device the pending reports may wait for ranks that are gone."""
    sink = Memory()
    with xla.init("cpu") as world:
        log = RunLog(world, [sink], global_batch=8, start=0, stop=9, log_every=9, stream=io.StringIO())
        scalar = torch.ones(())
        with pytest.raises(ZeroDivisionError), log:
            log.record(0, StepResult(scalar, scalar, scalar, 1e-3))
            log.record(1, StepResult(scalar, scalar, scalar, 1e-3))
            monkeypatch.setattr(world, "host_views", lambda tensors: pytest.fail("the device was read"))
            1 / 0  # noqa: B018
    assert [step for step, _ in sink.steps] == [0]
    assert sink.closed


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_summary_of_a_very_short_run(clock, steps):
    with xla.init("cpu") as world:
        log, _, _ = run(clock, world, steps)
        summary = log.summary(steps - 1)
    assert summary.first_loss == 9.0
    assert summary.final_loss == 10.0 - steps
    assert summary.average_throughput == (16.0 if steps == 3 else 0.0)


def test_time_that_the_run_waits(clock):
    def slow_batches():
        for batch in "ab":
            clock.now += 3.0
            yield batch

    with xla.init("cpu") as world:
        log = RunLog(world, [], global_batch=8, start=0, stop=2, stream=io.StringIO())
        assert list(log.waiting_for_input(slow_batches())) == ["a", "b"]
        with log.saving():
            clock.now += 5.0
        wall_time = log.wall_time()
    assert (wall_time["input"], wall_time["checkpoint"]) == (6.0, 5.0)


def test_utilization_is_in_the_summary_with_all_it_is_computed_from(clock, tmp_path):
    with xla.init("cpu") as world:
        log, _, _ = run(clock, world, 30, utilization=Utilization(flops_per_sequence=3e9, peak_flops=96e9))
        summary = log.summary(29)
    summary.write(tmp_path / "results.json")
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["mfu"] == pytest.approx(3e9 * 16.0 / (1 * 96e9))  # 16 sequences a second
    assert (results["flops_per_sequence"], results["peak_flops"]) == (3e9, 96e9)
    assert results["mfu_formula"] == "flops_per_sequence * sequences_per_second / (world_size * peak_flops)"
    assert "50.0 % of the peak FLOPs" in str(summary)


def test_the_wall_time_adds_up(clock, tmp_path):
    """Twenty seconds of the first two steps, five of the others, ten of checkpoints: nothing is counted twice."""
    with xla.init("cpu") as world:
        log = RunLog(world, [], global_batch=8, start=0, stop=12, stream=io.StringIO(), restored=0.0)
        scalar = torch.ones(())
        for step in range(12):
            for _ in log.waiting_for_input([None]):
                clock.now += 1.0
            clock.now += 9.0 if step < 2 else 0.5
            log.record(step, StepResult(scalar, scalar, scalar, 1e-3))
            if step in (5, 11):
                with log.saving():
                    clock.now += 5.0
        log.close()
        wall_time = log.wall_time()
        summary = log.summary(11)
    assert wall_time["step"] + wall_time["input"] == pytest.approx(2 * 10 + 10 * 1.5)
    assert wall_time["checkpoint"] == 10.0
    assert wall_time["rendezvous"] > 0
    assert summary.wall_time == pytest.approx(wall_time)
    assert 0 < summary.goodput < 1
    assert "checkpoint" in str(summary).splitlines()[2]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (754, "12:34"), (3600 * 3 + 245, "3:04:05"), (86400 + 3600 * 3 + 245, "1d 03:04:05")],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text
