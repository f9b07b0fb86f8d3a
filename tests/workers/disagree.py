"""The training script, started differently on each rank: `disagree.py ... --on_rank_1 FLAG VALUE`."""

import os
import runpy
import sys
from pathlib import Path

at = sys.argv.index("--on_rank_1")
only_there = sys.argv[at + 1 :]
script = Path(__file__).parents[2] / "examples" / "bert_phase1" / "train.py"
sys.argv = [str(script), *sys.argv[1:at], *(only_there if os.environ["RANK"] == "1" else [])]
sys.path.insert(0, str(script.parent))
runpy.run_path(str(script), run_name="__main__")
