import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trn_dist.xla as xla
from trn_dist.training import HANG_EXIT_CODE, Watchdog
from trn_dist.training.phases import PhaseClock
from trn_dist.training.stragglers import Pace, Straggler, StragglerWatch, find_slow


def pace(rank, steps=100, data=0.0, compute=1.0):
    return Pace(rank, f"host-{rank // 32}", steps, {"data": data, "compute": compute})


def test_a_slow_rank_is_named_with_its_phase():
    paces = [pace(rank) for rank in range(64)]
    paces[5] = pace(5, data=0.4)
    paces[40] = pace(40, compute=1.5)
    assert [(p.rank, ratio, phase) for p, ratio, phase in find_slow(paces)] == [
        (5, pytest.approx(1.4), "data"),
        (40, pytest.approx(1.5), "compute"),
    ]


def test_two_ranks_can_be_compared_and_one_cannot():
    assert [p.rank for p, _, _ in find_slow([pace(0), pace(1, compute=2.0)])] == [1]
    assert find_slow([pace(0)]) == []
    assert find_slow([]) == []


@given(st.lists(st.floats(1.0, 1.2), min_size=2, max_size=40))
def test_ranks_that_are_nearly_alike_are_no_stragglers(times):
    assert find_slow([pace(rank, compute=seconds) for rank, seconds in enumerate(times)]) == []


def test_a_straggler_is_reported_after_twenty_steps_and_then_ever_less_often():
    watch = StragglerWatch()
    reported = []
    for steps in range(0, 400, 10):
        reported += [s.steps for s in watch.look([pace(0, steps), pace(1, steps), pace(5, steps, data=0.4)])]
    assert reported == [20, 40, 80, 160, 320]
    assert watch.look([pace(0, 400), pace(1, 400), pace(5, 400)]) == []
    # It was well in between: counting begins anew.
    assert watch.look([pace(0, 410), pace(1, 410), pace(5, 410, data=0.4)]) == []


def test_the_line_of_a_straggler():
    assert str(Straggler(5, "host-a", 1.4, "data", 40)) == "rank 5 on host-a: 1.4x, in data, for 40 steps"


@given(
    st.builds(
        Pace,
        st.integers(0, 10**6),
        st.text(max_size=20),
        st.integers(0, 10**9),
        st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False)),
    )
)
def test_a_pace_travels_as_json(pace):
    assert Pace.from_json(pace.to_json()) == pace
    json.loads(pace.to_json())


class Late(PhaseClock):
    """A clock whose step takes too long."""

    late = False

    def overdue(self, factor, minimum):
        assert (factor, minimum) == (10.0, 600.0)
        return (6000.0, 600.0) if self.late else None


def test_a_worker_alone_is_watched_too(tmp_path):
    clock, codes = Late(), []
    with xla.init("cpu") as world, (tmp_path / "stderr").open("w") as stream:
        watchdog = Watchdog(world, clock, tmp_path / "stacks", every=0.01, stream=stream, leave=codes.append)
        with watchdog:
            assert watchdog.look() is None
            clock.late = True
            watchdog._thread.join(timeout=30)
    assert codes == [HANG_EXIT_CODE] == [75]
    for text in ((tmp_path / "stacks" / "rank_00000.txt").read_text(), (tmp_path / "stderr").read_text()):
        assert "step 1 of this run takes 6000 s so far, in step; the limit is 600 s" in text
        assert "test_a_worker_alone_is_watched_too" in text  # the main thread's stack


def test_a_loop_that_goes_well_is_left_alone(tmp_path):
    stream = io.StringIO()
    with (
        xla.init("cpu") as world,
        Watchdog(world, PhaseClock(), tmp_path, every=0.001, stream=stream, leave=pytest.fail),
    ):
        pass
    assert stream.getvalue() == ""
    assert list(tmp_path.iterdir()) == []


def test_a_hanging_step_shows_the_stacks_of_every_worker_and_ends_the_job(run_world):
    run = run_world("watched.py", "hang", size=2)
    assert run.returncode != 0
    assert "exitcode  : 75" in run.output or "exitcode: 75" in run.output
    stacks = run.output
    for rank in (0, 1):
        assert f"The stacks of rank {rank} on " in stacks
    assert "in never_returns" in stacks  # rank 1's main thread
    assert "in all_reduce" in stacks  # rank 0's, which waits for it


def test_a_slow_rank_is_named_while_the_job_runs(run_world):
    run = run_world("watched.py", "straggle", size=2)
    assert run.returncode == 0, run.output
    assert "straggler: rank 1 on " in run.output
    assert ", in data, for " in run.output
    assert "straggler: rank 0" not in run.output
