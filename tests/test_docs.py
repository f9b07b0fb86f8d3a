"""The commands of the documentation are run, page by page, in a folder of their own."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def blocks(page, languages="sh|python"):
    """The blocks of code of a page as (language, text), in order."""
    return re.findall(rf"^```({languages})\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path):
    """What a page may use: the examples."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_a_page_does_what_it_says(page, folder):
    lines = ["set -euo pipefail"]
    for number, (language, text) in enumerate(blocks(page)):
        if language == "python":
            (folder / f"block{number}.py").write_text(text)
        lines.append(text if language == "sh" else f"python block{number}.py")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout
    for expected in EXPECTED.get(page.stem, ()):
        assert re.search(expected, done.stdout), f"{expected} is not in:\n{done.stdout}"


EXPECTED = {
    "bert": [
        r"starting from new weights",
        r"step 10/10 ",
        r"resumed from .* after step 10",
        r"step 20/20 ",
        "final_loss",
        r"step +20  whole",
        r"runs/hf: step 20, ",
    ],
    "data": [r"samples in 8 shards", "masked"],
    "launch": [
        r"rank 1 of 2: \['--name', 'two words'\] a=b",
        r"rank 1 of 2: \[\] None",
        "--nnodes', *'2:4'|'2:4'",
        r"rank 0 of 2: \['--name', 'from Python'\] hello|SUCCEEDED",
    ],
    "training": [
        r"step 30/30  loss 0\.\d+",
        r"\[0\]:step 30/30  loss 0\.\d+",
        r"input batch was float32\[3,4\] and is float32\[2,4\]",
    ],
}


def test_every_page_is_reached_from_the_readme():
    readme = (ROOT / "README.md").read_text()
    for page in PAGES:
        assert f"docs/{page.name}" in readme


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), target


def test_the_readmes_commands_are_those_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    commands = re.findall(r"^make (\w+)", "\n".join(text for _, text in blocks(ROOT / "README.md", "sh")), re.MULTILINE)
    assert commands == ["demo", "test"]
    for name in commands:
        assert re.search(rf"^{name}:", makefile, re.MULTILINE)


def test_every_flag_of_the_training_script_is_in_its_page(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples" / "bert_phase1")
    import arguments

    page = (ROOT / "docs" / "bert.md").read_text()
    for name in vars(arguments.parse_arguments([])):
        assert f"`--{name}" in page, name


def test_every_argument_of_the_component_is_in_its_page():
    import inspect

    from trn_dist.components import ddp

    page = (ROOT / "docs" / "launch.md").read_text()
    for name in inspect.signature(ddp).parameters:
        flag = f"-{name}" if len(name) == 1 else f"--{name}"
        assert name == "script_args" or f"`{flag}" in page, name
