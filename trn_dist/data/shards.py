"""Pre-training shards on disk: HDF5 files in the layout of NVIDIA's BERT recipe, and the manifest that describes them.

A shard holds N instances of S tokens, of which at most P are masked. Unused places are 0.

| key                  | dtype | shape  |                                                                |
|----------------------|-------|--------|----------------------------------------------------------------|
| input_ids            | int32 | [N, S] | `[CLS] A [SEP] B [SEP]`, with masks in place                   |
| input_mask           | int8  | [N, S] | 1 on tokens, 0 on padding                                      |
| segment_ids          | int8  | [N, S] | 0 on `[CLS] A [SEP]` and on padding, 1 on `B [SEP]`            |
| masked_lm_positions  | int32 | [N, P] | rising; 0 marks an unused slot, because position 0 is `[CLS]`  |
| masked_lm_ids        | int32 | [N, P] | the original tokens at those positions                         |
| next_sentence_labels | int8  | [N]    | 0 when B follows A, 1 when B is from another document          |
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt

from trn_dist.errors import DataError

KEYS = (
    "input_ids",
    "input_mask",
    "segment_ids",
    "masked_lm_positions",
    "masked_lm_ids",
    "next_sentence_labels",
)
MANIFEST_NAME = "manifest.json"
MANIFEST_FORMAT = 1

Columns = dict[str, npt.NDArray[np.integer[Any]]]

DTYPES = dict(zip(KEYS, ("int32", "int8", "int8", "int32", "int32", "int8"), strict=True))
_RANKS = dict(zip(KEYS, (2, 2, 2, 2, 2, 1), strict=True))
_PATTERN = "*training*.hdf5"
# Shards are read whole, so a chunk spans whole rows; many rows a chunk keep the chunk index small and gzip effective.
_ROWS_PER_CHUNK = 1024


@dataclass(frozen=True)
class ShardInfo:
    """One shard, as its metadata describes it.

    Attributes:
        path: of the HDF5 file.
        num_samples: instances in it (N).
        seq_len: tokens an instance, with padding (S).
        max_predictions: slots for masked tokens an instance (P).
    """

    path: Path
    num_samples: int
    seq_len: int
    max_predictions: int


@dataclass(frozen=True)
class ManifestShard:
    """What a manifest records of one shard.

    Attributes:
        name: of the file in the data set's directory.
        num_samples: instances in it.
        sha256: of the file, in hex.
    """

    name: str
    num_samples: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What `trn-dist data prepare` made: equal manifests mean byte-equal data sets.

    Attributes:
        library_version: version of trn_dist that wrote the data set.
        counts: `documents`, `sentences`, `tokens` (of the text, once), `instances` and `predictions`.
        vocab_size: number of tokens in the vocabulary.
        vocab_sha256: of `vocab.txt`, in hex.
        settings: every setting that the output depends on.
        shards: in order of their names.
        format: version of the manifest's form.
    """

    library_version: str
    counts: dict[str, int]
    vocab_size: int
    vocab_sha256: str
    settings: dict[str, Any]
    shards: tuple[ManifestShard, ...]
    format: int = MANIFEST_FORMAT

    def write(self, directory: Path) -> None:
        """Writes `manifest.json` into a directory."""
        text = json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"
        with _written_beside(directory / MANIFEST_NAME) as path:
            path.write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """Reads a directory's `manifest.json`.

        Returns:
            The manifest, or None when there is none: published shards come without.

        Raises:
            DataError: the file is not a manifest of this format.
        """
        path = directory / MANIFEST_NAME
        try:
            fields = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise DataError(f"{path} is not JSON ({error}): prepare or copy the data set again") from error
        found = fields.get("format") if isinstance(fields, dict) else None
        if found != MANIFEST_FORMAT:
            raise DataError(
                f"{path}: field 'format' is {found!r}, but this version of trn_dist reads format {MANIFEST_FORMAT}: "
                "prepare the data set again with it"
            )
        try:
            shards = tuple(ManifestShard(**shard) for shard in fields.pop("shards"))
            return cls(shards=shards, **fields)
        except (KeyError, TypeError) as error:
            raise DataError(f"{path} lacks or misnames a field ({error}): prepare or copy it again") from error


def write_shard(path: Path, columns: Columns) -> None:
    """Writes a shard, gzip-compressed; equal columns give byte-equal files.

    Args:
        path: of the file; it appears there only when it is complete.
        columns: an array for each of `KEYS`, in the shapes that the module describes and of any integer dtype.
    """
    with _written_beside(path) as partial, h5py.File(partial, "w") as file:
        for key in KEYS:
            column = columns[key].astype(DTYPES[key])
            chunks = (min(_ROWS_PER_CHUNK, len(column)), *column.shape[1:])
            file.create_dataset(key, data=column, chunks=chunks, compression="gzip", track_times=False)


class ShardSet:
    """The shards of a directory, checked when they are opened and read one at a time.

    Attributes:
        directory: where they are.
        shards: in order of their file names.
        sizes: int64 [number of shards], the samples of each.
        num_samples: of all shards.
        seq_len: tokens a sample (S).
        max_predictions: slots for masked tokens a sample (P).
        manifest: of the data set, or None for shards that came without.
        fingerprint: sha256 (hex) over the shards' names, shapes and recorded hashes. It is the same on every machine
            and path, so workers compare it to make sure that they read the same data.
    """

    def __init__(self, directory: Path, shards: tuple[ShardInfo, ...], manifest: Manifest | None) -> None:
        self.directory, self.shards, self.manifest = directory, shards, manifest
        self.sizes: npt.NDArray[np.int64] = np.asarray([shard.num_samples for shard in shards], dtype=np.int64)
        self.num_samples = int(self.sizes.sum())
        self.seq_len, self.max_predictions = shards[0].seq_len, shards[0].max_predictions
        self.fingerprint = _fingerprint(shards, manifest)

    @property
    def vocab_size(self) -> int | None:
        """Number of tokens in the vocabulary, where a manifest tells."""
        return self.manifest.vocab_size if self.manifest else None

    @classmethod
    def open(cls, directory: str | Path) -> ShardSet:
        """Finds `*training*.hdf5` in a directory and checks each shard's metadata; no samples are read.

        Raises:
            DataError: there are no shards; a shard is damaged, empty, lacks a key, or has a key of the wrong rank,
                dtype or length; the shards differ in their shapes; or they are not those that the manifest lists.
        """
        directory = Path(directory)
        manifest = Manifest.read(directory)
        paths = sorted(directory.glob(_PATTERN), key=lambda path: path.name)
        if not paths:
            raise DataError(_no_shards(directory, manifest))
        shards = tuple(_inspect(path) for path in paths)
        _check_equal_shapes(shards)
        if manifest:
            _check_manifest(directory, shards, manifest)
        return cls(directory, shards, manifest)

    def read(self, index: int) -> Columns:
        """Reads a whole shard into memory, in its own dtypes.

        Reading whole is what makes HDF5 fast: reading gzip-compressed rows one by one is more than a thousand times
        slower.

        Raises:
            DataError: the file is damaged.
        """
        path = self.shards[index].path
        with _opened(path) as file:
            return {key: file[key][()] for key in KEYS}


@contextmanager
def _written_beside(path: Path) -> Iterator[Path]:
    """Gives a path to write to, renamed to `path` at the end and removed when an error comes first."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    """Opens a shard; what HDF5 has to say while it is open becomes a `DataError` that names the file."""
    try:
        with h5py.File(path, "r") as file:
            yield file
    except (OSError, KeyError, RuntimeError) as error:  # h5py raises each of them for damaged files
        raise DataError(f"shard {path} is damaged or not HDF5 ({error}): copy or prepare it again") from error


def _inspect(path: Path) -> ShardInfo:
    with _opened(path) as file:
        shapes = {key: _shape(path, file, key) for key in KEYS}
    size, seq_len = shapes["input_ids"]
    max_predictions = shapes["masked_lm_positions"][1]
    if size == 0:
        raise DataError(f"shard {path}: key 'input_ids' is empty: remove the file or prepare it again")
    widths = dict(zip(KEYS, (seq_len, seq_len, seq_len, max_predictions, max_predictions), strict=False))
    for key, shape in shapes.items():
        expected = (size, widths[key]) if key in widths else (size,)
        if shape != expected:
            raise DataError(
                f"shard {path}: key '{key}' has shape {shape}, but the other keys ask for {expected}: "
                "copy or prepare the shard again"
            )
    return ShardInfo(path, size, seq_len, max_predictions)


def _shape(path: Path, file: h5py.File, key: str) -> tuple[int, ...]:
    if file.get(key, getclass=True) is not h5py.Dataset:
        found = ", ".join(sorted(map(str, file))) or "no keys"
        raise DataError(f"shard {path} lacks the key '{key}' (it has {found}): a shard must have {', '.join(KEYS)}")
    dataset = file[key]
    if dataset.ndim != _RANKS[key] or dataset.dtype.kind not in "iu":
        raise DataError(
            f"shard {path}: key '{key}' holds {dataset.dtype} of shape {dataset.shape}, "
            f"but must hold integers of {_RANKS[key]} dimension{'s' if _RANKS[key] > 1 else ''}"
        )
    shape: tuple[int, ...] = dataset.shape
    return shape


def _check_equal_shapes(shards: tuple[ShardInfo, ...]) -> None:
    first = shards[0]
    for shard in shards:
        for key, field in (("input_ids", "seq_len"), ("masked_lm_positions", "max_predictions")):
            if getattr(shard, field) != getattr(first, field):
                raise DataError(
                    f"shard {shard.path}: key '{key}' is {getattr(shard, field)} wide, but {getattr(first, field)} in "
                    f"{first.path.name}: keep only shards with the same {field} in a directory"
                )


def _check_manifest(directory: Path, shards: tuple[ShardInfo, ...], manifest: Manifest) -> None:
    found = {shard.path.name: shard.num_samples for shard in shards}
    listed = {shard.name: shard.num_samples for shard in manifest.shards}
    for name in sorted(found.keys() | listed.keys()):
        if found.get(name) != listed.get(name):
            on_disk = f"holds {found[name]:,} samples" if name in found else "is missing"
            in_manifest = f"says {listed[name]:,} samples" if name in listed else "does not list it"
            raise DataError(
                f"shard {directory / name} {on_disk}, but {MANIFEST_NAME} {in_manifest}: "
                "copy or prepare the data set again"
            )


def _no_shards(directory: Path, manifest: Manifest | None) -> str:
    if not directory.is_dir():
        problem = f"{directory} is not a directory"
    else:
        problem = f"{directory} holds no shards ({_PATTERN})"
    if manifest:
        return f"{problem}, though its {MANIFEST_NAME} lists {len(manifest.shards)}: copy the data set again"
    return f"{problem}: make some with `trn-dist data prepare --input TEXT --out {directory}`"


def _fingerprint(shards: tuple[ShardInfo, ...], manifest: Manifest | None) -> str:
    hashes = {shard.name: shard.sha256 for shard in manifest.shards} if manifest else {}
    rows = [
        [shard.path.name, shard.num_samples, shard.seq_len, shard.max_predictions, hashes.get(shard.path.name)]
        for shard in shards
    ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
