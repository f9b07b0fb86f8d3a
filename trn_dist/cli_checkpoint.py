"""The commands `trn-dist checkpoint ls`, `verify` and `export-hf`.

They stand beside `cli` because they join two rooms, the checkpoints of training and the names of a model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from trn_dist.errors import CheckpointError, ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from trn_dist.training.checkpoint import Checkpoint, CheckpointStore


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command `checkpoint`; each of its commands sets `handler`, which takes the parsed arguments."""
    checkpoint = subparsers.add_parser("checkpoint", help="list, verify and export checkpoints")
    commands = checkpoint.add_subparsers(required=True, metavar="COMMAND")
    for name, handler, text in (
        ("ls", _list, "list the checkpoints of a run"),
        ("verify", _verify, "read every byte and compare it with the manifests"),
        ("export-hf", _export, "write a BERT checkpoint as a Hugging Face model"),
    ):
        parser = commands.add_parser(name, help=text)
        parser.add_argument("directory", type=Path, metavar="DIR", help="a run's output directory, or its checkpoints")
        parser.set_defaults(handler=handler)
        if name == "export-hf":
            parser.add_argument("out", type=Path, metavar="OUT", help="folder of the model; must not exist")
            parser.add_argument("--step", type=int, metavar="N", help="(default: the newest)")


def _list(args: argparse.Namespace) -> int:
    store = _open(args.directory)
    for step in store.steps():
        path = store.path(step)
        size = sum(file.stat().st_size for file in path.iterdir())
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        score, best = store.score(step), " (best)" if step == store.best() else ""
        shown = "" if score is None else f"  score {score:.4f}{best}"
        print(f"step {step:>8}  {size / 2**20:10,.1f} MiB  {state['world_size']} workers{shown}  {path}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    store = _open(args.directory)
    damaged = 0
    for step in store.steps():
        try:
            store.load(step)
            print(f"step {step:>8}  whole")
        except CheckpointError as error:
            damaged += 1
            print(f"step {step:>8}  DAMAGED: {error}")
    return 1 if damaged else 0


def _export(args: argparse.Namespace) -> int:
    from safetensors.torch import save_file

    from trn_dist.models.bert import BertConfig, config_to_huggingface, to_huggingface

    if args.out.exists():
        raise ConfigError(f"{args.out} exists already: name a folder that does not")
    checkpoint = _load(_open(args.directory), args.step)
    settings = checkpoint.state["identity"].get("model")
    if not isinstance(settings, dict):
        raise ConfigError(f"the checkpoint of step {checkpoint.step} does not say the sizes of a BERT model")
    config = BertConfig(**settings)
    beside = args.out.with_name(f".{args.out.name}.unfinished")
    beside.mkdir(parents=True)
    weights = {
        name: tensor.contiguous() for name, tensor in to_huggingface(checkpoint.tensors["model"], config).items()
    }
    tied = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}  # transformers ties them itself
    metadata = {"format": "pt"}
    save_file({n: t for n, t in weights.items() if n not in tied}, beside / "model.safetensors", metadata=metadata)
    (beside / "config.json").write_text(json.dumps(config_to_huggingface(config), indent=2) + "\n", encoding="utf-8")
    beside.rename(args.out)
    print(f"{args.out}: step {checkpoint.step}, {config.num_parameters:,} parameters")
    return 0


def _open(directory: Path) -> CheckpointStore:
    try:
        from trn_dist.training.checkpoint import CheckpointStore
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "safetensors", "numpy"):
            raise
        raise MissingDependencyError(
            f"the package '{error.name}' is not installed: pip install 'trn-dist[train]'"
        ) from error
    for candidate in (directory / "checkpoints", directory):
        store = CheckpointStore(candidate)
        if store.steps():
            return store
    raise ConfigError(f"there is no checkpoint in {directory} nor in {directory / 'checkpoints'}")


def _load(store: CheckpointStore, step: int | None) -> Checkpoint:
    newest = store.newest() if step is None else store.load(step)
    if newest is None:
        raise ConfigError(f"there is no checkpoint in {store.directory}")
    return newest
