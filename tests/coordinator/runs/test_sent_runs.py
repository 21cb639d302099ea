"""Runs whose examples a client sends: whole runs with the owner's key service on loopback."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.keys import Secret
from raycloak.attestation.core.messages import parse
from raycloak.attestation.sealed.sent_batch import seal_sent
from raycloak.coordinator.checkpoints.archive import Archive
from raycloak.coordinator.client.sent_batches import SentExamples, SentRun
from raycloak.coordinator.config import home
from raycloak.coordinator.config.sections import CheckpointConfig
from raycloak.coordinator.evidence.sources import LocalPlatform
from raycloak.coordinator.ledger.entries import StepCharged
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.proof.claims import ClaimOutcome
from raycloak.coordinator.proof.verify import verify_parts
from raycloak.coordinator.record.batch_files import INDEX, BatchFiles
from raycloak.coordinator.training.assignment import NewRun, ReplayedRun, ResumedRun
from raycloak.coordinator.training.pace import OPEN
from raycloak.metrics.errors import BudgetError, RaycloakError, RefusedError, RunFailedError
from raycloak.workers.inputs.datasets import DatasetForm
from raycloak.workers.inputs.sent_rows import SentForm, SentRows
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.step_input import step_input
from tests.coordinator.proof.proof_cases import CHECKPOINT, packed, parts_of, proved
from tests.owner import Owner, key_service
from tests.protocol import WholeRun, config, on, whole_run
from tests.sent import MARK, Client, examples, fields

RUN_ID = "the one of SECRET"
STEPS = 3


@pytest.fixture
def owner(tmp_path) -> Iterator[Owner]:
    with key_service(tmp_path) as owner:
        yield owner


@pytest.fixture
def client(owner, tmp_path) -> Client:
    return Client(owner, tmp_path, {step: [examples(step), examples(100 + step, 5)] for step in range(STEPS)})


def sent_run(client: Client, **arguments: Any) -> WholeRun:
    return whole_run(home.home(), **{"pace": client, **fields(client.owner), **arguments})


def finished(client: Client, **arguments: Any) -> WholeRun:
    run = sent_run(client, **arguments)
    run.train()
    return run


def test_the_same_batches_give_the_same_weights_on_any_workers_and_when_one_is_killed(client):
    run = finished(client)
    assert len(run.digests) == STEPS
    assert finished(client, num_workers=2).digests == run.digests
    assert finished(client, num_workers=1, secure_aggregation=False, min_workers=1).digests == run.digests
    killed = finished(client, disturb=on("step", "worker-1", "dies after", 1))
    assert killed.digests == run.digests
    assert killed.left
    assert killed.entries == run.entries, "a repeat is charged nothing"


def archive(folder: Path) -> Archive:
    return Archive(CheckpointConfig(checkpoint_frequency=2, storage="packages"), RUN_ID, folder, lambda line: None)


def manifest_of(run: WholeRun) -> Manifest:
    return parse(Manifest, (run.folder / "manifest.json").read_bytes().strip())


def failure(client: Client, kind: type[RaycloakError] = RefusedError, **arguments: Any) -> tuple[str, WholeRun]:
    """Return the code of a run that fails."""
    run = sent_run(client, **arguments)
    with pytest.raises(kind) as error:
        run.train()
    return error.value.code, run


def without_client(client: Client) -> dict[str, Any]:
    """Return the arguments of an execution that nobody sends anything to."""
    return {**fields(client.owner), "pace": OPEN}


def killed_after_two(client: Client) -> WholeRun:
    """Return a run whose driver dies when it binds the vectors of its third step, which is charged then."""

    def disturb(call: Any) -> None:
        if (call.method, call.index) == ("bind_vectors", 2):
            raise Killed

    run = sent_run(client, disturb=disturb, assignment=NewRun(archive(client.folder)))
    with pytest.raises(Killed):
        run.train()
    return run


class Killed(BaseException):
    """An error that stands for a driver that ends without any of its handlers."""


def test_a_killed_run_resumes_with_the_files_beside_it(client):
    undisturbed = finished(client)
    first = killed_after_two(client)
    second = whole_run(
        home.home(), assignment=ResumedRun(manifest_of(first), archive(client.folder)), folder=first.folder,
        **without_client(client),
    )  # fmt: skip
    second.train()
    assert second.digests[-1] == undisturbed.digests[-1]
    assert second.entries == undisturbed.entries, "the same charges"


def test_a_run_that_ends_before_its_first_step_keeps_the_terms_that_its_client_has_sealed_batches_for(client):
    """A run that charged nothing is void elsewhere, and another one, with another manifest, takes its place."""

    class Leaves:
        """The pace of a service that is killed when it has taken the first batches."""

        def admit(self, training: Any) -> bool:
            client.admit(training)
            return not client.batches(0)

        batches, is_released, computed, release = client.batches, client.is_released, client.computed, client.release

    found, first = failure(client, RunFailedError, pace=Leaves(), assignment=NewRun(archive(client.folder)))
    assert found == "stopped"
    assert not first.stage.calls("charge")
    assert first.coordinator.begun, "so its directory is not marked as void, and its secret stays"
    again = ResumedRun(manifest_of(first), archive(client.folder))
    assert len(finished(client, assignment=again, folder=first.folder).digests) == STEPS


def test_a_resume_names_a_batch_that_is_missing_or_altered(client):
    first = killed_after_two(client)
    (digests,) = BatchFiles(first.folder).sets(2)
    path = first.folder / "batches" / f"{digests[0].hex()}.batch"
    resumed = ResumedRun(manifest_of(first), archive(client.folder))
    sealed = path.read_bytes()
    path.write_bytes(sealed[:-1] + bytes([sealed[-1] ^ 1]))
    found, second = failure(client, assignment=resumed, folder=first.folder, pace=OPEN)
    assert found == "batch_altered"
    # It goes on from the newest package, which a thread saves: after the second step, or still after the first.
    assert second.digests == first.digests[2 - len(second.digests) :], "the charged step is not computed"
    path.unlink()
    assert failure(client, assignment=resumed, folder=first.folder, pace=OPEN)[0] == "batch_missing"


def test_other_batches_for_a_charged_step_are_refused_by_the_ledger(client):
    """The same example in another sealing is another batch too."""
    first = killed_after_two(client)
    client.files.pop(2)
    resumed = ResumedRun(manifest_of(first), archive(client.folder))
    assert failure(client, BudgetError, assignment=resumed, folder=first.folder)[0] == "step_already_charged"
    # The batches that were charged are still there, and the run can go on with them.
    again = whole_run(home.home(), assignment=resumed, folder=first.folder, **without_client(client))
    again.train()
    assert again.finished is not None


def test_a_replay_repeats_sent_steps_from_the_files_alone(client):
    run = finished(client, assignment=NewRun(archive(client.folder)))
    repeat = ReplayedRun(manifest_of(run), archive(client.folder), 0, STEPS)
    replayed = whole_run(home.home(), assignment=repeat, folder=run.folder, num_workers=2, **without_client(client))
    replayed.train()
    assert replayed.digests == run.digests
    assert replayed.entries == run.entries
    (run.folder / INDEX).unlink()
    assert failure(client, assignment=repeat, folder=run.folder, pace=OPEN)[0] == "batch_missing"


def test_the_charge_binds_the_batches_and_the_weights_stay_the_models(client):
    run = finished(client)
    manifest, files = manifest_of(run), BatchFiles(run.folder)
    parameters = [manifest.computation.initial_parameters, *map(bytes.fromhex, run.digests)]
    ledger = PrivacyLedger(f"sqlite:///{home.home() / 'ledger.sqlite'}", create=False)
    charges = [entry.event.input_digest for entry in ledger.history() if isinstance(entry.event, StepCharged)]
    ledger.close()
    for step, charged in enumerate(charges):
        (digests,) = files.sets(step)
        assert charged == step_input(parameters[step], digests)
        assert [digest(path.read_bytes()) for path in client.files[step]] == list(digests)
    committed = [body["released_digest"] for kind, body in run.evidence if kind == "committed"]
    assert committed == run.digests


def test_nobody_between_the_client_and_a_worker_sees_a_clear_example(client):
    """A planted value and the ids of examples are in no message, result, object or file of anybody."""
    secrets = MARK.tobytes(), b"patient-"
    plain = client.to_send[0][0]
    assert secrets[0] in SentExamples(config(**fields(client.owner)).dataset).encode(plain)[1][0]
    run = finished(client)
    passed = [
        (call.method, pickle.dumps(value))
        for call, answers in run.stage.log
        for value in (*call.arguments, *(each.value for each in answers))
        # The platform of this process, which is no message: on Ray each node has its own.
        if not isinstance(value, LocalPlatform)
    ]
    sent = {method for method, content in passed if client.files[0][0].read_bytes() in content}
    assert sent == {"step"}, "the search finds the ciphertext where it passes"
    for method, content in passed:
        assert not any(secret in content for secret in secrets), method
    for path in [each for folder in (home.home(), client.folder) for each in folder.rglob("*") if each.is_file()]:
        content = path.read_bytes()
        assert not any(secret in content for secret in secrets), path


def test_a_step_without_batches_is_refused_before_it_is_charged(client):
    del client.to_send[1]
    code, run = failure(client)
    assert code == "no_batches"
    assert len(run.digests) == 1
    assert len(run.stage.calls("charge")) == 1


def test_a_batch_for_another_step_is_refused_before_a_charge_and_by_every_worker(client, monkeypatch):
    changes, code = {"step": 2}, "batch_foreign"
    monkeypatch.setattr(
        "raycloak.coordinator.client.sent_batches.seal_sent",
        lambda head, rows, key_of: seal_sent(head.model_copy(update=changes if head.step == 1 else {}), rows, key_of),
    )
    client.to_send[1] = client.to_send[1][:1]
    found, run = failure(client)
    assert found == code
    assert len(run.stage.calls("charge")) == 1
    # Workers do not rest on the driver's look.
    monkeypatch.setattr("raycloak.coordinator.training.sent.require_step", lambda *_, **__: None)
    assert failure(client, RunFailedError)[0] == code


def test_a_wrong_key_and_altered_ciphertext_open_nothing(client, monkeypatch):
    """Every worker refuses alike, and the step that was charged is never released."""
    monkeypatch.setattr(SentRun, "_key", lambda self, v, epoch: Secret(b"x" * 32))
    code, run = failure(client, RunFailedError)
    assert (code, run.digests) == ("batch_sealed", [])


def test_a_workers_bytes_must_be_those_that_the_step_was_asked_for(client):
    """A changed object store is a worker's refusal, and no other worker is held up for long."""

    def tamper(worker: Any, member_id: str) -> None:
        step = worker.step

        def other(receipt, request, *given):
            changed = [*given[:-1], np.where(np.arange(len(given[-1])) == 700, given[-1] ^ 1, given[-1])]
            return step(receipt, request, *changed)

        if member_id == "worker-1":
            worker.step = other

    run = finished(client, tamper=tamper)
    assert ("worker-1", "batch_changed") in run.left


def test_an_example_out_of_range_counts_as_absent_and_changes_no_other(client):
    """Its row stays, as if the example contributed zero; nothing tells of it."""
    form = DatasetForm(
        num_examples=20, feature_shape=(6,), feature_dtype="float32", label_shape=(), label_dtype="int64"
    )
    encoded = SentExamples(config(**fields(client.owner)).dataset).encode(examples(0))[1]
    rows = dict(enumerate(encoded))
    wrong = {**rows, 4: rows[4][:-8] + (3).to_bytes(8, "little")}
    places = np.arange(20)
    right, absent = (SentRows(SentForm(form, None, 3), each) for each in (rows, wrong))
    assert right.present(places).tolist() == [True] * 12 + [False] * 8
    assert absent.present(places).tolist() == [i < 12 and i != 4 for i in range(20)]
    others = places != 4
    for one, other in zip(right.batch(places), absent.batch(places), strict=True):
        np.testing.assert_array_equal(one[others], other[others])
        assert not other[4].any()


def test_verify_proves_a_run_on_sent_data_and_needs_the_names_of_its_batches(client):
    run = finished(client, assignment=NewRun(packed(home.home())), checkpoint=CHECKPOINT.model_dump())
    record = proved(home.home(), run)
    claims = {claim.name: claim for claim in verify_parts(record.parts, record.trust).claims}
    assert claims["steps"].outcome is ClaimOutcome.PROVED, claims["steps"]
    for contents in (
        {name: content for name, content in record.contents.items() if name != INDEX},
        record.contents | {INDEX: record.contents[INDEX].replace(b'"step":1', b'"step":7')},
    ):
        claims = {claim.name: claim for claim in verify_parts(parts_of(contents), record.trust).claims}
        assert claims["steps"].outcome is ClaimOutcome.FAILED
