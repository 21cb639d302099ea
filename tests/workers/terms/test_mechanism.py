"""The mechanism's digest covers everything that privacy depends on, and nothing about hosting."""

import math
from typing import Any

import pytest
from pydantic import ValidationError

from raycloak.attestation.core.messages import parse
from raycloak.metrics.errors import ProtocolError
from raycloak.workers.terms.mechanism import Mechanism

VALUES: dict[str, Any] = {
    "query": "gradient",
    "private": True,
    "num_examples": 1437,
    "virtual_workers": 8,
    "sample_rate": 0.25,
    "steps": 200,
    "max_grad_norm": 1.5,
    "noise_multiplier": 2.5,
    "honest_share": 0.5,
    "expected_batch_size": 359.25,
    "dimension": 4810,
    "ring_bits": 32,
    "gamma_log2": -21,
    "clamp": 112.0,
    "sigma": 1.8e6,
    "micro_batch_size": 56,
    "micro_batches": 2,
    "overflow_probability": 1e-20,
}
MECHANISM = Mechanism(**VALUES)


def changed(name: str) -> Any:
    """Return another admissible value of a field."""
    value = VALUES[name]
    if name in ("ring_bits", "query"):
        return {"ring_bits": 64, "query": "evaluation"}[name]
    return (not value) if isinstance(value, bool) else value * 2


@pytest.mark.parametrize("name", sorted(VALUES))
def test_changing_any_field_changes_the_digest(name: str):
    assert Mechanism(**VALUES | {name: changed(name)}).digest() != MECHANISM.digest()


def test_every_field_is_covered_by_this_test():
    fixed = {"unit", "adjacency", "accountant", "max_participations"}
    assert set(Mechanism.model_fields) == set(VALUES) | fixed


@pytest.mark.parametrize("name", ["num_workers", "min_workers", "aggregators", "use_gpu", "hosting"])
def test_hosting_and_speed_are_not_part_of_it(name: str):
    with pytest.raises(ValidationError):
        Mechanism(**VALUES, **{name: 1})


def test_it_cannot_be_changed_in_place():
    with pytest.raises(ValidationError):
        MECHANISM.noise_multiplier = 0.0


def test_bytes_round_trip():
    assert parse(Mechanism, MECHANISM.encode()) == MECHANISM


@pytest.mark.parametrize(
    ("name", "value"),
    [("accountant", "zcdp"), ("adjacency", "replace_one"), ("unit", "user"), ("ring_bits", 24), ("sigma", math.nan)],
)
def test_what_the_accountant_does_not_know_is_refused(name: str, value: Any):
    with pytest.raises(ValidationError):
        Mechanism(**VALUES | {name: value})


def test_sensitivity_is_the_clip_and_what_rounding_adds():
    assert MECHANISM.gamma == 2.0**-21
    assert MECHANISM.sensitivity == pytest.approx(1.5 + 2.0**-21 * math.sqrt(4810), rel=1e-15)
    assert MECHANISM.sensitivity > MECHANISM.max_grad_norm


def sent(bound: int) -> Mechanism:
    return Mechanism(**VALUES | {"sample_rate": 1.0, "max_participations": bound})


def test_the_bound_on_participations_is_in_the_digest():
    without = Mechanism(**VALUES | {"sample_rate": 1.0})
    assert len({without.digest(), sent(3).digest(), sent(4).digest()}) == 3
    assert parse(Mechanism, sent(3).encode()) == sent(3)


def test_a_mechanism_of_an_earlier_version_keeps_its_bytes_and_its_digest():
    assert b"max_participations" not in MECHANISM.encode()
    # As it was before there was such a field.
    assert MECHANISM.digest().hex() == "80bb5ea0a9889e6661c97c3cb4b531cf8e1d95dade31d636c62465e15c3044fc"
    with pytest.raises(ProtocolError, match="canonical"):
        parse(Mechanism, MECHANISM.encode().replace(b'"max_grad', b'"max_participations":null,"max_grad'))


@pytest.mark.parametrize("changes", [{"sample_rate": 0.25}, {"sample_rate": 1.0, "private": False}])
def test_a_bound_without_a_gaussian_sum_of_all_that_was_sent_is_refused(changes: dict[str, Any]):
    with pytest.raises(ValidationError, match="left to chance"):
        Mechanism(**VALUES | changes | {"max_participations": 3})


def test_one_example_takes_part_in_no_more_releases_than_the_bound():
    assert [sent(3).participations(count) for count in (0, 1, 3, 4, 200)] == [0, 1, 3, 3, 3]
    assert MECHANISM.participations(200) == 200
