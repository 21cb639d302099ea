"""Seeded bugs, and whether the tests notice them: ``python -m tests.mutations [ROOM...] [--name WORDS]``.

Each mutation of `mutations.yaml` is an edit of the product that breaks a promise. It is made in a copy of the working
tree, which itself is never touched, and its tests run there until one fails. Its tests pass without it, which is tried
first: a test that fails anyway would notice nothing.

A mutation whose text is not there exactly once is an error, so that a renamed or moved line takes it along.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path(__file__).with_name("mutations.yaml")
DEADLINE_S = 900.0
"""Some fifty times what the slowest set of tests takes. A mutation that makes them wait for ever is no good one."""
FAILED = 1
"""pytest's exit code if a test failed; any other but 0 says that they did not run."""


@dataclass(frozen=True)
class Mutation:
    """An edit of one file, and the tests of which one is to fail."""

    room: str
    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def problem(self, root: Path) -> str | None:
        """Return why it cannot be made in the tree at ``root``; None if it can."""
        path = root / self.file
        found = path.read_text().count(self.before) if path.is_file() else 0
        missing = [test for test in self.tests if not (root / test.partition("::")[0]).is_file()]
        if found != 1:
            return f"its text is {found} times in {self.file}, not once"
        return f"there is no {missing[0]}" if missing else None


def recorded(record: Path = RECORD) -> list[Mutation]:
    """Return the recorded mutations."""
    rooms = yaml.safe_load(record.read_text())
    return [
        Mutation(room, **{**each, "tests": tuple(each["tests"])}) for room, listed in rooms.items() for each in listed
    ]


class Copy:
    """A copy of what Git would commit of the working tree: tracked files, and new ones that it does not ignore."""

    def __init__(self, root: Path, source: Path = ROOT) -> None:
        self.root = root
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        names = subprocess.run(listed, cwd=source, capture_output=True, check=True, encoding="utf-8").stdout
        for name in filter(None, names.split("\0")):
            target = root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if (source / name).is_symlink() or (source / name).exists():
                shutil.copy2(source / name, target, follow_symlinks=False)

    @contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[None]:
        """Make the edit for the length of the block.

        The file gets its time back too: Python takes a compiled module for that of a source by its time and size.
        """
        path = self.root / mutation.file
        text, time_ns = path.read_text(), path.stat().st_mtime_ns
        path.write_text(text.replace(mutation.before, mutation.after))
        yield
        path.write_text(text)
        os.utime(path, ns=(time_ns, time_ns))

    def test(self, tests: Sequence[str]) -> int | None:
        """Run tests until one fails; return pytest's exit code, None if they do not end."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPATH"] = str(self.root)
        log = self.root.parent / "log"
        with log.open("wb") as file:
            try:
                done = subprocess.run(
                    command, cwd=self.root, env=environment, stdout=file, stderr=file, timeout=DEADLINE_S, check=False
                )
            except subprocess.TimeoutExpired:
                return None
        return done.returncode

    def last_words(self) -> str:
        """Return the line of the last run that names the test that failed, or its last line."""
        lines = (self.root.parent / "log").read_text(errors="replace").strip().splitlines()
        return next((line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1] if lines else "")


def run(mutations: Sequence[Mutation], copy: Copy) -> int:
    """Print what becomes of each; return how many are not killed."""
    passing: set[tuple[str, ...]] = set()
    bad = 0
    for each in mutations:
        begun, problem = time.monotonic(), each.problem(copy.root)
        if problem is None and each.tests not in passing:
            code = copy.test(each.tests)
            problem = None if code == 0 else f"its tests do not pass without it: {copy.last_words()}"
            passing |= {each.tests} if code == 0 else set()
        if problem is None:
            with copy.mutated(each):
                code = copy.test(each.tests)
            if code not in (0, FAILED):
                problem = f"its tests did not run: {copy.last_words()}"
        verdict = f"error ({problem})" if problem else "killed" if code == FAILED else "SURVIVED"
        by = f"  {copy.last_words()}" if verdict == "killed" else ""
        print(f"{each.room}: {each.name}: {verdict} in {time.monotonic() - begun:.0f} s{by}", flush=True)
        bad += verdict != "killed"
    print(f"{len(mutations) - bad} of {len(mutations)} killed")
    return bad


def main() -> int:
    """Return 1 unless every chosen mutation is killed."""
    mutations = recorded()
    rooms = list(dict.fromkeys(each.room for each in mutations))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=", ".join(rooms))
    parser.add_argument("--name", default="", help="only those whose name contains these words")
    chosen = parser.parse_args()
    if unknown := set(chosen.rooms) - set(rooms):
        parser.error(f"no room {', '.join(sorted(unknown))}; there are {', '.join(rooms)}")
    some = [each for each in mutations if each.room in (chosen.rooms or rooms) and chosen.name in each.name]
    with tempfile.TemporaryDirectory() as folder:
        return 1 if run(some, Copy(Path(folder) / "tree")) or not some else 0


if __name__ == "__main__":
    sys.exit(main())
