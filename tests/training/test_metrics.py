import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trn_dist.training import JsonLines, TensorBoard


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_lines(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    sink = JsonLines(path)
    sink.write(0, {"loss": 9.5})
    assert lines(path) == [{"step": 0, "loss": 9.5}]  # readable while the run goes on
    sink.write(1, {"loss": 9.25})
    sink.close()
    assert lines(path) == [{"step": 0, "loss": 9.5}, {"step": 1, "loss": 9.25}]


def test_numbers_that_json_lacks_are_null(tmp_path):
    sink = JsonLines(tmp_path / "metrics.jsonl")
    sink.write(0, {"a": float("nan"), "b": float("inf"), "c": 1.0})
    sink.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 0, "a": None, "b": None, "c": 1.0}]


@pytest.mark.parametrize("tail", ["", '{"step": 5, "lo', "\n"])
def test_a_resumed_run_writes_each_step_once(tmp_path, tail):
    """The run before went on to step 4 after its last checkpoint, of step 3, and died in the middle of a line."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(5)) + tail)
    sink = JsonLines(path, start=3)
    for step in (3, 4):
        sink.write(step, {"loss": 2.0})
    sink.close()
    assert [(line["step"], line["loss"]) for line in lines(path)] == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


def test_tensorboard_reads_the_events_and_hides_what_was_undone(tmp_path):
    first = TensorBoard(tmp_path)
    for step in range(5):
        first.write(step, {"loss": 10.0 - step, "learning_rate": 0.5})
    first.close()
    second = TensorBoard(tmp_path, start=3)
    second.write(3, {"loss": 1.0})
    second.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(0, 10.0), (1, 9.0), (2, 8.0), (3, 1.0)]
    assert "learning_rate" in events.Tags()["scalars"]
