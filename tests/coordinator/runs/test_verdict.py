"""A verdict states its claims with their limits, and never a better figure than the truth."""

from dataclasses import replace
from pathlib import Path

import pytest

from raycloak.coordinator.cli.views.verdict import verdict_text
from raycloak.coordinator.console.figures import epsilon_text, size_text
from raycloak.coordinator.record.verdict import Verdict
from raycloak.coordinator.report.words import verdict_rows

VERDICT = Verdict(
    run_dir=Path("/home/someone/.local/share/raycloak/runs/digits-0123456789abcdef"),
    steps=200,
    planned_steps=200,
    ending="complete",
    private=True,
    privacy_epsilon=7.99998,
    privacy_epsilon_if_stop_was_blind=7.99998,
    privacy_epsilon_one_worker=10.9746,
    privacy_epsilon_charged=7.99998,
    privacy_delta=1e-5,
    epsilon_cap=8.0,
    evaluation_accuracy=0.9444,
    evidence_class="simulated",
    model_digest="ab" * 32,
    num_workers=3,
    virtual_workers=8,
    keys_on_one_machine=3,
    masked_bytes=11_544_000,
    wall_seconds=21.53,
)


def row(verdict, label):
    (value,) = (value for name, value in verdict_rows(verdict) if name == label)
    return value


def test_every_claim_stands_with_its_limit():
    text = verdict_text(VERDICT)
    assert "Verdict (SIMULATED evidence)" in text
    assert row(VERDICT, "ε") == "8.000, against outsiders and the aggregator, however the run ended"
    assert row(VERDICT, "ε with one worker") == "10.975, if its machine, with 3 of 8 keys, helps the aggregator"
    assert row(VERDICT, "ε of the account") == "8.000 for all its runs together, of which 8.000 is charged so far"
    assert row(VERDICT, "δ") == "1e-05"
    assert row(VERDICT, "accuracy") == "94.4% on the public split"
    assert row(VERDICT, "evidence").startswith("SIMULATED")
    assert row(VERDICT, "workers") == "3, hosting 8 virtual workers"
    assert row(VERDICT, "masked").startswith("11.5 MB reached the aggregator")
    assert row(VERDICT, "ledger rollback").startswith("not covered")
    assert row(VERDICT, "parameters") == "ab" * 32
    assert "200, 21.5 s with the start of the workers" in text
    assert "raycloak.load(RUN_DIR)" in row(VERDICT, "its model")


def test_a_sealed_split_and_a_key_service_are_named_with_what_they_do_not_do():
    text = dict(verdict_rows(VERDICT))
    assert "evaluation data" not in text
    assert "keys" not in text
    assert row(replace(VERDICT, evaluation_data="clear"), "evaluation data") == "public, in the clear"
    sealed = replace(VERDICT, evaluation_data="sealed", key_service="keys.example.org:7443")
    assert row(sealed, "evaluation data").endswith("its results are public")
    assert row(sealed, "accuracy") == "94.4% on the sealed evaluation split"
    assert row(sealed, "keys") == "half of each from keys.example.org:7443"
    assert row(replace(sealed, evaluation_accuracy=None), "accuracy") == "not measured: the run failed first"
    assert row(replace(sealed, evaluation_accuracy=None, evaluation_loss=0.5), "loss").endswith(
        "sealed evaluation split"
    )
    assert Verdict.of({"run_dir": sealed.run_dir, "metrics": sealed.metrics()}) == sealed


def test_a_bound_that_the_service_counted_is_named_with_whose_word_it_is():
    assert "participations" not in dict(verdict_rows(VERDICT))
    text = dict(verdict_rows(replace(VERDICT, max_participations=4)))
    assert text["data"] == "sent: encrypted by the client for attested workers"
    assert text["amplification"].startswith("none is claimed")
    assert text["participations"].startswith("4 of 200 steps at most, and ε pays for 4: by the word of the service")


def test_no_line_is_cut_in_a_narrow_terminal():
    text = verdict_text(VERDICT, width=60)
    assert max(map(len, text.splitlines())) <= 60
    squeezed = "".join(line.rstrip("│").split("│")[-1].strip() for line in text.splitlines())
    assert "ab" * 32 in squeezed
    assert str(VERDICT.run_dir) in squeezed


def test_plain_text_has_no_escape_sequences():
    assert "\x1b" not in verdict_text(VERDICT)


def test_a_run_without_privacy_says_so_in_capitals():
    public = replace(
        VERDICT,
        private=False,
        privacy_epsilon=None,
        privacy_epsilon_if_stop_was_blind=None,
        privacy_epsilon_one_worker=None,
        privacy_epsilon_charged=None,
        privacy_delta=None,
        epsilon_cap=None,
    )
    text = verdict_text(public)
    assert "Verdict (NOT PRIVATE, SIMULATED evidence)" in text
    assert row(public, "privacy").startswith("NOT PRIVATE")
    assert "ε" not in text


def test_a_run_that_is_not_exact_says_so_in_capitals_with_what_that_means_for_its_epsilon():
    assert VERDICT.metrics()["exact"] is True
    assert "EXACT" not in verdict_text(VERDICT)
    loose = replace(VERDICT, exact=False)
    assert "Verdict (NOT EXACT, SIMULATED evidence)" in verdict_text(loose)
    assert row(loose, "exact").startswith("NOT EXACT")
    assert "no noise covers" in row(loose, "exact")
    assert loose.metrics()["exact"] is False


def test_a_loss_is_shown_where_no_accuracy_is_measured():
    measured = replace(VERDICT, evaluation_accuracy=None, evaluation_loss=0.0123456)
    assert row(measured, "loss") == "0.0123456, mean over the public split"
    assert "accuracy" not in [label for label, _ in verdict_rows(measured)]


def test_a_smaller_figure_stands_beside_the_claim_only_with_its_condition():
    assert "ε if the stop was blind" not in [label for label, _ in verdict_rows(VERDICT)]
    stopped = replace(VERDICT, steps=20, ending="stopped", privacy_epsilon_if_stop_was_blind=2.1)
    assert row(stopped, "ε").startswith("8.000")
    assert row(stopped, "ε if the stop was blind") == "2.100, only if nothing that was released led to the end"


def test_hardware_evidence_is_named_and_never_called_simulated():
    hardware = replace(VERDICT, evidence_class="tdx")
    assert "SIMULATED" not in verdict_text(hardware)
    assert row(hardware, "evidence") == "tdx"


def test_links_are_shown_where_a_worker_has_a_gpu():
    assert "links" not in [label for label, _ in verdict_rows(VERDICT)]
    clear = replace(VERDICT, evidence_class="nvidia_gpu", links="clear over attested switches")
    assert row(clear, "links") == "clear over attested switches"
    assert row(replace(clear, evidence_class="simulated"), "links") == "clear over attested switches (SIMULATED)"


@pytest.mark.parametrize("spelling", ["simulated", "SIMULATED", "Simulated"])
def test_simulated_is_seen_in_any_spelling(spelling):
    assert replace(VERDICT, evidence_class=spelling).simulated


def test_what_weakens_the_claim_is_shown_only_where_it_holds():
    labels = [label for label, _ in verdict_rows(VERDICT)]
    assert "colocated" not in labels
    assert "warning" not in labels
    weak = replace(VERDICT, colocated=True, warnings=("delta is large.",), masked_bytes=0, evaluation_accuracy=None)
    assert "one node" in row(weak, "colocated")
    assert row(weak, "warning") == "delta is large."
    assert row(weak, "masked") == "nothing: secure aggregation was off"
    assert row(weak, "accuracy").startswith("not measured")
    assert row(replace(VERDICT, rollback_witness=True), "ledger rollback").startswith("a witness")


def test_a_verdict_is_read_back_from_the_trainers_result():
    result = {"run_dir": str(VERDICT.run_dir), "metrics": {**VERDICT.metrics(), "another_figure": 1}}
    assert Verdict.of(result) == VERDICT
    assert "run_dir" not in VERDICT.metrics()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7.9991, "8.000"),
        (8.0, "8.000"),
        (0.0, "0.000"),
        (1.2341, "1.235"),
        (None, "unbounded"),
        (float("inf"), "unbounded"),
    ],
)
def test_an_epsilon_is_never_rounded_down(value, text):
    assert epsilon_text(value) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (2_500_000, "2.5 MB"), (10**10, "10.0 GB")],
)
def test_sizes_have_decimal_units(count, text):
    assert size_text(count) == text


@pytest.mark.parametrize(
    ("ending", "named"),
    [
        ("complete", "120 of 200, 21.5 s with the start of the workers"),
        ("cap_exceeded", "120 of 200, 21.5 s with the start of the workers: the cap is reached"),
        ("stopped", "120 of 200, 21.5 s with the start of the workers: stopped, resume with --resume"),
        ("too_few_workers", "120 of 200, 21.5 s with the start of the workers: ended by too_few_workers"),
    ],
)
def test_how_the_run_ended_stands_beside_its_steps(ending, named):
    assert row(replace(VERDICT, steps=120, ending=ending), "steps") == named
