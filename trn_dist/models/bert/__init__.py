"""BERT with its pre-training heads, in static shapes for compiled graphs."""

from trn_dist.models.bert.config import BertConfig
from trn_dist.models.bert.huggingface import (
    config_from_huggingface,
    config_to_huggingface,
    from_huggingface,
    to_huggingface,
)
from trn_dist.models.bert.model import BertForPreTraining, PreTrainingLogits, PreTrainingLosses, pretraining_losses

__all__ = [
    "BertConfig",
    "BertForPreTraining",
    "PreTrainingLogits",
    "PreTrainingLosses",
    "config_from_huggingface",
    "config_to_huggingface",
    "from_huggingface",
    "pretraining_losses",
    "to_huggingface",
]
