"""The desk's decisions, with drivers that follow its commands: order, refusals, cancellation, loss, places."""

import json
from hashlib import sha256

import pytest

from raycloak.attestation.processes.failure import Failed
from raycloak.attestation.processes.program import Exited
from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.service.operation_queues import MOST_SAMPLES
from raycloak.coordinator.service.pipe import Computed, Ended, HeldStep, Opened, Over, ReleasedStep, Spent
from raycloak.coordinator.service.sampling.requests import wrong_field
from raycloak.metrics.service_errors import (
    BudgetExceededError,
    FutureFailedError,
    ServiceError,
    ServiceNotFoundError,
    ServicePermissionError,
    ServiceQueueFullError,
    ServiceStateError,
    ServiceValidationError,
)
from tests.coordinator.service.scripted import GIVEN, SENT, TEXT, World, digest, released

FB, OPT, SAVE, LOAD, SAMPLE = "forward_backward", "optim_step", "save_state", "load_state", "sample"
TEXTS = {"prompts": ["a"], "max_tokens": 3, "top_p": 1.0, "completions": 1}


def steps(site, client, count):
    """Submit so many steps; return their operations."""
    return [(site.submit(client, FB), site.submit(client, OPT)) for _ in range(count)]


def test_a_loop_gives_the_results_in_their_order(site):
    client = site.create()
    assert site.client(client).status == "INITIALIZING"
    pairs = steps(site, client, 3)
    assert site.client(client).queued == 6
    site.run()
    for number, (forward, optim) in enumerate(pairs):
        forward, optim = site.get(forward), site.get(optim)
        assert (forward.state, optim.state) == ("done", "done")
        assert forward.forward_backward.step == number
        assert optim.optim_step.step == number + 1
        assert optim.optim_step.model_digest == digest(number + 1)
        assert not forward.forward_backward.HasField("loss")
        assert forward.forward_backward.dp_metrics.epsilon_spent == pytest.approx(0.1 * (number + 1))
        assert forward.forward_backward.dp_metrics.steps_charged == number + 1
    shown = site.client(client)
    assert (shown.status, shown.step, shown.queued, shown.evidence_class) == ("READY", 3, 0, "simulated")
    assert json.loads(shown.manifest_json) == {"run_id": "run0"}
    assert site.ended.counted == [(kind, "done") for _ in range(3) for kind in (FB, OPT)]


def test_nothing_is_charged_before_forward_backward_or_released_before_optim_step(site):
    client = site.create()
    site.run()
    assert site.world.facts("run0", "charge") == []
    forward = site.submit(client, FB)
    site.run()
    assert site.get(forward).state == "done"
    assert (site.world.facts("run0", "charge"), site.world.facts("run0", "release")) == ([[0]], [])
    site.submit(client, OPT)
    site.run()
    assert (site.world.facts("run0", "charge"), site.world.facts("run0", "release")) == ([[0]], [[0]])


def test_one_step_is_handed_to_the_driver_at_a_time(site):
    """So that a queued one can be cancelled with nothing charged."""
    client = site.create()
    site.run()
    pairs = steps(site, client, 2)
    states = [[site.get(each).state for each in pair] for pair in pairs]
    assert states == [["running", "running"], ["queued", "queued"]]


REFUSED = {
    "a second forward_backward": ([FB], FB, {}, ServiceStateError, "step_pending"),
    "optim_step without one": ([], OPT, {}, ServiceStateError, "no_gradient"),
    "a second optim_step": ([FB, OPT], OPT, {}, ServiceStateError, "no_gradient"),
    "an optim_step after the last": ([FB, OPT] * 4, OPT, {}, ServiceStateError, "steps_done"),
    "a step without noise": ([FB], OPT, {"apply_dp_noise": False}, ServiceValidationError, "invalid"),
    "a save inside a step": ([FB], SAVE, {}, ServiceStateError, "step_pending"),
    "a load inside a step": ([FB], LOAD, {"artifact_id": "x"}, ServiceStateError, "step_pending"),
    "an unknown artifact": ([], LOAD, {"artifact_id": "c0.1"}, ServiceNotFoundError, "not_found"),
    "a sample of no text model": ([], SAMPLE, TEXTS, ServiceValidationError, "invalid"),
    "too many notes": ([], SAVE, {"metadata": {str(n): "" for n in range(33)}}, ServiceValidationError, "invalid"),
    "a step after the last": ([FB, OPT] * 4, FB, {}, ServiceStateError, "steps_done"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_call_that_does_not_fit_is_refused_and_the_client_goes_on(site, case):
    before, kind, fields, error, code = REFUSED[case]
    client = site.create()
    site.run()
    for each in before:
        site.submit(client, each)
    queued, charged = site.client(client).queued, site.world.facts("run0", "charge")
    with pytest.raises(error) as refusal:
        site.submit(client, kind, **fields)
    assert refusal.value.code == code
    assert (site.client(client).queued, site.world.facts("run0", "charge")) == (queued, charged)
    site.run()
    assert site.client(client).status in ("READY", "BUSY")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompts", []),
        ("prompts", [""]),
        ("prompts", ["a" * 2**19, "b" * (2**19 + 1)]),
        ("max_tokens", 0),
        ("max_tokens", 4097),
        ("temperature", -1.0),
        ("temperature", 0.009),
        ("temperature", 101.0),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("top_k", 2**31),
        ("stop", ["x"] * 17),
        ("stop", [""]),
        ("stop", ["x" * 257]),
        ("completions", 0),
        ("completions", 65),
    ],
)
def test_a_sample_out_of_range_names_its_field_and_is_not_queued(site, field, value):
    client = site.create(config=TEXT)
    with pytest.raises(ServiceValidationError) as refusal:
        site.submit(client, SAMPLE, **{**TEXTS, field: value})
    assert (refusal.value.code, refusal.value.field) == ("invalid", field)
    assert site.client(client).queued == 0


def test_a_sample_at_all_its_bounds_is_taken_by_desk_and_sampler(site):
    client = site.create(config=TEXT)
    most = {"max_tokens": 4096, "temperature": 100.0, "top_p": 1.0, "top_k": 2**31 - 1, "seed": 2**64 - 1}
    stops = ["x" * 256] * 16
    for fields in (
        {**most, "prompts": ["a"] * 32, "stop": stops, "completions": 2},
        {**TEXTS, "prompts": ["a" * 2**20], "temperature": 0.01, "top_p": 1e-9, "completions": 64},
    ):
        site.submit(client, SAMPLE, **fields)
        assert wrong_field(wire.Sample(**fields)) is None


def test_public_data_may_go_without_noise(site):
    client = site.create(dataset="open", dp_config={"enabled": False})
    forward = site.submit(client, FB)
    optim = site.submit(client, OPT, apply_dp_noise=False)
    site.run()
    assert site.get(optim).state == "done"
    assert not site.client(client).dp_metrics.private
    counted = site.get(forward).forward_backward
    assert (counted.loss, counted.tokens) == (0.25, 12)
    assert (site.get(optim).optim_step.loss, site.get(optim).optim_step.grad_norm) == (0.25, 1.5)
    assert rates(site) == [12 / 0.5]


def rates(site):
    """Return the tokens per second of all steps that were told of as released; None where none are told."""
    changes = [each for _, each in site.published if isinstance(each, wire.Change)]
    told = [each.progress for each in changes if each.progress.phase == "released"]
    return [each.tokens_per_second if each.HasField("tokens_per_second") else None for each in told]


def test_a_private_step_has_no_facts_of_its_examples(site):
    client = site.create()
    forward, optim = site.submit(client, FB), site.submit(client, OPT)
    site.run()
    counted, stepped = site.get(forward).forward_backward, site.get(optim).optim_step
    assert not any(counted.HasField(name) for name in ("loss", "grad_norm", "tokens"))
    assert not any(stepped.HasField(name) for name in ("loss", "grad_norm"))
    assert rates(site) == [None]


def test_a_repeated_key_gives_the_same_operation_and_another_request_under_it_is_refused(site):
    client = site.create(key="k")
    assert site.create(key="k") == client
    with pytest.raises(ServiceValidationError, match="idempotency_key"):
        site.create(key="k", steps=5)
    first = site.submit(client, FB, key="one")
    assert site.submit(client, FB, key="one") == first
    with pytest.raises(ServiceValidationError, match="idempotency_key"):
        site.submit(client, OPT, key="one")
    with pytest.raises(ServiceValidationError, match="idempotency_key"):
        site.submit(client, OPT, key="x" * 200)
    assert site.client(client).queued == 1
    # Another tenant's keys are its own.
    assert site.create("south", key="k") != client


def test_another_tenants_things_are_answered_as_what_does_not_exist(site):
    client = site.create(config=TEXT)
    operation = site.submit(client, FB)
    site.submit(client, OPT)
    save = site.submit(client, SAVE)
    site.run()
    assert site.get(save).state == "done"
    own = site.create("south", config=TEXT)
    absent = "c" + "0" * 16
    desk, artifact = site.desk, site.get(save).save_state.artifact.artifact_id

    def submitted(client_id):
        return site.submit(client_id, FB, tenant="south")

    def said(call, *arguments):
        with pytest.raises(ServiceNotFoundError) as refusal:
            site.ask(call, *arguments) if call is not submitted else call(*arguments)
        return str(refusal.value), refusal.value.resource

    for call in (desk.client, desk.close_client, desk.artifacts):
        assert said(call, "south", client) == said(call, "south", absent)
    assert said(desk.changes, "south", client, 0) == said(desk.changes, "south", absent, 0)
    assert said(submitted, client) == said(submitted, absent)
    for call in (desk.operation, desk.cancel):
        of_other = said(call, "south", own, operation.operation_id)
        assert of_other == said(call, "south", own, f"{own}.99")
        assert said(call, "south", client, operation.operation_id) == said(call, "south", absent, f"{absent}.0")
    assert said(desk.artifact, "south", own, artifact) == said(desk.artifact, "south", own, f"{own}.7")
    with pytest.raises(ServiceNotFoundError) as refusal:
        site.submit(own, LOAD, tenant="south", artifact_id=artifact)
    assert refusal.value.resource == "artifact"
    assert [each.client_id for each in site.ask(desk.clients, "south")] == [own]


def test_a_list_of_clients_is_small_however_much_they_were_given(site):
    """A tenant whose list is larger than a message could not list its clients any more."""
    large = {**SENT, "key_service": SENT["key_service"] | {"contract": json.dumps({"x": "y" * 2**19})}}
    clients = [site.create(config=large, metadata={"number": str(number)}) for number in range(3)]
    site.run()
    found = site.ask(site.desk.clients, "north")
    whole = [site.client(client) for client in clients]
    for each in whole:
        assert len(each.config_json) > 2**19
        each.config_json = each.manifest_json = ""
    assert sorted(found, key=lambda each: each.metadata["number"]) == whole
    assert wire.ListClientsReply(clients=found).ByteSize() < 4096


@pytest.mark.parametrize(
    ("fields", "error", "detail"),
    [
        ({"dataset": "secret"}, ServiceNotFoundError, "dataset"),
        ({"model": "unknown"}, ServiceNotFoundError, "model"),
        ({"model": {"hf": "/etc", "task": "causal_lm"}}, ServiceNotFoundError, "model"),
        ({"model": "os:system"}, ServicePermissionError, None),
        ({"loss": "os:system"}, ServicePermissionError, None),
        ({"optimizer": {"name": "os:System"}}, ServicePermissionError, None),
        ({"optimizer": {"schedule": "os:system"}}, ServicePermissionError, None),
        ({**SENT, "key_service": {"address": "127.0.0.1:2", "contract": "{}"}}, ServicePermissionError, None),
        ({"num_workers": 9}, ServiceValidationError, "num_workers"),
        ({"policy": "p"}, ServiceValidationError, "policy"),
        ({"nonsense": 1}, ServiceValidationError, "nonsense"),
        ({"expected_batch_size": -1}, ServiceValidationError, "expected_batch_size"),
        ({"dp_config": {}}, ServiceValidationError, "dp_config"),
        ({"optimizer": {"warmup_steps": 9}}, ServiceValidationError, "optimizer.warmup_steps"),
        ({"optimizer": {"averaged_weights": True}}, ServiceValidationError, "optimizer.averaged_weights"),
    ],
)
def test_a_configuration_is_refused_with_its_field_and_makes_no_client(site, fields, error, detail):
    with pytest.raises(error) as refusal:
        site.create(**fields)
    assert getattr(refusal.value, "field", getattr(refusal.value, "resource", None)) == detail
    assert site.ask(site.desk.clients, "north") == []


def test_the_run_has_the_services_fields_and_the_datasets_account(make_site):
    site = make_site(
        run={"num_workers": 4, "ledger": {"url": "postgresql://u@host/l", "prepaid": True}},
        datasets={
            "digits": {
                "dataset": {"kind": "digits"},
                "account": "ward",
                "evaluation": {"dataset": {"kind": "digits", "split": "public"}},
            },
            "open": {"dataset": {"kind": "digits", "public": True}},
        },
    )
    client = site.create(metadata={"who": "me"})
    config = site.drivers.of[client].begin.config
    assert (config["num_workers"], config["ledger"]["account"], config["ledger"]["prepaid"]) == (4, "ward", True)
    assert config["evaluation"]["dataset"]["split"] == "public"
    assert config["checkpoint"]["recipients"] == [str(site.folder / "key.pub")]
    assert config["ledger"]["url"] == "postgresql://u@host/l"
    assert site.client(client).metadata == {"who": "me"}


def test_a_queued_forward_backward_is_cancelled_with_its_optim_step_and_nothing_is_charged(site):
    client = site.create()
    site.run()
    first, second, third = steps(site, client, 3)
    assert site.cancel(second[0]).state == "cancelled"
    assert site.get(second[1]).error.kind == "cancelled"
    assert "no step was charged" in site.get(second[1]).error.message
    site.run()
    assert [site.get(each).state for each in (*first, *third)] == ["done"] * 4
    assert site.get(third[1]).optim_step.step == 2
    assert site.world.facts("run0", "charge") == [[0], [1]]


def test_a_cancelled_optim_step_takes_all_later_ones_with_it_and_its_step_waits_for_another(site):
    client = site.create()
    site.run()
    first, second = steps(site, client, 2)
    save = site.submit(client, SAVE)
    assert site.cancel(second[1]).state == "cancelled"
    assert (site.get(save).state, site.get(second[0]).state) == ("cancelled", "queued")
    site.run()
    assert [site.get(each).state for each in (*first, second[0])] == ["done"] * 3
    with pytest.raises(ServiceStateError, match="step_pending"):
        site.submit(client, FB)
    again = site.submit(client, OPT)
    site.run()
    assert site.get(again).optim_step.step == 2


def test_a_running_forward_backward_is_cancelled_stays_charged_and_its_step_is_used_again(site):
    client = site.create()
    site.run()
    forward = site.submit(client, FB)
    reports = site.drivers.of[client].pump()
    site.tell(client, next(reports))
    assert site.world.facts("run0", "charge") == [[0]]
    assert site.cancel(forward).state == "running", "only the driver knows whether it is computed"
    behind = [site.submit(client, OPT), site.submit(client, SAVE)]
    for report in reports:
        site.tell(client, report)
    cancelled = site.get(forward)
    assert (cancelled.state, cancelled.error.kind) == ("cancelled", "cancelled")
    assert "stays charged" in cancelled.error.message
    assert ["no step was charged" in site.get(each).error.message for each in behind] == [True, True]
    assert site.client(client).dp_metrics.epsilon_spent == pytest.approx(0.1)
    assert site.client(client).dp_metrics.steps_charged == 1
    # The driver is inside the step: nothing can be saved before it is released.
    with pytest.raises(ServiceStateError, match="step_pending"):
        site.submit(client, SAVE)
    with pytest.raises(ServiceStateError, match="no_gradient"):
        site.submit(client, OPT)
    site.submit(client, FB)
    optim, save = site.submit(client, OPT), site.submit(client, SAVE)
    site.run()
    assert (site.get(optim).state, site.get(save).state) == ("done", "done")
    assert site.world.facts("run0", "charge") == [[0]]


def test_a_step_is_cancelled_while_it_computes_although_its_release_was_asked_for(site):
    client = site.create()
    site.run()
    first, second = steps(site, client, 2)
    reports = site.drivers.of[client].pump()
    site.tell(client, next(reports))
    assert site.cancel(first[0]).state == "running"
    for report in reports:
        site.tell(client, report)
    assert [site.get(each).state for each in first] == ["cancelled", "cancelled"]
    site.run()
    # The next one takes the step, which is charged once.
    assert site.get(second[1]).optim_step.model_digest == digest(1)
    assert site.world.facts("run0", "charge") == site.world.facts("run0", "release") == [[0]]
    assert site.client(client).dp_metrics.steps_charged == 1


def test_a_step_that_is_computed_when_its_driver_hears_of_the_cancellation_goes_on(site):
    client = site.create()
    site.run()
    ((forward, optim),) = steps(site, client, 1)
    # What runs by sent data alone is cancelled by its optim_step.
    assert site.cancel(optim).state == "running"
    charged, computed, *later = list(site.drivers.of[client].pump())
    site.tell(client, charged)
    assert site.cancel(forward).state == "running"
    site.tell(client, computed)
    assert site.drivers.of[client].held is False
    for report in later:
        site.tell(client, report)
    site.run()
    assert [site.get(each).state for each in (forward, optim)] == ["done", "done"]
    assert [site.cancel(each).state for each in (forward, optim)] == ["done", "done"]


def test_a_report_of_a_held_step_that_goes_on_takes_nothing_from_it(site):
    """The driver had heard of the cancellation, and has to be told of the release again."""
    client = site.create()
    site.run()
    ((forward, optim),) = steps(site, client, 1)
    driver = site.drivers.of[client]
    reports = driver.pump()
    site.tell(client, next(reports))
    late = HeldStep(step=0, epsilon=0.1)
    driver.marks = (1, 0)
    site.tell(client, late)
    assert driver.marks == (1, 1)
    assert "cancelled" not in [each.progress.phase for _, each in site.published if isinstance(each, wire.Change)]
    for report in reports:
        site.tell(client, report)
    assert [site.get(each).state for each in (forward, optim)] == ["done", "done"]


def lose(site, client):
    """Have a client's driver end without a word, as one that is killed."""
    site.tell(client, Exited(code=-9, last_words=""))


def fourth_step_of_four(make_site):
    """Return a site, a client and the operations of its fourth step, which runs.

    A driver that resumes begins with the third step, as packages are sealed after every second one.
    """
    site = make_site(package_every=2)
    client = site.create()
    site.run()
    steps(site, client, 3)
    site.run()
    ((forward, optim),) = steps(site, client, 1)
    site.tell(client, next(site.drivers.of[client].pump()))
    return site, client, forward, optim


def test_a_held_step_that_a_resumed_driver_has_not_reached_takes_no_release_of_an_earlier_one_back(make_site):
    site, client, forward, _ = fourth_step_of_four(make_site)
    site.cancel(forward)
    lose(site, client)
    site.run()
    assert site.get(forward).state == "cancelled"
    assert site.drivers.of[client].position == 2, "one step before the one that was cancelled"
    again = site.submit(client, FB)
    site.run()
    assert site.get(again).state == "done"


def test_a_step_that_is_repeated_takes_no_cancellation_of_a_later_one_away(make_site):
    site, client, forward, optim = fourth_step_of_four(make_site)
    lose(site, client)
    reports = site.drivers.of[client].pump()
    for report in reports:
        if isinstance(report, Computed):
            break
        site.tell(client, report)
    assert report.step == 2
    site.cancel(forward)
    site.tell(client, report)
    for report in reports:
        site.tell(client, report)
    assert [site.get(each).state for each in (forward, optim)] == ["cancelled", "cancelled"]


def test_a_cancellation_survives_the_service_and_the_driver(make_site):
    site = make_site()
    client = site.create()
    site.run()
    ((forward, optim),) = steps(site, client, 1)
    site.tell(client, next(site.drivers.of[client].pump()))
    site.cancel(forward)
    again = make_site(world=site.world)
    again.run()
    assert [again.get(each).state for each in (forward, optim)] == ["cancelled", "cancelled"]
    assert again.world.facts("run0", "release") == []
    again.submit(client, FB, key="again")
    optim = again.submit(client, OPT, key="released")
    again.run()
    assert again.get(optim).optim_step.model_digest == digest(1)
    assert again.world.facts("run0", "charge") == [[0]]


@pytest.mark.parametrize("charged", [True, False])
@pytest.mark.parametrize("package_every", [1, 2])
@pytest.mark.parametrize("config", [GIVEN, SENT], ids=["registered", "sent"])
def test_a_cancellation_tells_whether_a_driver_that_was_lost_had_charged_the_step(
    make_site, config, package_every, charged
):
    site = make_site(package_every=package_every)
    client = site.create(config=config)
    site.run()
    for number in range(2):
        forward = site.submit(client, FB) if config is GIVEN else site.send(client, f"x{number}")
        optim = site.submit(client, OPT)
        if number == 0:
            site.run()
    if charged:
        next(site.drivers.of[client].pump())  # and it is lost before it can report anything
    lose(site, client)
    running = forward if config is GIVEN else optim
    site.cancel(running)
    site.run()
    found = site.get(running)
    assert found.state == "cancelled"
    assert ("stays charged" in found.error.message, "no step was charged" in found.error.message) == (
        charged,
        not charged,
    )
    assert site.client(client).dp_metrics.steps_charged == 1 + charged
    assert len(site.world.facts("run0", "charge")) == 1 + charged


def test_nothing_is_told_as_charged_where_nothing_is_private(site):
    client = site.create(dataset="open", dp_config={"enabled": False})
    site.run()
    forward = site.submit(client, FB)
    reports = site.drivers.of[client].pump()
    site.tell(client, next(reports))
    site.cancel(forward)
    for report in reports:
        site.tell(client, report)
    assert (site.get(forward).state, "no step was charged" in site.get(forward).error.message) == ("cancelled", True)


def test_a_state_is_saved_listed_and_loaded(site, monkeypatch):
    client = site.create()
    steps(site, client, 1)
    save = site.submit(client, SAVE, metadata={"epoch": "1"})
    steps(site, client, 1)
    site.run()
    artifact = site.get(save).save_state.artifact
    assert (artifact.step, artifact.bytes, artifact.metadata) == (1, 1234, {"epoch": "1"})
    assert site.ask(site.desk.artifacts, "north", client) == [artifact]
    assert site.client(client).model_digest == digest(2)
    load = site.submit(client, LOAD, artifact_id=artifact.artifact_id)
    site.run()
    assert site.get(load).load_state.model_digest == digest(1)
    shown = site.client(client)
    # What was spent stays, and so does the number of steps.
    assert (shown.step, shown.model_digest, shown.dp_metrics.steps_charged) == (2, digest(1), 2)
    later = [site.submit(client, SAVE) for _ in range(2)]
    site.run()
    monkeypatch.setattr("raycloak.coordinator.service.desk.MOST_LISTED", 2)
    newest = [site.get(each).save_state.artifact for each in later]
    assert site.ask(site.desk.artifacts, "north", client) == newest


def test_a_refused_save_fails_alone(site):
    client = site.create()
    save = site.submit(client, SAVE)
    pairs = steps(site, client, 1)
    site.run()
    assert (site.get(save).state, site.get(save).error.code) == ("failed", "no_state")
    assert site.get(pairs[0][1]).state == "done"


def test_text_is_sampled_from_a_copy_of_the_newest_step_beside_the_next(site):
    client = site.create(config=TEXT)
    steps(site, client, 1)
    sample = site.submit(client, SAMPLE, **TEXTS)
    pairs = steps(site, client, 1)
    site.run()
    # The next step did not wait for the text.
    assert (site.get(sample).state, site.get(pairs[0][1]).state) == ("running", "done")
    package, run_dir, request = site.sampler.asked[sample.operation_id]
    copy = site.batches / "copies" / client / f"{digest(1)}.safetensors"
    assert (package, run_dir, list(request.prompts)) == (str(copy), "run0", ["a"])
    assert copy.read_text() == digest(1)
    assert site.world.facts("run0", "save") == [], "nothing is kept for good"
    assert site.ask(site.desk.artifacts, "north", client) == []
    site.desk.reports.tokens(sample.operation_id, 0, "he")
    assert site.published[-1][1].tokens.text == "he"
    site.ask(site.desk.reports.sampling, sample.operation_id, 7.5)
    told = site.published[-1][1].progress
    assert (told.operation_id, told.phase, told.step, told.tokens_per_second) == (
        sample.operation_id,
        "sampling",
        1,
        7.5,
    )
    assert told.epsilon == pytest.approx(0.2)
    completion = wire.Completion(prompt=0, text="hello", finish_reason="stop", tokens=2)
    site.ask(site.desk.reports.sampled, sample.operation_id, [completion])
    result = site.get(sample).sample
    assert (list(result.completions), result.step, result.model_digest) == ([completion], 1, digest(1))
    told = len(site.published)
    site.ask(site.desk.reports.sampling, sample.operation_id, 8.0)
    assert len(site.published) == told, "it has ended"
    assert not copy.exists(), "there are newer weights, which the next sample needs"


def test_guarantee_a_client_has_one_copy_of_weights_and_those_that_its_samples_need(make_site):
    site = make_site()
    client = site.create(config=TEXT)
    assert site.sampler.asked == {}
    for step in range(3):
        steps(site, client, 1)
        # The second one needs no driver, and no copy of its own.
        under_way = [site.submit(client, SAMPLE, **TEXTS) for _ in range(2)]
        site.run()
        for sample in under_way[: 2 if step < 2 else 1]:
            site.ask(site.desk.reports.sampled, sample.operation_id, [])
        assert copies(site) == [digest(step + 1)]
    steps(site, client, 1)
    other = site.create(config=TEXT)
    steps(site, other, 1)
    site.submit(other, SAMPLE, **TEXTS)
    site.run()
    assert copies(site) == [digest(1), digest(3)]
    (site.batches / "copies" / client / ".draft").touch()
    (site.batches / "copies" / client / f"{digest(4)}.safetensors").touch()
    # Another process of the service goes on with samples that are under way, and keeps nothing else.
    site = make_site(world=site.world)
    assert copies(site) == [digest(1), digest(3)]
    assert {package for package, _, _ in site.sampler.asked.values()} == set(map(str, site.batches.rglob("copies/*/*")))
    for name in list(site.sampler.asked):
        site.ask(site.desk.reports.sampled, name, [])
    site.ask(site.desk.close_client, "north", other)
    assert copies(site) == []


def test_a_sample_before_the_first_step_is_refused_by_the_run(site):
    client = site.create(config=TEXT)
    sample = site.submit(client, SAMPLE, **TEXTS)
    site.run()
    assert (site.get(sample).state, site.get(sample).error.code) == ("failed", "no_state")
    assert site.sampler.asked == {}


def copies(site):
    """Return the names of all copies of weights."""
    return sorted(file.stem for file in (site.batches / "copies").rglob("*") if file.is_file())


def test_a_sample_of_a_saved_state_needs_no_driver_and_can_be_cancelled(site):
    client = site.create(config=TEXT)
    steps(site, client, 1)
    site.submit(client, SAVE)
    site.run()
    site.drivers.stop(client)
    site.run()
    assert site.drivers.of == {}
    first, second = (site.submit(client, SAMPLE, **TEXTS) for _ in range(2))
    assert site.drivers.of == {}
    assert list(site.sampler.asked) == [first.operation_id, second.operation_id]
    assert site.cancel(first).state == "cancelled"
    assert site.sampler.cancelled == [first.operation_id]
    site.ask(site.desk.reports.sampled, first.operation_id, [])
    site.ask(site.desk.reports.sampled, second.operation_id, [], FutureFailedError("oom", "no memory."))
    assert (site.get(first).state, site.get(second).error.code) == ("cancelled", "oom")


def test_guarantee_a_tenant_with_many_clients_leaves_the_sampler_to_others_too(site):
    """The sampler refuses more than it has room for, and it writes for who came first."""
    clients = [site.create(config=TEXT) for _ in range(3)]
    for client in clients:
        steps(site, client, 1)
        site.submit(client, SAVE)
    site.run()
    asked = [site.submit(client, SAMPLE, **TEXTS).operation_id for client in clients for _ in range(MOST_SAMPLES)]
    site.run()
    assert list(site.sampler.asked) == asked[:MOST_SAMPLES]
    other = site.create("south", config=TEXT)
    for kind in (FB, OPT, SAVE):
        site.submit(other, kind, tenant="south")
    site.run()
    theirs = site.submit(other, SAMPLE, tenant="south", **TEXTS)
    assert theirs.operation_id in site.sampler.asked
    # The others follow as these end, in whatever way.
    site.cancel(site.get(site.ask(site.desk.operation, "north", clients[0], asked[0])))
    site.ask(site.desk.tick)
    under_way = list(site.sampler.asked)
    for name in under_way:
        assert site.store.samples_under_way("north") <= MOST_SAMPLES
        site.ask(site.desk.reports.sampled, name, [])
        site.ask(site.desk.tick)
        under_way += [each for each in site.sampler.asked if each not in under_way]
    assert sum(site.client(client).queued for client in clients) == 0


@pytest.mark.parametrize("how", ["closed", "failed"])
def test_no_text_is_written_for_a_client_that_has_ended(site, how):
    """A sampler writes for all tenants, and who closes a client gets room for another one."""
    client = site.create(config=TEXT)
    steps(site, client, 1)
    site.submit(client, SAVE)
    site.run()
    sample = site.submit(client, SAMPLE, **TEXTS)
    if how == "closed":
        site.ask(site.desk.close_client, "north", client)
        site.run()
    else:
        site.fail(client)
    assert site.get(sample).state == "failed"
    assert site.sampler.cancelled == [sample.operation_id]
    site.ask(site.desk.reports.sampled, sample.operation_id, [])
    assert site.get(sample).state == "failed"


def test_an_account_without_room_fails_the_step_by_name_and_refuses_later_ones(make_site, tmp_path):
    site = make_site(world=World(tmp_path / "poor", room=1))
    client = site.create()
    first, second = steps(site, client, 2)
    site.run()
    assert site.get(first[1]).state == "done"
    for each in second:
        error = site.get(each).error
        assert (error.kind, error.current_epsilon, error.max_epsilon) == ("budget_exceeded", pytest.approx(0.1), 3.0)
    for kind in (FB, OPT):
        with pytest.raises(BudgetExceededError) as refusal:
            site.submit(client, kind)
        assert (refusal.value.current_epsilon, refusal.value.max_epsilon) == (pytest.approx(0.1), 3.0)
    assert site.client(client).status == "READY"


@pytest.mark.parametrize("ending", ["cap_exceeded", "early_stopped"])
@pytest.mark.parametrize("lost", [False, True])
def test_what_was_released_is_saved_loaded_and_sampled_although_no_step_will_follow(make_site, tmp_path, ending, lost):
    site = make_site(world=World(tmp_path / "poor", room=1, ending=ending))
    client = site.create(config=TEXT)
    first, second = steps(site, client, 2)
    early = site.submit(client, SAVE)
    site.run()
    assert [site.get(each).state for each in (*first, *second, early)] == ["done"] * 2 + ["failed"] * 2 + ["done"]
    site.world.room += 1  # its cap is raised; but no step comes that nobody asked for
    if lost:
        lose(site, client)
    save, sample = site.submit(client, SAVE), site.submit(client, SAMPLE, **TEXTS)
    load = site.submit(client, LOAD, artifact_id=site.get(early).save_state.artifact.artifact_id)
    site.run()
    assert site.get(save).save_state.artifact.model_digest == digest(1)
    assert (site.get(sample).state, site.get(load).state) == ("running", "done")
    assert site.world.facts("run0", "charge") == site.world.facts("run0", "release") == [[0]]
    with pytest.raises((BudgetExceededError, ServiceStateError)) as refusal:
        site.submit(client, FB)
    assert refusal.value.code == ("cap_exceeded" if ending == "cap_exceeded" else "run_ended")
    assert site.client(client).status == "BUSY"
    site.ask(site.desk.close_client, "north", client)
    site.run()
    assert site.drivers.of == {}


def test_what_a_measurement_has_cost_is_told_although_no_step_follows(site):
    client = site.create()
    site.run()
    seen = site.client(client).revision
    site.tell(client, Spent(epsilon=0.75))
    site.tell(client, Over(ending="early_stopped"))
    assert site.client(client).dp_metrics.epsilon_spent == 0.75
    assert site.ask(site.desk.changes, "north", client, seen).changes[-1].client.dp_metrics.epsilon_spent == 0.75


def test_a_save_of_a_run_that_was_ended_elsewhere_fails_by_its_ending(site):
    client = site.create()
    steps(site, client, 1)
    site.run()
    site.tell(client, Ended(ending="complete", metrics=None))
    site.tell(client, Exited(code=0, last_words=""))
    save = site.submit(client, SAVE)
    site.tell(client, Ended(ending="complete", metrics=None))
    assert (site.get(save).state, site.get(save).error.code) == ("failed", "run_ended")


def test_a_failed_driver_fails_the_client_and_all_that_waits(site):
    client = site.create()
    site.run()
    pairs = steps(site, client, 2)
    site.fail(client)
    for pair in pairs:
        for each in pair:
            error = site.get(each).error
            assert (error.kind, error.code, error.message) == ("failed", "worker_error", "it broke.")
    shown = site.client(client)
    assert (shown.status, shown.error.code, shown.queued) == ("ERROR", "worker_error", 0)
    with pytest.raises(ServiceStateError, match="client_failed"):
        site.submit(client, FB)
    assert site.drivers.of == {}


@pytest.mark.parametrize("close", [False, True])
def test_a_late_report_neither_gives_an_ended_client_another_cause_nor_opens_it_again(site, close):
    client = site.create()
    site.run()
    steps(site, client, 1)
    site.ask(site.desk.reports.give_up, client)
    if close:
        site.ask(site.desk.close_client, "north", client)
    site.tell(client, released(0))
    assert site.client(client).status == ("TERMINATED" if close else "ERROR")
    assert site.client(client).error.code == "report_lost"


def test_a_driver_that_stops_though_nobody_told_it_to_is_lost(site):
    client = site.create()
    ((forward, _),) = steps(site, client, 1)
    for _ in range(4):
        site.tell(client, Ended(ending="stopped", metrics=None))
        site.tell(client, Exited(code=0, last_words=""))
    assert site.drivers.of == {}
    assert site.get(forward).error.code == "driver_lost"


def test_a_lost_driver_is_started_again_but_not_for_ever(site, caplog):
    client = site.create()
    pairs = steps(site, client, 1)
    for number in range(3):
        site.tell(client, Exited(code=-9, last_words="its last line"))
        assert client in site.drivers.of
        assert [f"client {client}: its driver ended (-9): its last line"] * (number + 1) == caplog.messages
    # The operator's log has it, and no tenant.
    assert "its last line" not in f"{site.client(client)} {site.get(pairs[0][0])} {site.published}"
    site.tell(client, Exited(code=-9, last_words=""))
    assert site.drivers.of == {}
    assert site.get(pairs[0][0]).error.code == "driver_lost"


def test_a_run_that_another_process_executes_is_tried_again(site):
    client = site.create()
    site.run()
    forward = site.submit(client, FB)
    site.fail(client, "run_in_progress")
    assert (site.drivers.of, site.get(forward).state) == ({}, "running")
    site.now += 2
    site.ask(site.desk.tick)
    site.run()
    assert site.get(forward).state == "done"
    site.fail(client, "run_in_progress")
    site.now += 1000
    site.ask(site.desk.tick)
    site.submit(client, OPT)
    site.fail(client, "run_in_progress")
    assert site.client(client).status == "ERROR"


def test_a_run_that_was_locked_long_ago_is_tried_again(site):
    client = site.create()
    site.run()
    for _ in range(2):
        forward = site.submit(client, FB)
        site.fail(client, "run_in_progress")
        assert site.client(client).status != "ERROR"
        site.now += 1000
        site.ask(site.desk.tick)
        optim = site.submit(client, OPT)
        site.run()
        assert [site.get(each).state for each in (forward, optim)] == ["done", "done"]


def test_a_key_or_a_name_with_a_null_character_is_refused_like_any_other(make_site, store_url):
    """PostgreSQL takes none in a text, and a store that fails ends the service."""
    site = make_site(url=store_url)
    client = site.create()
    with pytest.raises(ServiceValidationError):
        site.submit(client, FB, key="a\0b")
    with pytest.raises(ServiceNotFoundError):
        site.client(client + "\0")
    assert site.ask(site.desk.changes, "north", client, 2**64 - 1).changes == []
    site.submit(client, FB)


def test_a_step_that_is_repeated_with_another_result_fails_the_client(site):
    client = site.create()
    steps(site, client, 1)
    site.run()
    same = ReleasedStep(step=0, model_digest=digest(1), epsilon=0.1, seconds=1.0, evaluation_accuracy=None, evaluation_loss=None, loss=None)  # fmt: skip # noqa: E501
    site.tell(client, same)
    assert site.client(client).status == "READY"
    other = ReleasedStep(step=0, model_digest=digest(9), epsilon=0.1, seconds=1.0, evaluation_accuracy=None, evaluation_loss=None, loss=None)  # fmt: skip # noqa: E501
    site.tell(client, other)
    assert site.client(client).error.code == "not_exact"


def test_a_closed_client_cancels_what_waits_and_finishes_what_runs(site):
    client = site.create()
    site.run()
    first, second = steps(site, client, 2)
    assert site.ask(site.desk.close_client, "north", client).status == "TERMINATED"
    assert site.get(second[0]).state == "cancelled"
    site.run()
    assert [site.get(each).state for each in first] == ["done", "done"]
    assert site.drivers.of == {}
    with pytest.raises(ServiceStateError, match="client_closed"):
        site.submit(client, FB)
    assert site.ask(site.desk.close_client, "north", client).status == "TERMINATED"


def test_a_client_is_closed_before_it_has_a_place(make_site):
    site = make_site(limits={"active_clients": 1})
    site.create()
    client = site.create()
    forward = site.submit(client, FB)
    site.ask(site.desk.close_client, "north", client)
    assert site.get(forward).state == "cancelled"
    site.run()
    assert list(site.drivers.of) != [client]


def test_queue_and_clients_are_bounded(make_site):
    site = make_site(limits={"queued_operations": 2, "clients_per_tenant": 1})
    client = site.create()
    steps(site, client, 1)
    with pytest.raises(ServiceQueueFullError) as refusal:
        site.submit(client, FB)
    assert refusal.value.retry_after_s > 0
    with pytest.raises(ServiceQueueFullError, match="clients_full"):
        site.create()
    site.create("south")
    site.run()
    site.submit(client, FB)
    site.ask(site.desk.close_client, "north", client)
    site.create()


def test_guarantee_what_one_client_may_have_kept_is_bounded(make_site):
    limits = {"operations_per_client": 9, "artifacts_per_client": 2, "queued_bytes": 120, "sampled_bytes": 200}
    site = make_site(limits=limits)
    client = site.create(config=TEXT)
    site.run()

    def refused(kind, **fields):
        with pytest.raises(ServiceQueueFullError) as refusal:
            site.submit(client, kind, **fields)
        return refusal.value.code

    for _ in range(2):
        site.submit(client, FB)
        site.submit(client, OPT)
        site.run()
    site.submit(client, SAVE)
    site.submit(client, SAVE)
    assert refused(SAVE) == "artifacts_full", "they count while they wait"
    site.run()
    assert refused(SAVE) == "artifacts_full"
    # Of samples there are requests that wait, and texts that stay.
    first, second = (site.submit(client, SAMPLE, **TEXTS | {"prompts": ["a" * 40]}) for _ in range(2))
    assert refused(SAMPLE, **TEXTS | {"prompts": ["a" * 40]}) == "queue_full"
    text = wire.Completion(text="b" * 100)
    for each in (first, second):
        site.ask(site.desk.reports.sampled, each.operation_id, [text])
    assert site.get(first).sample.completions == [text]
    assert site.get(second).error.code == "texts_full"
    assert site.store.client(client).open_bytes == 0
    assert not any(site.store.operation(client, number).payload for number in range(8))
    # The last forward_backward may have its optim_step.
    forward = site.submit(client, FB)
    assert refused(FB) == "operations_full"
    optim = site.submit(client, OPT)
    site.run()
    assert [site.get(each).state for each in (forward, optim)] == ["done", "done"]
    assert {refused(kind) for kind in (FB, OPT, SAVE)} == {"operations_full"}
    # One that has all its texts is refused before it is written.
    other = site.create(config=TEXT)
    site.run()
    with site.desk.book.turn():
        site.store.change_client(site.store.client(other), sampled_bytes=200)
    with pytest.raises(ServiceQueueFullError, match="texts_full"):
        site.submit(other, SAMPLE, **TEXTS)


def test_batches_count_as_operations_of_their_client(make_site):
    site = make_site(limits={"operations_per_client": 2})
    client = site.create(config=SENT)
    site.run()
    site.send(client, "a")
    site.send(client, "b")
    with pytest.raises(ServiceQueueFullError, match="operations_full"):
        site.send(client, "c")
    optim = site.submit(client, OPT)
    site.run()
    assert site.get(optim).state == "done"


def test_changes_are_told_in_their_order_from_any_revision_on(site):
    client = site.create()
    steps(site, client, 2)
    site.run()
    changes = site.ask(site.desk.changes, "north", client, 0).changes
    revisions = [(each.operation if each.HasField("operation") else each.client).revision for each in changes]
    assert revisions == sorted(set(revisions))
    assert [each.operation.state for each in changes if each.HasField("operation")] == ["done"] * 4
    assert site.ask(site.desk.changes, "north", client, revisions[-1]).changes == []
    assert site.ask(site.desk.changes, "north", client, revisions[1]).changes == changes[2:]
    (client_change,) = (each.client for each in changes if each.HasField("client"))
    assert (client_change.status, client_change.step) == ("READY", 2)


def test_many_changes_come_in_pages_and_none_is_left_out(make_site, monkeypatch):
    monkeypatch.setattr("raycloak.coordinator.service.desk.PAGE", 3)
    site = make_site()
    client = site.create(steps=20)
    steps(site, client, 10)
    site.run()
    seen, since = [], 0
    while page := site.ask(site.desk.changes, "north", client, since).changes:
        assert len(page) <= 4
        for change in page:
            what = change.operation if change.HasField("operation") else change.client
            assert what.revision > since
            since = what.revision
            seen.append(getattr(what, "operation_id", "client"))
    assert len(seen) == len(set(seen)) == 21


@pytest.mark.parametrize("config", [GIVEN, SENT], ids=["charged", "sent"])
def test_another_run_never_takes_the_place_of_one_that_was_charged_or_that_batches_were_sealed_for(site, config):
    client = site.create(config=config)
    site.run()
    if config is GIVEN:
        steps(site, client, 1)
        site.run()
    else:
        site.send(client, "a")
    site.tell(client, Exited(code=-9, last_words=""))
    submitted = site.submit(client, FB if config is GIVEN else OPT)
    driver = site.drivers.of[client]
    site.tell(client, Opened(run_id="run9", run_dir=site.folder))
    assert driver.stopped
    assert site.client(client).error.code == "run_lost"
    assert (site.client(client).run_id, site.get(submitted).state) == ("run0", "failed")


def test_a_refusal_of_a_shared_account_names_no_run_of_another_client(site):
    client, ours, other = site.create(), "0" * 16, "a1" * 8
    site.tell(client, Opened(run_id=ours, run_dir=site.folder))
    said = f"the account is held for the plan of run {other} alone, and run {ours} is another."
    site.tell(client, Failed(code="account_not_shared", message=said, remedy=f"Resume run {other}, or name one in ledger.account.", error="RefusedError", epsilon=None, step=None))  # fmt: skip # noqa: E501
    error = site.client(client).error
    assert error.message == f"the account is held for the plan of another run alone, and run {ours} is another."
    # A client has no ledger to configure.
    assert error.remedy == "Resume another run, or name one in the service's settings, as the account of the data."


def test_a_step_that_waits_when_its_client_is_closed_fails_by_the_closing(site):
    client = site.create()
    forward = site.submit(client, FB)
    site.ask(site.desk.close_client, "north", client)
    assert site.get(forward).error.code == "cancelled"
    other = site.create()
    site.run()
    running = site.submit(other, FB)
    site.ask(site.desk.close_client, "north", other)
    site.tell(other, Exited(code=0, last_words=""))
    assert (site.get(running).state, site.get(running).error.code) == ("failed", "client_closed")


# Sent data


def test_sent_batches_accumulate_for_one_step_whose_files_come_before_its_charge(site):
    client = site.create(config=SENT)
    first, second = site.send(client, "a", "b"), site.send(client, "c")
    assert (first.state, first.forward_backward.examples_sent, first.forward_backward.step) == ("done", 2, 0)
    assert second.state == "done"
    site.run()
    assert site.world.facts("run0", "charge") == []
    optim = site.submit(client, OPT)
    files = site.drivers.of[client].files[0]
    assert [each.read_bytes() for each in files] == [b"secret", b"secret"]
    site.run()
    assert site.get(optim).optim_step.step == 1
    assert site.send(client, "a").forward_backward.step == 1


def test_an_example_is_used_as_often_as_declared_and_once_in_a_step(site):
    client = site.create(config=SENT)
    site.send(client, "a")
    for batch in (("a",), ("b", "a"), ("b", "b")):
        with pytest.raises(ServiceValidationError) as refusal:
            site.send(client, *batch)
        assert (refusal.value.code, refusal.value.field) == ("id_repeated", "example_ids")
    site.submit(client, OPT)
    site.send(client, "a")
    site.submit(client, OPT)
    with pytest.raises(ServiceValidationError) as refusal:
        site.send(client, "b", "a")
    assert refusal.value.code == "participations_exceeded"
    # Nothing of a refused batch counts.
    assert site.store.used_in_step(client, b"") == (0, -1)
    site.send(client, "b")
    site.submit(client, OPT)
    site.send(client, "b")
    # Another client's ids are its own.
    site.send(site.create(config=SENT), "a")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"examples": 3}, "example_ids"),
        ({"examples": 0, "example_hashes": b""}, "batch"),
        ({"bytes": 0}, "batch"),
        ({"bytes": 2**40}, "batch"),
        ({"sha256": b"short"}, "sha256"),
    ],
)
def test_a_batch_whose_head_is_wrong_is_refused_before_its_bytes(site, change, field):
    client = site.create(config=SENT)
    head, _ = site.batch(client, "a", "b")
    for name, value in change.items():
        setattr(head, name, value)
    with pytest.raises(ServiceValidationError) as refusal:
        site.ask(site.desk.announce_batch, "north", head)
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hashes": b"x" * 32}, "example_ids"),
        ({"run_id": "run9"}, "batch"),
        ({"client_id": "c0"}, "batch"),
        ({"step": 2}, "batch"),
        ({"number": 0}, "batch"),
        ({"first": 0}, "batch"),
    ],
)
def test_examples_are_counted_as_they_were_sealed_and_a_batch_of_another_place_spoils_no_step(site, change, field):
    client = site.create(config=SENT)
    site.run()
    site.send(client, "z")
    site.submit(client, OPT)
    site.send(client, "a")
    head, file = site.batch(client, "b", "c")
    sealed = site.sealed(head).model_copy(update=change)
    with pytest.raises(ServiceValidationError) as refusal:
        site.ask(site.desk.accept_batch, "north", head, file, sealed)
    assert (refusal.value.code, refusal.value.field) == ("batch_foreign", field)
    # Nothing was counted, and the client goes on.
    site.send(client, "b", "c")


def test_a_step_takes_no_more_examples_than_it_computes(site):
    client = site.create(config=SENT)
    site.send(client, "a", "b", "c")
    with pytest.raises(ServiceValidationError, match="more than 4 examples"):
        site.send(client, "d", "e")
    site.send(client, "d")


def test_each_kind_of_data_has_its_own_forward_backward(site):
    registered, sent = site.create(), site.create(config=SENT)
    with pytest.raises(ServiceValidationError) as refusal:
        site.submit(sent, FB)
    assert refusal.value.field == "batch"
    with pytest.raises(ServiceValidationError) as refusal:
        site.send(registered, "a")
    assert refusal.value.field == "batch"
    with pytest.raises(ServiceStateError, match="no_gradient"):
        site.submit(sent, OPT)


def test_batches_that_were_sent_twice_count_once(site):
    client = site.create(config=SENT)
    first = site.send(client, "a", key="same")
    assert site.send(client, "a", key="same") == first
    with pytest.raises(ServiceValidationError, match="idempotency_key"):
        site.send(client, "b", key="same")


def test_an_optim_step_on_sent_data_is_cancelled_unless_more_was_sent(site):
    client = site.create(config=SENT)
    site.send(client, "a")
    optim = site.submit(client, OPT)
    site.send(client, "b")
    with pytest.raises(ServiceStateError, match="batch_follows"):
        site.cancel(optim)
    later = site.submit(client, OPT)
    assert site.cancel(later).state == "cancelled"
    site.send(client, "c")
    site.submit(client, OPT)
    site.run()
    assert [len(files) for files in site.drivers.of[client].files.values()] == [1, 2]


def test_an_optim_step_on_sent_data_is_cancelled_while_its_step_computes_and_keeps_its_batches(site):
    client = site.create(config=SENT)
    site.run()
    site.send(client, "a", "b")
    optim, behind = site.submit(client, OPT), site.submit(client, SAVE)
    reports = site.drivers.of[client].pump()
    site.tell(client, next(reports))
    assert site.cancel(optim).state == "running"
    for report in reports:
        site.tell(client, report)
    assert [site.get(each).state for each in (optim, behind)] == ["cancelled", "cancelled"]
    with pytest.raises(ServiceStateError, match="step_pending"):
        site.submit(client, SAVE)
    optim = site.submit(client, OPT)
    site.run()
    assert site.get(optim).optim_step.step == 1
    assert site.world.facts("run0", "charge") == [[0]]
    assert len(site.drivers.of[client].files[0]) == 1


def test_an_optim_step_whose_batches_are_followed_while_its_driver_is_asked_goes_on(site):
    client = site.create(config=SENT)
    site.run()
    site.send(client, "a")
    optim = site.submit(client, OPT)
    reports = site.drivers.of[client].pump()
    site.tell(client, next(reports))
    site.cancel(optim)
    site.send(client, "b")
    for report in reports:
        site.tell(client, report)
    site.run()
    assert site.get(optim).state == "done"


def test_a_step_that_was_charged_with_its_batches_takes_no_other_one(site):
    """Its charge names them, so the other one would be counted and would never be computed."""
    client = site.create(config=SENT)
    site.run()
    site.send(client, "a")
    optim = site.submit(client, OPT)
    reports = site.drivers.of[client].pump()
    site.tell(client, next(reports))
    site.cancel(optim)
    for report in reports:
        site.tell(client, report)
    with pytest.raises(ServiceStateError, match="step_charged"):
        site.send(client, "b")
    assert site.store.used_in_step(client, sha256(b"b").digest()[:16]) == (0, -1)
    site.submit(client, OPT)
    site.send(client, "b")
    optim = site.submit(client, OPT)
    site.run()
    assert site.get(optim).state == "done"
    assert [len(files) for files in site.drivers.of[client].files.values()] == [1, 1]


def test_a_computed_step_of_sent_data_is_not_cancelled_by_an_older_report_of_its_driver(site):
    """An aggregator was lost after the step was computed, and the driver heard of the first cancellation alone."""
    client = site.create(config=SENT)
    site.run()
    site.send(client, "a")
    optim = site.submit(client, OPT)
    reports = site.drivers.of[client].pump()
    site.tell(client, next(reports))
    computed = Computed(step=0, epsilon=0.1, loss=None)
    site.cancel(optim)
    site.tell(client, computed)
    site.cancel(optim)
    assert site.drivers.of[client].held is False
    site.tell(client, HeldStep(step=0, epsilon=0.1))
    assert site.get(optim).state == "running"
    for report in reports:
        site.tell(client, report)
    assert site.get(optim).state == "done"
    # Nothing is held any more: a state is saved between two steps, whatever was sent for the next one.
    site.send(client, "b")
    site.submit(client, SAVE)


def test_batches_that_follow_a_step_keep_it_although_its_driver_resumes_from_an_earlier_one(make_site):
    site = make_site(package_every=2)
    client = site.create(config=SENT, steps=6)
    site.run()
    for example in ("a", "b", "c"):
        site.send(client, example)
        site.submit(client, OPT)
    site.run()
    site.send(client, "d")
    optim = site.submit(client, OPT)
    site.tell(client, next(site.drivers.of[client].pump()))
    site.cancel(optim)
    site.send(client, "e")
    lose(site, client)
    site.run()
    assert site.get(optim).state == "done"


def test_an_optim_step_is_not_cancelled_once_batches_of_a_later_one_were_sealed(site):
    """They were sealed for their step, so none of them could move to the step before."""
    client = site.create(config=SENT)
    optims = []
    for example in ("a", "b"):
        site.send(client, example)
        optims.append(site.submit(client, OPT))
    with pytest.raises(ServiceStateError, match="batch_follows"):
        site.cancel(optims[0])
    assert [site.get(each).state for each in optims] == ["queued", "queued"]


def test_the_room_for_batches_is_bounded_for_each_tenant(make_site):
    site = make_site(limits={"stored_batch_bytes": 13})
    client = site.create(config=SENT)
    site.send(client, "a")
    site.send(client, "b")
    with pytest.raises(ServiceQueueFullError, match="batches_full"):
        site.send(client, "c")
    site.send(site.create("south", config=SENT), "a", tenant="south")


# Places


def test_places_go_to_who_waits_longest_and_no_tenant_gets_a_second_before_anothers_first(make_site):
    times = iter(range(1000))
    site = make_site(limits={"active_clients": 2, "idle_seconds": 5}, clock=lambda: float(next(times)))
    first, second, third = (site.create() for _ in range(3))
    assert list(site.drivers.of) == [first, second]
    other = site.create("south")
    # South has no place and north has two, so one of them leaves although it is not idle for long.
    assert [site.drivers.of[each].stopped for each in (first, second)] == [True, False]
    site.run()
    assert list(site.drivers.of) == [second, other]
    # Clients of one tenant wait for an idle one.
    site.run()
    site.now = 20
    site.ask(site.desk.tick)
    site.run()
    assert third in site.drivers.of


def test_a_client_without_a_place_goes_on_where_it_was(make_site):
    site = make_site(limits={"active_clients": 1, "idle_seconds": 0})
    one, two = site.create(), site.create()
    pairs = {client: steps(site, client, 1) for client in (one, two)}
    for _ in range(3):
        site.run()
        site.now += 1
        site.ask(site.desk.tick)
    site.run()
    assert all(site.get(each).state == "done" for each in (*pairs[one][0], *pairs[two][0]))
    again = steps(site, one, 1)
    for _ in range(3):
        site.run()
        site.now += 1
        site.ask(site.desk.tick)
    site.run()
    assert site.get(again[0][1]).optim_step.step == 2
    assert len(site.world.facts("run0", "begin")) == 2
    assert site.world.facts("run0", "charge") == [[0], [1]]


def pass_time(site, seconds):
    """Have time pass, and drivers do what they may."""
    site.now += seconds
    site.ask(site.desk.tick)
    site.run()


def test_guarantee_a_tenants_place_is_bounded_in_time_though_its_step_never_ends(make_site, caplog):
    site = make_site(limits={"active_clients": 1, "idle_seconds": 5, "turn_seconds": 10, "leave_seconds": 20})
    slow = site.create()
    site.run()
    forward, optim = steps(site, slow, 1)[0]
    site.drivers.of[slow].hangs = True
    other = site.create("south")
    for now, stopped, killed in ((9, False, False), (10, True, False), (29, True, False), (30, True, True)):
        site.now = now
        site.ask(site.desk.tick)
        assert (site.drivers.of[slow].stopped, site.drivers.of[slow].killed) == (stopped, killed)
    site.run()
    assert list(site.drivers.of) == [other]
    assert "did not give its place up" in caplog.text
    assert site.get(forward).state == "running"
    # It goes on when it has a place again, and its step is not charged again.
    for _ in range(2):
        pass_time(site, 10)
    assert [site.get(each).state for each in (forward, optim)] == ["done", "done"]
    assert site.world.facts("run0", "charge") == [[0]]


def test_a_client_fails_whose_step_never_ends_in_its_turns(make_site, caplog):
    site = make_site(limits={"active_clients": 1, "idle_seconds": 5, "turn_seconds": 10, "leave_seconds": 20})
    slow = site.create()
    site.run()
    operations = steps(site, slow, 1)[0]
    site.drivers.hanging, site.drivers.of[slow].hangs = {slow}, True
    other = site.create("south")
    for _ in range(200):
        if slow in site.drivers.of and site.client(other, "south").status == "READY":
            site.submit(other, FB, "south")
            site.submit(other, OPT, "south")
        pass_time(site, 1)
    assert caplog.text.count("did not give its place up") == 4
    assert site.client(slow).status == "ERROR"
    assert {site.get(each).error.code for each in operations} == {"step_too_long"}


@pytest.mark.parametrize("how", ["closed", "failed"])
def test_a_driver_that_does_not_end_after_its_client_gives_its_place_to_one_that_waits(make_site, how):
    site = make_site(limits={"active_clients": 1, "leave_seconds": 20})
    first = site.create()
    site.run()
    if how == "closed":
        site.ask(site.desk.close_client, "north", first)
    else:
        failed = Failed(error="RunFailedError", code="worker_error", message="broken.", remedy="", epsilon=0.5, step=1)
        site.tell(first, failed)
    site.drivers.of[first].hangs = True
    site.now = 100
    site.ask(site.desk.tick)
    assert not site.drivers.of[first].killed, "nobody waits"
    other = site.create()
    site.ask(site.desk.tick)
    site.run()
    assert list(site.drivers.of) == [other]
    assert site.client(first).status == ("TERMINATED" if how == "closed" else "ERROR")


# A new process of the service


@pytest.mark.parametrize("package_every", [1, 2, 3])
def test_another_process_goes_on_from_the_store_alone(make_site, package_every):
    site = make_site()
    client = site.create(config=TEXT)
    pairs = steps(site, client, 3)
    save, load_later = site.submit(client, SAVE), steps(site, client, 1)
    sample = site.submit(client, SAMPLE, **TEXTS)
    driver = site.drivers.of[client]
    reports = driver.pump()
    for _ in range(6):  # up to the first release
        site.tell(client, next(reports))
    # The driver does its next step, of which nobody is told.
    next(reports), next(reports), next(reports)
    site = make_site(world=site.world, package_every=package_every)
    site.run()
    assert all(site.get(each).state == "done" for pair in (*pairs, *load_later) for each in pair)
    assert [site.get(pair[1]).optim_step.model_digest for pair in pairs] == [digest(step) for step in (1, 2, 3)]
    assert site.get(save).save_state.artifact.step == 3
    assert [step for (step,) in site.world.facts("run0", "charge")] == [0, 1, 2, 3]
    site = make_site(world=site.world)
    assert list(site.sampler.asked) == [sample.operation_id]


def test_another_process_removes_files_that_no_operation_names(make_site):
    site = make_site()
    client = site.create(config=SENT)
    site.send(client, "a")
    _, orphan = site.batch(client, "b")
    site = make_site(world=site.world)
    assert not (site.batches / orphan).exists()
    assert len(list(site.batches.rglob("*"))) == 2
    site.submit(client, OPT)
    site.run()
    assert len(site.drivers.of[client].files[0]) == 1


@pytest.mark.parametrize("config", [GIVEN, SENT], ids=["registered", "sent"])
def test_what_the_operator_has_withdrawn_is_trained_on_no_more_and_what_was_released_stays(make_site, config):
    site = make_site()
    client = site.create(config=config)
    site.run()
    site.send(client, "a") if config is SENT else site.submit(client, FB)
    site.submit(client, OPT)
    tenant = {"token_sha256": [{"sha256": sha256(b"north").hexdigest()}]}
    site = make_site(world=site.world, tenants={"north": tenant})
    site.run()
    assert site.client(client).step == 1, "what was submitted before is done"
    with pytest.raises((ServiceNotFoundError, ServicePermissionError)):
        site.send(client, "b", key="b") if config is SENT else site.submit(client, FB, key="b")
    save = site.submit(client, SAVE, key="save")
    site.run()
    assert site.get(save).state == "done"
    site = make_site(world=site.world)
    site.send(client, "b", key="b") if config is SENT else site.submit(client, FB, key="b")
    assert site.get(site.submit(client, OPT, key="o")).state != "failed"


def test_a_stopping_desk_stops_drivers_and_starts_none(site):
    client = site.create()
    site.run()
    pairs = steps(site, client, 1)
    site.ask(site.desk.drivers.stop)
    site.create()
    site.run()
    assert site.desk.drivers.of == {}
    assert site.get(pairs[0][1]).state == "running"


def test_a_refusal_undoes_its_part_of_a_turn_alone(site):
    client = site.create(config=SENT)
    one, file = site.batch(client, "a")
    two, other = site.batch(client, "b", "a")
    with site.desk.book.turn():
        with site.desk.book.part():
            site.desk.accept_batch("north", one, file, site.sealed(one))
        with pytest.raises(ServiceError), site.desk.book.part():
            site.desk.accept_batch("north", two, other, site.sealed(two))
    assert site.client(client).client_id == client
    site.send(client, "b")


def test_a_driver_is_told_nothing_of_a_part_of_a_turn_that_is_undone(site):
    client, told = site.create(), []
    site.run()
    site.drivers.send = lambda client, command: told.append(command)
    request = wire.SubmitRequest(client_id=client, idempotency_key="a", forward_backward=wire.ForwardBackward())

    def fail_after_it():
        with site.desk.book.part():
            site.desk.submit("north", request)
            raise ZeroDivisionError

    with site.desk.book.turn(), pytest.raises(ZeroDivisionError):
        fail_after_it()
    assert told == []
    assert site.store.open_operations(client) == []


def test_the_figures_name_what_waits(site):
    client = site.create()
    site.submit(client, FB)
    assert site.ask(site.desk.queued_by_kind) == ({FB: 1}, 1000.0)
    assert site.ask(site.store.clients_by_status) == {"INITIALIZING": 1}
    site.run()
    assert site.ask(site.store.clients_by_status) == {"READY": 1}
    assert GIVEN["dataset"] == "digits"


def test_an_operation_costs_the_store_no_more_after_many_others(make_site):
    site = make_site(limits={"queued_operations": 1000})
    site.database.run("PRAGMA synchronous = OFF")
    client = site.create(config=TEXT, steps=10**6)
    site.run()
    done = [0]

    def count():
        done[0] += 1

    # SQLite calls it for every instruction of its machine.
    site.database._connection.set_progress_handler(count, 1)

    def cost(act, *arguments):
        before = done[0]
        act(*arguments)
        return done[0] - before

    def step():
        site.submit(client, FB)
        site.submit(client, OPT)

    def sample():
        operation = site.submit(client, SAMPLE, **TEXTS)
        site.run()
        site.ask(site.desk.reports.sampled, operation.operation_id, [])

    def costs():
        found = {"submit": cost(step), "tick": cost(site.ask, site.desk.tick), "run": cost(site.run)}
        figures = cost(site.ask, site.desk.queued_by_kind)
        return {**found, "figures": figures, "sample": cost(sample)}

    costs()
    first = costs()
    for _ in range(60):
        step()
        site.run()
    later = costs()
    assert all(later[name] < 1.5 * first[name] for name in first), (first, later)


def test_a_batch_reads_no_row_of_those_before_it_in_its_step(site, monkeypatch):
    """A step may have as many batches as examples, and the desk is everybody's."""
    client = site.create(config={**SENT, "dataset": SENT["dataset"] | {"max_examples_per_step": 50}})
    site.run()
    for number in range(20):
        site.send(client, f"x{number}")
    head, file = site.batch(client, "y")
    sealed = site.sealed(head)
    read = [0]
    run = site.database.run

    def counted(*statement):
        found = run(*statement)
        read[0] += len(found)
        return found

    monkeypatch.setattr(site.database, "run", counted)
    assert site.ask(site.desk.accept_batch, "north", head, file, sealed).state == "done"
    assert read[0] < 20
