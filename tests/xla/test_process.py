import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from trn_dist.xla.process import code_fingerprint
print(code_fingerprint())
"""


def fingerprint(script):
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_same_code_has_the_same_fingerprint_wherever_it_lies(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(PROGRAM)
    assert fingerprint(tmp_path / "a/train.py") == fingerprint(tmp_path / "b/train.py")


@pytest.mark.parametrize("change", ["train.py", "arguments.py"])
def test_code_that_differs_anywhere_has_another(tmp_path, change):
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "arguments.py").write_text("BATCH = 8\n")
    before = fingerprint(tmp_path / "train.py")
    with Path(tmp_path / change).open("a") as file:
        file.write("# changed\n")
    assert fingerprint(tmp_path / "train.py") != before
