"""Profiles of real runs: whole files that a viewer of Chrome traces can read, and training that does not notice."""

import gzip
import json
import re
import shutil
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trn_dist.xla as xla
from trn_dist.errors import ConfigError
from trn_dist.xla.graphs import count_graphs
from trn_dist.xla.profiling import StepProfile, neuron_profile_environment, parse_steps

WORKER = """
import json, sys
from pathlib import Path
import torch
import trn_dist.xla as xla
from trn_dist.training import AdamW, Precision, TrainStep, linear_warmup_linear_decay
from trn_dist.xla.graphs import count_graphs
from trn_dist.xla.profiling import StepProfile, parse_steps

out, device, steps, every_rank = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] == "every"
with xla.init(device) as world:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 12)).to(world.device)
    train_step = TrainStep(
        world,
        lambda batch: (model(batch["x"]) - batch["x"].sin()).square().mean(),
        AdamW(model.named_parameters()),
        linear_warmup_linear_decay(1e-2, 5, 100),
        precision=Precision.named("fp32"),
    )
    losses = []
    with StepProfile(world, out / "profiles", parse_steps(steps), every_rank=every_rank) as profile:
        for step in range(8):
            x = torch.randn(16, 12, generator=torch.Generator().manual_seed(100 * step + world.rank))
            with profile.step(step):
                result = train_step(step, [{"x": x}])
            losses.append(result.loss)
    values = [view.item() for view in world.host_views(losses)]
    world.barrier()
    (out / f"{world.rank}.json").write_text(json.dumps([values, count_graphs(world).compiled, str(out)]))
"""


def read(path):
    """Reads a trace and holds it to the Chrome trace-event format, so far as viewers depend on it."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    tracks = defaultdict(list)
    for event in trace["traceEvents"]:
        assert event["ph"] in {"X", "M", "s", "f", "i"}
        assert isinstance(event["name"], str)
        assert {"pid", "tid"} <= event.keys()
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        # Perfetto drops what overlaps on a track: spans must nest. Times have a nanosecond of rounding.
        open_ends = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= begin + 0.002:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 0.002
            open_ends.append(end)
    return trace["traceEvents"]


def steps_in(events):
    return {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e["name"].startswith("ProfilerStep#")}


def files(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


@pytest.fixture(params=["cpu", "cpu-xla"])
def world(request):
    with xla.init(request.param) as world:
        yield world


def work(world):
    """A step whose operations are known."""
    x = torch.ones(64, 64, device=world.device)
    torch.mm(x, x).sum()
    world.sync()


# The text of the option.


@given(st.integers(0, 10**12), st.integers(1, 10**12))
def test_every_range_is_read_back(first, length):
    assert parse_steps(f"{first}:{first + length}") == range(first, first + length)


@given(st.one_of(st.text(), st.from_regex(r"[-+0-9 ]*:[-+0-9 ]*", fullmatch=True), st.text("0123456789:-٣²")))
def test_any_other_text_is_refused(text):
    try:
        steps = parse_steps(text)
    except ConfigError:
        return
    first, end = text.split(":")
    assert (int(first), int(end)) == (steps.start, steps.stop)
    assert steps


@pytest.mark.parametrize("text", ["", "10", ":20", "10:", "10-20", "a:b", "-1:5", "1:2:3", " 1:2", "1:2\n", "9" * 5000])
def test_what_is_no_range(text):
    with pytest.raises(ConfigError, match="is no range of steps: write FIRST:END, such as 10:20 for the steps 10 to"):
        parse_steps(text)


@pytest.mark.parametrize("text", ["20:10", "20:20"])
def test_a_range_without_steps(text):
    with pytest.raises(ConfigError, match=f"'{text}' has no step in it, .*: for step 20 alone write 20:21"):
        parse_steps(text)


# Real training, in worlds of two processes.


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cpu-xla"])
def test_training_does_not_notice_its_profile(run_world, tmp_path, device):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    warnings = {"PYTHONWARNINGS": "error::UserWarning"}
    profiled = run_world(script, device, "4:6", "first", env=warnings)
    assert profiled.returncode == 0, profiled.output
    plain = run_world(script, device, "1000:1001", "first", env=warnings)
    assert plain.returncode == 0, plain.output
    # Bit-equal losses, and no graph more.
    assert [rank[:2] for rank in profiled.by_rank] == [rank[:2] for rank in plain.by_rank]
    assert plain.output.count("no profile was written: the run took none of the steps 1000:1001") == 1
    assert "ERROR" not in profiled.output

    directory = Path(profiled.by_rank[0][2]) / "profiles"
    name = "rank_00000.steps_000004-000006"
    others = [path for path in files(directory) if path != f"{name}.trace.json.gz"]
    assert len(others) == (device == "cpu-xla")
    assert all(re.fullmatch(rf"plugins/profile/{name}/[^/]+\.xplane\.pb", path) for path in others)
    path = directory / f"{name}.trace.json.gz"
    assert profiled.output.count(f"profile of steps 4 to 5: {path}\n  open it at https://ui.perfetto.dev") == 1
    assert (f"tensorboard --logdir {directory}" in profiled.output) == (device == "cpu-xla")

    events = read(path)
    steps = steps_in(events)
    assert list(steps) == ["ProfilerStep#4", "ProfilerStep#5"]
    (begin, middle), (_, end) = steps.values()
    assert begin < middle <= steps["ProfilerStep#5"][0] < end
    names = {event["name"] for event in events}
    assert {"aten::linear", "aten::addmm"} & names
    assert {"c10d::allreduce_", "gloo:all_reduce"} <= names  # where a rank waits for the others
    if device == "cpu-xla":
        # On one clock: what torch_xla did is within the steps, which is where its work was asked for.
        asked = [event for event in events if event["name"] == "StepMarker"]
        assert len(asked) >= 4
        assert all(begin - 500 < event["ts"] < end for event in asked)
        operations = [event for event in events if "hlo_op" in event.get("args", {})]
        assert any("dot" in event["name"] for event in operations)
        assert max(event["dur"] for event in operations) > 0
        # The graphs of a step are in it as often as the step was taken.
        modules = {event["args"]["hlo_module"] for event in operations}
        assert len(modules) == 2


@pytest.mark.slow
def test_every_rank_writes_files_of_its_own(run_world, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    run = run_world(script, "cpu-xla", "6:100", "every")
    assert run.returncode == 0, run.output
    directory = Path(run.by_rank[0][2]) / "profiles"
    names = [f"rank_{rank:05d}.steps_000006-000008" for rank in (0, 1)]
    assert sorted(path.name for path in directory.glob("plugins/profile/*")) == names
    for name in names:
        assert list(steps_in(read(directory / f"{name}.trace.json.gz"))) == ["ProfilerStep#6", "ProfilerStep#7"]
    assert len(files(directory)) == 4


# Where a loop begins and ends.


def profiled_loop(world, directory, taken, steps="3:6"):
    with StepProfile(world, directory, parse_steps(steps)) as profile:
        for step in taken:
            with profile.step(step):
                work(world)


def test_a_run_that_ends_within_the_steps(world, tmp_path, capsys):
    profiled_loop(world, tmp_path / "a" / "b", range(5))
    (name, *_) = [path for path in files(tmp_path / "a" / "b") if "/" not in path]
    assert name == "rank_00000.steps_000003-000005.trace.json.gz"
    assert list(steps_in(read(tmp_path / "a" / "b" / name))) == ["ProfilerStep#3", "ProfilerStep#4"]
    assert "profile of steps 3 to 4: " in capsys.readouterr().out


def test_a_run_that_begins_within_the_steps_and_goes_on(world, tmp_path):
    profiled_loop(world, tmp_path, range(5, 9))
    (path,) = tmp_path.glob("*.gz")
    assert path.name == "rank_00000.steps_000005-000006.trace.json.gz"
    events = read(path)
    assert list(steps_in(events)) == ["ProfilerStep#5"]
    ((begin, end),) = steps_in(events).values()
    products = [event["ts"] for event in events if event["name"] == "aten::mm"]
    assert products
    assert all(begin < ts < end for ts in products)


def test_the_graph_under_construction_is_not_cut(tmp_path):
    with xla.init("cpu-xla") as world:

        def loop(profile):
            before, total = count_graphs(world).compiled, torch.zeros(7, 3, device=world.device)
            for step in range(3):
                with profile.step(step):
                    total = total * 1.5 + step  # nothing ends the graph
            assert world.host_views([total])[0][0, 0] == 3.5
            return count_graphs(world).compiled - before

        with StepProfile(world, tmp_path, range(1, 2)) as profile:
            profiled = loop(profile)
        with StepProfile(world, tmp_path, range(0)) as profile:
            plain = loop(profile)
        assert (profiled, plain) == (1, 0)


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), SystemExit(143), KeyboardInterrupt()])
def test_an_error_within_the_steps_keeps_its_way_and_the_profile(world, tmp_path, error):
    with pytest.raises(type(error)) as raised, StepProfile(world, tmp_path, range(3, 6)) as profile:
        for step in range(9):
            with profile.step(step):
                work(world)
                if step == 4:
                    raise error
    assert raised.value is error
    (path,) = tmp_path.glob("*.gz")
    assert path.name == "rank_00000.steps_000003-000005.trace.json.gz"
    assert list(steps_in(read(path))) == ["ProfilerStep#3", "ProfilerStep#4"]
    assert not list(tmp_path.glob(".*"))


def test_a_profile_that_cannot_be_written_does_not_hide_the_error(world, tmp_path):
    error = ZeroDivisionError("by zero")
    directory = tmp_path / "profiles"

    def lose_the_directory(error):
        with StepProfile(world, directory, range(0, 2)) as profile, profile.step(0):
            shutil.rmtree(directory)
            if error:
                raise error

    with pytest.raises(ZeroDivisionError) as raised:
        lose_the_directory(error)
    assert "the profile could not be written either: " in raised.value.__notes__[0]
    with pytest.raises(OSError, match="host.json"):
        lose_the_directory(None)
    # Neither of them keeps the next one from being recorded.
    profiled_loop(world, directory, range(1, 2), "1:2")
    assert list(steps_in(read(directory / "rank_00000.steps_000001-000002.trace.json.gz"))) == ["ProfilerStep#1"]


def test_beside_another_profiler_of_xla_it_does_not_begin(tmp_path):
    from torch_xla.debug import profiler

    with xla.init("cpu-xla") as world:
        profiler.start_trace(tmp_path / "other")
        try:
            with (
                pytest.raises(RuntimeError, match="Profile has already been started"),
                StepProfile(world, tmp_path / "mine", range(0, 1)) as profile,
                profile.step(0),
            ):
                work(world)
        finally:
            profiler.stop_trace()
    assert not list((tmp_path / "mine").iterdir())


def test_a_second_run_of_the_same_steps_replaces_the_first(world, tmp_path):
    profiled_loop(world, tmp_path, range(9))
    before = files(tmp_path)
    profiled_loop(world, tmp_path, range(9))
    assert files(tmp_path) == before


def test_without_steps_nothing_is_made(world, tmp_path, capsys):
    with StepProfile(world, tmp_path / "profiles", range(0)) as profile, profile.step(0):
        work(world)
    assert not (tmp_path / "profiles").exists()
    assert capsys.readouterr().out == ""


def test_another_rank_is_not_profiled(tmp_path, capsys):
    other = SimpleNamespace(kind="cpu", rank=3)
    with StepProfile(other, tmp_path / "profiles", range(0, 1)) as profile, profile.step(0):
        pass
    assert not (tmp_path / "profiles").exists()


def test_a_directory_that_cannot_be_made(world, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write profiles to .*file/profiles .*: choose another directory"):
        StepProfile(world, tmp_path / "file" / "profiles", range(0, 1)).__enter__()


# Neuron: the variables, and what there is to do beside the runtime's own profile.


def test_the_variables_of_neuron(tmp_path):
    variables = neuron_profile_environment({"RANK": "0", "PATH": "/bin"}, tmp_path)
    assert variables == {
        "NEURON_RT_INSPECT_ENABLE": "1",
        "NEURON_RT_INSPECT_SYSTEM_PROFILE": "1",
        "NEURON_RT_INSPECT_DEVICE_PROFILE": "0",
        "NEURON_RT_INSPECT_OUTPUT_DIR": str(tmp_path / "neuron"),
    }
    assert neuron_profile_environment({}, tmp_path) == variables
    assert neuron_profile_environment({"RANK": "1"}, tmp_path) == {}
    assert neuron_profile_environment({"RANK": "1"}, tmp_path, every_rank=True) == variables


def test_variables_that_are_set_already_are_kept(tmp_path):
    mine = {
        "NEURON_RT_INSPECT_ENABLE": "1",
        "NEURON_RT_INSPECT_SYSTEM_PROFILE": "0",
        "NEURON_RT_INSPECT_DEVICE_PROFILE": "session",
        "NEURON_RT_INSPECT_OUTPUT_DIR": "/shared",
    }
    assert neuron_profile_environment(mine, tmp_path) == {}
    some = {name: mine[name] for name in ("NEURON_RT_INSPECT_DEVICE_PROFILE", "NEURON_RT_INSPECT_OUTPUT_DIR")}
    assert neuron_profile_environment(some, tmp_path) == {
        "NEURON_RT_INSPECT_ENABLE": "1",
        "NEURON_RT_INSPECT_SYSTEM_PROFILE": "1",
    }


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"NEURON_RT_INSPECT_ENABLE": "0"}, "sets NEURON_RT_INSPECT_ENABLE=0: unset it, or do not ask for a profile"),
        ({"NEURON_RT_INSPECT_SYSTEM_PROFILE": "0"}, "SYSTEM_PROFILE=0, and .* unset the first, or set the second"),
    ],
)
def test_variables_that_contradict(tmp_path, environment, says):
    with pytest.raises(ConfigError, match=says):
        neuron_profile_environment(environment, tmp_path)


def test_on_neuron_the_steps_are_noted_as_unix_time(tmp_path):
    printed = []
    neuron = SimpleNamespace(kind="neuron", rank=0, print=printed.append)
    with pytest.raises(ConfigError, match="set what neuron_profile_environment.* returns before trn_dist.xla.init"):
        StepProfile(neuron, tmp_path, range(2, 4), environment={}).__enter__()
    variables = neuron_profile_environment({}, tmp_path)
    with StepProfile(neuron, tmp_path, range(2, 4), environment=variables) as profile:
        for step in range(6):
            with profile.step(step):
                pass
    events = read(tmp_path / "rank_00000.steps_000002-000004.trace.json.gz")
    assert [event["name"] for event in events] == ["ProfilerStep#2", "ProfilerStep#3"]
    for event in events:
        assert event["args"]["begin_unix_ns"] == pytest.approx(1000 * event["ts"], abs=1000)
    assert f"neuron-explorer view -d {tmp_path / 'neuron'}" in printed[0]
