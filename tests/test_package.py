"""What the package promises as a whole: light imports, rooms that import downwards only, errors and exit codes."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import trn_dist
from trn_dist import cli
from trn_dist.errors import ConfigError, DataError, MissingDependencyError, RecompileError, TrnDistError, exit_code_of

PACKAGE = Path(trn_dist.__file__).parent
HEAVY = {"torch", "torch_xla", "torchx", "kubernetes", "h5py", "numpy", "tokenizers", "transformers", "safetensors"}


def loaded_by(statement):
    program = f"import sys; {statement}; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import trn_dist", set()),
        ("import trn_dist; trn_dist.ConfigError; dir(trn_dist)", set()),
        ("import trn_dist.cli; trn_dist.cli.make_parser()", set()),
        ("import trn_dist.data", set()),
        ("import trn_dist.models.bert.config", {"torch", "numpy"}),
        ("import trn_dist.components", {"torchx"}),
        ("import trn_dist.data.shards", {"numpy", "h5py"}),
        ("import trn_dist.training", {"torch", "numpy", "safetensors"}),
    ],
)
def test_imports_are_light(statement, allowed):
    assert loaded_by(statement) & HEAVY <= allowed


def test_public_names_are_there():
    for name in trn_dist.__all__:
        assert getattr(trn_dist, name) is not None
    with pytest.raises(AttributeError, match="module 'trn_dist' has no attribute 'nothing'"):
        trn_dist.nothing  # noqa: B018


# What each room may import of the others; the arrows of the design point down this list only.
ARROWS = {
    "errors": set(),
    "xla": {"errors"},
    "models": {"errors"},
    "data": {"errors"},
    "training": {"xla", "errors"},
    "launcher": {"errors"},
    "components": {"launcher", "errors"},
    "cli": {"data", "cli_checkpoint", "cli_graphs", "errors"},
    "cli_graphs": {"xla", "errors"},
    "cli_checkpoint": {"training", "models", "errors"},
}


def rooms_imported_by(room):
    files = (PACKAGE / room).rglob("*.py") if (PACKAGE / room).is_dir() else [PACKAGE / f"{room}.py"]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name.startswith("trn_dist."):
                    yield name.split(".")[1]


@pytest.mark.parametrize("room", ARROWS)
def test_rooms_import_downwards_only(room):
    assert set(rooms_imported_by(room)) - {room} <= ARROWS[room]


def test_every_room_has_its_arrows():
    rooms = {path.stem for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert rooms - {"__init__", "__pycache__"} == ARROWS.keys()


@pytest.mark.parametrize(
    ("error", "code"),
    [(TrnDistError, 1), (ConfigError, 78), (RecompileError, 78), (DataError, 78), (MissingDependencyError, 78)],
)
def test_exit_codes(capsys, error, code):
    def main():
        raise error("what is wrong")

    assert exit_code_of(main) == code
    assert capsys.readouterr().err == "error: what is wrong\n"


def test_exit_codes_of_success_and_of_faults():
    assert exit_code_of(lambda: None) == 0
    assert exit_code_of(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        exit_code_of(lambda: 1 / 0)


def test_command_line(capsys, tmp_path):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"trn-dist {trn_dist.__version__}\n"
    with pytest.raises(SystemExit, match="2"):
        cli.main([])
    capsys.readouterr()
    assert cli.main(["data", "info", str(tmp_path)]) == 78
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}")


def test_interrupting_the_command_line(monkeypatch, capsys):
    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "exit_code_of", interrupt)
    assert cli.main(["data", "info", "x"]) == 130
    assert capsys.readouterr().err == "trn-dist: interrupted\n"
