"""Claims about what the run left behind: sealed packages, the released model, measurements, metrics and verdict."""

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn, TypeGuard, TypeVar

from safetensors.numpy import load, save

from raycloak.attestation.core.canonical import read_json
from raycloak.attestation.core.messages import parse
from raycloak.attestation.gpu.switches import weakest_links
from raycloak.attestation.sealed.package_keys import open_manifest
from raycloak.attestation.sealed.package_manifest import PackageManifest
from raycloak.coordinator.ledger.rules import epsilon_at
from raycloak.coordinator.proof.budget_claims import TOLERANCE
from raycloak.coordinator.proof.bundle import MEASUREMENTS, METRICS, PACKAGE, PARAMETERS, VERDICT
from raycloak.coordinator.proof.case import ProofCase
from raycloak.coordinator.proof.claims import Broken, NotThere, require
from raycloak.coordinator.proof.history import LoggedLoad, LoggedPackage
from raycloak.workers.terms.measurement import ReleasedValues, average_of, released, values_digest
from raycloak.workers.terms.model_digest import model_digest, tensor_digests

T = TypeVar("T")

_LARGEST_HEADER = 2**24
_BEHIND = "of a run that has not ended: a resume repeats steps that are committed, and may be stopped among them"
_LARGEST_PACKAGE_TEXT = 2**26


def packages(case: ProofCase) -> str:
    """Each sealed package is signed, and states what log and ledger have; the newest published one is there."""
    names, present = case.parts.packages(), set[bytes]()
    for name in names:
        case.packages[name] = found = _package(case, name)
        present.add(found.digest())
    published = case.history.published
    last = next(reversed(published.values()), None)
    if last is not None and last.package_digest not in present:
        raise Broken(PACKAGE, f"the package of step {last.step}, which was published last, is not there")
    if not names:
        raise NotThere("the run published no package")
    recipients = sorted({each.name for found in case.packages.values() for each in found.recipients})
    gone = len(published.keys() - present)
    retired = f"; {gone} that were published earlier are not kept" if gone else ""
    return f"{len(names)} packages, for {', '.join(recipients)}; their encrypted files are not part of this{retired}"


def _package(case: ProofCase, name: str) -> PackageManifest:
    body = case.parts.read(f"{PACKAGE}{name}/manifest.json", _LARGEST_PACKAGE_TEXT)
    signature = case.parts.read(f"{PACKAGE}{name}/manifest.sig", _LARGEST_PACKAGE_TEXT)
    _, found = open_manifest(body, signature, case.trust.signers)
    where, manifest, history = f"package {name}", case.manifest, case.history
    commit = history.commits.get(("gradient", found.step - 1))
    own = LoggedPackage(step=found.step, package_digest=found.digest())
    agrees = {
        "run": (found.run_id, found.manifest_digest) == (manifest.run_id, manifest.digest()),
        "step": commit is not None and own in history.sealed,
        "parameters": commit is not None and (found.model_digest, found.averaged_digest) == commit.model.digests,
        "ledger": commit is not None
        and (found.ledger_sequence, found.ledger_hash) == (commit.ledger_sequence, commit.ledger_hash),
        "evidence log": case.log.root_at(found.log_length) == found.log_hash,
        "roster": found.roster_digest in history.rosters.get(("gradient", found.step - 1), []),
        "predecessor": found.previous == b"" or found.previous in history.published,
        "evidence class": set(found.evidence_class.split("+")) <= history.classes,
        # With what follows the number: step 5 must not pass for step 51.
        "name": name.startswith((f"step-{found.step:06d}.", f"step-{found.step:06d}-")),
        "delta": found.delta == case.extract.audited.accounts[manifest.account].terms.delta,
        "epsilon": _may_claim(case, found.epsilon, found.step),
    }
    for what, is_so in agrees.items():
        require(is_so, where, f"its {what} is not what log, ledger and manifest have")
    return found


def _may_claim(case: ProofCase, stated: Any, steps: int) -> bool:
    """Return whether a run may state an epsilon of so many steps: at least what they claim, at most its whole plan."""
    if not case.manifest.computation.mechanism.private:
        return stated is None
    claim = case.own_claim
    return _is_number(stated) and claim.least(steps) * (1 - TOLERANCE) <= stated <= claim.whole * (1 + TOLERANCE)


def model(case: ProofCase) -> str:
    """The released parameters are, byte for byte, the ones that the last step committed."""
    if PARAMETERS not in case.parts:
        if case.history.finished and case.steps:
            raise Broken(PARAMETERS, "the run ended with a model, and it is missing")
        raise NotThere("the run has not ended, and has released no model")
    manifest = case.manifest
    tensors = manifest.computation.tensors
    size = sum(4 * tensor.size for tensor in tensors)
    content = case.parts.read(PARAMETERS, size + _LARGEST_HEADER)
    try:
        found = load(content)
    except Exception as error:  # noqa: BLE001 - the library has no common error, and raises its own from Rust
        raise Broken(PARAMETERS, f"it cannot be read: {type(error).__name__}") from None
    if {name: (str(each.dtype), each.shape) for name, each in found.items()} != {
        tensor.name: ("float32", tensor.shape) for tensor in tensors
    }:
        raise Broken(PARAMETERS, "it has other tensors than the manifest")
    digests = [tensor_digests(found[tensor.name].reshape(-1), (tensor,))[0] for tensor in tensors]
    digest = model_digest(tensors, digests)
    steps = next((each for each in case.resting_steps if case.exported_after(each) == digest), None)
    if steps is None:
        raise Broken(PARAMETERS, f"its digest is {digest.hex()}, which step {case.steps} did not commit")
    # A header may hold anything, so the whole file must be the one that the run writes.
    metadata = {"run_id": manifest.run_id, "model_digest": digest.hex()}
    if not _is_header(content, save({tensor.name: found[tensor.name] for tensor in tensors}, metadata)):
        raise Broken(PARAMETERS, "its header is not the one that the run writes")
    if steps < case.steps:
        raise NotThere(f"it has the parameters of step {steps}, not {case.steps}, {_BEHIND}")
    return f"{len(tensors)} tensors of {manifest.computation.mechanism.dimension} parameters after step {case.steps}"


def _is_header(content: bytes, written: bytes) -> bool:
    """Return whether two files are the same but for the order of names in their headers, which the library leaves open.

    White space and repeated names are differences.
    """
    if len(content) != len(written):
        return False
    end = 8 + int.from_bytes(content[:8], "little")
    headers = [each[8:end].rstrip(b" ") for each in (content, written)]
    compact = [json.dumps(read_json(header), separators=(",", ":"), ensure_ascii=False).encode() for header in headers]
    same = read_json(headers[0]) == read_json(headers[1])
    return same and content[:8] == written[:8] and content[end:] == written[end:] and headers[0] == compact[0]


def measurements(case: ProofCase) -> str:
    """Each measured value is what was committed, and each committed measurement is there."""
    made = {place: each for place, each in case.history.commits.items() if place[0] != "gradient"}
    if not made and MEASUREMENTS not in case.parts:
        raise NotThere("the run made no measurements")
    releases = parse(ReleasedValues, case.parts.line(MEASUREMENTS)).releases
    case.released = {(each.query, each.number): each for each in releases}
    seen: set[tuple[str, int]] = set()
    for each in releases:
        where = f"{MEASUREMENTS}, {each.query} {each.number}"
        place = each.query, each.number
        if place in seen or not (place in made or case.may_wait_for_its_commit(*place)):
            raise Broken(where, "it was not committed, or is there twice")
        seen.add(place)
        measurement = case.manifest.computation.measurement(each.query)
        average = average_of(measurement, each.values)
        planned = case.manifest.computation.mechanism.steps
        if released(measurement, each.number, planned, average) != each:
            raise Broken(where, "its values, their noise or its step are not those of such a measurement")
        if place in made and values_digest(each.query, each.number, average) != made[place].released_digest:
            raise Broken(where, "its values are not the ones that were committed")
    if lacking := made.keys() - seen:
        query, number = min(lacking)
        raise Broken(f"{MEASUREMENTS}, {query} {number}", "it was committed, and its values are missing")
    require(bool(seen), MEASUREMENTS, "the run committed no measurement")
    ahead = len(seen - made.keys())
    waits = f"{ahead} that a resume has to repeat, since a kill came before the commit, may have been edited"
    if not made:
        raise NotThere(waits)
    proved = f"{len(made)} releases, each with the values that were committed and the noise of its mechanism"
    return f"{proved}; {waits}" if ahead else proved


def metrics(case: ProofCase) -> NoReturn:
    """Hold `metrics.jsonl` to the signed records that it repeats. Nobody signs the file, so it is never proved."""
    if METRICS not in case.parts:
        raise NotThere("there is no metrics.jsonl")
    seen: set[int] = set()
    loads = {(each.after_step, each.step, each.model_digest.hex()): each for each in case.history.loads}
    for number, line in enumerate(case.parts.lines(METRICS) if case.parts.by_name[METRICS].size else [], 1):
        where = f"{METRICS}, line {number}"
        event = _object(line, where)
        for name, expected in _expected(case, event, loads).items():
            if name in event and not _same(event[name], expected):
                raise Broken(where, f"it states {name} {event[name]}, the signed record {expected}")
        if event.get("event") == "step" and isinstance(step := event.get("step"), int):
            seen.add(step)
    raise NotThere(
        f"nobody signs it: lines about {len(seen)} of {case.steps} steps agree with the signed records, "
        "but results on the evaluation split, times, bytes and members may have been edited"
    )


def _expected(
    case: ProofCase, event: dict[str, Any], loads: Mapping[tuple[int, int, str], LoggedLoad]
) -> dict[str, Any]:
    """Return what the signed records say of an event's fields; ``loads`` are those of the log."""
    computation, kind = case.manifest.computation, event.get("event")
    if kind == "step" and isinstance(step := event.get("step"), int):
        commit = case.history.commits.get(("gradient", step))
        # A run that was killed may have told of a step that it did not live to commit.
        if commit is None:
            return {}
        charge = case.charge(case.run.charges["gradient"][step])
        return {"model_digest": commit.released_digest.hex(), "epsilon": charge.charged_epsilon}
    if kind == "measurement":
        made = _among(case.released, event.get("query"), event.get("release"))
        name = event.get("value_name")
        if made is None or not isinstance(name, str) or name not in made.values:
            return {"event": "of no measurement that was committed"}
        charge = case.charge(case.run.charges[made.query][made.number])
        return {
            "value": made.values[name],
            "noise_deviation": made.deviation[name],
            "steps": made.after,
            "epsilon": charge.charged_epsilon,
        }
    if kind == "load":
        known = _among(loads, event.get("steps"), event.get("step"), event.get("model_digest"))
        return {} if known else {"event": "of no state that was loaded there"}
    if kind == "admitted":
        mechanism, planned = computation.mechanism, event.get("epsilon_planned")
        account = case.extract.audited.accounts[case.manifest.account].terms
        return {
            "run": case.manifest.run_id,
            "account": case.manifest.account,
            "manifest_digest": case.manifest.digest().hex(),
            "evidence_class": _class_of(case, event.get("evidence_class")),
            "steps_planned": mechanism.steps,
            "virtual_workers": mechanism.virtual_workers,
            "parameters": mechanism.dimension,
            "noise_multiplier": mechanism.noise_multiplier if mechanism.private else None,
            "delta": account.delta if mechanism.private else None,
            "epsilon_planned": planned if _may_claim(case, planned, 0) else "that no claim of the run could have",
        }
    return {}


def _among(known: Mapping[Any, T], *place: Any) -> T | None:
    """Return what is known under a place that a file states; None if there is no such place, such as a list."""
    return known.get(place) if all(isinstance(each, str | int) for each in place) else None


def verdict(case: ProofCase) -> NoReturn:
    """Hold `verdict.json` to the signed records that it repeats, and its epsilon to the charges; as :func:`metrics`."""
    if VERDICT not in case.parts:
        raise NotThere("there is no verdict.json")
    require(case.steps > 0, VERDICT, "the run committed no step, and has no verdict")
    found = _object(case.parts.line(VERDICT), VERDICT)
    account = case.extract.audited.accounts[case.manifest.account].terms
    mechanism = case.manifest.computation.mechanism
    steps = next((each for each in case.resting_steps if _same(found.get("steps"), each)), case.steps)
    last = case.exported_after(steps)
    expected = {
        "steps": steps,
        "planned_steps": mechanism.steps,
        "private": mechanism.private,
        "account": case.manifest.account,
        "privacy_delta": account.delta if mechanism.private else None,
        "accountant": mechanism.accountant if mechanism.private else None,
        "exact": case.manifest.computation.exact,
        "evidence_class": _class_of(case, found.get("evidence_class")),
        "links": _links_of(case, found.get("links")),
        "model_digest": last.hex() if last else None,
        "averaged_weights": case.manifest.computation.optimizer.averaged_weights,
        "virtual_workers": mechanism.virtual_workers,
        "unit": mechanism.unit,
        "rows_per_unit": mechanism.rows_per_unit,
        "copies": mechanism.copies,
        "max_participations": mechanism.max_participations,
        "loads": [[each.after_step, each.step] for each in case.history.loads],
        "measurements": [each.model_dump(mode="json") for each in case.released.values()],
    }
    for name, value in expected.items():
        if name not in found or not _same(found[name], value):
            raise Broken(VERDICT, f"it states {name} {found.get(name)}, the signed records {value}")
    held = max((len(each) for each in case.history.machines.values()), default=0)
    if not isinstance(found.get("keys_on_one_machine"), int) or found["keys_on_one_machine"] < held:
        raise Broken(VERDICT, f"it states fewer keys on one machine than the {held} that the log has")
    if not _may_claim(case, found.get("privacy_epsilon"), steps):
        raise Broken(VERDICT, f"it claims epsilon {found.get('privacy_epsilon')}, which charges and plan do not give")
    _check_charged(case, found)
    if steps < case.steps:
        raise NotThere(f"nobody signs it, and it is of step {steps}, not {case.steps}, {_BEHIND}")
    raise NotThere(
        "nobody signs it: steps, parameters, measurements, classes of evidence, links of GPUs, keys on one machine, "
        "and the epsilon that it claims and was charged agree with the signed records. All else may have been edited, "
        "such as epsilons against other adversaries, evaluation results, times and warnings"
    )


def _class_of(case: ProofCase, stated: Any) -> str:
    """Return the evidence class that a file may state: ``stated`` itself, if it is of a session of the run.

    Sessions may differ, as when GPUs came later. SIMULATED evidence in any of them must be said.
    """
    classes = case.history.classes
    found = set(stated.split("+")) if isinstance(stated, str) else set()
    is_so = found <= classes and found and ("simulated" in found) == ("simulated" in classes)
    return str(stated) if is_so else "+".join(sorted(classes))


def _links_of(case: ProofCase, stated: Any) -> str | None:
    """Return what a verdict may state of the links between GPUs: ``stated``, if it is of a session of the run."""
    if isinstance(stated, str) and stated in case.history.links:
        return stated
    shown = weakest_links(case.history.links)
    # Nobody showed a GPU, so that the links of those that computed are not attested.
    return shown or ("not attested" if case.manifest.computation.numerics.gpu is not None else None)


def _check_charged(case: ProofCase, found: dict[str, Any]) -> None:
    """Require the account's epsilon in a verdict to be one that it had after the run's last charge."""
    stated = found.get("privacy_epsilon_charged")
    if not case.manifest.computation.mechanism.private:
        require(stated is None, VERDICT, "it states a charge of a run that is not private")
        return
    account = case.extract.audited.standing(case.manifest.account)
    own = max(sequence for charges in case.run.charges.values() for sequence in charges.values())
    later = [
        case.charge(sequence).charged_epsilon
        for run in case.extract.audited.runs.values()
        if run.registered.account == case.manifest.account
        for charges in run.charges.values()
        for sequence in charges.values()
        if sequence >= own
    ]
    # What the account had spent also changes with a prepaid run, which no charge states, and with a cap under pld.
    known = [*later, epsilon_at(account.account.terms, account.spent)]
    if not _is_number(stated) or not min(known) * (1 - TOLERANCE) <= stated <= max(known) * (1 + TOLERANCE):
        raise Broken(VERDICT, f"it states that the account was charged {stated}, which it never was after the run")


def _is_number(stated: Any) -> TypeGuard[float]:
    return isinstance(stated, float | int) and not isinstance(stated, bool)


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        found = read_json(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Broken(where, "it is no JSON object")
    return found


def _same(stated: Any, expected: Any) -> bool:
    if isinstance(expected, float) and _is_number(stated):
        return math.isclose(stated, expected, rel_tol=1e-12)
    if isinstance(expected, list) and isinstance(stated, list) and expected and isinstance(expected[0], dict):
        return json.dumps(stated, sort_keys=True) == json.dumps(expected, sort_keys=True)
    return bool(stated == expected) and isinstance(stated, bool) == isinstance(expected, bool)
