import math

import numpy as np
import pytest
import torch

import trn_dist.xla as xla
from trn_dist.errors import CheckpointError, ConfigError
from trn_dist.training import AdamW, Lamb
from trn_dist.training.precision import round_stochastically
from trn_dist.xla.graphs import count_graphs

SHAPES = {"embedding": (11, 4), "bias": (4,), "scalar": (), "weight": (4, 6)}


def make_parameters(dtype=torch.float32, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.nn.Parameter((0.1 * torch.randn(shape, generator=generator)).to(dtype).to(device))
        for name, shape in SHAPES.items()
    }


def make_gradients(step):
    generator = torch.Generator().manual_seed(1000 + step)
    return {name: torch.randn(shape, generator=generator) * 10.0 ** ((step % 5) - 2) for name, shape in SHAPES.items()}


def learning_rate(step):
    return 1e-3 * min(1.0, step / 10)  # starts at exactly zero


@pytest.mark.parametrize("device", ["cpu", "cpu-xla"])
def test_adamw_is_torchs(device):
    """100 steps with warm-up from zero and weight decay on the matrices only; weights about 0.1, as in a model."""
    with xla.init(device) as world:
        ours, theirs = make_parameters(device=world.device), make_parameters()
        optimizer = AdamW(ours.items(), weight_decay=0.1, eps=1e-6, betas=(0.9, 0.98))
        groups = [
            {"params": [theirs["embedding"], theirs["weight"]], "weight_decay": 0.1},
            {"params": [theirs["bias"], theirs["scalar"]], "weight_decay": 0.0},
        ]
        reference = torch.optim.AdamW(groups, lr=1.0, eps=1e-6, betas=(0.9, 0.98), foreach=False)
        for step in range(100):
            gradients = make_gradients(step)
            optimizer.step({n: g.to(world.device) for n, g in gradients.items()}, learning_rate(step))
            world.sync()
            for name, parameter in theirs.items():
                parameter.grad = gradients[name]
            for group in reference.param_groups:
                group["lr"] = learning_rate(step)
            reference.step()
        views = world.host_views(list(ours.values()))
        for name, view in zip(SHAPES, views, strict=True):
            torch.testing.assert_close(view, theirs[name].detach(), rtol=0, atol=1e-6)


def lamb_in_float64(weights, steps, *, decay, betas, eps, trust_clip):
    """Algorithm 2 of You et al. 2020 in numpy; what does not decay takes the direction unscaled."""
    weights = {name: weight.astype(np.float64) for name, weight in weights.items()}
    mean = {name: np.zeros_like(weight) for name, weight in weights.items()}
    square = {name: np.zeros_like(weight) for name, weight in weights.items()}
    for t in range(1, steps + 1):
        for name, weight in weights.items():
            g = make_gradients(t - 1)[name].numpy().astype(np.float64)
            mean[name] = betas[0] * mean[name] + (1 - betas[0]) * g
            square[name] = betas[1] * square[name] + (1 - betas[1]) * g**2
            m_hat, v_hat = mean[name] / (1 - betas[0] ** t), square[name] / (1 - betas[1] ** t)
            direction = m_hat / (np.sqrt(v_hat) + eps)
            ratio = 1.0
            if weight.ndim > 1:
                direction = direction + decay * weight
                ratio = np.linalg.norm(weight) / np.linalg.norm(direction)
                ratio = min(ratio, 1.0) if trust_clip else ratio
            weights[name] = weight - learning_rate(t - 1) * ratio * direction
    return weights


@pytest.mark.parametrize("trust_clip", [True, False])
def test_lamb_is_the_papers(trust_clip):
    parameters = make_parameters()
    start = {name: parameter.detach().numpy().copy() for name, parameter in parameters.items()}
    optimizer = Lamb(parameters.items(), weight_decay=0.02, trust_clip=trust_clip)
    for step in range(100):
        optimizer.step(make_gradients(step), learning_rate(step))
    expected = lamb_in_float64(start, 100, decay=0.02, betas=(0.9, 0.999), eps=1e-6, trust_clip=trust_clip)
    for name, parameter in parameters.items():
        np.testing.assert_allclose(parameter.detach().numpy(), expected[name], rtol=0, atol=2e-5)


def test_lamb_leaves_a_weight_of_zeros_finite():
    parameter = torch.nn.Parameter(torch.zeros(3, 3))
    Lamb([("w", parameter)]).step({"w": torch.ones(3, 3)}, 0.1)
    assert torch.isfinite(parameter).all()
    assert (parameter != 0).all()


@pytest.mark.parametrize("make", [AdamW, Lamb])
def test_one_graph_for_all_steps_and_learning_rates(make):
    """Zero and one are the learning rates that PyTorch/XLA would turn into constants."""
    with xla.init("cpu-xla") as world:
        parameters = make_parameters(device=world.device)
        # torch_xla shares the buffers of scalars, which costs a parameter without dimensions one more graph.
        del parameters["scalar"]
        optimizer = make(parameters.items(), stochastic_rounding=True)
        world.sync()
        compiled = []
        for step, rate in enumerate([0.0, 1.0, 0.5, 0.25, 0.0, 1.0, 1e-3]):
            optimizer.step({n: g.to(world.device) for n, g in make_gradients(step).items()}, rate)
            world.sync()
            compiled.append(count_graphs(world).compiled)
        assert len(set(compiled)) == 1


@pytest.mark.parametrize("make", [AdamW, Lamb])
def test_master_weights_follow_the_fp32_run(make):
    full, halved = make_parameters(), make_parameters(torch.bfloat16)
    for name, parameter in full.items():
        parameter.data.copy_(halved[name].float())
    fp32, master = make(full.items()), make(halved.items(), master_weights=True)
    for step in range(50):
        fp32.step(make_gradients(step), 1e-4)
        master.step(make_gradients(step), 1e-4)
    for name, parameter in full.items():
        assert torch.equal(master.state["master"][name], parameter.detach())
        assert torch.equal(halved[name].detach(), parameter.detach().bfloat16())


def test_rounding_to_nearest_loses_small_updates_and_stochastic_rounding_does_not():
    """1,000 steps of 1e-5 * 1.0 from 1.0: the unit of bf16 below 1 is 2**-8, so each step alone is lost."""
    results = {}
    for stochastic in (False, True):
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        optimizer = AdamW([("w", parameter)], weight_decay=0.0, eps=1e-12, stochastic_rounding=stochastic)
        for _ in range(1000):
            optimizer.step({"w": torch.ones(4096)}, 1e-5)
        results[stochastic] = parameter.float().mean().item()
    assert results[False] == 1.0
    assert results[True] == pytest.approx(0.99, abs=2e-4)


@pytest.mark.parametrize("device", ["cpu", "cpu-xla"])
def test_stochastic_rounding_is_unbiased_and_lands_on_a_neighbour(device):
    with xla.init(device) as world:
        world.seed(1)
        value = 1.0 + 2.0**-7 * 0.3  # three tenths of the way from 1 to the next bf16 number
        for sign in (1.0, -1.0):
            n = 200_000
            rounded = round_stochastically(torch.full((n,), sign * value, device=world.device)).float()
            (view,) = world.host_views([rounded])
            low, high = sign * 1.0, sign * (1.0 + 2.0**-7)
            up = (view == high).sum().item()
            assert up + (view == low).sum().item() == n
            # Five standard deviations of a binomial with p = 0.3.
            assert abs(up - 0.3 * n) < 5 * math.sqrt(n * 0.3 * 0.7)


@pytest.mark.parametrize("device", ["cpu", "cpu-xla"])
def test_stochastic_rounding_keeps_what_bf16_holds_and_takes_a_neighbour_of_all_else(device):
    """Every bf16 number of normal spacing, and those between them; the neighbours are known from the bits."""
    patterns = torch.arange(1 << 16, dtype=torch.int32) << 16
    held = patterns.view(torch.float32)
    held = held[torch.isfinite(held) & ((held.abs() >= 2.0**-119) | (held == 0))]
    between = (held.view(torch.int32) + torch.randint(1, 1 << 16, held.shape, dtype=torch.int32)).view(torch.float32)
    between = between[torch.isfinite(between) & (between.abs() >= 2.0**-119) & (between.abs() < 3e38)]
    below = (between.view(torch.int32) & -(1 << 16)).view(torch.float32)
    above = ((between.view(torch.int32) & -(1 << 16)) + (1 << 16)).view(torch.float32)
    with xla.init(device) as world:
        rounded = [round_stochastically(values.to(world.device)).float() for values in (held, between)]
        kept, taken = (view.clone() for view in world.host_views(rounded))
    assert torch.equal(kept, held)
    assert bool(((taken == below) | (taken == above)).all())
    assert 0.4 < (taken == above).float().mean() < 0.6


def test_stochastic_rounding_is_part_of_the_graph():
    import torch_xla.debug.metrics as xla_metrics

    def on_host():
        return {name: xla_metrics.counter_value(name) for name in xla_metrics.counter_names() if name[:6] == "aten::"}

    with xla.init("cpu-xla") as world:
        values = torch.randn(7, 5).to(world.device)
        world.sync(wait=True)
        before, compiled = on_host(), count_graphs(world).compiled
        round_stochastically(values)
        rounded = round_stochastically(values * 2)
        world.sync(wait=True)
        assert on_host() == before
        assert count_graphs(world).compiled - compiled <= 1
        assert rounded.dtype == torch.bfloat16


@pytest.mark.parametrize("device", ["cpu", "cpu-xla"])
@pytest.mark.parametrize("options", [{}, {"master_weights": True}, {"stochastic_rounding": True}], ids=str)
def test_a_step_that_is_not_applied_leaves_no_trace(device, options):
    """Weights, moments, master weights and bias corrections go on as if the bad step had never been."""
    dtype = torch.bfloat16 if options else torch.float32
    with xla.init(device) as world:
        results = []
        for steps in ([0, 1, 2], [0, "bad", 1, "bad", 2]):
            parameters = make_parameters(dtype, device=world.device)
            optimizer = AdamW(parameters.items(), **options)
            for step in steps:
                gradients = make_gradients(0 if step == "bad" else step)
                if step == "bad":
                    gradients["weight"][0, 0] = float("nan")
                else:
                    world.seed(step)
                norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().to(world.device)
                gradients = {name: gradient.to(world.device) for name, gradient in gradients.items()}
                optimizer.step(gradients, 1e-2, apply=torch.isfinite(norm))
                world.sync()
            tensors = [*parameters.values(), *optimizer.state_tensors().values()]
            results.append([view.clone() for view in world.host_views(tensors)])
    assert optimizer.steps == 5
    for clean, disturbed in zip(*results, strict=True):
        assert torch.equal(clean, disturbed)


def test_state_survives_saving_and_loading():
    first, second = make_parameters(), make_parameters()
    one = AdamW(first.items())
    for step in range(3):
        one.step(make_gradients(step), 1e-3)
    for name, parameter in second.items():
        parameter.data.copy_(first[name])
    other = AdamW(second.items())
    other.load_state({name: tensor.clone() for name, tensor in one.state_tensors().items()}, one.steps)
    one.step(make_gradients(3), 1e-3)
    other.step(make_gradients(3), 1e-3)
    for name, parameter in first.items():
        assert torch.equal(parameter, second[name])


def test_state_of_another_optimizer_is_refused():
    optimizer = AdamW(make_parameters().items())
    master = AdamW(make_parameters().items(), master_weights=True)
    with pytest.raises(CheckpointError, match=r"has 13 tensors and this optimizer 9; they differ in master\.bias"):
        optimizer.load_state(master.state_tensors(), 1)


def test_state_of_another_shape_is_refused():
    optimizer = AdamW(make_parameters().items())
    tensors = {**optimizer.state_tensors(), "exp_avg.bias": torch.zeros(9)}
    with pytest.raises(CheckpointError, match=r"exp_avg\.bias has shape \(9,\), this optimizer's has \(4,\)"):
        optimizer.load_state(tensors, 1)


def test_master_weights_with_stochastic_rounding_are_refused():
    with pytest.raises(ConfigError, match="cancel each other"):
        AdamW(make_parameters().items(), master_weights=True, stochastic_rounding=True)
