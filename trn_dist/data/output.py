"""A directory that appears whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from trn_dist.data.shards import MANIFEST_NAME
from trn_dist.errors import ConfigError


@contextmanager
def staged(out: Path, inputs: Sequence[Path], *, overwrite: bool) -> Iterator[tuple[Path, Path]]:
    """Gives an empty directory that becomes `out` at the end, and one for files in between.

    Both lie in a directory beside `out`, which is removed however this ends. A data set that was in `out` stays there
    until the new one takes its place.

    Args:
        out: the directory to make; its parents are made too.
        inputs: files and directories that must not overlap it.
        overwrite: whether a data set in `out`, known by its manifest, may be replaced.

    Yields:
        The directory to fill, and that for other files.

    Raises:
        ConfigError: `out` holds something that may not be replaced, overlaps an input or cannot be written.
    """
    out = out.resolve()
    _check(out, inputs, overwrite)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        directory = TemporaryDirectory(prefix=f".{out.name}.", suffix=".partial", dir=out.parent)
    except OSError as error:
        raise ConfigError(f"cannot write to {out.parent} ({error.strerror}): choose another directory") from error
    with directory as temporary:
        # The temporary directory is private; a directory made in it has the permissions of any new one.
        output, work, previous = (Path(temporary) / name for name in ("output", "work", "previous"))
        output.mkdir()
        work.mkdir()
        yield output, work
        if out.exists():
            out.replace(previous)
        try:
            output.replace(out)
        except BaseException:
            if previous.exists():
                previous.replace(out)
            raise


def _check(out: Path, inputs: Sequence[Path], overwrite: bool) -> None:
    for path in inputs:
        if out.is_relative_to(path.resolve()) or path.resolve().is_relative_to(out):
            raise ConfigError(f"the output {out} and the input {path} overlap: choose another output directory")
    if out.is_dir() and any(out.iterdir()):
        if not overwrite:
            raise ConfigError(f"the output {out} is not empty: choose another, or pass --overwrite to replace it")
        if not (out / MANIFEST_NAME).exists():
            raise ConfigError(
                f"the output {out} has no {MANIFEST_NAME}, so it is no data set to overwrite: choose another, or "
                "remove it yourself"
            )
    elif out.exists() and not out.is_dir():
        raise ConfigError(f"the output {out} is a file: choose a directory")
