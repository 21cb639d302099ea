"""The mechanism's digest covers everything that privacy depends on, and nothing about hosting."""

import math
import pickle
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from raycloak.attestation.core.messages import checked, parse
from raycloak.metrics.errors import ProtocolError
from raycloak.workers.terms.mechanism import Mechanism, check_together, honest_share_of

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
    "clamp": 14.0,
    "sigma": 2e7,
    "micro_batch_size": 56,
    "micro_batches": 2,
    "overflow_probability": 1e-20,
}
MECHANISM = Mechanism(**VALUES)


def changed(name: str) -> Any:
    """Return another admissible value of a field."""
    value = VALUES[name]
    others = {"ring_bits": 64, "query": "evaluation", "gamma_log2": -20}
    if name in others:
        return others[name]
    return (not value) if isinstance(value, bool) else value * 2


@pytest.mark.parametrize("name", sorted(VALUES))
def test_changing_any_field_changes_the_digest(name: str):
    assert Mechanism(**VALUES | {name: changed(name)}).digest() != MECHANISM.digest()


def test_every_field_is_covered_by_this_test():
    fixed = {"unit", "rows_per_unit", "adjacency", "accountant", "max_participations", "mask_split_probability"}
    fixed |= {"clipping", "coefficients", "copies"}
    assert set(Mechanism.model_fields) == set(VALUES) | fixed


def test_units_of_several_rows_are_in_the_bytes_and_one_row_of_each_example_is_not():
    persons = Mechanism(**VALUES, unit="patient_id", rows_per_unit=8)
    assert parse(Mechanism, persons.encode()) == persons
    assert persons.micro_batch_rows == 8 * MECHANISM.micro_batch_size
    digests = {each.digest() for each in (MECHANISM, persons, persons.model_copy(update={"rows_per_unit": 1}))}
    assert len(digests) == 3
    assert b"rows_per_unit" not in MECHANISM.encode()
    assert b"copies" not in persons.encode()
    seen_twice = Mechanism(**VALUES, unit="patient_id", rows_per_unit=8, copies=2)
    assert (seen_twice.rows_chosen, seen_twice.digest() in digests) == (4, False)


def test_what_a_client_sends_has_no_unit_of_several_rows():
    for changes in ({"unit": "person"}, {"rows_per_unit": 2}):
        with pytest.raises(ValidationError, match="a unit of its own"):
            Mechanism(**VALUES | {"sample_rate": 1.0, "max_participations": 3} | changes)


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
    [("accountant", "zcdp"), ("adjacency", "replace_one"), ("unit", ""), ("ring_bits", 24), ("sigma", math.nan)],
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


# Each is a number that proof 001, 002, 004 or 006 has no place for, or noise that the shares do not add up to.
OUT_OF_BOUNDS: list[tuple[str, Any]] = [
    ("num_examples", 0),
    ("rows_per_unit", 0),
    ("copies", 0),
    ("copies", 2),
    ("num_examples", 10**4000),
    ("virtual_workers", 0),
    ("virtual_workers", 10**400),
    ("virtual_workers", -8),
    ("sample_rate", 0.0),
    ("sample_rate", 1.0000001),
    ("steps", 0),
    ("max_grad_norm", 2.0**-101),
    ("max_grad_norm", 2.0**101),
    ("max_grad_norm", -1.5),
    ("noise_multiplier", 0.0),
    ("noise_multiplier", -2.5),
    ("noise_multiplier", 13.0),
    ("honest_share", 0.0),
    ("honest_share", -0.5),
    ("honest_share", 1.0000001),
    ("honest_share", 1.1e6),
    ("honest_share", 0.51),
    ("expected_batch_size", 0.0),
    ("expected_batch_size", -1.0),
    ("dimension", 0),
    ("dimension", 2**34 + 1),
    ("gamma_log2", -121),
    ("gamma_log2", 2000),
    ("gamma_log2", 10**400),
    ("gamma_log2", -25),
    ("clamp", 0.0),
    ("clamp", -14.0),
    ("clamp", 14.0 + 2.0**-22),
    ("clamp", 200.0),
    ("sigma", 15.0),
    ("sigma", 3.9e6),
    ("sigma", 5e7),
    ("sigma", 2.0**41),
    ("sigma", 1e300),
    ("clamp", 1e300),
    ("noise_multiplier", 1e300),
    ("sigma", -2e7),
    ("micro_batch_size", 0),
    ("micro_batches", -1),
    ("overflow_probability", -1e-20),
    ("overflow_probability", 1.0),
    ("mask_split_probability", -(2.0**-40)),
    ("mask_split_probability", 1.0),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_BOUNDS)
def test_every_number_is_within_the_bounds_that_its_proof_needs(name: str, value: Any):
    """Whoever reads one refuses it: as an object, in bytes, and as a copy that nobody has checked."""
    forged = MECHANISM.model_copy(update={name: value})
    for read in (
        lambda: Mechanism(**VALUES | {name: value}),
        lambda: parse(Mechanism, forged.encode()),
        lambda: checked(Mechanism, pickle.loads(pickle.dumps(forged))),
    ):
        with pytest.raises(ProtocolError, match="mechanism_bounds: a mechanism of query gradient has "):
            read()
    assert checked(Mechanism, MECHANISM) == MECHANISM


def test_a_private_mechanism_has_the_noise_that_it_claims():
    """To the last bit, in exact arithmetic."""
    needed = (Fraction(2.5) * (Fraction(1.5) * 2**21 + Fraction(math.isqrt(4810 << 100) + 1, 2**50))) ** 2 + 4
    least = math.sqrt(needed / 4)
    while 4 * Fraction(least) ** 2 < needed:
        least = math.nextafter(least, math.inf)
    assert Mechanism(**VALUES | {"sigma": math.nextafter(least, math.inf)}).noise_multiplier == 2.5
    short = math.nextafter(math.nextafter(least, 0), 0)
    with pytest.raises(ProtocolError, match=r"sigma .*: it does not pay for the noise that is claimed"):
        Mechanism(**VALUES | {"sigma": short})
    # Nothing is claimed of a release without noise.
    Mechanism(**VALUES | {"private": False, "sigma": 0.0, "noise_multiplier": 0.0})


@given(st.integers(1, 4096), st.data())
def test_a_share_counts_on_no_more_virtual_workers_than_are_left(virtual_workers: int, data: Any):
    uncounted = data.draw(st.integers(0, virtual_workers - 1))
    share = honest_share_of(virtual_workers, uncounted)
    assert 0 < share <= 1
    assert virtual_workers * Fraction(share) <= virtual_workers - uncounted
    assert round(virtual_workers * (1 - share)) == uncounted


TOGETHER: dict[str, Any] = {"query": "class_counts", "sample_rate": 1.0, "max_grad_norm": 1.0}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"virtual_workers": 16}, "virtual_workers"),
        ({"honest_share": 1.0}, "honest_share"),
        ({"num_examples": 100}, "num_examples"),
        ({"accountant": "pld"}, "accountant"),
        ({"max_participations": 1}, "max_participations"),
        ({"mask_split_probability": 2.0**-40}, "masks"),
        ({"query": "gradient"}, "each query"),
    ],
)
def test_mechanisms_of_one_run_count_the_same_examples_shares_and_participations(changes: dict[str, Any], named: str):
    """Workers take these from the gradient's alone: another number would claim noise that nobody adds."""
    check_together([MECHANISM, Mechanism(**VALUES | TOGETHER)])
    with pytest.raises(ProtocolError, match=f"mechanism_bounds: .*{named}"):
        check_together([MECHANISM, Mechanism(**VALUES | TOGETHER | changes)])
    with pytest.raises(ProtocolError, match="mechanism_bounds"):
        check_together([Mechanism(**VALUES | TOGETHER)])


def test_what_delta_pays_for_masks_is_in_the_digest_and_left_out_of_the_bytes_where_it_is_nothing():
    paid = Mechanism(**VALUES | {"mask_split_probability": 2.0**-40})
    assert paid.digest() != MECHANISM.digest()
    assert parse(Mechanism, paid.encode()) == paid
    assert b"mask_split_probability" not in MECHANISM.encode()


def test_normalised_clipping_is_in_the_digest_and_of_private_gradients_alone():
    normalised = Mechanism(**VALUES | {"clipping": "normalised"})
    assert normalised.digest() != MECHANISM.digest()
    assert parse(Mechanism, normalised.encode()) == normalised
    assert b"clipping" not in MECHANISM.encode()
    for other in (TOGETHER, {"private": False, "sigma": 0.0, "noise_multiplier": 0.0}):
        with pytest.raises(ProtocolError, match=r"mechanism_bounds: .* only gradients that are private are normalised"):
            Mechanism(**VALUES | other | {"clipping": "normalised"})


def test_the_bound_on_participations_is_in_the_digest():
    without = Mechanism(**VALUES | {"sample_rate": 1.0})
    assert len({without.digest(), sent(3).digest(), sent(4).digest()}) == 3
    assert parse(Mechanism, sent(3).encode()) == sent(3)


def test_a_mechanism_of_an_earlier_version_keeps_its_bytes_and_its_digest():
    assert b"max_participations" not in MECHANISM.encode()
    # As it was before there was such a field.
    assert MECHANISM.digest().hex() == "e3138a91216c4d2cde0df934d814d68c11ee26d89fc37d22385f64cd97ec4813"
    with pytest.raises(ProtocolError, match="canonical"):
        parse(Mechanism, MECHANISM.encode().replace(b'"max_grad', b'"max_participations":null,"max_grad'))


@pytest.mark.parametrize("changes", [{"sample_rate": 0.25}, {"sample_rate": 1.0, "private": False}])
def test_a_bound_without_a_gaussian_sum_of_all_that_was_sent_is_refused(changes: dict[str, Any]):
    with pytest.raises(ValidationError, match="left to chance"):
        Mechanism(**VALUES | changes | {"max_participations": 3})


def test_one_example_takes_part_in_no_more_releases_than_the_bound():
    assert [sent(3).participations(count) for count in (0, 1, 3, 4, 200)] == [0, 1, 3, 3, 3]
    assert MECHANISM.participations(200) == 200
