"""Fuzzes the parsers one after the other and says what came of it.

``python -m tests.fuzz --folder DIR [--index INDEX.json] [--own-runs N] [--library-runs N] [TARGET ...]``

Seeds are made anew in DIR and never committed. Exit code 1 if a target crashed, needed more than 256 MB, or took longer
than 100 ms of CPU time for one input; libFuzzer leaves that input in DIR.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

from tests.fuzz.corpus import write_corpus
from tests.fuzz.targets import TARGETS, Target

MEMORY_MB, LONGEST_INPUT = 256, 1 << 16
_FIGURES = {
    "executions": r"stat::number_of_executed_units:\s+(\d+)",
    "seconds": r"Done \d+ runs in (\d+) second",
    "peak MB": r"stat::peak_rss_mb:\s+(\d+)",
}


def main() -> int:
    options = _options()
    folder: Path = options.folder
    write_corpus(folder, options.index)
    print(f"{'target':20}" + "".join(f"{name:>12}" for name in _FIGURES) + "  result")
    failed = 0
    for name in options.targets or TARGETS:
        target = TARGETS[name]
        runs = options.own_runs if target.own else options.library_runs
        code, figures, text = _run(target, folder, runs, options.seconds)
        failed += code != 0
        numbers = "".join(f"{figures[each]:>12}" for each in _FIGURES)
        print(f"{name:20}{numbers}  {'FAILED' if code else 'ok'}", flush=True)
        if code != 0:
            print(text[-3000:])
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", choices=[[], *TARGETS], metavar="TARGET")
    parser.add_argument("--folder", type=Path, required=True, help="where seeds and findings go")
    parser.add_argument("--index", type=Path, help="index of recorded evidence to take seeds from")
    parser.add_argument("--own-runs", type=int, default=2_000_000)
    parser.add_argument("--library-runs", type=int, default=100_000)
    parser.add_argument("--seconds", type=int, default=0, help="at most that long per target; 0 sets no limit")
    return parser.parse_args()


def _run(target: Target, folder: Path, runs: int, seconds: int) -> tuple[int, dict[str, str], str]:
    limits = [f"-runs={runs}", f"-rss_limit_mb={MEMORY_MB}", f"-max_len={LONGEST_INPUT}", f"-max_total_time={seconds}"]
    reporting = ["-print_final_stats=1", "-verbosity=1", f"-artifact_prefix={folder}/{target.name}-"]
    seeds = folder / target.name
    seeds.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.fuzz.run_one", target.name, str(seeds), "-seed=1", *limits, *reporting]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    text = done.stdout + done.stderr
    found = {name: re.search(pattern, text) for name, pattern in _FIGURES.items()}
    return done.returncode, {name: match[1] if match else "-" for name, match in found.items()}, text


if __name__ == "__main__":
    sys.exit(main())
