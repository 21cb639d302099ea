"""The manifest: what may differ between two executions of one run is not in it."""

import numpy as np
import pytest

from raycloak.attestation.core.messages import parse
from raycloak.attestation.keys.halves import ServiceContract
from raycloak.coordinator.planning.manifest import build_computation, epochs, run_terms
from raycloak.coordinator.planning.measurements import plan_measurements
from raycloak.metrics.errors import ProtocolError
from raycloak.workers.terms.manifest import Computation, Manifest
from raycloak.workers.terms.model_digest import TensorContent
from tests.drawn import batches_of
from tests.protocol import HandRun, config


@pytest.fixture(scope="module")
def hand(tmp_path_factory) -> HandRun:
    return HandRun(tmp_path_factory.mktemp("manifest"))


def computation_of(hand: HandRun, settings):
    return build_computation(settings, hand.setup.model.name, hand.setup.dataset, hand.facts, hand.mechanism)


def test_hosts_ranges_paths_and_names_do_not_enter(hand):
    base = computation_of(hand, hand.config)
    for changes in (
        {"num_workers": 5},
        {"aggregators": 3},
        {"name": "another"},
        {"num_workers": 1, "secure_aggregation": False},
        {"failure": {"step_deadline_s": 1}},
        {"secret_retention": "keep"},
    ):
        assert computation_of(hand, config(**changes)).digest() == base.digest(), changes
    moved = hand.setup.dataset.model_copy(update={"path": "elsewhere.npz"})
    assert build_computation(hand.config, hand.setup.model.name, moved, hand.facts, hand.mechanism) == base


def test_whatever_decides_the_bytes_of_the_weights_enters(hand):
    base = computation_of(hand, hand.config)
    digests = {base.digest()}
    settings = [
        config(["optimizer.learning_rate=0.25"]),
        config(["optimizer.momentum=0"]),
        config(["optimizer.schedule=cosine"]),
        config(loss="mse"),
        config(epoch_steps=7),
    ]
    digests |= {computation_of(hand, each).digest() for each in settings}
    changed_facts = [
        {"model_code": bytes(32)},
        {"loss_code": bytes(32)},
        {"numerics": hand.facts.numerics.model_copy(update={"threads": 2})},
        {"numerics": hand.facts.numerics.model_copy(update={"deterministic": False})},
        {"initial_parameters": b"s" * 32},
        {"tensors": hand.facts.tensors[::-1]},
        {"contents": (TensorContent("table", "float32", (1,), bytes(32), trained=False),)},
    ]
    for changes in changed_facts:
        facts = hand.facts.model_copy(update=changes)
        digests.add(
            build_computation(hand.config, hand.setup.model.name, hand.setup.dataset, facts, hand.mechanism).digest()
        )
    other = hand.mechanism.model_copy(update={"noise_multiplier": 0.5})
    digests.add(build_computation(hand.config, hand.setup.model.name, hand.setup.dataset, hand.facts, other).digest())
    assert len(digests) == 1 + len(settings) + len(changed_facts) + 1


def test_physical_shape_and_dtypes_are_in_the_manifest(hand):
    """A kernel's rounding depends on the rows per pass, their number, and the types."""
    computation = hand.manifest.computation
    assert (computation.mechanism.micro_batch_size, computation.mechanism.micro_batches) == (4, 2)
    assert (computation.parameter_dtype, computation.accumulation_dtype) == ("float32", "float64")
    others = [{"parameter_dtype": "float64"}, {"accumulation_dtype": "float32"}]
    assert len({computation.model_copy(update=each).digest() for each in others} | {computation.digest()}) == 3
    clipped = hand.workers["worker-0"]._stage.planned.computers["gradient"]._engine.clipped_sum
    nothing = np.zeros(0, np.int64)
    batches = batches_of(hand.workers["worker-0"]._stage.planned.workload.dataset, nothing, computation.mechanism)
    sums = {str(piece.dtype) for piece in clipped(hand.start, batches)}
    assert sums == {f"torch.{computation.accumulation_dtype}"}
    assert str(hand.start.dtype) == computation.parameter_dtype


def test_epochs_are_counted_up():
    assert [epochs(config(steps=steps, epoch_steps=100)) for steps in (1, 100, 101)] == [1, 1, 2]


def test_the_manifest_names_everybody_who_may_sign_and_survives_the_wire(hand):
    manifest = hand.manifest
    assert manifest.log_owner == hand.orchestrator_key
    assert manifest.ledger_key == hand.ledger_key.public
    assert manifest.run_id == hand.run_id
    assert len(manifest.key_commitments) == 1
    assert Manifest.model_validate_json(manifest.encode()) == manifest
    others = [
        {field: bytes(32)}
        for field in ("known_answer", "policy_digest", "ledger_key", "orchestrator_key", "orchestrator_ml_dsa")
    ] + [
        {"account": "another"},
        {"run_id": "another"},
        {"key_commitments": ()},
    ]
    digests = {manifest.model_copy(update=changes).digest() for changes in others}
    assert len(digests | {manifest.digest()}) == 1 + len(others)


@pytest.mark.parametrize(
    ("honest_share", "most", "fits"),
    [
        (1.0, None, True),
        (1.0, 1, False),
        (0.25, None, False),
        (0.25, 3, True),
        (0.25, 4, False),
        (0.25, 6, True),
        (0.25, 7, False),
    ],
)
def test_a_manifest_bounds_keys_by_machine_exactly_where_some_noise_is_not_counted_on(hand, honest_share, most, fits):
    """Of eight virtual workers, two machines with three each may be known at a share of a quarter; never seven.

    Nor four, which whole machines do not add up to.
    """
    computation = hand.manifest.computation
    mechanism = computation.mechanism.model_copy(update={"honest_share": honest_share, "noise_multiplier": 0.1})
    changes = {"computation": computation.model_copy(update={"mechanism": mechanism}), "keys_per_machine": most}
    body = hand.manifest.model_copy(update=changes).encode()
    if fits:
        assert run_terms(parse(Manifest, body), hand.policy, hand.collateral).contract.keys_per_machine == most
    else:
        with pytest.raises(ProtocolError, match="malformed"):
            parse(Manifest, body)


@pytest.mark.parametrize(
    ("colluders", "paid", "uncounted", "fits"),
    [
        (None, 0.0, 0, True),
        (None, 2.0**-40, 0, False),
        (100, 2.0**-40, 0, True),
        (100, 0.0, 0, False),
        (100, 2.0**-41, 0, False),
        (6, 2.0**-40, 6, True),
        (5, 2.0**-40, 6, False),
    ],
)
def test_a_manifest_has_masks_with_holes_exactly_where_delta_pays_for_them(hand, colluders, paid, uncounted, fits):
    computation = hand.manifest.computation
    share = {"honest_share": 1 - uncounted / 8, "noise_multiplier": 0.1, "mask_split_probability": paid}
    changes = {
        "computation": computation.model_copy(update={"mechanism": computation.mechanism.model_copy(update=share)}),
        "keys_per_machine": 3 if uncounted else None,
        "mask_colluders": colluders,
    }
    body = hand.manifest.model_copy(update=changes).encode()
    if fits:
        assert parse(Manifest, body).mask_colluders == colluders
    else:
        with pytest.raises(ProtocolError, match="malformed"):
            parse(Manifest, body)


def test_a_measurement_counts_on_the_shares_of_the_run_it_is_in(hand):
    """Its own number of virtual workers would claim the noise of workers that there are not."""
    counts = plan_measurements(
        config(measurements={"class_counts": {"classes": 3, "noise_multiplier": 5.0}}), hand.mechanism
    )
    computation = hand.manifest.computation.model_copy(update={"measurements": counts})
    assert parse(Computation, computation.encode()) == computation
    one = counts[0].mechanism
    for changes in (
        {"virtual_workers": 8000, "sigma": one.sigma / 30},
        {"max_participations": 1},
        {"num_examples": 8},
        {"honest_share": 0.5, "noise_multiplier": 0.1},
    ):
        thin = counts[0].model_copy(update={"mechanism": one.model_copy(update=changes)})
        with pytest.raises(ProtocolError, match="mechanism_bounds: the mechanism of class_counts has another"):
            parse(Computation, computation.model_copy(update={"measurements": (thin,)}).encode())


def test_a_key_context_differs_with_every_field_but_the_commitments_to_its_own_keys(hand):
    """`KeyContract.key_context`. The field of a subclass that is added tomorrow is in it, too."""
    manifest = hand.manifest
    service = ServiceContract(
        run_id="r", orchestrator_key=bytes(32), orchestrator_ml_dsa=b"", policy_digest=bytes(32), virtual_workers=8,
        known_answer=bytes(32), key_commitments=(b"c",),
    )  # fmt: skip
    others = {
        "computation": manifest.computation.model_copy(update={"frozen": bytes(32)}),
        "key_service": service,
        "account": "another",
        "run_id": "another",
        "keys_per_machine": 1,
        "mask_colluders": 1,
    }
    contexts = {manifest.key_context}
    for field in type(manifest).model_fields:
        changed = manifest.model_copy(update={field: others.get(field, b"another")})
        if field == "key_commitments":
            assert changed.key_context == manifest.key_context
        else:
            contexts.add(changed.key_context)
    keyed = manifest.model_copy(update={"key_service": service.with_keys((b"d",))})
    contexts.add(keyed.key_context)
    assert len(contexts) == 1 + len(type(manifest).model_fields), "all but one field, and the service's own keys"
    assert service.with_keys(()).key_context == service.key_context
    fields = {"policy_digest": b"p" * 32, "known_answer": b"k" * 32, "virtual_workers": 9, "run_id": "s"}
    of_service = {service.model_copy(update={name: value}).key_context for name, value in fields.items()}
    assert len(of_service | {service.key_context}) == 1 + len(fields)


def test_the_orchestrator_is_told_the_manifests_own_terms(hand):
    terms = run_terms(hand.manifest, hand.policy, hand.collateral)
    assert terms.manifest_digest == hand.manifest.digest()
    assert terms.contract == hand.manifest
    assert terms.contract.key_owners == hand.mechanism.virtual_workers
    assert (terms.policy, terms.collateral) == (hand.policy, hand.collateral)
