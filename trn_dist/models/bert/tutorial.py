"""Weights from `ckpt_<step>.pt`, the checkpoints of the published tutorial's training script."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trn_dist.errors import ConfigError, DataError
from trn_dist.models.bert.config import BertConfig
from trn_dist.models.bert.huggingface import from_huggingface

_FILE = re.compile(r"ckpt_(\d+)\.pt")
# Names of NVIDIA's BERT, which some of these checkpoints have, and of a wrapped module.
_OLD_NAMES = ((r"^module\.", ""), (r"\.dense_act\.", ".dense."), (r"\.gamma$", ".weight"), (r"\.beta$", ".bias"))


def find_tutorial_checkpoint(path: Path, step: int | None = None) -> Path | None:
    """Returns the file itself, the newest `ckpt_<step>.pt` of a folder, or that of a step; None where there is none."""
    if path.is_file():
        return path
    found = {int(match[1]): file for file in path.glob("ckpt_*.pt") if (match := _FILE.fullmatch(file.name))}
    if step is not None:
        return found.get(step)
    return found[max(found)] if found else None


def read_tutorial_checkpoint(path: Path, config: BertConfig) -> dict[str, torch.Tensor]:
    """Returns the weights of a checkpoint of the published tutorial, by our model's names.

    Only tensors and plain containers are unpickled (`weights_only`); a file that holds anything else is refused. Its
    optimizer and its position are left: they do not say enough to go on exactly.

    Args:
        path: of the file, from `torch.save`, with the state dict of a Hugging Face or NVIDIA BERT under `model`.
        config: sizes of the model.

    Returns:
        CPU tensors.

    Raises:
        DataError: the file is damaged, holds code, or has no `model`.
        ConfigError: the weights are not those of a BERT of these sizes; the message names one.
    """
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise DataError(
            f"{path} holds more than tensors and plain values ({_first_line(error)}): it is not read, since "
            "unpickling would run its code. Save the weights alone with the program that made it"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a PyTorch file: {_first_line(error)}") from error
    weights = content.get("model") if isinstance(content, Mapping) else None
    if not isinstance(weights, Mapping) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise DataError(f"{path} has no state dict under 'model', as the tutorial's checkpoints have")
    try:
        return from_huggingface({_modern(name): value for name, value in weights.items()}, config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _first_line(error: Exception) -> str:
    return (str(error) or repr(error)).splitlines()[0]


def _modern(name: str) -> str:
    for old, new in _OLD_NAMES:
        name = re.sub(old, new, name)
    return name
