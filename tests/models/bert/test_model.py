import math

import pytest
import torch

import trn_dist.xla as xla
from trn_dist.errors import ConfigError
from trn_dist.models.bert import BertConfig, BertForPreTraining, pretraining_losses
from trn_dist.xla.graphs import count_graphs


def loss_of(model, batch, device="cpu"):
    logits = model(*(tensor.to(device) for tensor in batch.inputs))
    losses = pretraining_losses(logits, batch.targets.to(device), batch.labels.to(device))
    return losses.masked_lm_sum / losses.masked_lm_count + losses.next_sentence_sum / len(batch.labels)


def test_initial_weights():
    model = BertForPreTraining(BertConfig.named("mini", vocab_size=2000), seed=1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all()
        elif "norm" in name:
            assert (parameter == 1).all()
        else:
            # Five standard errors of the mean and of the deviation of n normal numbers.
            n = parameter.numel()
            assert abs(parameter.mean().item()) < 5 * 0.02 / math.sqrt(n)
            assert parameter.std().item() == pytest.approx(0.02, rel=5 / math.sqrt(2 * n))


def test_initial_weights_depend_on_the_seed_alone(config):
    torch.manual_seed(1)
    first = BertForPreTraining(config, seed=7).state_dict()
    torch.manual_seed(2)
    second = BertForPreTraining(config, seed=7).state_dict()
    other = BertForPreTraining(config, seed=8).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["pooler.weight"], other["pooler.weight"])


def test_the_initial_loss_is_that_of_guessing(config, make_batch):
    """ln V for the masked words and ln 2 for the next sentence; the initial scores are nearly equal."""
    loss = loss_of(BertForPreTraining(config), make_batch(batch=32))
    assert loss.item() == pytest.approx(math.log(config.vocab_size) + math.log(2), abs=0.1)


def test_sequences_that_are_too_long():
    model = BertForPreTraining(BertConfig.named("debug", max_position_embeddings=8))
    tokens = torch.ones(1, 9, dtype=torch.int32)
    with pytest.raises(ConfigError, match="sequences of 9 tokens do not fit a model with max_position_embeddings 8"):
        model(tokens, tokens, tokens, tokens[:, :1])


def test_padding_does_not_change_the_tokens(config, make_batch):
    model, batch = BertForPreTraining(config, seed=1), make_batch()
    ids, mask, segments, positions = batch.inputs
    noise = torch.where(mask == 0, 17, ids)
    for ours, theirs in zip(model(*batch.inputs), model(noise, mask, segments, positions), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_unused_predictions_do_not_count(config, make_batch):
    model, batch = BertForPreTraining(config), make_batch()
    before = pretraining_losses(model(*batch.inputs), batch.targets, batch.labels)
    moved = batch.inputs[3].clone()
    moved[batch.targets == 0] = 9
    after = pretraining_losses(model(*batch.inputs[:3], moved), batch.targets, batch.labels)
    torch.testing.assert_close(before.masked_lm_sum, after.masked_lm_sum)
    assert before.masked_lm_count == after.masked_lm_count


def test_the_decoder_is_the_word_embedding_on_an_xla_device_too(config, make_batch):
    with xla.init("cpu-xla") as world:
        model = BertForPreTraining(config).to(world.device)
        names = [name for name, parameter in model.named_parameters() if parameter.shape[0] == config.padded_vocab_size]
        assert names == ["decoder_bias", "embeddings.word.weight"]
        word = model.embeddings.word.weight
        loss_of(model, make_batch(), world.device).backward()
        with torch.no_grad():
            word -= word.grad
            word += 1.0  # moves every row: input and output must both see it
        model.eval()
        on_device = [*model(*(tensor.to(world.device) for tensor in make_batch().inputs))]
        copy = BertForPreTraining(config)
        views = world.host_views([*model.parameters(), *on_device])
        for parameter, view in zip(copy.parameters(), views, strict=False):
            parameter.data.copy_(view)
        for ours, reference in zip(views[-2:], copy(*make_batch().inputs), strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-4)


def test_xla_is_eager_pytorch(config, make_batch):
    eager, batch = BertForPreTraining(config, seed=2), make_batch()
    with xla.init("cpu-xla") as world:
        model = BertForPreTraining(config, seed=2).to(world.device)
        loss = loss_of(model, batch, world.device)
        loss.backward()
        reference = loss_of(eager, batch)
        reference.backward()
        views = world.host_views([loss, *(parameter.grad for parameter in model.parameters())])
        torch.testing.assert_close(views[0], reference.detach(), rtol=0, atol=1e-5)
        for view, parameter in zip(views[1:], eager.parameters(), strict=True):
            torch.testing.assert_close(view, parameter.grad, rtol=0, atol=1e-5)


def test_one_graph_whatever_the_batch_and_no_read_by_the_host(make_batch):
    import torch_xla.debug.metrics as metrics

    config = BertConfig.named("debug", vocab_size=203)
    with xla.init("cpu-xla") as world:
        model = BertForPreTraining(config).to(world.device)
        world.sync()
        metrics.clear_counters()
        compiled = []
        for seed in range(5):
            world.seed(seed)
            loss_of(model, make_batch(seed), world.device).backward()
            for parameter in model.parameters():
                parameter.grad = None
            world.sync()
            compiled.append(count_graphs(world).compiled)
        assert set(compiled) == {compiled[0]}
        assert not [name for name in metrics.counter_names() if name.startswith("aten::")]


@pytest.mark.parametrize("device", ["cpu", "cpu-xla"])
def test_bf16_weights_give_a_finite_loss_in_fp32(make_batch, device):
    config = BertConfig.named("debug", vocab_size=203)
    with xla.init(device) as world:
        model = BertForPreTraining(config).to(torch.bfloat16).to(world.device)
        loss = loss_of(model, make_batch(), world.device)
        assert loss.dtype == torch.float32
        loss.backward()
        views = world.host_views([loss, *(parameter.grad for parameter in model.parameters())])
        assert all(torch.isfinite(view).all() for view in views)
        assert views[0].item() == pytest.approx(math.log(203) + math.log(2), abs=0.2)


def test_dropout_is_on_in_training_alone(make_batch):
    model, batch = BertForPreTraining(BertConfig.named("debug", vocab_size=203)), make_batch()
    assert loss_of(model, batch) != loss_of(model, batch)
    model.eval()
    assert loss_of(model, batch) == loss_of(model, batch)
