import pytest

from trn_dist.training import phases as phases_module
from trn_dist.training.phases import PhaseClock


@pytest.fixture
def time(monkeypatch):
    class Time:
        now = 50.0

        def perf_counter(self):
            return self.now

    time = Time()
    monkeypatch.setattr(phases_module, "time", time)
    return time


def test_time_goes_to_the_phase_that_is_on(time):
    clock = PhaseClock()
    with clock.within("input"):
        time.now += 2.0
    time.now += 3.0
    with clock.within("checkpoint"):
        time.now += 5.0
        with clock.within("log"):
            time.now += 7.0
    clock.enter("end")
    assert clock.seconds == {"input": 2.0, "step": 3.0, "checkpoint": 5.0, "log": 7.0, "other": 0.0, "end": 0.0}


@pytest.mark.parametrize("phase", ["checkpoint", "other"])
def test_a_checkpoint_or_an_evaluation_is_no_part_of_a_steps_duration(time, phase):
    clock = PhaseClock()
    for _ in range(3):
        time.now += 1.0
        with clock.within(phase):
            time.now += 100.0
        clock.step_done()
    assert list(clock.durations) == [1.0, 1.0, 1.0]


def _after(time, seconds):
    clock = PhaseClock()
    for duration in seconds:
        time.now += duration
        clock.step_done()
    return clock


def test_a_step_is_overdue_at_a_multiple_of_the_median(time):
    clock = _after(time, [60.0, 2.0, 2.0, 2.0, 2.0])
    time.now += 20.0
    assert clock.overdue(10.0, 1.0) is None
    time.now += 0.5
    assert clock.overdue(10.0, 1.0) == (20.5, 20.0)
    assert clock.overdue(10.0, 30.0) is None


def test_nothing_is_overdue_while_steps_compile_or_a_checkpoint_is_waited_for(time):
    clock = _after(time, [1.0] * 4)
    time.now += 1e6
    assert clock.overdue(10.0, 1.0) is None
    clock = _after(time, [1.0] * 5)
    for phase in ("checkpoint", "other", "end"):
        with clock.within(phase):
            time.now += 1e6
            assert clock.overdue(10.0, 1.0) is None
    clock = _after(time, [1.0] * 5)
    with clock.within("input"):
        time.now += 11.0
        assert clock.overdue(10.0, 1.0) == (11.0, 10.0)
