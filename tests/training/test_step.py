import pytest
import torch

import trn_dist.xla as xla
from trn_dist.training import AdamW, Precision, TrainStep, linear_warmup_linear_decay

STEPS = 20


def train(run_world, device, size, batch_size, accumulation, precision="fp32"):
    run = run_world("train_small.py", device, batch_size, accumulation, STEPS, precision, size=size)
    assert run.returncode == 0, run.output
    return run.by_rank


@pytest.fixture(scope="module")
def reference():
    """The same 20 steps in plain PyTorch and float64: no buckets, no accumulation, torch's own optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 12)).double()
    groups = [{"params": [p], "weight_decay": 0.01 if p.dim() > 1 else 0.0} for p in model.parameters()]
    optimizer = torch.optim.AdamW(groups, lr=1.0, eps=1e-6)
    schedule = linear_warmup_linear_decay(1e-2, 5, 100)
    losses, norms = [], []
    for step in range(STEPS):
        x = torch.randn(16, 12, generator=torch.Generator().manual_seed(step)).double()
        loss = (model(x) - x.sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, [p.detach().flatten().tolist() for p in model.parameters()]


@pytest.mark.parametrize("device", ["cpu", "cpu-xla"])
@pytest.mark.parametrize(("size", "batch_size", "accumulation"), [(1, 16, 1), (2, 8, 1), (2, 2, 4)])
def test_every_cut_of_the_global_batch_is_the_same_run(run_world, reference, device, size, batch_size, accumulation):
    losses, norms, weights = reference
    by_rank = train(run_world, device, size, batch_size, accumulation)
    for result in by_rank:
        # Bit-equal parameters on all ranks after every step.
        assert result["digests"] == by_rank[0]["digests"]
        assert result["losses"] == pytest.approx(losses, abs=1e-6)
        assert result["norms"] == pytest.approx(norms, abs=1e-5)
        for ours, theirs in zip(result["weights"], weights, strict=True):
            assert ours == pytest.approx(theirs, abs=5e-6)


@pytest.mark.parametrize(("size", "accumulation", "graphs"), [(1, 1, 1), (2, 1, 2), (1, 4, 2), (2, 4, 2)])
def test_graphs_do_not_grow_after_the_first_step(run_world, size, accumulation, graphs):
    """Warm-up from zero, clipping and reading losses included. `graphs`: of a step, beside the two of the start."""
    for result in train(run_world, "cpu-xla", size, 16 // size // accumulation, accumulation):
        assert set(result["compiled"]) == {result["compiled"][0]}
        assert result["compiled"][0] <= graphs + 2


def test_no_graph_is_compiled_after_the_first_of_200_steps(run_world):
    """With accumulation, warm-up from zero, clipping, logging, metrics, checkpoints, the watchdog and two workers."""
    run = run_world("two_hundred_steps.py", size=2)
    assert run.returncode == 0, run.output
    for result in run.by_rank:
        assert len(result["compiled"]) == 200
        assert {*result["compiled"], result["at_the_end"]} == {result["compiled"][0]}
        assert result["at_the_end"] <= 5
        assert result["saved"][-2:] == [175, 200]


@pytest.mark.parametrize("precision", ["bf16", "bf16-master", "autocast"])
def test_ranks_stay_equal_in_every_precision(run_world, reference, precision):
    """Stochastic rounding draws the same numbers on every rank, or the ranks would drift apart."""
    first, second = train(run_world, "cpu-xla", 2, 8, 1, precision)
    assert first["digests"] == second["digests"]
    assert set(first["compiled"]) == {first["compiled"][0]}
    assert first["compiled"][0] <= 4
    assert first["losses"] == pytest.approx(reference[0], rel=0.05)


def test_dropout_depends_on_step_micro_batch_and_rank_only():
    with xla.init("cpu-xla") as world:
        drawn = {}

        def loss(batch):
            drawn[len(drawn)] = torch.rand(4, device=world.device)
            return (batch["x"] * weight).sum()

        weight = torch.nn.Parameter(torch.ones(4, device=world.device))
        step = TrainStep(
            world,
            loss,
            AdamW([("w", weight)]),
            lambda step: 1e-3,
            accumulation=2,
            precision=Precision.named("fp32"),
            seed=3,
        )
        batch = {"x": torch.ones(4)}
        for index in (0, 1, 0):
            step(index, [batch, batch])
        first, second, third, fourth, fifth, sixth = (world.host_views([drawn[i]])[0].tolist() for i in range(6))
    assert [first, second] == [fifth, sixth]
    assert len({tuple(values) for values in (first, second, third, fourth)}) == 4


@pytest.mark.parametrize("device", ["cpu", "cpu-xla"])
def test_a_loss_that_is_no_number_on_one_rank_changes_nothing_on_any(run_world, device):
    run = run_world("nan_loss.py", device, size=2)
    assert run.returncode == 0, run.output
    first, second = run.by_rank
    assert first == second
    assert [finite for finite, _ in first] == [True, True, True, False, True, True]
    weights = [digest for _, digest in first]
    assert weights[3] == weights[2]
    assert len(set(weights)) == 5


def test_a_step_refuses_another_number_of_micro_batches():
    with xla.init("cpu") as world:
        weight = torch.nn.Parameter(torch.ones(1))
        step = TrainStep(
            world,
            lambda batch: weight.sum(),
            AdamW([("w", weight)]),
            lambda step: 1e-3,
            accumulation=2,
            precision=Precision.named("fp32"),
        )
        with pytest.raises(ValueError, match="a step takes 2 micro-batches, not 1"):
            step(0, [{}])
