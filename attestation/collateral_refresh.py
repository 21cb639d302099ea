"""Keeps a long-running service supplied with current collateral."""

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

from attestation.collateral_keeper import CollateralKeeper
from attestation.evidence import CollateralBundle
from metrics.errors import EvidenceError

LOOK_S: Final = 5.0


class CollateralRefresh:
    """A thread that hands newer collateral to an orchestrator as soon as it is fetched.

    Guarantee: the orchestrator's turn is not held during a network request.

    Args:
        take: the orchestrator's `take_collateral`.
        turn: held during the call of ``take``.
    """

    def __init__(
        self, keeper: CollateralKeeper, take: Callable[[CollateralBundle], None], turn: AbstractContextManager[object]
    ) -> None:
        self._keeper = keeper
        self._take = take
        self._turn = turn
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="collateral-refresh", daemon=True)

    def start(self) -> None:
        """Start to look every few seconds whether a fetch is due, until :meth:`stop`."""
        self._thread.start()

    def stop(self) -> None:
        """End, after the current attempt if there is one."""
        self._ended.set()
        self._thread.join()

    def look(self) -> None:
        """Fetch and hand over if a fetch is due. A failure is logged here, and refused where collateral is needed."""
        if not self._keeper.due:
            return
        try:
            collateral = self._keeper.current()
        except EvidenceError as refusal:
            logging.getLogger(__name__).warning("%s", refusal)
            return
        if self._keeper.problem:
            logging.getLogger(__name__).warning("collateral: %s", self._keeper.problem)
        # The turn is taken only now, so that no network request holds up the orchestrator.
        with self._turn:
            self._take(collateral)

    def _work(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.look()
