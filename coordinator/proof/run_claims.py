"""Claims about the run itself: its contract, its members, its keys, its rosters, and the chain of its steps."""

from raycloak.attestation.core.lineage import ModelPoint, StepRelease, open_parts
from raycloak.attestation.core.messages import parse
from raycloak.attestation.core.roster import Query
from raycloak.attestation.log.evidence_log import check_exported_log
from raycloak.attestation.orchestrator.documents import read_documents
from raycloak.coordinator.ledger.entries import DataBound
from raycloak.coordinator.proof import history as of
from raycloak.coordinator.proof.bundle import DOCUMENTS, LOG, MANIFEST, check_index
from raycloak.coordinator.proof.case import ProofCase
from raycloak.coordinator.proof.claims import Broken, NotThere, require
from raycloak.coordinator.proof.history import Commit, replay
from raycloak.metrics.errors import ProtocolError
from raycloak.workers.terms.receipt import data_root


def bundle(case: ProofCase) -> str:
    """Every byte of the bundle is one that a trusted site signed."""
    if case.bundle is None:
        raise NotThere("this is a run directory; only a bundle is signed as a whole")
    index, signer = check_index(case.parts, case.trust.signers)
    if index.run_id != case.manifest.run_id:
        raise Broken("index.json", f"it is of run {index.run_id}, the manifest of {case.manifest.run_id}")
    return f"{len(index.parts)} parts, signed as a whole by '{signer}'"


def manifest(case: ProofCase) -> str:
    """The manifest names the orchestrator, the ledger and the policy that the auditor trusts."""
    found = case.manifest
    if found.log_owner not in case.trust.orchestrators:
        raise Broken(MANIFEST, f"the trust file does not have its orchestrator {found.log_owner.key_id.hex()}")
    # A ledger whose key was rotated says in its chain which keys are its own.
    if found.ledger_key != case.trust.ledger and found.ledger_key not in case.extract.audited.keys:
        raise Broken(MANIFEST, f"its ledger is {found.ledger_key.hex()}, which is not the trusted one")
    if found.policy_digest != case.trust.policy.digest():
        raise Broken(MANIFEST, f"its policy is {found.policy_digest.hex()}, which is not the trusted one")
    return f"run {found.run_id}, manifest {found.digest().hex()}"


def log(case: ProofCase) -> str:
    """Every entry of the evidence log is in its place, under both signatures of its owner."""
    case.log = check_exported_log(case.parts.lines(LOG), case.manifest.log_owner)
    require(case.log.head.run_id == case.manifest.run_id, LOG, f"it is the log of run {case.log.head.run_id}")
    case.documents = read_documents(case.parts.lines(DOCUMENTS))
    case.history = replay(case.log, case.manifest, case.trust.policy, case.documents)
    ended = "ended for good" if case.history.finished else "not ended: the run may be resumed"
    return f"{case.log.head.length} entries, {ended}"


def contract(case: ProofCase) -> str:
    """Every session, and the ledger's registration, are of this manifest."""
    case.history.claim(of.CONTRACT)
    registered, stated = case.run.registered, case.manifest
    require(case.history.sessions > 0, LOG, "no session of the run has begun")
    differing = {
        "manifest": registered.manifest_digest != stated.digest(),
        "account": not registered.account == stated.account == case.extract.stated.account,
        "mechanisms": registered.mechanisms != stated.computation.mechanisms,
        "ledger key": case.extract.audited.keys.at(case.run.sequence) != stated.ledger_key,
        "data": registered.data.fingerprint != stated.dataset_fingerprint,
        "lineage": registered.lineage != stated.lineage,
    }
    for what, differs in differing.items():
        require(not differs, f"ledger, entry {case.run.sequence}", f"it registers the run with another {what}")
    return f"{case.history.sessions} sessions and the ledger's registration name this manifest"


def evidence(case: ProofCase) -> str:
    """Each member's evidence passes the trusted policy at the time that its entry states."""
    case.history.claim(of.EVIDENCE)
    found = case.history
    require(found.admissions > 0, LOG, "no member was admitted")
    simulated = "; SIMULATED evidence proves nothing about a machine" if "simulated" in found.classes else ""
    left = f"; {found.observers} observers, who got no keys, are left out" if found.observers else ""
    return f"{found.admissions} admissions appraised again, of {', '.join(sorted(found.classes))}{left}{simulated}"


def keys(case: ProofCase) -> str:
    """Each key went to a worker that was admitted before, and no machine got more than the manifest allows."""
    case.history.claim(of.KEYS)
    most = max((len(held) for held in case.history.machines.values()), default=0)
    return f"{case.history.releases} releases, each after its admission; at most {most} keys of an epoch on a machine"


def rosters(case: ProofCase) -> str:
    """Each roster covers every virtual worker once, by members that were admitted and have the keys."""
    case.history.claim(of.ROSTERS)
    count = sum(map(len, case.history.rosters.values()))
    fewest = case.history.fewest_workers
    hosts = ", at times by one worker alone, whose vectors nothing masks" if fewest == 1 else f", by {fewest} or more"
    covered = f"{count} rosters, each covering all {case.manifest.key_owners} virtual workers once"
    return f"{covered}{hosts if count else ''}"


def documents(case: ProofCase) -> str:
    """Every document is one that the log names."""
    extra = [each for name, each in case.documents.items() if name not in case.history.used]
    if extra:
        raise Broken(DOCUMENTS, f"no entry of the log names the {extra[0].kind} {extra[0].name.hex()}")
    return f"{len(case.documents)} documents, all of them named by the log"


def data(case: ProofCase) -> str:
    """The run was bound to its data once, and log and ledger mean the same data."""
    case.history.claim(of.DATA)
    if case.run.data is None:
        raise NotThere("nothing was charged, so the run was not bound to data")
    event = case.extract.entries[case.run.data].event
    assert isinstance(event, DataBound), "the audit filed it as the binding of data"
    commitments = [case.history.data.get(v, b"") for v in range(case.manifest.key_owners)]
    if event.data_root != data_root(commitments):
        raise Broken(f"ledger, entry {case.run.data}", "it binds the run to other data than the members committed to")
    return f"{len(commitments)} slices, bound by the ledger's entry {case.run.data}"


def steps(case: ProofCase) -> str:
    """Each release has one charge, one binding and one commit; each step starts where the one before ended.

    A logged load of an earlier state stands in for the parameters of the step before it.
    """
    case.history.claim(of.COMMITS)
    ahead = 0
    for query in (each.query for each in case.manifest.computation.mechanisms):
        ahead += _releases(case, query)
    made = len(case.history.commits)
    if made == 0:
        raise NotThere("no step was committed")
    later = f"; {ahead} later charges released nothing that the log has" if ahead else ""
    measured = f" and {made - case.steps} measurements" if made > case.steps else ""
    jumps = "".join(f"; the state of step {each.step} loaded after {each.after_step}" for each in case.history.loads)
    return f"{case.steps} steps{measured}, each charged, bound and committed once and in order{later}{jumps}"


def lineage(case: ProofCase) -> str:
    """Each result is what the aggregators of its roster signed, made of the model that the run had before it."""
    if case.manifest.lineage is None:
        raise NotThere("the run's caller made the updates by hand, and only its word is there for them")
    commits = case.history.commits
    if not commits:
        raise NotThere("no step was committed")
    ranges = {_signed_ranges(case, query, step, commit) for (query, step), commit in commits.items()}
    loads = "".join(f"; parameters loaded at step {each.after_step}" for each in case.history.loads)
    # A range's digest says nothing of the others', and the digests of its tensors are too many for the log.
    many = "; that the ranges together are each step's model is the word of ledger and orchestrator"
    return f"{len(commits)} results, each signed by the aggregators of its roster{loads}{many if ranges != {1} else ''}"


def _signed_ranges(case: ProofCase, query: Query, step: int, commit: Commit) -> int:
    """Require the signatures under one result; return how many ranges it has."""
    where, computation = f"{query} step {step}", case.manifest.computation
    require(bool(commit.releases), where, "no aggregator signed its result")
    try:
        roster = parse(StepRelease, commit.releases[0].body).roster_digest
        require(roster in case.history.rosters[query, step], where, "it was released under a roster of another step")
        parts = open_parts(commit.releases, case.history.aggregators.get(roster, ()), roster)
    except ProtocolError as refusal:
        raise Broken(where, f"{refusal.message.rstrip('.')} ({refusal.code})") from None
    release, charge = parts[0], case.charge(case.run.charges[query][step])
    result = commit.model
    if query == "gradient":
        before = case.model_after(step)
    else:
        after = computation.measurement(query).after(step, computation.mechanism.steps)
        before = ModelPoint.of_values(case.exported_after(after) or b"")
    agrees = {
        "binding": release.binding == commit.ledger_hash,
        "charge": release.input_digest == charge.input_digest,
        "model before": release.before == before,
        "result": len(parts) > 1 or release.after == result,
    }
    for what, is_so in agrees.items():
        require(is_so, where, f"its aggregators signed another {what} than log and ledger have")
    return len(parts)


def _releases(case: ProofCase, query: Query) -> int:
    """Follow the releases of one mechanism; return how many charges are beyond the last commit."""
    charges, bound = case.run.charges[query], case.run.bound.get(query, {})
    commits = sorted((step, each) for (name, step), each in case.history.commits.items() if name == query)
    if sorted(charges) != list(range(len(charges))):
        missing = next(step for step in range(len(charges) + 1) if step not in charges)
        raise Broken(f"{query} step {missing}", "it was not charged, and a later one was")
    computation, before = case.manifest.computation, 0
    for step, commit in commits:
        where, charge, binding = f"{query} step {step}", charges.get(step), bound.get(step)
        if charge is None or binding is None:
            raise Broken(where, f"it was committed, but not {'charged' if charge is None else 'bound to its vectors'}")
        if not before < charge < binding:
            raise Broken(where, f"its charge, entry {charge}, and its binding, entry {binding}, are out of order")
        entry = case.extract.entries.get(binding)
        if commit.ledger_sequence != binding or entry is None or entry.hash != commit.ledger_hash:
            named = f"the ledger's entry {commit.ledger_sequence}"
            raise Broken(where, f"its commit names {named}, which is not its binding")
        finished = step
        if query != "gradient":
            finished = computation.measurement(query).after(step, computation.mechanism.steps)
        if not case.started_from(case.charge(charge).input_digest, finished, query):
            of_batches = ", or for batches that are not named" if computation.mechanism.max_participations else ""
            raise Broken(where, f"it was charged for other parameters than those after {finished} steps{of_batches}")
        before = binding
    ahead = len(charges) - len(commits)
    # A step that fails after its charge stays charged; nothing is charged after it in a run that has ended.
    if case.history.finished and ahead > 1:
        raise Broken(f"{query} step {len(commits) + 1}", "it was charged, and the log of the ended run has no commit")
    return ahead
