import re

import pytest
import torch

from trn_dist.errors import ConfigError
from trn_dist.models.bert import (
    BertConfig,
    BertForPreTraining,
    config_from_huggingface,
    config_to_huggingface,
    from_huggingface,
    pretraining_losses,
    to_huggingface,
)


@pytest.fixture
def theirs(config):
    import transformers

    fields = {k: v for k, v in config_to_huggingface(config).items() if k not in ("model_type", "architectures")}
    torch.manual_seed(3)
    model = transformers.BertForPreTraining(transformers.BertConfig(**fields, attn_implementation="eager"))
    for parameter in model.parameters():  # no weight keeps a value that hides a mistake, such as a bias of zero
        parameter.data += 0.02 * torch.randn_like(parameter)
    return model


@pytest.fixture
def ours(config, theirs):
    model = BertForPreTraining(config)
    model.load_state_dict(from_huggingface(theirs.state_dict(), config))
    return model


def run_theirs(theirs, batch):
    ids, mask, segments, positions = (tensor.long() for tensor in batch.inputs)
    labels = torch.full_like(ids, -100)
    for row in range(len(ids)):
        for position, target in zip(positions[row], batch.targets[row], strict=True):
            if target:
                labels[row, position] = target
    return theirs(
        input_ids=ids,
        attention_mask=mask,
        token_type_ids=segments,
        labels=labels,
        next_sentence_label=batch.labels.long(),
    )


@pytest.mark.parametrize("seed", range(3))
def test_logits_loss_and_gradients_are_theirs(config, ours, theirs, make_batch, seed):
    batch = make_batch(seed)
    logits, reference = ours(*batch.inputs), run_theirs(theirs, batch)
    index = batch.inputs[3].long()[:, :, None].expand(-1, -1, config.vocab_size)
    assert (logits.masked_lm - reference.prediction_logits.gather(1, index)).abs().max() < 1e-5
    assert (logits.next_sentence - reference.seq_relationship_logits).abs().max() < 1e-5

    losses = pretraining_losses(logits, batch.targets, batch.labels)
    loss = losses.masked_lm_sum / losses.masked_lm_count + losses.next_sentence_sum / len(batch.labels)
    assert losses.masked_lm_count == (batch.targets != 0).sum()
    assert loss.item() == pytest.approx(reference.loss.item(), abs=1e-5)

    loss.backward()
    reference.loss.backward()
    gradients = from_huggingface({name: p.grad for name, p in theirs.named_parameters()}, config)
    for name, parameter in ours.named_parameters():
        assert (parameter.grad - gradients[name]).abs().max() < 1e-5, name


def test_there_and_back_is_bit_equal(config, ours, theirs):
    exported = to_huggingface(ours.state_dict(), config)
    original = theirs.state_dict()
    assert exported.keys() == original.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor, original[name]), name
    theirs.load_state_dict(exported, strict=True)


def test_the_other_way_round_too(config):
    model = BertForPreTraining(config, seed=5)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["embeddings.word.weight"][config.vocab_size :] = 0.0  # padding, which theirs does not have
    back = from_huggingface(to_huggingface(state, config), config)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


def test_padding_of_the_vocabulary_is_cut(config):
    exported = to_huggingface(BertForPreTraining(config).state_dict(), config)
    assert config.padded_vocab_size == 208
    assert exported["bert.embeddings.word_embeddings.weight"].shape == (203, 128)
    assert exported["cls.predictions.decoder.bias"].shape == (203,)


def test_weights_that_are_missing_or_unknown_are_named(config, theirs):
    state = dict(theirs.state_dict())
    with pytest.raises(ConfigError, match=r"unknown to BertForPreTraining: extra\.weight"):
        from_huggingface({**state, "extra.weight": torch.ones(1)}, config)
    del state["bert.encoder.layer.1.attention.self.key.bias"]
    with pytest.raises(ConfigError, match=r"are missing: bert\.encoder\.layer\.1\.attention\.self\.key\.bias"):
        from_huggingface(state, config)
    with pytest.raises(ConfigError, match="are missing: .* and [0-9]+ more"):
        to_huggingface({}, config)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("bert.pooler.dense.weight", (3, 3), r"\(3, 3\), the configuration asks for \(128, 128\)"),
        ("bert.encoder.layer.1.attention.self.key.bias", (4,), r"\(4,\), the configuration asks for \(128,\)"),
        ("cls.predictions.bias", (208,), r"\(208,\), the configuration asks for \(203,\)"),
    ],
)
def test_weights_of_another_shape_are_named(config, theirs, name, shape, message):
    with pytest.raises(ConfigError, match=f"{re.escape(name)} has the shape {message}"):
        from_huggingface({**theirs.state_dict(), name: torch.ones(shape)}, config)


def test_a_model_of_another_size_is_not_exported(config):
    state = BertForPreTraining(config).state_dict()
    with pytest.raises(ConfigError, match=r"embeddings\.word\.weight has the shape \(208, 128\), .* \(104, 128\)"):
        to_huggingface(state, BertConfig.named("tiny", vocab_size=100))


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_decoders_that_are_not_tied_are_refused(config, theirs, part):
    state = dict(theirs.state_dict())
    state[f"cls.predictions.decoder.{part}"] = state[f"cls.predictions.decoder.{part}"] + 1.0
    with pytest.raises(
        ConfigError, match=rf"cls\.predictions\.decoder\.{part} is not .* only models whose decoder is tied"
    ):
        from_huggingface(state, config)


def test_configurations_both_ways(config, theirs):
    assert config_from_huggingface(theirs.config.to_dict()) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act = 'relu'; only 'gelu' is supported"),
        ({"model_type": "roberta"}, "model_type = 'roberta'; only 'bert' is supported"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'; only 'absolute'"),
        ({"is_decoder": True}, "is_decoder = True; only False is supported"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = False; only True is supported"),
    ],
)
def test_models_that_are_not_plain_bert_are_refused(config, changes, message):
    with pytest.raises(ConfigError, match=message):
        config_from_huggingface({**config_to_huggingface(config), **changes})


def test_configurations_that_lack_a_size(config):
    fields = config_to_huggingface(config)
    del fields["hidden_size"], fields["vocab_size"]
    with pytest.raises(ConfigError, match="the Hugging Face configuration lacks hidden_size, vocab_size"):
        config_from_huggingface(fields)
