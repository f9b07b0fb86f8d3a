"""The `trn-dist` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from trn_dist import __version__, cli_checkpoint, cli_graphs
from trn_dist.data import commands as data_commands
from trn_dist.errors import exit_code_of


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command; each room adds its own verbs."""
    parser = argparse.ArgumentParser(prog="trn-dist", description="Distributed training on AWS Trainium.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    data_commands.register(verbs)
    cli_checkpoint.register(verbs)
    cli_graphs.register(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
        The exit code; an error that trn_dist raises on purpose is printed and gives its own (78 for what trying again
        cannot help).
    """
    arguments = make_parser().parse_args(argv)
    try:
        return exit_code_of(lambda: arguments.handler(arguments))
    except KeyboardInterrupt:
        print("trn-dist: interrupted", file=sys.stderr)
        return 130
