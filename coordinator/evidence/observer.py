"""Observes the evidence of a run from outside while it trains, and believes nothing that it has not checked."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from raycloak.attestation.appraisal.appraisal import Appraisal, appraise
from raycloak.attestation.appraisal.enrolment import check_enrolment
from raycloak.attestation.attester.attester import Attester, EvidenceSource
from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.evidence import CollateralBundle
from raycloak.attestation.core.messages import Envelope
from raycloak.attestation.core.roster import Roster, open_roster
from raycloak.attestation.log.entries import SignedHead, parse_line
from raycloak.attestation.log.evidence_log import ExportedLog, read_exported_log
from raycloak.attestation.orchestrator.run_terms import OBSERVER
from raycloak.attestation.policy.policy import Policy
from raycloak.attestation.service.client import EvidenceClient
from raycloak.metrics.errors import EvidenceError, ProtocolError
from raycloak.workers.terms.manifest import Manifest

CHANGING_S: Final = 10.0
"""Bounds how long a roster is asked for again while its members change."""
PAUSE_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Observation:
    """The data that an observer was shown, all of it checked.

    Attributes:
        evidence_class: the class of the observer's own evidence.
        roster: the newest attempt's roster; None before the first.
        members: the roster's members, as this observer appraises them.
        log: the evidence log so far.
    """

    evidence_class: str
    roster: Roster | None
    members: tuple[Appraisal, ...]
    log: ExportedLog


@dataclass(frozen=True, slots=True)
class Observer:
    """A party with evidence of its own that knows the manifest of a run.

    Attributes:
        address: ``host:port`` of the run's evidence service.
        name: the observer's name, which begins with ``observer-``.
        source: source of the evidence that admits the observer.
        policy, collateral: of the run, obtained by the observer. Every member's evidence is judged by them again.
    """

    address: str
    name: str
    manifest: Manifest
    source: EvidenceSource
    policy: Policy
    collateral: CollateralBundle

    def look(self, log_file: Path) -> Observation:
        """Attest, fetch roster and log, and write the log to ``log_file``.

        Guarantee: the roster is from the manifest's orchestrator, and every member has evidence that the policy
        accepts. The log is whole under a head with both of the orchestrator's signatures.

        Raises:
            EvidenceError, ProtocolError: the observer is refused, or a part of the answer does not hold.
        """
        attester, manifest = Attester(self.name, self.source), self.manifest
        key, terms = manifest.orchestrator_key, manifest.digest()
        with EvidenceClient(self.address, manifest_digest=terms, orchestrator_key=key, attester=attester) as client:
            result = client.attest(attester.present(client.challenge(OBSERVER), terms, b""))
            roster, members = self._roster(client)
            log = self._log(client, log_file)
        return Observation(result.evidence_class.value, roster, members, log)

    def _roster(self, client: EvidenceClient) -> tuple[Roster | None, tuple[Appraisal, ...]]:
        deadline = time.monotonic() + CHANGING_S
        while True:
            try:
                envelope, presentations = client.roster()
            except ProtocolError as error:
                if error.code != "no_roster":
                    raise
                return None, ()
            roster = open_roster(
                envelope,
                orchestrator_key=self.manifest.orchestrator_key,
                run_id=self.manifest.run_id,
                manifest_digest=self.manifest.digest(),
                virtual_workers=self.manifest.computation.mechanism.virtual_workers,
                minimum_workers=1,
            )
            # By digest, because the signed roster names evidence by it.
            shown = {digest(envelope.body): envelope for envelope in presentations}
            missing = [member for member in roster.members if member.evidence_digest not in shown]
            if not missing:
                return roster, self._appraised(roster, shown)
            # It has left since, or presented anew. The roster of the next attempt will say so.
            if time.monotonic() >= deadline:
                raise EvidenceError("peer_not_bound", f"no evidence of {missing[0].member_id} was shown", "Look again.")
            time.sleep(PAUSE_S)

    def _appraised(self, roster: Roster, shown: Mapping[bytes, Envelope]) -> tuple[Appraisal, ...]:
        members = []
        for member in roster.members:
            appraisal = appraise(
                shown[member.evidence_digest],
                run_id=roster.run_id,
                member_id=member.member_id,
                role=member.role,
                manifest_digest=roster.manifest_digest,
                policy=self.policy,
                collateral=self.collateral,
                now=int(time.time()),
            )
            if (appraisal.mask_key, appraisal.identity_key) != (member.mask_key, member.identity_key):
                raise EvidenceError("key_not_bound", f"the roster's keys of {member.member_id} are not its evidence's")
            members.append(appraisal)
        check_enrolment(members, self.policy)
        return tuple(members)

    def _log(self, client: EvidenceClient, file: Path) -> ExportedLog:
        owner, lines = self.manifest.log_owner, list[bytes]()
        while True:
            more, head = client.log(len(lines))
            lines += more
            length = parse_line(SignedHead, head, "the signed head").open(owner).length
            # The log grows meanwhile. The head in the last answer covers all of it.
            if not more or len(lines) >= length:
                break
        file.write_bytes(b"".join(line + b"\n" for line in (*lines, head)))
        return read_exported_log(file, owner)
