"""A worker whose vectors mix sums of earlier steps: what it computes again, and what it refuses."""

from dataclasses import replace

import numpy as np
import pytest

from raycloak.attestation.core.messages import Envelope, parse, seal
from raycloak.attestation.core.roster import Roster
from raycloak.metrics.errors import ProtocolError
from raycloak.workers.terms.binding import sum_digests
from raycloak.workers.terms.step_input import step_input
from raycloak.workers.vectors.payload import Header, VerifiedAttempt, open_header
from raycloak.workers.virtual_worker import VirtualWorkerComputer
from tests.mixed import BANDS, EPOCH, MixedRun
from tests.protocol import VIRTUAL_WORKERS, Asked

MOVED = {"worker-0": (0, 2, 4, 6, 7), "worker-1": (1, 3, 5)}
"""Virtual worker 7 is worker 0's from now on, which has no sum of it."""


def after(run: MixedRun, steps: int) -> Envelope:
    """Take a run through so many steps; return the roster of the next one."""
    roster = run.roster()
    for step in range(steps):
        roster = run.roster(step + 1, commit=run.advance(roster, step))
    return roster


@pytest.fixture
def third(tmp_path) -> tuple[MixedRun, Envelope]:
    """Return a run and the roster of its third step, which mixes two sums of before."""
    run = MixedRun(tmp_path)
    return run, after(run, 2)


@pytest.fixture
def moved(tmp_path) -> tuple[MixedRun, Envelope]:
    """Return the same, with a virtual worker on another host than before."""
    run = MixedRun(tmp_path)
    roster, step = run.roster(), 0
    for step in range(2):
        commit = run.advance(roster, step)
        if step == 1:
            run.place({"worker-0": (7,)})
            run.hosting = MOVED
        roster = run.roster(step + 1, commit=commit)
    return run, roster


@pytest.fixture
def computed(monkeypatch) -> list[tuple[str, int, int]]:
    """Return (kind, virtual worker, step) of all sums that are computed, in order."""
    seen: list[tuple[str, int, int]] = []
    vector, own_sum = VirtualWorkerComputer.vector, VirtualWorkerComputer.own_sum

    def spied(self, v, keys, step, *rest, **more):
        seen.append(("vector", v, step))
        return vector(self, v, keys, step, *rest, **more)

    def spied_sum(self, v, keys, step, *rest, **more):
        seen.append(("sum", v, step))
        return own_sum(self, v, keys, step, *rest, **more)

    monkeypatch.setattr(VirtualWorkerComputer, "vector", spied)
    monkeypatch.setattr(VirtualWorkerComputer, "own_sum", spied_sum)
    return seen


def header_of(run: MixedRun, name: str, asked: Asked, parameters=None) -> Header:
    reply, _ = run.ask(name, asked, parameters)
    assert reply.code == "ok"
    assert reply.header is not None
    return parse(Header, reply.header.body)


# --- what is computed


def test_a_worker_that_stays_computes_no_earlier_sum_again(third, computed):
    run, roster = third
    assert run.code("worker-0", run.request(roster, 2)) == "ok"
    hosted = run.hosting["worker-0"]
    # Each vector computes its own step's sum.
    assert computed == [(kind, v, 2) for v in hosted for kind in ("vector", "sum")]


def test_guarantee_a_new_host_computes_earlier_sums_of_their_models_as_they_were(moved, computed):
    """The sums' tags, and so the ledger's digests of them, are those that the old host signed."""
    run, roster = moved
    asked, given = run.with_past(run.request(roster, 2), 2)
    mine = header_of(run, "worker-0", asked, given)
    assert [(kind, v, step) for kind, v, step in computed if (v, kind) == (7, "sum")] == [
        ("sum", 7, 0),
        ("sum", 7, 1),
        ("sum", 7, 2),
    ]
    assert not [step for kind, v, step in computed if v != 7 and step < 2]
    theirs = header_of(run, "worker-1", run.request(roster, 2))
    digests = sum_digests([mine, theirs])
    assert digests[1:] == (run.sums[1][0], run.sums[0][0])
    assert run.sums[1][1:] == (run.sums[0][0],)


def test_models_that_are_given_to_a_worker_that_has_the_sums_change_nothing(third):
    run, roster = third
    asked, given = run.with_past(run.request(roster, 2), 1)
    honest = header_of(run, "worker-0", asked, given)
    assert [len(tags) for tags in honest.sum_tags] == [BANDS] * len(honest.virtual_workers)
    masked, _ = run.ask("worker-0", run.request(run.roster(2), 2))
    assert masked.header is not None
    assert parse(Header, masked.header.body).sum_tags == honest.sum_tags


def test_a_mix_starts_anew_at_each_key_epoch(tmp_path):
    """No sum is mixed into a step of another epoch, whose keys say nothing of it."""
    run = MixedRun(tmp_path)
    roster = after(run, EPOCH - 1)
    commit = run.advance(roster, EPOCH - 1)
    for name in run.workers:
        run.admit(name)
    run.place(run.hosting, epoch=1)
    asked = run.request(run.roster(EPOCH, commit=commit), EPOCH)
    header = header_of(run, "worker-0", asked)
    assert [len(tags) for tags in header.sum_tags] == [1] * len(header.virtual_workers)
    assert run.code("worker-1", *run.with_past(asked, 1)) == "past_mismatch"


# --- what is refused


def test_a_step_whose_past_is_missing_is_refused_and_computes_nothing(moved, computed):
    run, roster = moved
    assert run.code("worker-0", run.request(roster, 2)) == "past_missing"
    assert computed == []
    # The oldest of two is not there.
    asked, given = run.with_past(run.request(run.roster(2), 2), 1)
    assert run.code("worker-0", asked, given) == "past_missing"
    assert computed == []
    asked, given = run.with_past(run.request(run.roster(2), 2), 2)
    assert run.code("worker-0", asked, given) == "ok"


def test_more_models_than_a_step_mixes_are_refused(third, computed):
    run, roster = third
    asked, given = run.with_past(run.request(roster, 2), 2)
    assert run.code("worker-0", replace(asked, past=BANDS), (*given[:1], *given)) == "past_mismatch"
    # Three arrays are no two models and a third of one range each, nor four.
    assert run.code("worker-0", asked, given[1:]) == "past_mismatch"
    assert run.code("worker-0", replace(asked, past=1), given) == "past_mismatch"
    assert computed == []
    assert run.code("worker-0", asked, given) == "ok"


def test_a_first_step_has_no_past(tmp_path, computed):
    run = MixedRun(tmp_path)
    computed.clear()
    asked = run.request(run.roster())
    assert run.code("worker-0", replace(asked, past=1), (*run.parameters, *run.parameters)) == "past_mismatch"
    assert run.code("worker-0", replace(asked, input_before=b"x" * 32)) == "receipt_mismatch"
    assert computed == []


WRONG_PAST = {
    "the oldest model": lambda asked, given: (asked, (given[0] + np.float32(1), *given[1:])),
    "the newest of before": lambda asked, given: (asked, (given[0], given[1] + np.float32(1), given[2])),
    "the order": lambda asked, given: (asked, (given[1], given[0], given[2])),
    "the model itself": lambda asked, given: (asked, (*given[:2], given[2] + np.float32(1))),
    "the step before": lambda asked, given: (replace(asked, input_before=b"x" * 32), given),
    "no step before": lambda asked, given: (replace(asked, past=1, input_before=b""), given[1:]),
}


@pytest.mark.parametrize("name", WRONG_PAST)
def test_guarantee_another_past_has_another_input_and_nothing_is_computed_of_it(moved, computed, name):
    """The receipt is for the input that names every step before: nobody else's past is drawn from again."""
    run, roster = moved
    asked, given = run.with_past(run.request(roster, 2), 2)
    assert run.code("worker-0", *WRONG_PAST[name](asked, given)) == "receipt_mismatch"
    assert computed == []
    assert run.code("worker-0", asked, given) == "ok"


def test_a_worker_that_kept_its_sums_takes_no_other_step_before(third, computed):
    run, roster = third
    asked = run.request(roster, 2)
    assert run.code("worker-0", replace(asked, input_before=b"x" * 32)) == "receipt_mismatch"
    assert run.code("worker-0", replace(asked, input_before=b"")) == "receipt_mismatch"
    assert computed == []
    assert run.code("worker-0", asked) == "ok"


def test_sums_of_a_past_that_was_taken_back_are_not_mixed_into_another(third, computed):
    """A receipt for another past, as a ledger that forgot might sign: what was kept of the first one is not used."""
    run, roster = third
    other = b"x" * 32
    charged = run.receipt(2, input_digest=step_input(run.model_digest, (), other))
    asked = replace(run.request(roster, 2), receipt=charged, input_before=other)
    assert run.code("worker-0", asked) == "past_missing"
    assert computed == []


def test_parameters_of_an_earlier_step_that_change_while_they_are_read_are_refused(moved, monkeypatch):
    run, roster = moved
    asked, given = run.with_past(run.request(roster, 2), 2)
    genuine = VirtualWorkerComputer.own_sum

    def changed_meanwhile(self, v, keys, step, *rest, **more):
        given[1][:] = 0.25
        return genuine(self, v, keys, step, *rest, **more)

    monkeypatch.setattr(VirtualWorkerComputer, "own_sum", changed_meanwhile)
    assert run.code("worker-0", asked, given) == "parameters_mismatch"


# --- what a header says of it


def test_headers_that_say_less_or_more_of_the_mixed_sums_are_refused(third):
    run, roster = third
    request, _ = run.compute(roster, 2)
    own, attester = Roster.model_validate_json(roster.body), run.workers["worker-0"]._stage._attester
    attempt = VerifiedAttempt.of(own, run.digest, run.vector_ranges, run.mechanism.ring_bits, BANDS)
    header = open_header(request.headers[0], attempt, "worker-0")
    tags = header.sum_tags
    assert [len(each) for each in tags] == [BANDS] * (VIRTUAL_WORKERS // 2)
    for forged in (
        (),
        tags[1:],
        (*tags, tags[0]),
        (tags[0][:2], *tags[1:]),
        ((*tags[0], tags[0][0]), *tags[1:]),
        ((tags[0][0][:-1], *tags[0][1:]), *tags[1:]),
        ((b"", *tags[0][1:]), *tags[1:]),
    ):
        envelope = seal(header.model_copy(update={"sum_tags": forged}), attester.identity)
        with pytest.raises(ProtocolError, match=r"header_mismatch: .* differs in sum_tags"):
            open_header(envelope, attempt, "worker-0")
    for mixed in (0, BANDS - 1, BANDS + 1):
        with pytest.raises(ProtocolError, match="sum_tags"):
            open_header(request.headers[0], replace(attempt, mixed=mixed), "worker-0")
