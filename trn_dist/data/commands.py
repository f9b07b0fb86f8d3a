"""The commands `trn-dist data prepare` and `trn-dist data info`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from trn_dist.errors import MissingDependencyError

if TYPE_CHECKING:
    from trn_dist.data.shards import Columns, Manifest, ShardSet
    from trn_dist.data.vocabulary import Vocabulary

Handler = Callable[[argparse.Namespace], int]

_PACKAGES = {"h5py", "numpy", "tokenizers", "tqdm"}


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command `data`; each of its commands sets `handler`, which takes the parsed arguments."""
    data = subparsers.add_parser("data", help="prepare and inspect pre-training data")
    commands = data.add_subparsers(required=True, metavar="COMMAND")
    _register_prepare(commands)
    info = commands.add_parser("info", help="describe a data set and show a sample")
    info.add_argument("directory", type=Path, metavar="DIR", help="directory of the shards")
    info.set_defaults(handler=_handler(_info))


def _register_prepare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("prepare", help="make BERT pre-training shards from text")
    add = parser.add_argument
    add(
        "--input",
        type=Path,
        nargs="+",
        action="extend",
        required=True,
        metavar="FILE|DIR",
        help="UTF-8 text, also gzip-compressed; of a directory all *.txt and *.txt.gz files",
    )
    add("--out", type=Path, required=True, metavar="DIR", help="directory of the data set")
    add(
        "--format",
        choices=("blank-line", "line"),
        default="blank-line",
        help="what separates documents: blank lines, or the end of each line (default: blank-line)",
    )
    add("--vocab", type=Path, metavar="FILE", help="a BERT vocab.txt (default: a vocabulary is trained on the text)")
    add("--lowercase", action=argparse.BooleanOptionalAction, default=True, help="lower-case, strip accents (default)")
    for name, default, text in (
        ("vocab_size", 30_522, "most tokens of a trained vocabulary"),
        ("seq_len", 128, "tokens an instance"),
        ("max_predictions", 20, "most masked tokens an instance"),
        ("duplicate_factor", 5, "times that the text is gone through, with other pairs and masks"),
        ("masked_lm_prob", 0.15, "share of the tokens that are masked"),
        ("short_seq_prob", 0.1, "share of the documents that are cut to shorter sequences"),
        ("seed", 12345, "of everything random"),
    ):
        add(f"--{name}", type=type(default), default=default, metavar="N", help=f"{text} (default: {default})")
    add("--num_shards", type=int, metavar="N", help="(default: 8, or as many as hold 100,000 instances each)")
    add("--processes", type=int, metavar="N", help="(default: the number of CPUs that this process may use)")
    add("--overwrite", action="store_true", help="replace a data set in --out once the new one is complete")
    parser.set_defaults(handler=_handler(_prepare))


def _handler(function: Handler) -> Handler:
    """Turns the absence of a package of the `data` extra into an error that names the extra."""

    def run(args: argparse.Namespace) -> int:
        try:
            return function(args)
        except ModuleNotFoundError as error:
            if error.name not in _PACKAGES:
                raise
            raise MissingDependencyError(
                f"the package '{error.name}' is not installed: pip install 'trn-dist[data]'"
            ) from error

    return run


def _prepare(args: argparse.Namespace) -> int:
    from trn_dist.data.instances import InstanceConfig
    from trn_dist.data.prepare import PrepareConfig, prepare

    config = PrepareConfig(
        inputs=tuple(args.input),
        out=args.out,
        vocab=args.vocab,
        vocab_size=args.vocab_size,
        lowercase=args.lowercase,
        text_format=args.format,
        duplicate_factor=args.duplicate_factor,
        num_shards=args.num_shards,
        processes=args.processes,
        overwrite=args.overwrite,
        instances=InstanceConfig(
            seq_len=args.seq_len,
            max_predictions=args.max_predictions,
            masked_lm_prob=args.masked_lm_prob,
            short_seq_prob=args.short_seq_prob,
            seed=args.seed,
        ),
    )
    manifest = prepare(config)
    _print_counts(manifest)
    print(f"written to {args.out}; look at it with: trn-dist data info {args.out}")
    return 0


def _info(args: argparse.Namespace) -> int:
    from trn_dist.data.prepare import VOCAB_NAME
    from trn_dist.data.shards import ShardSet
    from trn_dist.data.vocabulary import Vocabulary

    shards = ShardSet.open(args.directory)
    manifest = shards.manifest
    _print_shards(shards)
    if manifest:
        _print_counts(manifest)
        for name, value in sorted(manifest.settings.items()):
            print(f"  {name:<20} {value}")
    vocab = args.directory / VOCAB_NAME
    if vocab.exists():
        lowercase = bool(manifest.settings.get("lowercase", True)) if manifest else True
        print(f"sample 0 of {shards.shards[0].path.name}:")
        print(_describe(shards.read(0), 0, Vocabulary.load(vocab, lowercase=lowercase)))
    return 0


def _print_shards(shards: ShardSet) -> None:
    print(
        f"{shards.num_samples:,} samples in {len(shards.shards):,} shards ({shards.sizes.min():,} to "
        f"{shards.sizes.max():,} each), {shards.seq_len} tokens, at most {shards.max_predictions} predictions"
    )
    print(f"fingerprint {shards.fingerprint}")


def _print_counts(manifest: Manifest) -> None:
    counts = manifest.counts
    print(
        f"{counts['documents']:,} documents, {counts['sentences']:,} sentences and {counts['tokens']:,} tokens made "
        f"{counts['instances']:,} instances with {counts['predictions']:,} predictions in {len(manifest.shards):,} "
        f"shards; the vocabulary has {manifest.vocab_size:,} tokens"
    )


def _describe(columns: Columns, row: int, vocabulary: Vocabulary) -> str:
    """Returns a sample as text, masked, with the original words behind it."""
    length = int(columns["input_mask"][row].sum())
    masked = columns["masked_lm_ids"][row]
    label = "from another document" if columns["next_sentence_labels"][row] else "the next in the document"
    return (
        f"  text     {vocabulary.decode(columns['input_ids'][row, :length].tolist())}\n"
        f"  masked   {', '.join(vocabulary.tokens[i] for i in masked[masked != 0].tolist())}\n"
        f"  second   {label}"
    )
