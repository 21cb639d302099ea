"""A worker measures what it was ordered to measure, on the slices it hosts, and signs exactly that."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raycloak.attestation.core.evidence import CollateralBundle
from raycloak.attestation.core.keys import IdentityKey, Secret
from raycloak.attestation.core.messages import Envelope, open_envelope, parse, seal
from raycloak.attestation.core.roster import RosterMembers
from raycloak.attestation.orchestrator.evaluation_order import EvaluationOrder
from raycloak.attestation.policy.policy import KeyQuotas, Policy
from raycloak.metrics.errors import DatasetError, RefusedError
from raycloak.workers.evaluation import (
    EvaluationAnswer,
    EvaluationReply,
    Scorer,
    SliceScore,
    check_evaluation_form,
    open_answer,
)
from raycloak.workers.inputs.datasets import ArrayDataset, dataset_form, slice_ids
from raycloak.workers.inputs.sealed import seal_dataset
from raycloak.workers.models.losses import cross_entropy
from raycloak.workers.models.models import ModelSource, build_model
from tests.protocol import VIRTUAL_WORKERS, HandRun, examples, orchestrator_key

KEY, COUNT = Secret(b"e" * 32), 30
COUNTS = {v: len(slice_ids(v, VIRTUAL_WORKERS, COUNT)) for v in range(VIRTUAL_WORKERS)}


def split() -> ArrayDataset:
    return ArrayDataset(*(part[-COUNT:] for part in examples(70)))


class EvaluatedRun(HandRun):
    """A run by hand with a sealed split, after its first step."""

    def __init__(self, home: Path, quotas: KeyQuotas | None = None, **fields: Any) -> None:
        self.quotas = quotas
        home.mkdir(exist_ok=True)
        (home / "data.key").touch(mode=0o600)
        (home / "data.key").write_text(KEY.reveal().hex())
        dataset = {"kind": "sealed", "path": str(home / "split"), "key_file": str(home / "data.key"), "public": True}
        super().__init__(home, evaluation={"dataset": dataset}, **fields)

    def judged_by(self) -> tuple[Policy, CollateralBundle]:
        policy, collateral = super().judged_by()
        if self.quotas:
            policy = policy.model_copy(update={"key_quotas": self.quotas})
        seal_dataset(split(), VIRTUAL_WORKERS, policy.digest(), KEY, self.home / "split", "evaluation")
        return policy, collateral

    def order(self) -> Envelope:
        """Return the order for the model after the first step."""
        return self.orchestrator.order_evaluation(1, self.digest, self.hosting)

    def forged_order(self, **changes: Any) -> Envelope:
        """Return an order with changes, signed by the orchestrator's own key."""
        return seal(parse(EvaluationOrder, self.order().body).model_copy(update=changes), orchestrator_key())

    def evaluate(self, name: str, order: Envelope) -> EvaluationReply:
        """Return a worker's answer."""
        return self.workers[name].evaluate(order, *self.parameters)

    def log(self) -> list[tuple[str, dict[str, Any]]]:
        return [(entry.kind, entry.content) for entry in self.orchestrator._run.books.log.entries()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> EvaluatedRun:
    """Return one run for all tests; orders and answers change nothing but the log."""
    run = EvaluatedRun(tmp_path_factory.mktemp("evaluated"))
    run.orchestrator.commit((run.advance(run.roster()),))
    return run


def code_of(act: Callable[..., Any], *arguments: Any, **more: Any) -> str:
    with pytest.raises(RefusedError) as refused:
        act(*arguments, **more)
    return refused.value.code


def test_the_scores_of_the_slices_are_those_of_their_examples(run):
    order = run.order()
    module = build_model(ModelSource.of("tests.models:small_model"), ".", 0)
    whole = Scorer(module, cross_entropy, "accuracy", 256)
    whole.load(np.concatenate(run.parameters))
    found = {}
    for member in parse(EvaluationOrder, order.body).members:
        reply = run.evaluate(member.member_id, order)
        assert (reply.code, reply.member_id) == ("ok", member.member_id)
        found |= open_answer(reply.answer, parse(EvaluationOrder, order.body).digest(), member, COUNTS)
    ids = {v: slice_ids(v, VIRTUAL_WORKERS, COUNT) for v in range(VIRTUAL_WORKERS)}
    totals = {v: scores.total for v, scores in found.items()}
    assert totals == {v: whole.scores(split(), own).total for v, own in ids.items()}
    assert 0 < sum(totals.values()) < COUNT


def test_an_order_is_for_committed_parameters_alone_and_in_the_log_before_it_leaves(run):
    """Otherwise the driver could have any parameters measured, and read examples off exact results."""
    order = open_envelope(EvaluationOrder, run.order(), run.orchestrator_key.ed25519)
    kind, body = run.log()[-1]
    stated = {"finished_steps": 1, "model_digest": run.digest.hex(), "digest": order.digest().hex()}
    stated["members"] = RosterMembers(members=order.members).digest().hex()
    assert (kind, body) == ("evaluation_ordered", stated)
    before = run.log()
    for steps, digest in ((1, bytes(32)), (0, run.manifest.computation.initial_parameters), (2, run.digest)):
        assert code_of(run.orchestrator.order_evaluation, steps, digest, run.hosting) == "not_committed"
    hosting = run.hosting
    partly = {name: hosting[name] for name in list(hosting)[:-1]}
    twice = hosting | {"worker-0": (*hosting["worker-0"], hosting["worker-1"][0])}
    for wrong in (partly, twice):
        assert code_of(run.orchestrator.order_evaluation, 1, run.digest, wrong) == "order_mismatch"
    assert code_of(run.orchestrator.order_evaluation, 1, run.digest, {"nobody": (0,)}) == "evidence_expired"
    assert run.log() == before


def test_a_worker_measures_only_what_its_orchestrator_ordered(run):
    honest = run.order()
    own = orchestrator_key()
    assert run.evaluate("worker-0", honest).code == "ok"
    stranger = seal(parse(EvaluationOrder, honest.body), IdentityKey.generate())
    assert run.evaluate("worker-0", stranger) == EvaluationReply(member_id="worker-0", code="signature")
    assert run.evaluate("worker-0", Envelope(body=honest.body + b" ", signature=honest.signature)).code == "signature"
    members = parse(EvaluationOrder, honest.body).members
    for changes, code in (
        ({"run_id": "0" * 16}, "order_mismatch"),
        ({"manifest_digest": bytes(32)}, "order_mismatch"),
        ({"members": members[1:]}, "order_mismatch"),
        ({"members": (*members, members[0])}, "order_mismatch"),
        ({"members": (members[0].model_copy(update={"identity_key": bytes(32)}), *members[1:])}, "roster_own_entry"),
        ({"members": (members[0].model_copy(update={"member_id": "worker-9"}), *members[1:])}, "order_mismatch"),
        ({"model_digest": bytes(32)}, "parameters_mismatch"),
    ):
        assert run.evaluate("worker-0", run.forged_order(**changes)) == EvaluationReply(
            member_id="worker-0", code=code
        ), changes
    assert seal(parse(EvaluationOrder, honest.body), own) == honest, "the forger signs as the orchestrator does"


def test_a_worker_measures_no_parameters_but_those_of_the_order(run):
    changed = run.parameters[0].copy()
    changed[0] += 1
    assert run.workers["worker-0"].evaluate(run.order(), changed).code == "parameters_mismatch"
    assert run.workers["worker-0"].evaluate(run.order(), changed[:-1]).code != "ok"


def test_a_worker_measures_no_slice_whose_key_it_was_not_given(run):
    members = parse(EvaluationOrder, run.order().body).members
    swapped = [
        each.model_copy(update={"virtual_workers": members[1 - i].virtual_workers})
        for i, each in enumerate(members[:2])
    ]
    order = run.forged_order(members=(*swapped, *members[2:]))
    assert run.evaluate("worker-0", order) == EvaluationReply(member_id="worker-0", code="slice_sealed")


def test_a_worker_without_a_sealed_split_refuses_every_order(tmp_path):
    plain = HandRun(tmp_path, workers=2)
    plain.orchestrator.commit((plain.advance(plain.roster()),))
    order = plain.orchestrator.order_evaluation(1, plain.digest, plain.hosting)
    assert plain.workers["worker-0"].evaluate(order, *plain.parameters).code == "evaluation_unknown"
    assert plain.new_worker("worker-9").evaluate(order, *plain.parameters).code == "evaluation_unknown"


def test_what_a_model_raises_stays_in_the_worker(run, monkeypatch):
    def fail(*_):
        raise ValueError("label 7")

    monkeypatch.setattr(Scorer, "scores", fail)
    assert run.evaluate("worker-0", run.order()) == EvaluationReply(member_id="worker-0", code="worker_error")


def test_only_an_answer_to_this_order_with_all_examples_of_the_right_slices_counts(run):
    order = parse(EvaluationOrder, run.order().body)
    member, other = order.members[:2]
    reply = run.evaluate(member.member_id, run.order())
    assert reply.answer is not None
    answer, key = parse(EvaluationAnswer, reply.answer.body), run.workers[member.member_id]._attester.identity
    open_answer(reply.answer, order.digest(), member, COUNTS)
    assert code_of(open_answer, reply.answer, order.digest(), other, COUNTS) == "signature"
    first = answer.scores[0]
    short = SliceScore(virtual_worker=first.virtual_worker, total=b"", count=first.count)
    for changes, code in (
        ({"order": bytes(32)}, "answer_mismatch"),
        ({"member_id": other.member_id}, "answer_mismatch"),
        ({"scores": answer.scores[1:]}, "answer_mismatch"),
        ({"scores": (first, *answer.scores)}, "answer_mismatch"),
        ({"scores": (first, first, *answer.scores[2:])}, "answer_mismatch"),
        ({"scores": answer.scores[::-1]}, "answer_mismatch"),
        ({"scores": (first.model_copy(update={"count": first.count - 1}), *answer.scores[1:])}, "answer_mismatch"),
        ({"scores": (short, *answer.scores[1:])}, "malformed"),
        ({"scores": (first.model_copy(update={"content": bytes(32)}), *answer.scores[1:])}, "answer_mismatch"),
        ({"scores": (first.model_copy(update={"classes": ((0, 1, 2),)}), *answer.scores[1:])}, "answer_mismatch"),
    ):
        forged = seal(answer.model_copy(update=changes), key)
        assert code_of(open_answer, forged, order.digest(), member, COUNTS) == code, changes


def test_evaluation_keys_have_a_quota_and_log_entries_of_their_own(tmp_path):
    """A split that is asked for too often is refused before any other key leaves."""
    run = EvaluatedRun(tmp_path, quotas=KeyQuotas(per_member=1, per_run=10), workers=2)
    released = [body["kind"] for kind, body in run.log() if kind == "released"]
    assert released == ["evaluation", "virtual_worker"] * 2
    run.orchestrator._run.books.draws._connection.execute("DELETE FROM draws WHERE kind = 'virtual_worker'")
    before = run.log()
    assert code_of(run.orchestrator.release, "worker-0", 0, run.hosting["worker-0"]) == "release_denied"
    refused = {"member_id": "worker-0", "kind": "evaluation", "code": "release_denied"}
    assert run.log() == [*before, ("release_refused", refused)]


def test_a_worker_forgets_the_slices_that_it_has_no_keys_of_in_the_next_epoch(tmp_path):
    run = EvaluatedRun(tmp_path, workers=2, epoch_steps=1)
    opened = run.workers["worker-0"]._stage.planned.workload.split.dataset
    assert set(opened._open) == set(run.hosting["worker-0"])
    run.admit("worker-0")
    run.place({"worker-0": run.hosting["worker-0"][:1]}, epoch=1)
    assert set(opened._open) == set(run.hosting["worker-0"][:1])


def test_a_worker_takes_no_evaluation_keys_in_the_place_of_others(run):
    """Keys of another split do not serve either."""
    name, hosted = "worker-0", run.hosting["worker-0"]
    release = run.orchestrator.release(name, 0, hosted, run.workers[name]._stage._watch.length)
    for wrong in (
        release.model_copy(update={"evaluation": release.model_copy(update={"evaluation": None})}),
        release.model_copy(update={"slices": release.evaluation}),
    ):
        assert code_of(run.workers[name].accept_keys, wrong) == "key_package_mismatch"
    run.workers[name].accept_keys(release)


def test_a_split_of_other_shapes_is_refused_before_anything_is_spent():
    form = dataset_form(split())
    check_evaluation_form(form, form.model_copy(update={"num_examples": 5}))
    for changes in (
        {"feature_shape": (7,)},
        {"feature_dtype": "int64"},
        {"label_shape": (2,)},
        {"label_dtype": "float32"},
    ):
        with pytest.raises(DatasetError, match="evaluation_form"):
            check_evaluation_form(form.model_copy(update=changes), form)


def test_a_loss_that_is_not_finite_is_told_as_it_is():
    """As in the clear: a model that diverged has no other mean."""
    data = ArrayDataset(np.full((3, 1), np.inf, np.float32), np.zeros((3, 1), np.float32))
    scorer = Scorer(torch.nn.Linear(1, 1), lambda output, labels: (output - labels)[:, 0].square(), "loss", 256)
    total = scorer.scores(data, np.arange(3)).total
    assert not np.isfinite(total)
