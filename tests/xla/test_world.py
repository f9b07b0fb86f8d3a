import hashlib
import subprocess
import sys

import pytest
import torch

import trn_dist.xla as xla
from trn_dist.errors import ConfigError, MissingDependencyError
from trn_dist.xla import world as world_module
from trn_dist.xla.world import derive_seed


@pytest.mark.parametrize("device", ["cpu", "cpu-xla"])
def test_collectives_of_two_processes(run_world, device):
    run = run_world("collectives.py", device)
    assert run.returncode == 0, run.output
    first = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    for rank, result in enumerate(run.by_rank):
        base, summed, averaged, after, whole = result["views"]
        assert base == [[x + 10 * rank for x in row] for row in first]
        assert summed == [[2 * x + 10 for x in row] for row in first]
        assert averaged == [[x + 5 for x in row] for row in first]
        assert after == [[2 * x + 10 for x in row] for row in first]
        assert whole == [rank + 1.0, 3.0, 3.0, rank + 1.0]
        base, mean, gathered, counts, received, twice = result["functional"]
        assert base == [[x + 10 * rank for x in row] for row in first]
        assert mean == [[x + 5 for x in row] for row in first]
        assert gathered == [[1.0, 4.0], [11.0, 14.0]]
        assert counts == [0, 1]
        assert received == [[x + 10 for x in row] for row in first]
        assert twice == [[2 * x + 20 for x in row] for row in first]
        assert result["objects"] == [{"rank": 0}, {"rank": 1}]
        assert result["broadcast"] == "from 0"
        assert result["place"] == [rank, 2, rank, 2]
        assert "the ranks do not agree on batch: rank 0: 0; rank 1: 1." in result["disagreement"]


def test_a_world_whose_collectives_do_nothing_is_refused(run_world):
    """The all-reduce of torch_xla on CPU returns each process its own value without an error."""
    run = run_world("false_world.py")
    assert run.returncode == 0, run.output
    for rank, message in enumerate(run.by_rank):
        assert message.startswith(f"rank {rank}: an all-reduce of known numbers over 2 ranks on cpu-xla gave")
        assert "instead of [2.0, 3.0, 5.0]" in message


@pytest.mark.parametrize(("device", "torch_device"), [("cpu", "cpu"), ("cpu-xla", "xla")])
def test_one_process_needs_no_launcher(device, torch_device):
    with xla.init(device) as world:
        assert (world.kind, world.rank, world.size) == (device, 0, 1)
        assert world.device.type == torch_device
        tensor = torch.ones(3, device=world.device)
        world.all_reduce_([tensor])
        assert world.host_views([tensor])[0].tolist() == [1.0, 1.0, 1.0]
        assert world.all_gather_object("x") == ["x"]
        world.require_equal(anything=object)
        world.barrier()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("device", ["cpu", "cpu-xla"])
def test_seed_decides_what_is_drawn(device):
    with xla.init(device) as world:
        draws = []
        for seed in (3, 4, 3):
            world.seed(seed)
            draws.append(world.host_views([torch.rand(8, device=world.device)])[0].clone())
    assert torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[1])


def test_views_of_a_tensor_that_was_changed_in_place_can_be_read():
    """torch_xla does not execute them with the rest, and aborts the process when such a buffer is asked for."""
    with xla.init("cpu-xla") as world:
        base = torch.arange(6.0, device=world.device) * 1
        before = base[2:4]
        element = before.unbind()[0]
        base.mul_(2)
        after = base[4:]
        views = world.host_views([before, element, after, base])
        assert [view.tolist() for view in views] == [[4.0, 6.0], 4.0, [8.0, 10.0], [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]]


def test_host_views_execute_what_is_pending_and_do_not_copy():
    with xla.init("cpu-xla") as world:
        tensor = torch.arange(5.0, device=world.device) * 2
        (view,) = world.host_views([tensor])
        assert view.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
        view[0] = 7.0
        assert tensor.cpu().tolist() == [7.0, 2.0, 4.0, 6.0, 8.0]


def test_an_existing_process_group_is_used_and_left_alone():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with xla.init("cpu"):
            pass
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()


def test_an_existing_process_group_of_another_world_is_refused(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="rank 0 of 1, but the environment says rank 0 of 2"):
            xla.init("cpu")
    finally:
        torch.distributed.destroy_process_group()


def test_unknown_device():
    with pytest.raises(ConfigError, match="unknown device 'gpu': choose one of auto, neuron, cpu-xla, cpu"):
        xla.init("gpu")


def test_neuron_without_a_device_is_refused():
    with pytest.raises(ConfigError, match="this host has no Neuron device"):
        xla.init("neuron")


def test_auto_takes_neuron_where_there_is_one(tmp_path):
    (tmp_path / "neuron0").touch()
    assert xla.resolve_device("auto", environment={}, dev=tmp_path) == "neuron"


@pytest.mark.parametrize("environment", [{"NEURON_RT_EXEC_TIMEOUT": "600"}, {"PJRT_DEVICE": "NEURON"}])
def test_auto_does_not_fall_back_from_neuron_to_the_cpu(environment, tmp_path):
    with pytest.raises(ConfigError, match="set up for Neuron .* but this host has no Neuron device"):
        xla.resolve_device("auto", environment=environment, dev=tmp_path)


def test_auto_without_any_sign_of_neuron(tmp_path):
    assert xla.resolve_device("auto", environment={}, dev=tmp_path) == "cpu-xla"


def test_another_pjrt_device_is_refused(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    with pytest.raises(ConfigError, match="the environment sets PJRT_DEVICE=TPU: unset it or set it to CPU"):
        xla.init("cpu-xla")


@pytest.mark.parametrize(
    ("kind", "absent", "extra"),
    [("cpu-xla", "torch_xla", "xla"), ("neuron", "torch_xla", "neuron"), ("neuron", "torch_neuronx", "neuron")],
)
def test_a_missing_package_names_the_extra(monkeypatch, kind, absent, extra):
    monkeypatch.setattr(world_module, "find_spec", lambda name: None if name == absent else object())
    with pytest.raises(
        MissingDependencyError, match=rf"{absent}, which is not installed: pip install 'trn-dist\[{extra}\]'"
    ):
        world_module._require_torch_xla(kind)


def test_autograd_before_the_device_is_named():
    program = "import torch, trn_dist.xla as x; torch.ones(1, requires_grad=True).sum().backward(); x.init('cpu-xla')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode != 0
    assert "ran a backward pass before it opened its XLA device" in done.stderr


def test_native_backend_does_not_import_torch_xla():
    program = "import sys, trn_dist.xla as x; x.init('cpu').close(); assert 'torch_xla' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_derived_seeds_are_those_of_sha256():
    expected = int(hashlib.sha256(b"7/dropout/3").hexdigest()[:8], 16) // 2
    assert derive_seed(7, "dropout", 3) == expected


def test_ranks_are_named_in_runs():
    assert world_module._ranks([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"
    assert world_module._ranks([4]) == "rank 4"
