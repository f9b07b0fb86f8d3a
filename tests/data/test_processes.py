import os
import signal

import pytest

from trn_dist.data.processes import Workers
from trn_dist.errors import DataError, TrnDistError


def square(number):
    return number * number, os.getpid()


def kill_itself(_):
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(number):
    raise DataError(f"not {number}")


def test_one_process_is_this_one():
    with Workers(1) as workers:
        assert list(workers.map(square, range(3))) == [(0, os.getpid()), (1, os.getpid()), (4, os.getpid())]


def test_results_are_in_order_and_tasks_are_read_as_they_are_done():
    read = []

    def tasks():
        for number in range(50):
            read.append(number)
            yield number

    with Workers(2) as workers:
        results = workers.map(square, tasks())
        first, process = next(results)
        assert (first, len(read)) == (0, 5)
        assert process != os.getpid()
        assert [result for result, _ in results] == [number * number for number in range(1, 50)]


def test_errors_of_a_worker_reach_the_caller():
    with Workers(2) as workers, pytest.raises(DataError, match="not 0"):
        list(workers.map(refuse, range(9)))


def test_killed_worker():
    message = "one of 2 worker processes was killed, most often for want of memory: try again with fewer processes"
    with Workers(2) as workers, pytest.raises(TrnDistError, match=message):
        list(workers.map(kill_itself, range(9)))
