"""Averaged weights: evaluated, measured, sealed and exported in place of a run's weights, from which steps go on."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from raycloak.attestation.core.keys import Secret
from raycloak.attestation.core.messages import parse
from raycloak.attestation.sealed.package_keys import SIGNER_PUBLIC_FILE, TrustStore, load_signer, run_recipient_key
from raycloak.coordinator.aggregation.aggregator import ReduceRequest
from raycloak.coordinator.checkpoints.reader import open_to_file, verify_package, weights_of
from raycloak.coordinator.checkpoints.storage import PackageStorage
from raycloak.coordinator.checkpoints.writer import PARAMETERS
from raycloak.coordinator.proof.verify import verify_parts
from raycloak.coordinator.record.folder import write_weights
from raycloak.coordinator.training.assignment import ReplayedRun, ResumedRun
from raycloak.workers.terms.model_digest import model_digest, tensor_digests
from tests.coordinator.proof.proof_cases import Proved, packed, parts_of, proved, train, whole
from tests.coordinator.runs.test_resumed_runs import Killed, killed_at, manifest_of
from tests.coordinator.training.test_sealed_evaluation import orders, sealed
from tests.protocol import SECRET, WholeRun

AVERAGED = {"name": "adam", "learning_rate": 0.05, "averaged_weights": True}


@pytest.fixture(scope="module")
def averaged(tmp_path_factory) -> WholeRun:
    """A run of four steps that keeps an average, is measured after the second and the fourth, and seals packages."""
    home = tmp_path_factory.mktemp("averaged")
    return train(home, optimizer=AVERAGED, evaluation=sealed(home))


@pytest.fixture(scope="module")
def record(averaged) -> Proved:
    return proved(averaged.home, averaged)


def averages(run: WholeRun) -> list[np.ndarray]:
    """Return the average after each step, as it follows from the weights that the aggregators returned."""
    calls = [(call, references) for call, references in run.stage.log if call.method == "reduce"]
    ranges = len(calls) // run.finished.steps
    found = [np.concatenate([call.arguments[2] for call, _ in calls[:ranges]])]
    for step in range(len(calls) // ranges):
        parts = [references[1].value for _, references in calls[step * ranges : (step + 1) * ranges]]
        old = found[-1].astype(np.float64)
        # A decay of (1 + t) / (10 + t), in float64.
        found.append((old + (np.concatenate(parts) - old) * (9 / (10 + step))).astype(np.float32))
    return found[1:]


def digest_of(run: WholeRun, flat: np.ndarray) -> str:
    tensors = run.finished.manifest.computation.tensors
    return model_digest(tensors, tensor_digests(flat, tensors)).hex()


def flat(run: WholeRun, arrays: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([arrays[each.name].reshape(-1) for each in run.finished.manifest.computation.tensors])


def exported(run: WholeRun) -> bytes:
    """Return the weights that a run's directory has, without the header of the file."""
    return flat(run, load_file(run.folder / "parameters.safetensors")).tobytes()


def test_the_average_is_what_a_run_gives_and_its_steps_go_on_from_the_weights(averaged):
    expected = averages(averaged)
    assert averaged.finished is not None
    assert averaged.finished.parameters.tobytes() == expected[-1].tobytes()
    assert averaged.finished.model_digest.hex() == digest_of(averaged, expected[-1])
    started = [call.arguments[2] for call in averaged.stage.calls("reduce")]
    made = [references[1].value for call, references in averaged.stage.log if call.method == "reduce"]
    assert [each.tobytes() for each in started[1:]] == [each.tobytes() for each in made[:-1]]
    assert made[-1].tobytes() != expected[-1].tobytes()


def test_evaluations_and_measurements_are_of_the_average(averaged):
    expected = [digest_of(averaged, each) for each in averages(averaged)]
    assert orders(averaged) == [(2, expected[1]), (4, expected[3])]
    requests = [parse(ReduceRequest, call.arguments[0].encode()) for call in averaged.stage.calls("measure")]
    initial = manifest_of(averaged).computation.initial_parameters.hex()
    assert [each.input_digest.hex() for each in requests] == [initial, expected[1], expected[3]]


def test_a_package_holds_both_and_gives_the_average(averaged, tmp_path):
    storage = PackageStorage.open(packed(averaged.home).location)
    signer = load_signer(averaged.home / "signer" / SIGNER_PUBLIC_FILE)
    package = verify_package(storage, storage.names()[-1], TrustStore.of("site", signer))
    key = package.unwrap(run_recipient_key(Secret(bytes.fromhex(SECRET))))
    kept = weights_of(package, key, PARAMETERS)
    assert digest_of(averaged, kept) == package.manifest.model_digest.hex() == averaged.digests[-1]
    open_to_file(package, key, tmp_path / "opened.safetensors")
    given = flat(averaged, load_file(tmp_path / "opened.safetensors"))
    assert given.tobytes() == averages(averaged)[-1].tobytes()


def test_a_record_with_averaged_weights_is_proved(averaged, record):
    report = verify_parts(record.parts, record.trust)
    assert not report.failed, [(claim.name, claim.says) for claim in report.failed]
    assert json.loads(record.contents["verdict.json"])["averaged_weights"] is True


def test_a_record_with_the_weights_in_place_of_their_average_fails(averaged, record, tmp_path):
    last = [references[1].value for call, references in averaged.stage.log if call.method == "reduce"][-1]
    path = tmp_path / "parameters.safetensors"
    write_weights(path, manifest_of(averaged), last, bytes.fromhex(averaged.digests[-1]))
    forged = {**record.contents, "parameters.safetensors": path.read_bytes()}
    assert "released model" in {claim.name for claim in verify_parts(parts_of(forged), record.trust).failed}


@pytest.mark.parametrize(("workers", "aggregators"), [(1, 2), (5, 3)])
def test_one_average_for_any_number_of_workers_and_ranges(averaged, tmp_path, workers, aggregators):
    fields = {"num_workers": workers, "secure_aggregation": workers > 1, "aggregators": aggregators}
    other = train(tmp_path, optimizer=AVERAGED, evaluation=sealed(tmp_path), **fields)
    assert other.digests == averaged.digests
    assert exported(other) == exported(averaged)


def test_a_run_that_was_killed_and_resumed_keeps_its_average(averaged, tmp_path):
    first = whole(tmp_path, optimizer=AVERAGED, evaluation=sealed(tmp_path), disturb=killed_at("reduce", 3))
    with pytest.raises(Killed):
        first.train()
    assignment = ResumedRun(manifest_of(first), packed(tmp_path))
    second = whole(tmp_path, optimizer=AVERAGED, evaluation=sealed(tmp_path), assignment=assignment)
    second.train()
    assert second.digests == averaged.digests[-len(second.digests) :]
    assert len(second.digests) < len(averaged.digests)
    assert exported(second) == exported(averaged)


def test_a_replay_computes_the_average_again(averaged):
    assignment = ReplayedRun(manifest_of(averaged), packed(averaged.home), 2, 4)
    again = whole(averaged.home, optimizer=AVERAGED, assignment=assignment)
    finished = again.train()
    assert finished.model_digest == averaged.finished.model_digest


def test_a_run_without_an_average_states_none(tmp_path):
    run = train(tmp_path)
    assert "averaged" not in (run.folder / "manifest.json").read_text()
    assert all("averaged_digest" not in body for kind, body in run.evidence if kind == "committed")
    weights = flat(run, load_file(run.folder / "parameters.safetensors"))
    assert digest_of(run, weights) == run.digests[-1]
