"""BERT with its pre-training heads, in static shapes for compiled graphs."""

from trn_dist.models.bert.config import BertConfig
from trn_dist.models.bert.huggingface import (
    config_from_huggingface,
    config_to_huggingface,
    from_huggingface,
    to_huggingface,
)
from trn_dist.models.bert.model import BertForPreTraining, PreTrainingLogits, PreTrainingLosses, pretraining_losses
from trn_dist.models.bert.tutorial import find_tutorial_checkpoint, read_tutorial_checkpoint

__all__ = [
    "BertConfig",
    "BertForPreTraining",
    "PreTrainingLogits",
    "PreTrainingLosses",
    "config_from_huggingface",
    "config_to_huggingface",
    "find_tutorial_checkpoint",
    "from_huggingface",
    "pretraining_losses",
    "read_tutorial_checkpoint",
    "to_huggingface",
]
