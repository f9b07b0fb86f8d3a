import threading

import pytest
import torch

import trn_dist.xla as xla
from trn_dist.errors import CheckpointError, ConfigError
from trn_dist.training import AdamW, CheckpointStore, TrainingState

IDENTITY = {"global_batch": 64, "seed": 1}


def make_state(world, *, identity=IDENTITY, width=4, master_weights=False):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width)).to(world.device)
    return TrainingState(world, model, AdamW(model.named_parameters(), master_weights=master_weights), identity)


def change(state):
    gradients = {name: torch.ones_like(parameter) for name, parameter in state.optimizer.parameters.items()}
    state.optimizer.step(gradients, 0.1)
    state.step += 1


@pytest.mark.parametrize("device", ["cpu", "cpu-xla"])
def test_resumes_what_was_saved(tmp_path, device):
    store = CheckpointStore(tmp_path)
    with xla.init(device) as world:
        state = make_state(world)
        for _ in range(3):
            change(state)
        state.save(store)
        store.wait()
        saved = state.fingerprint()
        other = make_state(world)
        assert other.fingerprint() != saved
        assert other.resume(store)
        assert (other.step, other.optimizer.steps) == (3, 3)
        assert other.fingerprint() == saved
        for each in (state, other):
            change(each)
        assert other.fingerprint() == state.fingerprint()


def test_nothing_to_resume(tmp_path):
    with xla.init("cpu") as world:
        state = make_state(world)
        assert not state.resume(CheckpointStore(tmp_path / "none"))
        assert state.step == 0


def test_a_run_with_another_identity_is_refused(tmp_path):
    store = CheckpointStore(tmp_path)
    with xla.init("cpu") as world:
        make_state(world).save(store)
        store.wait()
        other = make_state(world, identity={**IDENTITY, "global_batch": 128})
        with pytest.raises(ConfigError, match="written with global_batch = 64, this run has 128"):
            other.resume(store)


def test_another_global_batch_goes_on_from_the_next_sample_if_it_is_asked_for(tmp_path):
    store = CheckpointStore(tmp_path)
    with xla.init("cpu") as world:
        first = make_state(world)
        for _ in range(3):
            change(first)
        first.save(store)
        store.wait()
        second = make_state(world, identity={**IDENTITY, "global_batch": 100})
        assert second.resume(store, may_change={"global_batch"})
        assert (second.step, second.samples, second.sample_offset) == (3, 3 * 64, 3 * 64 - 3 * 100)
        change(second)
        change(second)
        assert second.samples == 3 * 64 + 2 * 100
        second.save(store)
        store.wait()
        third = make_state(world)
        third.resume(store, may_change={"global_batch"})
        assert (third.step, third.samples) == (5, 3 * 64 + 2 * 100)
        with pytest.raises(ConfigError, match="written with seed = 1, this run has 2"):
            make_state(world, identity={**IDENTITY, "seed": 2}).resume(store, may_change={"global_batch"})


def test_numbers_drawn_by_another_rule_are_refused(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    with xla.init("cpu") as world:
        make_state(world).save(store)
        store.wait()
        monkeypatch.setattr("trn_dist.training.state.RANDOM_NUMBERS", "another rule")
        with pytest.raises(ConfigError, match="written with random_numbers = 'sha256 of seed"):
            make_state(world).resume(store)


def test_a_host_reads_each_byte_of_a_checkpoint_once(run_world, tmp_path):
    """By the kernel's own count of what each process has read."""
    run = run_world("resume_reads.py", tmp_path / "checkpoints", size=2)
    assert run.returncode == 0, run.output
    first, second = run.by_rank
    assert first["bytes"] == second["bytes"] > 10e6
    assert first["read"] >= first["bytes"]
    assert second["read"] < 0.1 * second["bytes"]
    assert first["fingerprint"] == second["fingerprint"]


def test_a_host_that_sees_a_damaged_checkpoint_stops_all(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    with xla.init("cpu") as world:
        make_state(world).save(store)
        store.wait()
        other = make_state(world)
        monkeypatch.setattr(world, "all_gather_object", lambda problem: [problem, "rank 32: model is missing"])
        with pytest.raises(CheckpointError, match="not every host sees a good checkpoint of step 0: rank 32: model"):
            other.resume(store)
        assert other.step == 0


def test_another_model_is_refused_and_the_weight_named(tmp_path):
    store = CheckpointStore(tmp_path)
    with xla.init("cpu") as world:
        make_state(world).save(store)
        store.wait()
        with pytest.raises(CheckpointError, match=r"weight 0\.weight has shape \(4, 3\), the model's \(5, 3\)"):
            make_state(world, width=5).resume(store)


def test_a_chosen_step(tmp_path):
    store = CheckpointStore(tmp_path, keep=-1)
    with xla.init("cpu") as world:
        state = make_state(world)
        for _ in range(3):
            change(state)
            state.save(store)
        store.wait()
        other = make_state(world)
        other.resume(store, step=2)
        assert other.step == 2
        with pytest.raises(CheckpointError, match="step_00000009"):
            other.resume(store, step=9)


def test_weights_alone(tmp_path):
    """Phase 2 takes phase 1's weights and starts the optimizer afresh."""
    store = CheckpointStore(tmp_path)
    with xla.init("cpu") as world:
        state = make_state(world)
        change(state)
        state.save(store)
        store.wait()
        other = make_state(world, identity={"other": "run"}, master_weights=True)
        other.load_weights(store)
        assert other.fingerprint() == state.fingerprint()
        assert (other.step, other.optimizer.steps) == (0, 0)
        for name, master in other.optimizer.state["master"].items():
            assert torch.equal(master, state.optimizer.parameters[name])
        with pytest.raises(CheckpointError, match="there is no checkpoint in"):
            other.load_weights(CheckpointStore(tmp_path / "none"))


@pytest.mark.parametrize("device", ["cpu", "cpu-xla"])
def test_a_checkpoint_holds_its_own_step_although_training_goes_on(tmp_path, device, monkeypatch):
    """The writer waits until three more steps are done; what it then writes is the step at which it was asked."""
    store = CheckpointStore(tmp_path, keep=-1)
    go = threading.Event()
    write_now = store.save
    monkeypatch.setattr(store, "save", lambda *arguments: (go.wait(), write_now(*arguments)))
    with xla.init(device) as world:
        state = make_state(world)
        change(state)
        expected = state.fingerprint()
        state.save(store)
        for _ in range(3):
            change(state)
            world.sync(wait=True)
        go.set()
        store.wait()
        other = make_state(world)
        other.resume(store)
        assert other.step == 1
        assert other.fingerprint() == expected


def test_a_save_that_failed_in_the_background_is_raised_at_the_next_one(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    store = CheckpointStore(blocked / "checkpoints")
    with xla.init("cpu") as world:
        state = make_state(world)
        state.save(store)
        with pytest.raises(CheckpointError, match="the checkpoint of step 0 could not be written"):
            state.save(store)
        store.wait()  # reported once
