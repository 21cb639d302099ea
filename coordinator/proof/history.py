"""The history of a run, replayed from its evidence log: members, keys, rosters and commits.

The log's owner signed every entry; that is checked before. Here each entry is held to the rules by which the
orchestrator decided. Evidence is appraised again, and rosters are built again from their members' documents.

Guarantee: of each kind of record, the first that breaks a rule is noted, and no later one hides it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from raycloak.attestation.appraisal.appraisal import Appraisal, appraise, open_presentation
from raycloak.attestation.appraisal.enrolment import Enrolment, check_enrolment
from raycloak.attestation.core.canonical import canonical_json
from raycloak.attestation.core.evidence import CollateralBundle, Links, Role
from raycloak.attestation.core.lineage import ModelPoint
from raycloak.attestation.core.mask_graph import check_circle
from raycloak.attestation.core.messages import Envelope
from raycloak.attestation.core.roster import MaskCircle, Member, Query, Roster, RosterMembers, check_roster
from raycloak.attestation.log.entries import Entry
from raycloak.attestation.log.evidence_log import ExportedLog
from raycloak.attestation.orchestrator.admissions import admitted_body
from raycloak.attestation.orchestrator.documents import Document, DocumentKind
from raycloak.attestation.orchestrator.evaluation_order import EvaluationOrder, check_cover
from raycloak.attestation.orchestrator.machine_book import machines_of
from raycloak.attestation.orchestrator.revocations import revocable_names
from raycloak.attestation.orchestrator.run_terms import OBSERVER
from raycloak.attestation.policy.key_policy import KeyKind
from raycloak.attestation.policy.policy import Policy
from raycloak.attestation.trust.floors import SeenFacts
from raycloak.coordinator.proof.claims import Broken
from raycloak.metrics.errors import EvidenceError, ProtocolError
from raycloak.workers.terms.manifest import Manifest

CONTRACT: Final = "contract"
EVIDENCE: Final = "evidence"
KEYS: Final = "keys"
ROSTERS: Final = "rosters"
COMMITS: Final = "commits"
DATA: Final = "data"


class _Body(BaseModel):
    """The body of an entry. Its bytes are covered by the log's signature, so only its fields are checked here."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, val_json_bytes="hex")


class _Session(_Body):
    session: str
    manifest_digest: bytes
    policy_digest: bytes
    virtual_workers: int


class _Admitted(_Body):
    member_id: str
    appraised_at: int = Field(ge=0, lt=2**37)  # before the year 6326: later ones are no dates of any library
    collateral: bytes
    role: Role
    evidence_class: str
    evidence_digest: bytes
    platform_id: bytes
    gpus: tuple[bytes, ...]
    identity_key: bytes
    mask_key: bytes
    expires_at: int
    claims: dict[str, JsonValue]


class _Released(_Body):
    kind: KeyKind
    member_id: str
    epoch: int
    virtual_workers: tuple[int, ...]
    evidence_digest: bytes
    package: bytes


class _Expelled(_Body):
    member_id: str
    cause: str


class _Revoked(_Body):
    kind: str
    name: str
    reason: str
    revoked_at: int


class _Data(_Body):
    virtual_worker: int
    commitment: bytes


class _Roster(_Body):
    query: Query
    step: int
    attempt: int
    roster_digest: bytes = Field(alias="digest")
    ratchet: int
    nonce: bytes
    members: bytes
    circle: MaskCircle | None


class Commit(_Body):
    """A committed step, as the log has it."""

    query: Query
    step: int
    released_digest: bytes
    attempts: int
    ledger_sequence: int
    ledger_hash: bytes
    state_digest: bytes
    averaged_digest: bytes = b""
    releases: tuple[Envelope, ...]

    @property
    def model(self) -> ModelPoint:
        """The model after the step."""
        return ModelPoint(parameters=self.released_digest, state=self.state_digest, averaged=self.averaged_digest)


class _Ordered(_Body):
    finished_steps: int
    model_digest: bytes
    order_digest: bytes = Field(alias="digest")
    members: bytes


class LoggedPackage(_Body):
    """A sealed or published package, as the log has it."""

    step: int
    package_digest: bytes


class LoggedLoad(_Body):
    """A load of an earlier package's state, as the log has it."""

    after_step: int
    step: int
    package_digest: bytes
    model_digest: bytes


class _Finished(_Body):
    secret_destroyed: bool


_UNCHECKED: Final = frozenset({"refused", "release_refused", "refusals_omitted", "opened"})
"""Entries about what was not granted, and about the run opening its own packages."""


@dataclass(slots=True)
class History:
    """A replayed log.

    Attributes:
        problems: the first broken record of each kind.
        admissions, observers, releases: how many were appraised again, left out, and checked.
        classes: of the evidence of members that took part; ``links``: of their GPUs with each other.
        rosters: digests of the rosters of each release, in the order of their attempts.
        aggregators: by the digest of a roster, the identity keys of its aggregators, in the order of their ranges.
        fewest_workers: of any roster; 0 without one.
        commits: committed releases; ``made`` is how many of each mechanism.
        data: commitment to the slice of each virtual worker.
        machines: by machine and epoch, the virtual workers whose keys went there.
        sealed: the packages that the log has as sealed. published: those that it has as published, in order.
        loads: states of earlier packages that the run went on from, in order.
        loaded_after: by number of steps, the load that the next step started from; of several in one place, the last.
        used: names of the documents that entries name.
        finished: whether the log was ended for good.
    """

    manifest: Manifest
    manifest_digest: bytes
    policy: Policy
    documents: Mapping[bytes, Document]
    problems: dict[str, Broken] = field(default_factory=dict)
    sessions: int = 0
    admissions: int = 0
    observers: int = 0
    releases: int = 0
    classes: set[str] = field(default_factory=set)
    links: set[Links] = field(default_factory=set)
    rosters: dict[tuple[Query, int], list[bytes]] = field(default_factory=lambda: defaultdict(list))
    aggregators: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)
    fewest_workers: int = 0
    commits: dict[tuple[Query, int], Commit] = field(default_factory=dict)
    made: Counter[Query] = field(default_factory=Counter)
    data: dict[int, bytes] = field(default_factory=dict)
    machines: dict[tuple[str, int], set[int]] = field(default_factory=lambda: defaultdict(set))
    sealed: set[LoggedPackage] = field(default_factory=set)
    published: dict[bytes, LoggedPackage] = field(default_factory=dict)
    loads: list[LoggedLoad] = field(default_factory=list)
    loaded_after: dict[int, LoggedLoad] = field(default_factory=dict)
    used: set[bytes] = field(default_factory=set)
    finished: bool = False
    _members: dict[str, Appraisal] = field(default_factory=dict)
    _expiring: list[tuple[int, str]] = field(default_factory=list)
    _epochs: dict[bytes, int] = field(default_factory=dict)
    _grants: dict[tuple[str, int], set[int]] = field(default_factory=lambda: defaultdict(set))
    _enrolment: Enrolment = field(default_factory=Enrolment)
    _floors: SeenFacts = field(default_factory=SeenFacts)
    _nonces: set[bytes] = field(default_factory=set)
    _revoked: set[tuple[str, str]] = field(default_factory=set)
    _attempts: dict[tuple[Query, int], int] = field(default_factory=dict)
    _parsed: dict[bytes, RosterMembers] = field(default_factory=dict)
    _checked: set[tuple[bytes, int]] = field(default_factory=set)
    _circle: tuple[bytes, tuple[tuple[str, bytes], ...]] | None = None

    def claim(self, kind: str) -> None:
        """Raise the first problem with records of ``kind``."""
        if kind in self.problems:
            raise self.problems[kind]

    def follow(self, entry: Entry) -> None:
        """Take the next entry."""
        about = _HANDLERS.get(entry.kind)
        if about is None:
            if entry.kind not in _UNCHECKED:
                self.problems.setdefault(CONTRACT, _broken(entry, f"its kind '{entry.kind}' is unknown"))
            return
        kind, body, handle = about
        try:
            if self.sessions == 0 and entry.kind not in ("session", "finished", "revoked"):
                raise _broken(entry, "no session had begun")
            handle(self, entry, body.model_validate_json(entry.body))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            name = ".".join(map(str, first["loc"])) or "body"
            why = f"its field '{name}' is missing, extra or not what a {entry.kind} entry has"
            self.problems.setdefault(kind, _broken(entry, why))
        except Broken as broken:
            self.problems.setdefault(kind, broken)
        except (EvidenceError, ProtocolError) as refusal:
            self.problems.setdefault(kind, _broken(entry, f"{refusal.message.rstrip('.')} ({refusal.code})"))

    def _session(self, entry: Entry, body: _Session) -> None:
        self.sessions += 1
        stated = body.manifest_digest, body.policy_digest, body.virtual_workers
        if stated != (self.manifest_digest, self.manifest.policy_digest, self.manifest.key_owners):
            raise _broken(entry, "its session was of another manifest or policy")
        self._document(entry, body.policy_digest, "policy")
        self._members.clear()
        self._expiring.clear()
        self._grants.clear()
        self._checked.clear()
        self._circle = None
        self._enrolment = Enrolment()
        # As in the orchestrator: members of a later session may have their names, and machines stay what they are.
        self._revoked = {(kind, name) for kind, name in self._revoked if kind != "member"}

    def _admitted(self, entry: Entry, body: _Admitted) -> None:
        if body.role == OBSERVER:
            self.observers += 1
            return
        envelope = self._document(entry, body.evidence_digest, "presentation").envelope
        collateral = self._document(entry, body.collateral, "collateral").open(CollateralBundle)
        nonce = open_presentation(envelope).nonce
        if nonce in self._nonces:
            raise _broken(entry, f"the evidence of {body.member_id} answers a nonce that was used before")
        self._nonces.add(nonce)
        appraisal = appraise(
            envelope,
            run_id=self.manifest.run_id,
            member_id=body.member_id,
            role=body.role,
            manifest_digest=self.manifest_digest,
            policy=self.policy,
            collateral=collateral,
            now=body.appraised_at,
            floors=self._floors.floors,
        )
        if canonical_json(admitted_body(appraisal, body.appraised_at, body.collateral)) != entry.body:
            raise _broken(entry, f"the evidence of {body.member_id} says something else than its entry")
        if body.role == "worker" and appraisal.known_answer != self.manifest.known_answer:
            raise _broken(entry, f"{body.member_id} computes other bytes than the manifest's known answer")
        self._require_not_revoked(entry, appraisal)
        # A member whose evidence ran out may have left without an entry, as when the orchestrator restarted.
        while self._expiring and self._expiring[0][0] <= body.appraised_at:
            _, name = heappop(self._expiring)
            # It may have been expelled, or have presented itself anew since.
            if (known := self._members.get(name)) is None or known.expires_at <= body.appraised_at:
                self._enrolment.drop(name)
        self._enrolment.check(appraisal, self.policy)
        self._enrolment.put(appraisal)
        self._floors.keep(appraisal.facts)
        self._members[body.member_id] = appraisal
        heappush(self._expiring, (appraisal.expires_at, body.member_id))
        self._checked.clear()
        self.classes |= set(map(str, appraisal.evidence_classes))
        self.links |= {appraisal.links} if appraisal.links else set()
        self.admissions += 1

    def _released(self, entry: Entry, body: _Released) -> None:
        member = self._members.get(body.member_id)
        if member is None or member.role != "worker" or member.evidence_digest != body.evidence_digest:
            raise _broken(entry, f"{body.member_id} was not admitted as a worker by that evidence before")
        self._require_not_revoked(entry, member)
        wanted = body.virtual_workers
        if list(wanted) != sorted(set(wanted)) or not all(0 <= v < self.manifest.key_owners for v in wanted):
            raise _broken(entry, "it names virtual workers that the run does not have, or one twice")
        if not 0 <= body.epoch < self.manifest.epochs:
            raise _broken(entry, f"the manifest commits to no keys of epoch {body.epoch}")
        if self._epochs.setdefault(body.evidence_digest, body.epoch) != body.epoch:
            raise _broken(entry, f"the evidence of {body.member_id} served another epoch before")
        _require(body.kind is not KeyKind.CHECKPOINT, entry, "keys of packages are never released to members")
        if body.kind is KeyKind.VIRTUAL_WORKER:
            self._grants[body.member_id, body.epoch] |= set(wanted)
            most = self.manifest.keys_per_machine
            if most is not None and not member.names_machine:
                raise _broken(entry, f"the evidence of {body.member_id} names no machine to count its keys by")
            for machine in machines_of(member):
                held = self.machines[machine, body.epoch]
                held |= set(wanted)
                if most is not None and len(held) > most:
                    many = f"{len(held)} virtual workers, where {most} are the most"
                    raise _broken(entry, f"{machine} then had keys of {many}")
        self.releases += 1

    def _expelled(self, entry: Entry, body: _Expelled) -> None:
        self._members.pop(body.member_id, None)
        self._enrolment.drop(body.member_id)
        self._checked.clear()

    def _revoke(self, entry: Entry, body: _Revoked) -> None:
        self._checked.clear()
        self._revoked.add((body.kind, body.name))

    def _data(self, entry: Entry, body: _Data) -> None:
        if not 0 <= body.virtual_worker < self.manifest.key_owners or body.virtual_worker in self.data:
            raise _broken(
                entry, f"it binds the examples of virtual worker {body.virtual_worker} twice, or there is none"
            )
        self.data[body.virtual_worker] = body.commitment

    def _roster(self, entry: Entry, body: _Roster) -> None:
        place = body.query, body.step
        self.rosters[place].append(body.roster_digest)
        if body.attempt <= self._attempts.get(place, -1):
            raise _broken(entry, f"attempt {body.attempt} of {body.query} step {body.step} is not a later one")
        self._attempts[place] = body.attempt
        if not 0 <= body.step < self.manifest.computation.mechanism_of(body.query).steps:
            raise _broken(entry, f"{body.query} step {body.step} was not planned")
        listed = self._listed(entry, body.members)
        roster = Roster(
            run_id=self.manifest.run_id,
            manifest_digest=self.manifest_digest,
            query=body.query,
            step=body.step,
            attempt=body.attempt,
            ratchet=body.ratchet,
            nonce=body.nonce,
            members=listed.members,
            circle=body.circle,
        )
        _require(roster.digest() == body.roster_digest, entry, "the roster that its parts give has another digest")
        self.aggregators[body.roster_digest] = tuple(owner.identity_key for owner in roster.aggregators)
        self.fewest_workers = min(self.fewest_workers or len(roster.workers), len(roster.workers))
        epoch = self.manifest.computation.epoch_of(body.query, body.step)
        # The same members mostly stay for many steps; what was checked of them stays true until one comes or goes.
        if (body.members, epoch) not in self._checked:
            check_roster(
                roster,
                run_id=self.manifest.run_id,
                manifest_digest=self.manifest_digest,
                virtual_workers=self.manifest.key_owners,
                minimum_workers=1,
            )
            if len(self.data) != self.manifest.key_owners:
                raise _broken(entry, "not every slice of the data had been committed to")
            self._check_members(entry, roster.members, epoch)
            self._checked.add((body.members, epoch))
        self._check_circle(entry, roster)

    def _check_circle(self, entry: Entry, roster: Roster) -> None:
        """Require the masks to withstand what the roster states, on a circle that was drawn after its workers."""
        check_circle(roster, self.manifest.computation.releases, self.manifest.mask_colluders)
        if roster.circle is None:
            self._circle = None
            return
        workers = tuple((each.member_id, each.evidence_digest) for each in roster.workers)
        if roster.circle.seed == roster.nonce:
            self._circle = roster.nonce, workers
        elif self._circle != (roster.circle.seed, workers):
            raise _broken(entry, "the circle of its workers was drawn before they were known")

    def _listed(self, entry: Entry, name: bytes) -> RosterMembers:
        document = self._document(entry, name, "members")
        if name not in self._parsed:
            self._parsed[name] = document.open(RosterMembers)
        return self._parsed[name]

    def _check_members(self, entry: Entry, members: Sequence[Member], epoch: int | None) -> None:
        """Require members that take part to be admitted; in an ``epoch``, with its keys of what they host."""
        for member in members:
            known = self._members.get(member.member_id)
            if known is None or known.evidence_digest != member.evidence_digest or known.role != member.role:
                raise _broken(entry, f"{member.member_id} was not admitted by that evidence before")
            if (known.mask_key, known.identity_key) != (member.mask_key, member.identity_key):
                raise _broken(entry, f"the keys of {member.member_id} are not those of its evidence")
            self._require_not_revoked(entry, known)
            held = set(member.virtual_workers) if epoch is None else self._grants[member.member_id, epoch]
            if lacking := set(member.virtual_workers) - held:
                raise _broken(entry, f"{member.member_id} had got no keys of virtual workers {sorted(lacking)}")
        check_enrolment([self._members[member.member_id] for member in members], self.policy)

    def _committed(self, entry: Entry, body: Commit) -> None:
        place, known = (body.query, body.step), self.commits.get((body.query, body.step))
        _require(known is None, entry, f"{body.query} step {body.step} is committed a second time")
        # Made before it is judged, so that one wrong commit does not make all later ones wrong.
        made, self.made[body.query] = self.made[body.query], self.made[body.query] + 1
        self.commits[place] = body
        _require(made == body.step, entry, f"{body.query} step {body.step} is committed where step {made} is the next")
        if not 0 < body.attempts <= len(self.rosters[place]):
            raise _broken(
                entry, f"{body.query} step {body.step} states {body.attempts} attempts, which have no rosters"
            )

    def _reproduced(self, entry: Entry, body: Commit) -> None:
        known = self.commits.get((body.query, body.step))
        # Another attempt may have given it, and so another aggregator may have signed it.
        own = {"attempts": known.attempts, "releases": known.releases} if known else {}
        same = known == body.model_copy(update=own)
        _require(same, entry, f"{body.query} step {body.step} was not committed so before")

    def _ordered(self, entry: Entry, body: _Ordered) -> None:
        known = self.commits.get(("gradient", body.finished_steps - 1))
        load = self.loaded_after.get(body.finished_steps)
        loaded = self.commits.get(("gradient", load.step - 1)) if load else None
        models = [each.model.exported for each in (known, loaded) if each]
        if known is None or body.model_digest not in models:
            raise _broken(entry, "it orders an evaluation of parameters that were not committed")
        order = EvaluationOrder(
            run_id=self.manifest.run_id,
            manifest_digest=self.manifest_digest,
            finished_steps=body.finished_steps,
            model_digest=body.model_digest,
            members=self._listed(entry, body.members).members,
        )
        _require(order.digest() == body.order_digest, entry, "the order that its parts give has another digest")
        check_cover(order, self.manifest.key_owners)
        self._check_members(entry, order.members, None)

    def _sealed(self, entry: Entry, body: LoggedPackage) -> None:
        self.sealed.add(body)

    def _published(self, entry: Entry, body: LoggedPackage) -> None:
        _require(body in self.sealed, entry, f"a package of step {body.step} was published that was not sealed before")
        # Put last, should it be there already.
        self.published.pop(body.package_digest, None)
        self.published[body.package_digest] = body

    def _loaded(self, entry: Entry, body: LoggedLoad) -> None:
        self.loads.append(body)
        self.loaded_after[body.after_step] = body
        if body.after_step != self.made["gradient"]:
            raise _broken(entry, f"it loads a state after step {body.after_step}, which is not the last by then")
        known = self.commits.get(("gradient", body.step - 1))
        if known is None or known.released_digest != body.model_digest:
            raise _broken(entry, f"it loads parameters that step {body.step} was not committed with")
        published = self.published.get(body.package_digest)
        if published is None or published.step != body.step:
            raise _broken(entry, f"it loads a package of step {body.step} that was not published before")

    def _finished(self, entry: Entry, body: _Finished) -> None:
        self.finished = True

    def _document(self, entry: Entry, name: bytes, kind: DocumentKind) -> Document:
        document = self.documents.get(name)
        if document is None or document.kind != kind:
            raise _broken(entry, f"the {kind} that it names is not among the documents")
        self.used.add(name)
        return document

    def _require_not_revoked(self, entry: Entry, member: Appraisal) -> None:
        if self._revoked.intersection(revocable_names(member)):
            raise _broken(entry, f"{member.member_id} or its machine was revoked before")


_HANDLERS: Final[Mapping[str, tuple[str, type[_Body], Callable[[History, Entry, Any], None]]]] = {
    "session": (CONTRACT, _Session, History._session),
    "admitted": (EVIDENCE, _Admitted, History._admitted),
    "expelled": (EVIDENCE, _Expelled, History._expelled),
    "revoked": (EVIDENCE, _Revoked, History._revoke),
    "released": (KEYS, _Released, History._released),
    "data": (DATA, _Data, History._data),
    "roster": (ROSTERS, _Roster, History._roster),
    "committed": (COMMITS, Commit, History._committed),
    "reproduced": (COMMITS, Commit, History._reproduced),
    "evaluation_ordered": (ROSTERS, _Ordered, History._ordered),
    "sealed": (COMMITS, LoggedPackage, History._sealed),
    "published": (COMMITS, LoggedPackage, History._published),
    "loaded": (COMMITS, LoggedLoad, History._loaded),
    "finished": (COMMITS, _Finished, History._finished),
}


def replay(log: ExportedLog, manifest: Manifest, policy: Policy, documents: Mapping[bytes, Document]) -> History:
    """Follow a verified log from its first entry to its last; problems are noted, not raised."""
    history = History(manifest, manifest.digest(), policy, documents)
    for entry in log.entries:
        history.follow(entry)
    return history


def _require(condition: bool, entry: Entry, why: str) -> None:
    if not condition:
        raise _broken(entry, why)


def _broken(entry: Entry, why: str) -> Broken:
    return Broken(f"evidence log, entry {entry.sequence}", why)
