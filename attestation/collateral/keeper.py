"""The collateral keeper: fetch collateral before it expires, and refresh a service that runs for long.

Fetched collateral is kept on disk, so a restart needs no network until it expires.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, Final

from cryptography import x509
from pydantic import Field

from raycloak.attestation.collateral.fetch import Get, fetch_collateral
from raycloak.attestation.collateral.https_get import https_get
from raycloak.attestation.core.evidence import Collateral, CollateralBundle, Refusal, refuse
from raycloak.attestation.core.messages import Message, parse
from raycloak.attestation.files.whole import write_whole
from raycloak.attestation.policy.collateral_service import CollateralService
from raycloak.attestation.policy.policy import Policy
from raycloak.metrics.errors import EvidenceError, ProtocolError

# The last third bridges an outage of the service.
FETCHED_AFTER: Final = 2 / 3
"""Fetch again after this share of the life that the collateral had left when it was fetched."""
PAUSE_S: Final = 60
"""Wait this long after an attempt that failed, or brought nothing that lasts longer."""


class FetchedCollateral(Message):
    """A fetched bundle of collateral, and when it was fetched, in unix seconds."""

    DOMAIN: ClassVar[str] = "raycloak/fetched-collateral/v1"

    fetched_at: int = Field(ge=0)
    bundle: CollateralBundle


class CollateralKeeper:
    """The collateral of one service.

    Args:
        policy: names the service, and the roots under which it must be signed.
        folder: holds the file that it is kept in; created with mode 0700.
        given: collateral from files, which is passed on as well. Fetched collateral replaces its TDX part and is
            added to its revocation lists.
        clock: seconds since the epoch.
        get: asks the network; a parameter so that tests can replace it.

    Attributes:
        problem: why the last attempt failed, or its result could not be kept on disk; empty otherwise.
    """

    def __init__(
        self,
        policy: Policy,
        folder: Path,
        given: CollateralBundle | None = None,
        clock: Callable[[], float] = time.time,
        get: Get = https_get,
    ) -> None:
        assert policy.collateral_service is not None, "the caller has looked"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._service: CollateralService = policy.collateral_service
        self._anchors = policy.anchors
        # Named by the service, so that collateral of another policy is never taken for this one's.
        self._file = folder / f"{self._service.digest().hex()[:32]}.json"
        self._given = given or CollateralBundle()
        self._clock = clock
        self._get = get
        self._not_before = 0.0
        self._kept = self._stored()
        self.problem = ""

    @property
    def due(self) -> bool:
        """Return whether it is time to fetch again."""
        now = self._clock()
        if now < self._not_before:
            return False
        kept = self._kept
        return kept is None or now >= kept.fetched_at + FETCHED_AFTER * (ends_at(kept.bundle) - kept.fetched_at)

    def current(self) -> CollateralBundle:
        """Return the collateral to judge evidence with now; fetch it first if that is due.

        Guarantee: fetched collateral that has not ended stays in use while the service cannot be reached.

        Raises:
            EvidenceError: ``collateral_stale`` if none is left that has not ended.
        """
        if self.due:
            self._fetch()
        kept = self._kept
        if kept is None or ends_at(kept.bundle) <= self._clock():
            ended = f"; what was fetched before ended at {_text(ends_at(kept.bundle))}" if kept else ""
            refuse(Refusal.COLLATERAL_STALE, f"{self.problem or 'there is no collateral'}{ended}")
        fetched = kept.bundle
        lists = {
            "snp_vcek_crls": (*fetched.snp_vcek_crls, *self._given.snp_vcek_crls),
            "snp_vlek_crls": (*fetched.snp_vlek_crls, *self._given.snp_vlek_crls),
        }
        return self._given.model_copy(update={"tdx": fetched.tdx or self._given.tdx, **lists})

    def _fetch(self) -> None:
        now = int(self._clock())
        # Set before the attempt, so that a service that fails is not asked at every look.
        self._not_before = now + PAUSE_S
        try:
            bundle = fetch_collateral(self._service, self._anchors, self._get)
            # A mirror may serve older collateral, or collateral that has ended. It must not replace what is still good.
            # Nothing is kept before the first fetch, so the lengths may differ.
            for known, found in zip(self._kept.bundle.tdx if self._kept else (), bundle.tdx, strict=False):
                if _number(found) < _number(known):
                    numbers = f"{_number(found)}, where {_number(known)} was fetched before"
                    refuse(Refusal.COLLATERAL_ROLLBACK, f"the service gives collateral of evaluation number {numbers}")
            if (ends := ends_at(bundle)) <= self._clock():
                said = f"that ended at {_text(ends)}" if ends else "of which a part cannot be read"
                refuse(Refusal.COLLATERAL_STALE, f"the service gives collateral {said}")
        except EvidenceError as refusal:
            self.problem = refusal.message
            return
        self.problem = ""
        self._kept = FetchedCollateral(fetched_at=now, bundle=bundle)
        try:
            write_whole(self._file, self._kept.encode() + b"\n")
        except OSError as error:
            # A full disk must not end the thread that renews collateral.
            self.problem = f"{self._file} cannot be written ({error.strerror}), so a restart has to fetch it again"

    def _stored(self) -> FetchedCollateral | None:
        try:
            return parse(FetchedCollateral, self._file.read_bytes().strip())
        # A lost or damaged copy costs one fetch.
        except (OSError, ProtocolError):
            return None


def ends_at(bundle: CollateralBundle) -> int:
    """Return the unix second at which the first document or list in ``bundle`` ends; 0 if one does not say."""
    try:
        return int(min(_ends(bundle)).timestamp())
    # Collateral that cannot be read counts as ended, so it is never used.
    except (LookupError, TypeError, ValueError):
        return 0


def _ends(bundle: CollateralBundle) -> Iterator[datetime]:
    for each in bundle.tdx:
        for document in (each.tcb_info, each.qe_identity):
            yield datetime.fromisoformat(json.loads(document)["nextUpdate"])
    lists = [der for each in bundle.tdx for der in (each.pck_crl, each.root_ca_crl)]
    for der in (*lists, *bundle.snp_vcek_crls, *bundle.snp_vlek_crls):
        due = x509.load_der_x509_crl(der).next_update_utc
        if due is None:
            raise ValueError("a list that does not say when the next one is due")
        yield due


def _number(collateral: Collateral) -> int:
    try:
        return int(json.loads(collateral.tcb_info)["tcbEvaluationDataNumber"])
    except (LookupError, TypeError, ValueError):
        return 0  # of a kept file, which each appraisal judges anyhow


def _text(at: int) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()


# A look costs no request while no fetch is due, so it can be frequent.
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
