"""The graph guard, on real graphs: whatever makes a step's graph new is named before or after it is compiled."""

import json
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trn_dist.xla as xla
from trn_dist.errors import RecompileError
from trn_dist.xla import GraphGuard, RecompileWarning
from trn_dist.xla.compile_log import CompileLog, Frame, parse_compilations
from trn_dist.xla.graphs import count_graphs
from trn_dist.xla.recompile import Operation, changed_inputs, parse_detector, signature_of

WIDTH = 8


@pytest.fixture(scope="module")
def world():
    with xla.init("cpu-xla") as world:
        yield world


@dataclass
class Cause:
    """One way to make a new graph: what the program does, and what the error must say."""

    name: str
    loss: Any
    says: tuple[str, ...]
    data: Any = lambda changed: torch.randn(WIDTH, WIDTH)
    compiles: bool = False  # something is compiled before the difference is met


def _evaluate(model, x, changed):
    model.train(not changed)
    return model(x).sum()


def _frozen(model, x, changed):
    model[0].bias.requires_grad_(changed)
    return model(x).sum()


def _ones(rows):
    """A batch with ones in so many rows, and zeros in the others."""
    return (torch.arange(WIDTH) < rows).float()[:, None].expand(WIDTH, WIDTH).clone()


class _Roll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shift):
        ctx.shift = shift
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return torch.roll(gradient, ctx.shift, 0), None


ANOTHER_WAY = "the program took another way"
NUMBER = "a Python number that is fixed in the graph"
VALUES = "a size that depends on values"
CAUSES = [
    Cause(
        "ragged last batch",
        lambda m, x, c: m(x).sum(),
        (r"input x was float32\[8,8\] and is float32\[5,8\]", "a ragged last batch"),
        lambda c: torch.randn(5 if c else WIDTH, WIDTH),
    ),
    Cause(
        "longer sequence",
        lambda m, x, c: m(x[:, :WIDTH]).sum(),
        (r"input x was float32\[8,9\] and is float32\[8,12\]", "an input of another shape"),
        lambda c: torch.randn(WIDTH, 12 if c else 9),
    ),
    Cause(
        "dtype of an input",
        lambda m, x, c: m(x.float()).sum(),
        (r"input x was float32\[8,8\] and is bfloat16\[8,8\]", "an input of another dtype"),
        lambda c: torch.randn(WIDTH, WIDTH).to(torch.bfloat16 if c else torch.float32),
    ),
    Cause(
        "boolean mask",
        lambda m, x, c: m(x)[x[:, 0] > 0.5].sum(),
        ("lambda m, x, c: m.x..x.:, 0.", VALUES, "nonzero"),
        lambda c: _ones(5 if c else WIDTH),
        compiles=True,
    ),
    Cause(
        "masked_select",
        lambda m, x, c: m(x).masked_select(x[:, :4] > 0.5).sum(),
        (VALUES, "masked_select"),
        lambda c: _ones(5 if c else WIDTH),
        compiles=True,
    ),
    Cause(
        "value read in the step",
        lambda m, x, c: m(x).sum() * (m(x).mean().item() if c else 1.5),
        ("a value was read in the middle of the step", r"mean\(\)\.item\(\)"),
        compiles=True,
    ),
    Cause(
        "Python integer",
        lambda m, x, c: m(x).roll(2 if c else 1, 0).square().sum(),
        (r"operation aten::roll f32\[8,4\] \(shifts=\(2\), dims=\(0\)\)", r"was .*shifts=\(1\)", NUMBER),
    ),
    Cause(
        "number that becomes exactly one",
        lambda m, x, c: (m(x) * (1.0 if c else 0.5)).sum(),
        ("operation aten::mul", "exactly 0 or 1"),
    ),
    Cause(
        "slice that moves",
        lambda m, x, c: m(x)[:, : 3 if c else 2].sum(),
        (r"end=3", r"where it was .* \(dim=1, start=0, end=2", NUMBER),
    ),
    Cause(
        "k of topk",
        lambda m, x, c: m(x).topk(3 if c else 2, dim=1)[0].sum(),
        (r"operation aten::topk .*k=3", "k=2", NUMBER),
    ),
    Cause(
        "branch on a Python value",
        lambda m, x, c: (m(x) + x[:, :4] if c else m(x)).square().sum(),
        ("operation xla::select", "where it was aten::pow", ANOTHER_WAY),
    ),
    Cause("train to eval", _evaluate, (r"\d in _evaluate: return model\(x\)\.sum\(\)", ANOTHER_WAY)),
    # Gradients that were made before the difference are there to stay, and to be executed.
    Cause("thawed parameter", _frozen, (ANOTHER_WAY,), compiles=True),
    Cause(
        "number in a backward pass",
        lambda m, x, c: _Roll.apply(m(x), 2 if c else 1).square().sum(),
        (r"operation aten::roll .*shifts=\(2\)", r"\d in backward: return torch\.roll", NUMBER),
    ),
]


def make_step(world, loss, hidden, seed=0):
    """A small training step whose graph is no other test's, for torch_xla keeps graphs for the life of the process."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(WIDTH, hidden), torch.nn.GELU(), torch.nn.Dropout(0.5), torch.nn.Linear(hidden, 4)]
    model = torch.nn.Sequential(*layers).to(world.device)

    def step(x, changed):
        loss(model, x.to(world.device), changed).backward()
        world.sync()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-0.01)
                parameter.grad = None
        world.sync()

    return step


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.name)
def test_a_new_graph_soon_after_the_warm_up_is_named_before_it_is_compiled(world, cause):
    guard = GraphGuard(world, make_step(world, cause.loss, 20 + CAUSES.index(cause)))
    for _ in range(4):
        guard(cause.data(False), False)
    x, before = cause.data(True), count_graphs(world).compiled
    with pytest.raises(RecompileError) as caught:
        guard(x, True)
    if not cause.compiles:
        assert count_graphs(world).compiled == before
        assert "not compiled yet" in str(caught.value)
    _assert_says(cause, str(caught.value))


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.name)
def test_a_new_graph_much_later_is_named_too(world, cause):
    guard = GraphGuard(world, make_step(world, cause.loss, 50 + CAUSES.index(cause)))
    for _ in range(14):
        guard(cause.data(False), False)
    with pytest.raises(RecompileError) as caught:
        guard(cause.data(True), True)
    _assert_says(cause, str(caught.value))


def _assert_says(cause, message):
    assert "call 5 of the step" in message or "call 15 of the step" in message
    for pattern in cause.says:
        assert re.search(pattern, message), message
    # The user's own file and line, and nobody else's first.
    place = re.search(r"^  at (\S+):(\d+) in ", message, re.MULTILINE)
    assert place, message
    assert place[1] == __file__


def test_what_makes_no_graph_raises_nothing(world):
    guard = GraphGuard(world, make_step(world, lambda m, x, c: (m(x) * c).sum(), 80))
    for call in range(20):
        guard(torch.randn(WIDTH, WIDTH), 0.5 + call / 7)


def test_a_warning_lets_the_step_go_on_and_names_what_is_known(world):
    guard = GraphGuard(world, make_step(world, lambda m, x, c: m(x).sum(), 81), action="warn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            guard(torch.randn(WIDTH, WIDTH), False)
    with pytest.warns(
        RecompileWarning, match=r"(?s)1 compiled.*input x was float32\[8,8\] and is float32\[3,8\].*ragged"
    ):
        guard(torch.randn(3, WIDTH), False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guard(torch.randn(3, WIDTH), False)


def test_a_warning_that_cannot_know_the_operation_says_how_to_learn_it(world):
    guard = GraphGuard(
        world, make_step(world, lambda m, x, c: m(x).roll(3 if c else 1, 0).square().sum(), 82), action="warn"
    )
    for _ in range(3):
        guard(torch.randn(WIDTH, WIDTH), False)
    with pytest.warns(RecompileWarning, match=r"(?s)not known.*GraphGuard\(action='raise'\)"):
        guard(torch.randn(WIDTH, WIDTH), True)


def test_graphs_may_be_allowed(world):
    guard = GraphGuard(world, make_step(world, lambda m, x, c: m(x).sum(), 83), action="allow")
    for size in range(2, 8):
        guard(torch.randn(size, WIDTH), False)


def test_shapes_of_the_warm_up_are_known_shapes(world):
    guard = GraphGuard(world, make_step(world, lambda m, x, c: m(x).sum(), 84), warm_up=4)
    for size in (8, 4, 6, 8, 6, 4, 8, 4):
        guard(torch.randn(size, WIDTH), False)
    with pytest.raises(RecompileError, match=r"input x was float32\[\d,8\] and is float32\[5,8\]"):
        guard(torch.randn(5, WIDTH), False)


def test_a_graph_between_the_steps_is_named_unless_it_is_expected(world):
    guard = GraphGuard(world, make_step(world, lambda m, x, c: m(x).sum(), 85))
    log = []
    for _ in range(4):
        guard(torch.randn(WIDTH, WIDTH), False)
    with guard.expect_graphs():
        torch.randn(71, device=world.device).sum().item()
    guard(torch.randn(WIDTH, WIDTH), False)
    log.append(torch.randn(72, device=world.device).sum().item())
    with pytest.raises(
        RecompileError, match=r"between call 5 of the step and the next, asked for at \S*test_guard\.py:\d+ "
    ):
        guard(torch.randn(WIDTH, WIDTH), False)


def test_an_error_of_the_step_is_the_steps(world):
    def step(x):
        raise RuntimeError("out of coffee")

    guard = GraphGuard(world, step)
    with pytest.raises(RuntimeError, match="out of coffee"):
        guard(torch.randn(2))


def test_a_device_that_compiles_nothing_is_left_alone():
    with xla.init("cpu") as world:
        guard = GraphGuard(world, lambda x: x.sum())
        for size in range(1, 20):
            assert guard(torch.ones(size)) == size


def test_settings_that_cannot_be(world):
    with pytest.raises(ValueError, match="the warm-up must be at least two calls, not 1"):
        GraphGuard(world, lambda: None, warm_up=1)
    with pytest.raises(ValueError, match="action must be one of raise, warn, allow, not 'ignore'"):
        GraphGuard(world, lambda: None, action="ignore")


def test_a_rank_with_a_ragged_batch_ends_the_job_as_one_that_is_not_retried(run_world):
    run = run_world("ragged_batch.py", size=2, agent=True)
    assert run.returncode == 78, run.output
    assert "input micro_batches[0].x was float32[8,4] and is float32[3,4]" in run.output


REPORT = """
Compilation Analysis: ================================================================================
Compilation Analysis: Compilation Cause
Compilation Analysis:   most likely user code trying to access tensor value before torch_xla.sync
Compilation Analysis: Graph Info:
Compilation Analysis:   Graph Hash: c74c3b91b855b2b123f833b0d5f86943
Compilation Analysis:   Number of Graph Inputs: 35
Compilation Analysis: Python Frame Triggered Execution:
Compilation Analysis:   loss_of (/home/me/my project/train.py:71)
Compilation Analysis:   <module> (/home/me/my project/train.py:101)
Compilation Analysis:   ..........
Compilation Analysis: --------------------------------------------------------------------------------

Post Compilation Analysis: Graph input size: 1.548000 GB
"""


def test_torch_xlas_report_of_a_compilation():
    (one, two) = parse_compilations(REPORT + REPORT.replace("most likely user code trying to access tensor value", "x"))
    assert one.frames == (
        Frame("/home/me/my project/train.py", 71, "loss_of"),
        Frame("/home/me/my project/train.py", 101, "<module>"),
    )
    assert one.host_read
    assert not two.host_read


@given(st.text())
def test_any_text_is_a_report_of_nothing_at_worst(text):
    parse_compilations(text)
    Operation.parse(text)
    parse_detector(RuntimeError(text))


def test_the_log_leaves_a_users_own_settings_alone(tmp_path):
    environment = {"PT_XLA_DEBUG_FILE": str(tmp_path / "log")}
    log = CompileLog(environment)
    assert environment == {"PT_XLA_DEBUG_FILE": str(tmp_path / "log")}
    assert log.news() == []
    (tmp_path / "log").write_text(REPORT)
    assert len(log.news()) == 1
    assert log.news() == []
    assert CompileLog({"PT_XLA_DEBUG": "1"}).news() == []


def test_the_log_is_no_file_that_somebody_has_to_remove():
    environment: dict[str, str] = {}
    CompileLog(environment)
    assert environment["PT_XLA_DEBUG_LEVEL"] == "1"
    assert str(Path(environment["PT_XLA_DEBUG_FILE"]).readlink()).startswith("/memfd:")


@given(st.dictionaries(st.text(max_size=3), st.sampled_from(["f[1]", "f[2]"])))
def test_changed_inputs_are_those_that_differ(new):
    known = [{"a": "f[1]", "b": "f[2]"}]
    changed = changed_inputs(known, new)
    assert {name for name, _, _ in changed} == {n for n in {*known[0], *new} if known[0].get(n) != new.get(n)}
    assert changed_inputs([], new) == ()


def test_the_signature_of_nested_arguments():
    value = {"step": 3, "batches": [{"x": torch.zeros(2, 3)}, (torch.zeros(1, dtype=torch.int64).numpy(),)]}
    assert signature_of(value) == {"batches[0].x": "float32[2,3]", "batches[1][0]": "int64[1]"}
    json.dumps(signature_of(value))
