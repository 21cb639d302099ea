"""Forgeries: each is made by one who has some of the site's keys, and each breaks the claim that it is about."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load, save

from raycloak.attestation.core.canonical import canonical_json
from raycloak.attestation.core.hybrid_signature import HybridSigner
from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.core.lineage import ModelPoint, StepRelease
from raycloak.attestation.core.messages import parse, seal
from raycloak.attestation.core.roster import MaskCircle, Roster, RosterMembers
from raycloak.attestation.orchestrator.documents import Document, read_documents
from raycloak.attestation.sealed.package_keys import TrustStore
from raycloak.attestation.sealed.package_manifest import PackageManifest
from raycloak.coordinator.ledger.entries import RunRegistered, StepCharged, VectorsBound
from raycloak.coordinator.ledger.export import check_extract
from raycloak.coordinator.proof.verify import verify_parts
from raycloak.workers.terms.mechanism import Mechanism
from tests.coordinator.proof.proof_cases import Proved, joined, parts_of, reledgered, relogged

Forgery = Callable[[Proved, Proved], dict[str, bytes]]
FORGERIES: dict[str, tuple[str, str, Forgery]] = {}


def forgery(claim: str, record: str) -> Callable[[Forgery], Forgery]:
    """Name the claim that must fail, and a pattern of the record that is named."""

    def add(made: Forgery) -> Forgery:
        FORGERIES[made.__name__] = (claim, record, made)
        return made

    return add


def failures(contents: dict[str, bytes], record: Proved) -> dict[str, str]:
    report = verify_parts(parts_of(contents), record.trust)
    return {claim.name: f"{claim.record}: {claim.says}" for claim in report.failed}


# --- without any key but that of bundles


def _lines(record: Proved, name: str, edit: Callable[[list[bytes]], None]) -> dict[str, bytes]:
    lines = record.lines(name)
    edit(lines)
    return record.contents | {name: joined(lines)}


def _of_kind(lines: list[bytes], kind: str) -> list[int]:
    return [i for i, line in enumerate(lines) if f'"kind":"{kind}"'.encode() in line]


@forgery("ledger", "entry")
def swapped_charges(record, other):
    def edit(lines):
        first, second, *_ = _of_kind(lines, "step_charged")
        lines[first], lines[second] = lines[second], lines[first]

    return _lines(record, "ledger.jsonl", edit)


@forgery("ledger", "entry")
def a_dropped_charge(record, other):
    return _lines(record, "ledger.jsonl", lambda lines: lines.pop(_of_kind(lines, "step_charged")[1]))


@forgery("ledger", "the ledger states")
def the_last_entries_dropped(record, other):
    def edit(lines):
        del lines[-4:-1]

    return _lines(record, "ledger.jsonl", edit)


@forgery("ledger", "does not match its hash")
def an_edited_epsilon(record, other):
    def edit(lines):
        at = _of_kind(lines, "step_charged")[-1]
        lines[at] = re.sub(rb'"charged_epsilon":[0-9.]+', b'"charged_epsilon":0.5', lines[at])

    return _lines(record, "ledger.jsonl", edit)


@forgery("ledger", "does not match its hash")
def an_edited_cap(record, other):
    def edit(lines):
        at = _of_kind(lines, "account_opened")[0]
        lines[at] = re.sub(rb'"epsilon_cap":[0-9.]+', b'"epsilon_cap":1.0', lines[at])

    return _lines(record, "ledger.jsonl", edit)


@forgery("ledger", "does not end in a statement")
def no_statement_of_completeness(record, other):
    return _lines(record, "ledger.jsonl", lambda lines: lines.pop())


@forgery("ledger", "account")
def the_account_of_another_run(record, other):
    return record.contents | {"ledger.jsonl": other.contents["ledger.jsonl"]}


@forgery("evidence log", "not signed by the log's owner|another|entry 0")
def the_log_of_another_run(record, other):
    return record.contents | {name: other.contents[name] for name in ("evidence.jsonl", "documents.jsonl")}


@forgery("manifest", "a Manifest of format 1; this version reads format 2")
def a_record_of_a_former_format(record, other):
    body = record.contents["manifest.json"].replace(b'"format":2', b'"format":1')
    return record.contents | {"manifest.json": body}


@forgery("manifest", "orchestrator")
def two_runs_merged(record, other):
    return other.contents | {"ledger.jsonl": record.contents["ledger.jsonl"]}


@forgery("evidence log", "entry 3")
def a_dropped_log_entry(record, other):
    return _lines(record, "evidence.jsonl", lambda lines: lines.pop(3))


@forgery("evidence log", "head")
def a_log_without_its_end(record, other):
    def edit(lines):
        del lines[-3:-1]

    return _lines(record, "evidence.jsonl", edit)


@forgery("members' evidence", "presentation that it names is not among")
def a_member_without_evidence(record, other):
    return _lines(record, "documents.jsonl", lambda lines: lines.pop(_of_kind(lines, "presentation")[0]))


@forgery("members' evidence", "did not prove that it holds")
def evidence_signed_by_another_member(record, other):
    def edit(lines):
        first, second, *_ = _of_kind(lines, "presentation")
        one, two = (json.loads(lines[at]) for at in (first, second))
        lines[first] = canonical_json(one | {"signature": two["signature"]})

    return _lines(record, "documents.jsonl", edit)


@forgery("members' evidence", "collateral that it names is not among")
def other_collateral(record, other):
    def edit(lines):
        (at,) = _of_kind(lines, "collateral")
        lines[at] = lines[at].replace(b"tcbEvaluationDataNumber", b"tcbEvaluationDataNumbed", 1)

    return _lines(record, "documents.jsonl", edit)


@forgery("documents", "no entry of the log names")
def a_document_that_nobody_named(record, other):
    def edit(lines):
        lines.append(Document.of(RosterMembers(members=())).encode())

    return _lines(record, "documents.jsonl", edit)


@forgery("packages", "which was published last, is not there")
def an_older_package_as_the_newest(record, other):
    return {name: content for name, content in record.contents.items() if "step-000004" not in name}


@forgery("packages", "its run is not")
def a_package_of_another_run(record, other):
    of_other = {name: content for name, content in other.contents.items() if name.startswith("packages/")}
    return record.contents | of_other


@forgery("packages", "signature")
def a_package_with_another_epsilon(record, other):
    name = "packages/step-000004.tssp/manifest.json"
    return record.contents | {name: re.sub(rb'"epsilon":[0-9.]+', b'"epsilon":0.5', record.contents[name])}


@forgery("released model", "which step 4 did not commit")
def another_model(record, other):
    tensors = load(record.contents["parameters.safetensors"])
    name = next(iter(tensors))
    changed = tensors | {name: np.nextafter(tensors[name], np.float32(1))}
    return record.contents | {"parameters.safetensors": save(changed)}


@forgery("released model", "its header")
def a_model_with_something_in_its_header(record, other):
    tensors = load(record.contents["parameters.safetensors"])
    return record.contents | {"parameters.safetensors": save(tensors, {"note": "trained without privacy"})}


@forgery("released model", "it is missing")
def no_model(record, other):
    return {name: content for name, content in record.contents.items() if name != "parameters.safetensors"}


def _measured(record: Proved, edit: Callable[[list], None]) -> dict[str, bytes]:
    body = json.loads(record.contents["measurements.json"])
    edit(body["releases"])
    return record.contents | {"measurements.json": canonical_json(body) + b"\n"}


@forgery("measurements", "not those of such a measurement|not the ones that were committed")
def a_better_measurement(record, other):
    def edit(releases):
        values = next(each["values"] for each in releases if each["query"] == "evaluation")
        values["accuracy"] += 0.25

    return _measured(record, edit)


@forgery("measurements", "their noise")
def a_measurement_with_less_noise(record, other):
    def edit(releases):
        releases[0]["deviation"] = {name: value / 2 for name, value in releases[0]["deviation"].items()}

    return _measured(record, edit)


@forgery("measurements", "its values are missing")
def a_dropped_measurement(record, other):
    return _measured(record, lambda releases: releases.pop())


def _metrics(record: Proved, event: str, **changes: object) -> dict[str, bytes]:
    lines = [json.loads(line) for line in record.lines("metrics.jsonl")]
    at = next(i for i, line in enumerate(lines) if line["event"] == event)
    lines[at] |= changes
    return record.contents | {"metrics.jsonl": joined([json.dumps(line).encode() for line in lines])}


@forgery("metrics.jsonl", "model_digest")
def metrics_of_other_parameters(record, other):
    return _metrics(record, "step", model_digest="00" * 32)


@forgery("metrics.jsonl", "epsilon")
def metrics_with_less_epsilon(record, other):
    return _metrics(record, "step", epsilon=0.01)


@forgery("metrics.jsonl", "measurement")
def metrics_with_a_list_where_a_name_belongs(record, other):
    return _metrics(record, "measurement", value_name=[])


@forgery("metrics.jsonl", "value")
def metrics_with_a_better_measurement(record, other):
    return _metrics(record, "measurement", value=1.0)


@forgery("metrics.jsonl", "evidence_class")
def metrics_of_real_hardware(record, other):
    return _metrics(record, "admitted", evidence_class="intel_tdx")


@forgery("metrics.jsonl", "epsilon_planned")
def metrics_of_a_cheaper_plan(record, other):
    return _metrics(record, "admitted", epsilon_planned=0.01)


@forgery("metrics.jsonl", "delta")
def metrics_of_a_smaller_delta(record, other):
    return _metrics(record, "admitted", delta=1e-9)


def _verdict(record: Proved, **changes: object) -> dict[str, bytes]:
    found = json.loads(record.contents["verdict.json"]) | changes
    return record.contents | {"verdict.json": json.dumps(found).encode() + b"\n"}


@forgery("verdict.json", "it claims epsilon 0.5")
def a_smaller_claim(record, other):
    return _verdict(record, privacy_epsilon=0.5)


@forgery("verdict.json", "was charged 0.25")
def a_smaller_charge(record, other):
    return _verdict(record, privacy_epsilon_charged=0.25)


@forgery("verdict.json", "it states steps 2")
def a_verdict_of_an_earlier_step_of_a_run_that_has_ended(record, other):
    return _verdict(record, steps=2)


@forgery("verdict.json", "it states max_participations 1")
def a_verdict_of_examples_that_take_part_once(record, other):
    return _verdict(record, max_participations=1)


@forgery("verdict.json", "it states links encrypted")
def a_verdict_of_encrypted_links(record, other):
    return _verdict(record, links="encrypted")


@forgery("verdict.json", "it states links .'encrypted'.,")
def a_verdict_of_a_list_of_links(record, other):
    return _verdict(record, links=["encrypted"])


@forgery("verdict.json", "evidence_class")
def a_verdict_of_real_hardware(record, other):
    return _verdict(record, evidence_class="intel_tdx")


@forgery("verdict.json", "keys on one machine")
def a_verdict_that_hides_who_had_the_keys(record, other):
    return _verdict(record, keys_on_one_machine=1)


# --- with the key of packages and bundles


@forgery("packages", "its step is not")
def a_package_that_was_signed_and_never_sealed(record, other):
    name = "packages/step-000004.tssp/"
    forged = PackageManifest.model_validate_json(record.contents[f"{name}manifest.json"]).model_copy(
        update={"evaluation_accuracy": 0.99}
    )
    signature = record.site.signer.sign(forged.encode()).encode()
    return record.contents | {f"{name}manifest.json": forged.encode(), f"{name}manifest.sig": signature}


@forgery("packages", "its name is not")
def a_package_under_the_name_of_a_later_step(record, other):
    """The later step's number begins with the same digits."""
    return {name.replace("step-000004.tssp", "step-0000042.tssp"): content for name, content in record.contents.items()}


# --- with the ledger's key


def _charges(events: list) -> list[int]:
    return [i for i, event in enumerate(events) if isinstance(event, StepCharged) and event.query == "gradient"]


@forgery("ledger", "its epsilon is not what the charges add up to")
def a_cheaper_charge(record, other):
    def edit(events):
        at = _charges(events)[-1]
        events[at] = events[at].model_copy(update={"charged_epsilon": 0.5})

    return reledgered(record, edit)


@forgery("ledger", "a second time")
def a_step_charged_twice(record, other):
    def edit(events):
        events.insert(_charges(events)[0], events[_charges(events)[0]])

    return reledgered(record, edit)


@forgery("steps", "other parameters|names the ledger's entry")
def a_charge_for_other_parameters(record, other):
    def edit(events):
        at = _charges(events)[-1]
        events[at] = events[at].model_copy(update={"input_digest": bytes(32)})

    return reledgered(record, edit)


@forgery("steps", "not bound to its vectors")
def a_dropped_binding(record, other):
    def edit(events):
        bound = [i for i, event in enumerate(events) if isinstance(event, VectorsBound) and event.query == "gradient"]
        del events[bound[-1]]

    return reledgered(record, edit)


@forgery("steps", "names the ledger's entry|not charged")
def an_account_of_fewer_steps(record, other):
    def edit(events):
        del events[_charges(events)[-1] :]

    return reledgered(record, edit)


@forgery("data", "other data")
def another_dataset(record, other):
    def edit(events):
        at = next(i for i, event in enumerate(events) if event.DOMAIN == "data_bound")
        events[at] = events[at].model_copy(update={"data_root": bytes(32)})

    return reledgered(record, edit)


@forgery("ledger", "cost|order")
def a_mechanism_with_more_noise(record, other):
    def edit(events):
        at = next(i for i, event in enumerate(events) if isinstance(event, RunRegistered))
        first, *more = events[at].mechanisms
        # A coarser grid has room for it: the mechanism is sound, and another one than was charged.
        grid = first.gamma_log2 + 2
        clamp = math.ldexp(math.floor(math.ldexp(first.clamp, -grid)), grid)
        changes = {"noise_multiplier": first.noise_multiplier * 2, "gamma_log2": grid, "clamp": clamp}
        louder = Mechanism(**first.model_dump() | changes)
        events[at] = events[at].model_copy(update={"mechanisms": (louder, *more)})

    return reledgered(record, edit)


@forgery("contract", "another manifest")
def a_registration_of_another_manifest(record, other):
    def edit(events):
        for at, event in enumerate(events):
            if hasattr(event, "manifest_digest"):
                events[at] = event.model_copy(update={"manifest_digest": bytes(32)})

    return reledgered(record, edit)


# --- with the run's secret, from which the orchestrator's keys derive


def _first(entries: list, kind: str) -> int:
    return next(i for i, (each, _) in enumerate(entries) if each == kind)


def _last(entries: list, kind: str) -> int:
    return max(i for i, (each, _) in enumerate(entries) if each == kind)


def _with_roster(
    record: Proved, change: Callable[[tuple], tuple] = lambda members: members, circle: MaskCircle | None = None
) -> dict[str, bytes]:
    """Change members or circle of the last roster, and everything that follows from them."""
    manifest, made = record.manifest, []

    def edit(entries):
        _, body = entries[_last(entries, "roster")]
        known = read_documents(record.lines("documents.jsonl"))[bytes.fromhex(body["members"])].open(RosterMembers)
        members = RosterMembers(members=change(known.members))
        if members != known:
            made.append(Document.of(members).encode())
        roster = Roster(
            run_id=manifest.run_id,
            manifest_digest=manifest.digest(),
            nonce=bytes.fromhex(body["nonce"]),
            members=members.members,
            circle=circle,
            **{name: body[name] for name in ("query", "step", "attempt", "ratchet")},
        )
        body |= {"members": members.digest().hex(), "digest": roster.digest().hex()}
        body |= {"circle": circle.model_dump(mode="json") if circle else None}

    contents = relogged(record, edit)
    return contents | {"documents.jsonl": contents["documents.jsonl"] + joined(made)}


@forgery("rosters", "roster_cover")
def a_roster_with_a_virtual_worker_twice(record, other):
    def change(members):
        first, *more = members
        return (first.model_copy(update={"virtual_workers": more[0].virtual_workers}), *more)

    return _with_roster(record, change)


@forgery("rosters", "had got no keys")
def a_roster_with_a_host_without_keys(record, other):
    def change(members):
        first, second, *more = members
        swapped = first.virtual_workers, second.virtual_workers
        return (
            first.model_copy(update={"virtual_workers": swapped[1]}),
            second.model_copy(update={"virtual_workers": swapped[0]}),
            *more,
        )

    return _with_roster(record, change)


@forgery("rosters", "was not admitted by that evidence")
def a_roster_with_a_stranger(record, other):
    def change(members):
        first, *more = members
        return (first.model_copy(update={"member_id": "worker-7"}), *more)

    return _with_roster(record, change)


@forgery("rosters", "the keys of .* are not those")
def a_roster_with_the_attackers_key(record, other):
    def change(members):
        first, *more = members
        return (first.model_copy(update={"mask_key": bytes(range(32))}), *more)

    return _with_roster(record, change)


@forgery("rosters", "colluding workers were agreed")
def a_roster_whose_workers_mask_with_too_few(record, other):
    return _with_roster(record, circle=MaskCircle(seed=bytes(32), reach=1, colluding_workers=1))


@forgery("rosters", "has another digest")
def a_roster_under_another_digest(record, other):
    return relogged(record, lambda entries: entries[_last(entries, "roster")][1].update(digest="00" * 32))


@forgery("rosters", "is not a later one")
def an_attempt_that_was_opened_twice(record, other):
    def edit(entries):
        entries.insert(_last(entries, "roster"), entries[_last(entries, "roster")])

    return relogged(record, edit)


@forgery("rosters", "had been committed to")
def a_roster_before_the_data_was_known(record, other):
    def edit(entries):
        entries.insert(_first(entries, "data"), entries.pop(_first(entries, "roster")))

    return relogged(record, edit)


@forgery("key releases", "served another epoch|no keys of epoch")
def keys_of_an_epoch_that_the_manifest_does_not_have(record, other):
    return relogged(record, lambda entries: entries[_first(entries, "released")][1].update(epoch=1))


@forgery("key releases", "does not have, or one twice")
def keys_of_a_virtual_worker_that_does_not_exist(record, other):
    return relogged(record, lambda entries: entries[_first(entries, "released")][1].update(virtual_workers=[99]))


@forgery("key releases", "was not admitted as a worker")
def keys_before_admission(record, other):
    def edit(entries):
        entries.insert(1, entries.pop(_first(entries, "released")))

    return relogged(record, edit)


@forgery("key releases", "revoked")
def keys_for_a_revoked_machine(record, other):
    def edit(entries):
        _, admitted = entries[_first(entries, "admitted")]
        body = {"kind": "platform", "name": admitted["platform_id"], "reason": "stolen", "revoked_at": 1}
        entries.insert(_first(entries, "released"), ("revoked", body))

    return relogged(record, edit)


@forgery("members' evidence", "says something else than its entry")
def an_admission_with_other_claims(record, other):
    return relogged(record, lambda entries: entries[_first(entries, "admitted")][1].update(evidence_class="intel_tdx"))


@forgery("members' evidence", "collateral_stale|not valid|validity")
def an_admission_at_another_time(record, other):
    def edit(entries):
        entries[_first(entries, "admitted")][1]["appraised_at"] += 10 * 365 * 24 * 3600

    return relogged(record, edit)


@forgery("members' evidence", "its field 'appraised_at'")
def an_admission_at_a_time_that_no_calendar_has(record, other):
    return relogged(record, lambda entries: entries[_first(entries, "admitted")][1].update(appraised_at=10**15))


@forgery("members' evidence", "nonce that was used before")
def evidence_shown_twice(record, other):
    def edit(entries):
        at = _first(entries, "admitted")
        entries.insert(at, entries[at])

    return relogged(record, edit)


@forgery("contract", "another manifest or policy")
def a_session_under_another_policy(record, other):
    return relogged(record, lambda entries: entries[0][1].update(policy_digest="00" * 32))


@forgery("contract", "unknown")
def an_entry_of_an_unknown_kind(record, other):
    return relogged(record, lambda entries: entries.append(("keys_given_away", {})))


@forgery("steps", "other parameters|names the ledger's entry")
def a_commit_of_other_parameters(record, other):
    def edit(entries):
        (first, *_) = (body for kind, body in entries if kind == "committed" and body["query"] == "gradient")
        first["released_digest"] = "00" * 32

    return relogged(record, edit)


@forgery("steps", "second time")
def a_step_committed_twice(record, other):
    def edit(entries):
        at = _last(entries, "committed")
        entries.insert(at, entries[at])

    return relogged(record, edit)


@forgery("steps", "is the next")
def a_step_left_out_of_the_log(record, other):
    def edit(entries):
        gradient = [i for i, (kind, body) in enumerate(entries) if kind == "committed" and body["query"] == "gradient"]
        del entries[gradient[1]]

    return relogged(record, edit)


@forgery("steps", "no rosters")
def a_step_without_a_roster(record, other):
    def edit(entries):
        del entries[_last(entries, "roster")]

    return relogged(record, edit)


@forgery("released model", "which step 3 did not commit")
def an_earlier_end_of_the_run(record, other):
    """The last step is left out everywhere but in the model."""

    def edit(entries):
        gradient = [i for i, (kind, body) in enumerate(entries) if kind == "committed" and body["query"] == "gradient"]
        # The measurement after it goes, too: what is left is the record of a shorter run.
        for at in sorted({gradient[-1], _last(entries, "committed")}, reverse=True):
            del entries[at]

    return relogged(record, edit)


def _gradients(entries):
    return [body for kind, body in entries if kind == "committed" and body["query"] == "gradient"]


@forgery("lineage", "gradient step 1: no aggregator signed its result")
def a_result_that_no_aggregator_signed(record, other):
    return relogged(record, lambda entries: _gradients(entries)[1].update(releases=[]))


@forgery("lineage", "gradient step 2: .*roster of another step")
def the_signature_under_another_step(record, other):
    def edit(entries):
        _, second, third, *_ = _gradients(entries)
        third["releases"] = second["releases"]

    return relogged(record, edit)


@forgery("lineage", "gradient step 1: .*signature")
def a_result_that_a_stranger_signed(record, other):
    def edit(entries):
        second = _gradients(entries)[1]
        release = parse(StepRelease, bytes.fromhex(second["releases"][0]["body"]))
        second["releases"] = [seal(release, IdentityKey.generate()).model_dump(mode="json")]

    return relogged(record, edit)


@forgery("lineage", "gradient step 3: .*another result")
def a_state_that_the_last_step_did_not_leave(record, other):
    return relogged(record, lambda entries: _gradients(entries)[-1].update(state_digest="00" * 32))


@forgery("lineage", "gradient step 1: .*another result")
def a_state_that_was_exchanged(record, other):
    """The aggregators signed what they were given; the log has another state in its place."""
    return relogged(record, lambda entries: _gradients(entries)[1].update(state_digest="00" * 32))


@forgery("lineage", "evaluation step 0: .*signature")
def a_measurement_that_a_stranger_signed(record, other):
    def edit(entries):
        body = next(body for kind, body in entries if kind == "committed" and body["query"] == "evaluation")
        release = parse(StepRelease, bytes.fromhex(body["releases"][0]["body"]))
        body["releases"] = [seal(release, IdentityKey.generate()).model_dump(mode="json")]

    return relogged(record, edit)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"binding": bytes(32)}, "another binding"),
        ({"input_digest": bytes(32)}, "another charge"),
        ({"before": ModelPoint(parameters=bytes(32), state=b"")}, "another model before"),
        ({"after": ModelPoint(parameters=bytes(32), state=b"")}, "another result"),
    ],
)
@pytest.mark.parametrize("query", ["gradient", "evaluation"])
def test_what_an_aggregator_signed_is_held_to_log_and_ledger(record, query, changes, words):
    """Even by one who has the aggregator's key."""

    def edit(entries):
        *_, last = (body for kind, body in entries if kind == "committed" and body["query"] == query)
        release = parse(StepRelease, bytes.fromhex(last["releases"][0]["body"])).model_copy(update=changes)
        last["releases"] = [seal(release, record.site.aggregator).model_dump(mode="json")]

    found = failures(relogged(record, edit), record)
    assert words in found["lineage"]
    assert "it rests on 'lineage', which failed" in found["released model"]


# --- with both


@forgery("contract", "registers the run with another lineage")
def a_registration_without_the_lineage(record, other):
    """The ledger would then have charged for any model."""

    def edit(events):
        at = next(i for i, event in enumerate(events) if isinstance(event, RunRegistered))
        events[at] = events[at].model_copy(update={"lineage": None})

    return reledgered(record, edit)


@forgery("steps", "out of order")
def a_step_charged_before_the_one_before_it_was_bound(record, other):
    """Two gradients of one model's parameters could then be asked for; log and ledger are made to agree."""

    def edit(events):
        first, second, *_ = _charges(events)
        events.insert(first + 1, events.pop(second))

    contents = reledgered(record, edit)
    forged = replace(record, contents=contents)
    bound = {
        (entry.event.query, entry.event.step): entry
        for entry in check_extract(forged.lines("ledger.jsonl"), record.trust.ledger).entries.values()
        if isinstance(entry.event, VectorsBound)
    }

    def relog(entries):
        for kind, body in entries:
            if kind == "committed":
                entry = bound[body["query"], body["step"]]
                body |= {"ledger_sequence": entry.sequence, "ledger_hash": entry.hash.hex()}

    return relogged(forged, relog)


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_fails_the_claim_that_it_is_about(record, other, name):
    claim, pattern, forge = FORGERIES[name]
    found = failures(forge(record, other), record)
    assert claim in found, found
    assert re.search(pattern, found[claim]), found[claim]


def test_nothing_fails_without_a_forgery(record):
    assert failures(record.contents, record) == {}
    assert len(FORGERIES) > 50


@pytest.mark.parametrize("of", ["orchestrators", "ledger", "signers", "policy"])
def test_keys_and_rules_come_from_the_trust_file_alone(record, of):
    """Whoever made the run with other keys cannot make an auditor believe it."""
    stranger = HybridSigner.generate()
    others = {
        "orchestrators": (stranger.public,),
        "ledger": IdentityKey.generate().public,
        "signers": TrustStore.of("site", stranger.public),
        "policy": record.trust.policy.model_copy(update={"evidence_lifetime_s": 1}),
    }
    trust = record.trust.model_copy(update={of: others[of]})
    failed = {claim.name for claim in verify_parts(record.parts, trust).failed}
    assert ("packages" if of == "signers" else "manifest") in failed


def test_a_claim_never_stands_on_one_that_failed(record, other):
    found = failures(swapped_charges(record, other), record)
    assert {"contract", "steps", "epsilon", "released model"} <= found.keys()
    assert "it rests on 'ledger', which failed" in found["contract"]
