import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trn_dist.xla as xla
from trn_dist.errors import ConfigError
from trn_dist.xla import GradientBuckets


def make_parameters(shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [
        (f"p{i}", torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
        for i, shape in enumerate(shapes)
    ]


@settings(deadline=None, max_examples=40)
@given(
    shapes=st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=6),
    micro_batches=st.integers(1, 3),
    bucket_elements=st.integers(1, 100),
    zero_first=st.booleans(),
)
def test_gradients_come_back_as_they_went_in(shapes, micro_batches, bucket_elements, zero_first):
    parameters = make_parameters(shapes)
    buckets = GradientBuckets(parameters, bucket_mb=bucket_elements * 4 / 2**20)
    if zero_first:
        buckets.zero()
    for k in range(1, micro_batches + 1):
        for i, (_, parameter) in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, float(i + 1) * k)
        buckets.collect()
        assert all(parameter.grad is None for _, parameter in parameters)
    gradients = buckets.gradients()
    factor = sum(range(1, micro_batches + 1))
    for i, (name, parameter) in enumerate(parameters):
        assert torch.equal(gradients[name], torch.full_like(parameter, float(i + 1) * factor))


def test_layout_is_reversed_and_full():
    # 4-byte elements and a bucket of 10 of them: the last layers share a bucket, one that is too large stands alone.
    parameters = make_parameters([(3,), (25,), (4,), (6,)])
    buckets = GradientBuckets(parameters, bucket_mb=40 / 2**20)
    buckets.zero()
    assert [bucket.numel() for bucket in buckets.buckets] == [10, 25, 3]


def test_a_parameter_without_a_gradient_counts_as_zeros():
    parameters = make_parameters([(2,), (3,)])
    parameters[0][1].grad = torch.ones(2)
    buckets = GradientBuckets(parameters)
    buckets.collect()
    assert buckets.gradients()["p1"].tolist() == [0.0, 0.0, 0.0]


def test_frozen_parameters_are_left_out():
    parameters = make_parameters([(2,), (3,)])
    parameters[1][1].requires_grad_(False)
    buckets = GradientBuckets(parameters)
    buckets.collect()
    assert list(buckets.gradients()) == ["p0"]


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ConfigError, match="no parameter that requires a gradient"):
        GradientBuckets([])


@pytest.mark.parametrize("max_norm", [0.5, 1e6, None])
def test_clipping_is_torchs(max_norm):
    parameters = make_parameters([(7, 3), (5,), (2, 2)])
    gradients = [torch.randn_like(parameter) * 3 for _, parameter in parameters]
    for (_, parameter), gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    buckets = GradientBuckets(parameters, bucket_mb=30 / 2**20)
    buckets.collect()
    norm = buckets.clip(max_norm)
    for (_, parameter), gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    expected = torch.nn.utils.clip_grad_norm_([p for _, p in parameters], max_norm or float("inf"))
    torch.testing.assert_close(norm, expected)
    for name, parameter in parameters:
        torch.testing.assert_close(buckets.gradients()[name], parameter.grad)


def test_bf16_gradients_add_up_in_fp32():
    """1 + 256 * 2**-9 is 1.5; in bf16, whose unit at 1 is 2**-7, every one of the small terms would be lost."""
    parameters = make_parameters([(4,)], dtype=torch.bfloat16)
    buckets = GradientBuckets(parameters)
    for value in [1.0] + [2.0**-9] * 256:
        parameters[0][1].grad = torch.full((4,), value, dtype=torch.bfloat16)
        buckets.collect()
    assert buckets.gradients()["p0"].tolist() == [1.5] * 4


def test_reduction_over_one_process_changes_nothing_and_takes_the_loss_along():
    with xla.init("cpu-xla") as world:
        parameters = [("w", torch.nn.Parameter(torch.ones(3, device=world.device)))]
        parameters[0][1].grad = torch.arange(3.0, device=world.device)
        buckets = GradientBuckets(parameters, num_scalars=2)
        buckets.collect(torch.full((), 2.5, device=world.device), torch.ones(1, device=world.device))
        buckets.collect(torch.full((), 0.25, device=world.device), torch.ones(1, device=world.device))
        loss, count = buckets.all_reduce(world)
        norm = buckets.clip(1.0)
        views = world.host_views([loss, count, norm])
        assert [view.tolist() for view in views] == [2.75, 2.0, pytest.approx(5**0.5)]  # of the gradients alone
        assert world.host_views([buckets.gradients()["w"]])[0].tolist() == pytest.approx([0.0, 5**-0.5, 2 * 5**-0.5])


def test_the_number_of_scalars_is_fixed():
    with pytest.raises(ValueError, match="1 scalars travel with the gradients, not 0"):
        GradientBuckets(make_parameters([(2,)]), num_scalars=1).collect()


@pytest.mark.parametrize("device", ["cpu", "cpu-xla"])
@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-6), ("bfloat16", 5e-3)])
def test_a_loop_with_pytorchs_own_optimizer(run_world, device, dtype, close):
    """Against one process with the whole batch, in float64."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).double()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    run = run_world("torch_optimizer.py", device, dtype, size=2)
    assert run.returncode == 0, run.output
    first, second = run.by_rank
    assert first == second
    for ours, theirs in zip(first["weights"], [*model.parameters(), torch.ones(3)], strict=True):
        assert ours == pytest.approx(theirs.flatten().tolist(), abs=close)
    assert first["compiled"][-1] == first["compiled"][1]
