"""Keeps a service that runs for long in current collateral."""

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
    """Hands newer collateral to an orchestrator as soon as it is fetched.

    Guarantee: the orchestrator's turn is not held while the network is asked.

    Args:
        keeper: of the policy's service.
        take: the orchestrator's `take_collateral`.
        turn: held while it is called.
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
        """Look every few seconds whether it is time to fetch, until :meth:`stop`."""
        self._thread.start()

    def stop(self) -> None:
        """End after the attempt that is under way, if there is one."""
        self._ended.set()
        self._thread.join()

    def look(self) -> None:
        """Fetch and hand over if it is time to. What cannot be had is logged, and refused where it is needed."""
        if not self._keeper.due:
            return
        try:
            collateral = self._keeper.current()
        except EvidenceError as refusal:
            logging.getLogger(__name__).warning("%s", refusal)
            return
        if self._keeper.problem:
            logging.getLogger(__name__).warning("collateral: %s", self._keeper.problem)
        with self._turn:
            self._take(collateral)

    def _work(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.look()
