"""A released step is accepted from the aggregators of its roster alone, and as they signed it."""

from collections.abc import Callable

import pytest

from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.core.lineage import ModelPoint, OpenedRelease, SignedStep, open_release
from raycloak.attestation.core.messages import seal
from raycloak.metrics.errors import ProtocolError
from tests.released import START, Signers, point_of, tensors_of

SIGNERS = Signers("run-a", b"m" * 32)
BINDING = b"b" * 32
ROSTER = SIGNERS.roster(4)
HONEST = SIGNERS.released(ROSTER, START, "next", BINDING)


def opened(released: SignedStep) -> OpenedRelease:
    return open_release(
        released,
        orchestrator_key=SIGNERS.orchestrator.public,
        run_id=SIGNERS.run_id,
        manifest_digest=SIGNERS.manifest_digest,
    )


def test_guarantee_an_opened_release_is_what_each_aggregator_signed_of_its_range() -> None:
    assert opened(HONEST) == OpenedRelease("gradient", 4, BINDING, START.parameters, START, point_of("next"))


def test_another_attempt_by_other_aggregators_gives_the_same() -> None:
    """Somebody else computed the same bytes again."""
    others = Signers(SIGNERS.run_id, SIGNERS.manifest_digest, SIGNERS.orchestrator)
    again = others.released(others.roster(4, attempt=1), START, "next", BINDING)
    assert opened(again) == opened(HONEST)


def _with_range(index: int, **changes: object) -> SignedStep:
    ranges = list(HONEST.ranges)
    ranges[index] = ranges[index].model_copy(update=changes)
    return HONEST.model_copy(update={"ranges": tuple(ranges)})


FORGED: dict[str, tuple[str, Callable[[], SignedStep]]] = {
    "other values": (
        "release_mismatch",
        lambda: _with_range(0, tensors=tuple(t.model_copy(update={"content": b"v"}) for t in HONEST.ranges[0].tensors)),
    ),
    "a tensor under another name": (
        "release_mismatch",
        lambda: _with_range(1, tensors=tuple(t.model_copy(update={"name": "x"}) for t in HONEST.ranges[1].tensors)),
    ),
    "another state": (
        "release_mismatch",
        lambda: _with_range(1, tensors=tuple(t.model_copy(update={"state": b"s"}) for t in HONEST.ranges[1].tensors)),
    ),
    "the release of another range": ("signature", lambda: _with_range(0, release=HONEST.ranges[1].release)),
    "a range left out": ("release_mismatch", lambda: HONEST.model_copy(update={"ranges": HONEST.ranges[:1]})),
    "no ranges": ("release_mismatch", lambda: HONEST.model_copy(update={"ranges": ()})),
    "ranges in another order": (
        "signature",
        lambda: HONEST.model_copy(update={"ranges": HONEST.ranges[::-1]}),
    ),
    "signed by another member": (
        "signature",
        lambda: SIGNERS.released(ROSTER, START, "next", BINDING, signed_by=SIGNERS.aggregators[::-1]),
    ),
    "signed by a stranger": (
        "signature",
        lambda: SIGNERS.released(ROSTER, START, "next", BINDING, signed_by=[IdentityKey.generate()] * 2),
    ),
    "a roster of a stranger's": (
        "signature",
        lambda: HONEST.model_copy(update={"roster": seal(ROSTER, IdentityKey.generate())}),
    ),
    "a roster of another attempt": (
        "release_mismatch",
        lambda: HONEST.model_copy(update={"roster": seal(SIGNERS.roster(4, attempt=1), SIGNERS.orchestrator)}),
    ),
    "a roster of another step": (
        "release_mismatch",
        lambda: HONEST.model_copy(update={"roster": seal(SIGNERS.roster(5), SIGNERS.orchestrator)}),
    ),
    "a roster of another run": (
        "release_mismatch",
        lambda: SIGNERS.released(SIGNERS.roster(4, run_id="run-b"), START, "next", BINDING),
    ),
    "a roster of another manifest": (
        "release_mismatch",
        lambda: SIGNERS.released(SIGNERS.roster(4, manifest_digest=b"n" * 32), START, "next", BINDING),
    ),
    "a roster without aggregators": (
        "release_mismatch",
        lambda: SIGNERS.released(SIGNERS.roster(4, members=()), START, "next", BINDING),
    ),
    "ranges of two bindings": (
        "release_mismatch",
        lambda: SIGNERS.released(ROSTER, START, "next", BINDING, first={"binding": b"c" * 32}),
    ),
    "ranges of two charges": (
        "release_mismatch",
        lambda: SIGNERS.released(ROSTER, START, "next", BINDING, first={"input_digest": b"c" * 32}),
    ),
    "ranges made of two models": (
        "release_mismatch",
        lambda: SIGNERS.released(ROSTER, START, "next", BINDING, first={"before": point_of("other")}),
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_release_with_a_part_of_anything_else_is_refused(name: str) -> None:
    code, forge = FORGED[name]
    with pytest.raises(ProtocolError) as refusal:
        opened(forge())
    assert refusal.value.code == code


def test_a_measurement_is_signed_by_its_values() -> None:
    one = Signers(SIGNERS.run_id, SIGNERS.manifest_digest, SIGNERS.orchestrator, SIGNERS.aggregators[:1])
    roster = one.roster(0, query="evaluation")
    values, model = ModelPoint.of_values(b"v" * 32), ModelPoint.of_values(START.parameters)
    whole = SIGNERS.released(roster, START, "next", BINDING, first={"before": model, "after": values})
    found = opened(whole.model_copy(update={"ranges": whole.ranges[:1]}))
    assert (found.query, found.before, found.after) == ("evaluation", model, values)


def test_a_model_without_state_differs_from_one_with_any_and_not_by_its_cut() -> None:
    whole = [tensor for part in tensors_of("next") for tensor in part]
    assert ModelPoint.of(whole) == point_of("next")
    plain = [tensor.model_copy(update={"state": b""}) for tensor in whole]
    assert ModelPoint.of(plain) == ModelPoint.initial(point_of("next").parameters) != point_of("next")
    swapped = [whole[0].model_copy(update={"state": whole[1].state}), *whole[1:]]
    assert ModelPoint.of(swapped).state != point_of("next").state
