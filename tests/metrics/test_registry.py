import re

import pytest

from raycloak.metrics.events import FIELDS
from raycloak.metrics.privacy_class import PrivacyClass
from raycloak.metrics.registry import BY_NAME, GPU_STATES, OTHER, SERIES, Label, is_identifier
from tests.offenders import offenders

FORBIDDEN_LABELS = {"worker", "worker_id", "example", "user", "host", "pid", "message"}


def test_every_name_is_declared_once():
    assert len(BY_NAME) == len(SERIES)


def test_there_are_enough_series_to_watch_a_run():
    assert len([s for s in SERIES if s.privacy.exportable]) >= 25


def test_only_secret_is_not_exportable():
    assert [c for c in PrivacyClass if not c.exportable] == [PrivacyClass.SECRET]


def follows_the_conventions(series):
    assert re.fullmatch(r"raycloak(_[a-z0-9]+)+", series.name)
    assert not series.name.endswith(("_bucket", "_count", "_sum", "_created"))
    if series.name.endswith("_info"):
        assert series.kind == "gauge"
        assert series.labels
    assert series.help.endswith(".")


def test_names_follow_the_prometheus_conventions():
    assert offenders(SERIES, follows_the_conventions, lambda series: series.name) == {}


def has_few_bounded_labels(series):
    assert len(series.labels) <= 4
    assert len(set(series.label_names)) == len(series.labels)
    for label in series.labels:
        assert re.fullmatch(r"[a-z][a-z_]*", label.name)
        assert label.name not in FORBIDDEN_LABELS | {"le"}
        assert 1 <= label.at_most <= 1024


def test_labels_are_few_and_bounded():
    assert offenders(SERIES, has_few_bounded_labels, lambda series: series.name) == {}


def has_the_buckets_of_its_kind(series):
    if series.kind == "histogram":
        assert list(series.buckets) == sorted(set(series.buckets))
        assert series.buckets[0] > 0
    else:
        assert series.buckets == ()


def test_a_histogram_and_only_a_histogram_has_ascending_buckets():
    assert offenders(SERIES, has_the_buckets_of_its_kind, lambda series: series.name) == {}


def test_epsilon_is_derived_from_charges_and_so_released():
    assert BY_NAME["raycloak_privacy_epsilon_spent"].privacy is PrivacyClass.RELEASED
    assert BY_NAME["raycloak_evaluation_accuracy_ratio"].privacy is PrivacyClass.RELEASED
    assert BY_NAME["raycloak_evaluation_loss"].privacy is PrivacyClass.RELEASED


def is_physical_if_measured(series):
    """Durations and the times of steps' ends; utilization, power and temperature of the boards that compute.

    So is the most memory that a step took: a model of the user's own may ask for as much as its examples need.
    Evidence is renewed between two steps, and expires so long after that; only the start comes before all steps.
    Collateral ends when its vendor says.
    """
    timed = series.name.removesuffix("_total").endswith(("_seconds", "_watts", "_celsius"))
    measured = timed or any(each in series.name for each in ("utilization", "slow", "memory_peak"))
    expected = measured and "collateral" not in series.name and series.name != "raycloak_run_start_timestamp_seconds"
    assert (series.privacy is PrivacyClass.PHYSICAL) == expected


def test_what_is_measured_while_examples_are_computed_on_is_physical():
    assert offenders(SERIES, is_physical_if_measured, lambda series: series.name) == {}


def test_the_times_in_an_event_are_physical():
    timed = {field.name for field in FIELDS if field.name == "time" or field.name.endswith("seconds")}
    assert {field.name for field in FIELDS if field.privacy is PrivacyClass.PHYSICAL} == timed


@pytest.mark.parametrize("what", ["examples", "loss", "norm", "clipped", "nonfinite"])
def test_what_depends_on_private_examples_is_declared_secret(what):
    named = [s for s in SERIES if what in s.name and "evaluation" not in s.name]
    assert named
    assert all(s.privacy is PrivacyClass.SECRET for s in named)


@pytest.mark.parametrize(
    "text", ["", " ", "a b", "ValueError: x = 3", "a\n", "\u00e9", "x" * 129, "-a", "a\u2028b", "{}", '"'], ids=repr
)
def test_free_text_cannot_become_a_label_value(text):
    assert not is_identifier(text)
    assert Label("code").fold(text) == OTHER
    assert Label("state", GPU_STATES).fold(text) == OTHER


def test_identifiers_pass_an_open_label_and_only_members_a_closed_one():
    assert Label("code").fold("quote_signature_invalid") == "quote_signature_invalid"
    assert Label("node").fold("ip-10-0-0-1.example:9") == "ip-10-0-0-1.example:9"
    assert Label("state", GPU_STATES).fold("on") == "on"
    assert Label("state", GPU_STATES).fold("melted") == OTHER
