"""What `import trn_dist` adds to starting Python: medians of alternating runs.

python benchmarks/import_cost.py
"""

import statistics
import subprocess
import sys
import time

RUNS = 21


def seconds(program: str) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True)
    return time.perf_counter() - begin


def main() -> None:
    programs = {"pass": [], "import trn_dist": []}
    for program in programs:
        seconds(program)
    for _ in range(RUNS):
        for program, times in programs.items():
            times.append(seconds(program))
    bare, ours = (statistics.median(times) for times in programs.values())
    print(f"pass {bare * 1e3:.1f} ms, import trn_dist {ours * 1e3:.1f} ms: {(ours - bare) * 1e3:+.1f} ms")


if __name__ == "__main__":
    main()
