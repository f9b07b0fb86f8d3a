"""Lets torchx 0.7.0 resolve `trn_dist.components:ddp`.

That version reads what stands before the colon as a file. It asks the entry point `torchx.file` for the contents of
files that do not exist on disk; this hook answers for the dotted names of this package. Newer versions import such
names themselves and never ask.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def get_file_contents(conf_file: str) -> str | None:
    """Returns the source of a module of trn_dist, or the contents of a file that torchx itself ships, or None.

    Args:
        conf_file: `trn_dist` or a dotted name below it; or a path relative to the folder that holds the package torchx,
            which is what torchx's own hook takes.
    """
    if conf_file == "trn_dist" or conf_file.startswith("trn_dist."):
        try:
            spec = find_spec(conf_file)
        except ModuleNotFoundError:
            return None
        return Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else None
    torchx = find_spec("torchx")
    if torchx is None or torchx.origin is None:
        return None
    path = Path(torchx.origin).parents[1] / conf_file
    return path.read_text(encoding="utf-8") if path.exists() else None
