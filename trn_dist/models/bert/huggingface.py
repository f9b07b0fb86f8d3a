"""Weights and configurations from and to Hugging Face's `transformers.BertForPreTraining`, without importing it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trn_dist.errors import ConfigError
from trn_dist.models.bert.config import BertConfig
from trn_dist.models.bert.model import BertForPreTraining

# Ours to theirs. The query, key and value of a layer are one matrix here and three there.
_NAMES = {
    "embeddings.word.weight": "bert.embeddings.word_embeddings.weight",
    "embeddings.position.weight": "bert.embeddings.position_embeddings.weight",
    "embeddings.segment.weight": "bert.embeddings.token_type_embeddings.weight",
    "embeddings.norm": "bert.embeddings.LayerNorm",
    "pooler": "bert.pooler.dense",
    "transform": "cls.predictions.transform.dense",
    "transform_norm": "cls.predictions.transform.LayerNorm",
    "decoder_bias": "cls.predictions.bias",
    "next_sentence": "cls.seq_relationship",
}
_LAYER_NAMES = {
    "attention_output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "output_norm": "output.LayerNorm",
}
_QKV = ("query", "key", "value")
# Copies of other weights (the decoder is tied), and a buffer of older releases.
_REDUNDANT = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "bert.embeddings.position_ids": None,
}
_WITH_VOCABULARY = ("embeddings.word.weight", "decoder_bias")


def from_huggingface(state_dict: Mapping[str, torch.Tensor], config: BertConfig) -> dict[str, torch.Tensor]:
    """Returns the state dict of our model that holds the weights of theirs.

    Args:
        state_dict: of a `transformers.BertForPreTraining`.
        config: sizes; see `config_from_huggingface`.

    Returns:
        New tensors by our names; the vocabulary's padding is zero.

    Raises:
        ConfigError: a weight is missing, unknown or of another shape, or the decoder is not tied to the word embedding;
            the message names it.
    """
    pairs, shapes = _pairs(config), _our_shapes(config)
    known = {theirs for _, theirs in pairs} | _REDUNDANT.keys()
    _refuse_difference(state_dict.keys() - known, "are unknown to BertForPreTraining")
    _refuse_difference({theirs for _, theirs in pairs} - state_dict.keys(), "are missing")
    for name, theirs in pairs:
        _refuse_shape(theirs, state_dict[theirs], _their_shape(name, shapes[name], config))
    for copy, source in _REDUNDANT.items():
        if source and copy in state_dict and not torch.equal(state_dict[copy], state_dict[source]):
            raise ConfigError(
                f"{copy} is not {source}: only models whose decoder is tied to the embedding are supported"
            )
    ours: dict[str, list[torch.Tensor]] = {}
    for name, theirs in pairs:
        ours.setdefault(name, []).append(state_dict[theirs].detach())
    merged = {name: torch.cat(parts) for name, parts in ours.items()}
    for name in _WITH_VOCABULARY:
        padding = torch.zeros(config.padded_vocab_size - config.vocab_size, *merged[name].shape[1:])
        merged[name] = torch.cat([merged[name], padding.to(merged[name])])
    return merged


def to_huggingface(state_dict: Mapping[str, torch.Tensor], config: BertConfig) -> dict[str, torch.Tensor]:
    """Returns the state dict of `transformers.BertForPreTraining` that holds the weights of our model.

    Args:
        state_dict: of our model.
        config: its sizes.

    Returns:
        New tensors by their names, the tied decoder's included, without the vocabulary's padding.

    Raises:
        ConfigError: a weight is missing, unknown or of another shape; the message names it.
    """
    pairs, shapes = _pairs(config), _our_shapes(config)
    _refuse_difference(state_dict.keys() - {name for name, _ in pairs}, "are unknown to our BertForPreTraining")
    _refuse_difference({name for name, _ in pairs} - state_dict.keys(), "are missing")
    theirs: dict[str, torch.Tensor] = {}
    for name, their_name in pairs:
        value = state_dict[name].detach()
        _refuse_shape(name, value, shapes[name])
        if name in _WITH_VOCABULARY:
            value = value[: config.vocab_size]
        if ".qkv." in name:
            part = next(i for i, which in enumerate(_QKV) if f".{which}." in their_name)
            value = value.chunk(3)[part]
        theirs[their_name] = value.clone()
    for copy, source in _REDUNDANT.items():
        if source:
            theirs[copy] = theirs[source]
    return theirs


def config_from_huggingface(config: Mapping[str, Any]) -> BertConfig:
    """Returns our configuration for the `config.json` of a BERT model (as a dict).

    Raises:
        ConfigError: a size is missing, or the model is not a plain BERT encoder, such as one with another activation.
    """
    for key, plain in _PLAIN.items():
        if config.get(key, plain) != plain:
            raise ConfigError(
                f"the Hugging Face configuration has {key} = {config[key]!r}; only {plain!r} is supported"
            )
    if missing := sorted(set(_CONFIG_NAMES.values()) - config.keys()):
        raise ConfigError(f"the Hugging Face configuration lacks {', '.join(missing)}")
    return BertConfig(**{ours: config[theirs] for ours, theirs in _CONFIG_NAMES.items()})


def config_to_huggingface(config: BertConfig) -> dict[str, Any]:
    """Returns the fields of `transformers.BertConfig` for our configuration."""
    return {
        **{theirs: getattr(config, ours) for ours, theirs in _CONFIG_NAMES.items()},
        "hidden_act": "gelu",
        "pad_token_id": 0,
        "model_type": "bert",
        "architectures": ["BertForPreTraining"],
    }


# What a plain BERT encoder has; a configuration that leaves one out means the same.
_PLAIN = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "tie_word_embeddings": True,
}
_CONFIG_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "type_vocab_size": "type_vocab_size",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "layer_norm_eps": "layer_norm_eps",
    "initializer_range": "initializer_range",
}


def _pairs(config: BertConfig) -> list[tuple[str, str]]:
    """Returns (our name, their name) for every weight; a fused QKV stands once for each of its three."""
    pairs = []
    for ours, theirs in _NAMES.items():
        whole = ours.endswith(".weight") or ours == "decoder_bias"
        suffixes = ("",) if whole else (".weight", ".bias")
        pairs += [(ours + suffix, theirs + suffix) for suffix in suffixes]
    for index in range(config.num_layers):
        ours_at, theirs_at = f"layers.{index}", f"bert.encoder.layer.{index}"
        for suffix in ("weight", "bias"):
            pairs += [(f"{ours_at}.qkv.{suffix}", f"{theirs_at}.attention.self.{part}.{suffix}") for part in _QKV]
            pairs += [(f"{ours_at}.{a}.{suffix}", f"{theirs_at}.{b}.{suffix}") for a, b in _LAYER_NAMES.items()]
    return pairs


def _our_shapes(config: BertConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):  # neither memory nor random numbers
        return {name: tuple(tensor.shape) for name, tensor in BertForPreTraining(config).state_dict().items()}


def _their_shape(name: str, shape: tuple[int, ...], config: BertConfig) -> tuple[int, ...]:
    """Returns the shape that their part of our weight has."""
    if name in _WITH_VOCABULARY:
        return (config.vocab_size, *shape[1:])
    return (shape[0] // 3, *shape[1:]) if ".qkv." in name else shape


def _refuse_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ConfigError(f"{name} has the shape {tuple(tensor.shape)}, the configuration asks for {shape}")


def _refuse_difference(names: set[str], what: str) -> None:
    if names:
        listed = sorted(names)
        more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
        raise ConfigError(f"weights that {what}: {', '.join(listed[:3])}{more}")
