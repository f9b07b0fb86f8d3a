import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from trn_dist.errors import ConfigError
from trn_dist.models.bert import BertConfig, BertForPreTraining


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("debug", (1, 16, 2, 64)),
        ("tiny", (2, 128, 2, 512)),
        ("mini", (4, 256, 4, 1024)),
        ("small", (4, 512, 8, 2048)),
        ("base", (12, 768, 12, 3072)),
        ("large", (24, 1024, 16, 4096)),
    ],
)
def test_named_sizes(name, sizes):
    config = BertConfig.named(name)
    assert (config.num_layers, config.hidden_size, config.num_heads, config.intermediate_size) == sizes
    assert config.vocab_size == 30522


def test_changes_to_a_named_size():
    assert BertConfig.named("tiny", vocab_size=8000, dropout=0.0).vocab_size == 8000


def test_unknown_names_get_a_hint():
    with pytest.raises(ConfigError, match=r"unknown BERT size 'lrage': choose one of debug, .* did you mean 'large'\?"):
        BertConfig.named("lrage")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, r"num_heads \(3\) must divide hidden_size \(128\)"),
        ({"vocab_size": 0}, "BertConfig.vocab_size must be at least 1, not 0"),
        ({"num_layers": -1}, "BertConfig.num_layers must be at least 1, not -1"),
        ({"dropout": 1.0}, "BertConfig.dropout must be at least 0 and below 1, not 1.0"),
        ({"layer_norm_eps": 0.0}, "BertConfig.layer_norm_eps must be positive, not 0.0"),
        ({"initializer_range": -1.0}, "BertConfig.initializer_range must be positive, not -1.0"),
        ({"attention_dropout": -0.1}, "BertConfig.attention_dropout must be at least 0 and below 1, not -0.1"),
    ],
)
def test_sizes_that_cannot_be(changes, message):
    with pytest.raises(ConfigError, match=message):
        BertConfig.named("tiny", **changes)


@settings(deadline=None, max_examples=15)
@given(layers=st.integers(1, 3), heads=st.integers(1, 3), width=st.integers(1, 8), vocabulary=st.integers(1, 99))
def test_number_of_parameters_is_the_modules(layers, heads, width, vocabulary):
    config = BertConfig(vocab_size=vocabulary, hidden_size=heads * width, num_layers=layers, num_heads=heads,
                        intermediate_size=3 * width, max_position_embeddings=17)  # fmt: skip
    model = BertForPreTraining(config)
    assert config.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_published_numbers_of_parameters():
    """BERT-Large is published as 340 M and base as 110 M parameters (Devlin et al. 2019)."""
    assert BertConfig.named("large").num_parameters / 1e6 == pytest.approx(340, rel=0.02)
    assert BertConfig.named("base").num_parameters / 1e6 == pytest.approx(110, rel=0.01)


def test_flops_are_what_pytorch_counts():
    config = BertConfig.named("tiny", vocab_size=96, dropout=0.0, attention_dropout=0.0)
    model, (batch, seq_len, predictions) = BertForPreTraining(config), (3, 32, 5)
    tokens = torch.ones(batch, seq_len, dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        logits = model(tokens, tokens, tokens, torch.ones(batch, predictions, dtype=torch.int32))
        (logits.masked_lm.sum() + logits.next_sentence.sum()).backward()
    assert counter.get_total_flops() == batch * config.flops_per_sequence(seq_len, predictions)


def test_the_published_estimate_is_ours_without_heads():
    config = BertConfig.named("large")
    h, v, p = config.hidden_size, config.padded_vocab_size, 20
    heads = 3 * (2 * p * (h * h + h * v) + 2 * (h * h + 2 * h))
    assert config.published_flops_per_sequence(128) == config.flops_per_sequence(128, p) - heads
