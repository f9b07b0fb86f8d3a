"""Distributed training on AWS Trainium: launch, world, training loop, data and BERT.

The public names below are loaded on first use: importing trn_dist imports neither torch nor torchx nor kubernetes.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trn_dist import xla as xla
    from trn_dist.errors import CheckpointError as CheckpointError
    from trn_dist.errors import ConfigError as ConfigError
    from trn_dist.errors import DataError as DataError
    from trn_dist.errors import MissingDependencyError as MissingDependencyError
    from trn_dist.errors import RecompileError as RecompileError
    from trn_dist.errors import TrnDistError as TrnDistError
    from trn_dist.errors import WorldError as WorldError
    from trn_dist.xla import World as World
    from trn_dist.xla import init as init

_HOMES = {
    "CheckpointError": "trn_dist.errors",
    "ConfigError": "trn_dist.errors",
    "DataError": "trn_dist.errors",
    "MissingDependencyError": "trn_dist.errors",
    "RecompileError": "trn_dist.errors",
    "TrnDistError": "trn_dist.errors",
    "World": "trn_dist.xla",
    "WorldError": "trn_dist.errors",
    "init": "trn_dist.xla",
}
_ROOMS = ("components", "data", "models", "training", "xla")

__all__ = ["__version__", *_HOMES, *_ROOMS]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return import_module(f"trn_dist.{name}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'trn_dist' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
