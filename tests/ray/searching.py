"""A worker's vault that searches for its own secrets: they are made in its process, and only names leave it."""

from pathlib import Path

from raycloak.coordinator.vaults.worker_vault import WorkerVault
from raycloak.workers.answer_codes import _silenced
from tests.ray import leaks


class SearchingWorkerVault(WorkerVault):
    """A worker that looks for what only it may know wherever bytes of its run may lie."""

    def search(self, home: str, session: str, memory: bool) -> tuple[int, tuple[tuple[str, int], ...], tuple[str, ...]]:
        """Return the number of needles, the bytes of each place, and what was found.

        Args:
            memory: also that of every actor's process, which takes seconds for each.
        """
        with _silenced():
            needles = leaks.worker_needles(self)
        sizes, found = [], []
        for place in leaks.places_of_run(Path(home), Path(session)):
            sizes.append((place[0], len(place[1])))
            found += leaks.leaks(needles, [place])
        if memory:
            for place in leaks.memory_of_actors(Path(session)):
                sizes.append((place[0], len(place[1])))
                found += leaks.leaks(needles, [place])
        return len(needles), tuple(sizes), tuple(found)

    def plant(self, file: str) -> None:
        """Leave in a file what must not leave the process."""
        Path(file).write_bytes(leaks.words_of(self._stage._hosted._words).tobytes())
