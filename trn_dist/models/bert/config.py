"""The sizes of a BERT model, and what follows from them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import Any

from trn_dist.errors import ConfigError

# layers, hidden size, heads: the sizes of Devlin et al. 2019 (base, large) and Turc et al. 2019 (tiny, mini, small);
# `debug` is the published training script's --debug.
_SIZES = {
    "debug": (1, 16, 2),
    "tiny": (2, 128, 2),
    "mini": (4, 256, 4),
    "small": (4, 512, 8),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
}


@dataclass(frozen=True)
class BertConfig:
    """Sizes and rates of a BERT model; the defaults are those of bert-large-uncased.

    Attributes:
        vocab_size: number of tokens that the tokenizer knows.
        hidden_size: width of the encoder (H).
        num_layers: number of encoder layers (L).
        num_heads: attention heads a layer; must divide `hidden_size`.
        intermediate_size: width of the feed-forward layers.
        max_position_embeddings: longest sequence.
        type_vocab_size: number of segment kinds.
        dropout: dropout rate of embeddings and layer outputs.
        attention_dropout: dropout rate of attention probabilities.
        layer_norm_eps: added to the variance in layer norms.
        initializer_range: standard deviation of the initial weights.

    Raises:
        ConfigError: a size is not positive, the heads do not divide the width, a dropout rate is not in [0, 1), or
            `layer_norm_eps` or `initializer_range` is not positive.
    """

    vocab_size: int = 30522
    hidden_size: int = 1024
    num_layers: int = 24
    num_heads: int = 16
    intermediate_size: int = 4096
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    dropout: float = 0.1
    attention_dropout: float = 0.1
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and value < 1:
                raise ConfigError(f"BertConfig.{field.name} must be at least 1, not {value}")
        for name in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"BertConfig.{name} must be at least 0 and below 1, not {getattr(self, name)}")
        for name in ("layer_norm_eps", "initializer_range"):
            if not getattr(self, name) > 0.0:
                raise ConfigError(f"BertConfig.{name} must be positive, not {getattr(self, name)}")
        if self.hidden_size % self.num_heads:
            raise ConfigError(
                f"BertConfig.num_heads ({self.num_heads}) must divide hidden_size ({self.hidden_size}): "
                "each head gets an equal part of the width"
            )

    @classmethod
    def named(cls, name: str, **changes: Any) -> BertConfig:  # noqa: ANN401 - any field of the class
        """Returns a named size: debug, tiny, mini, small, base or large.

        Args:
            name: of the size.
            **changes: fields that differ from it.

        Raises:
            ConfigError: there is no size of that name.
        """
        if name not in _SIZES:
            near = difflib.get_close_matches(name, _SIZES, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"unknown BERT size {name!r}: choose one of {', '.join(_SIZES)}{hint}")
        num_layers, hidden_size, num_heads = _SIZES[name]
        sizes = {
            "num_layers": num_layers,
            "hidden_size": hidden_size,
            "num_heads": num_heads,
            "intermediate_size": 4 * hidden_size,
        }
        return cls(**{**sizes, **changes})

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary rounded up to a multiple of 8, the rows that the embedding has; the rest are never used."""
        return -(-self.vocab_size // 8) * 8

    @property
    def num_parameters(self) -> int:
        """Number of trainable parameters, with the padded vocabulary; the decoder shares the word embedding."""
        h, i = self.hidden_size, self.intermediate_size
        embeddings = (self.padded_vocab_size + self.max_position_embeddings + self.type_vocab_size) * h + 2 * h
        layer = 4 * (h * h + h) + (h * i + i) + (i * h + h) + 4 * h
        heads = (h * h + h) + (h * h + h) + 2 * h + self.padded_vocab_size + 2 * h + 2
        return embeddings + self.num_layers * layer + heads

    def flops_per_sequence(self, seq_len: int, num_predictions: int) -> int:
        """Returns the floating-point operations of training on one sequence, matrix products only.

        A product of [m, k] and [k, n] is 2*m*k*n operations, and the backward pass costs twice the forward pass. Per
        layer and token the weights are 4*H*H (attention) and 2*H*I (feed-forward), and attention itself costs
        2 * 2*S*H (scores and their weighted sum). The language-model head runs on the predictions alone.

        Args:
            seq_len: tokens of a sequence (S).
            num_predictions: masked positions of a sequence.
        """
        h, i, s = self.hidden_size, self.intermediate_size, seq_len
        layer = 2 * s * (4 * h * h + 2 * h * i) + 4 * s * s * h
        heads = 2 * num_predictions * (h * h + h * self.padded_vocab_size) + 2 * (h * h + 2 * h)
        return 3 * (self.num_layers * layer + heads)

    def published_flops_per_sequence(self, seq_len: int) -> int:
        """Returns the published tutorial's estimate, 12*L*H*S*(6*H + S), which leaves the heads out.

        It is `flops_per_sequence` without heads for an intermediate size of 4*H: use it to compare with figures that
        were computed with it.
        """
        h = self.hidden_size
        return 12 * self.num_layers * h * seq_len * (6 * h + seq_len)
