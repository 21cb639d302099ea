"""A report cannot be defined with a field that may not be shown."""

from dataclasses import field
from typing import Annotated

import pytest

from raycloak.metrics.privacy_class import PrivacyClass
from raycloak.metrics.reports import Fact, Physical, Release, classes_of, report


def test_a_report_knows_the_class_of_each_field() -> None:
    @report
    class Shown:
        step: Fact[int]
        seconds: Physical[float]
        values: Release[dict[str, float]] = field(default_factory=dict)

    assert classes_of(Shown) == {
        "step": PrivacyClass.DATA_INDEPENDENT,
        "seconds": PrivacyClass.PHYSICAL,
        "values": PrivacyClass.RELEASED,
    }
    assert Shown(1, 0.5) == Shown(1, 0.5, {})


@pytest.mark.parametrize("kind", [int, Annotated[int, PrivacyClass.SECRET], Annotated[int, "public"]])
def test_guarantee_a_field_without_a_class_or_a_secret_one_defines_no_report(kind) -> None:
    with pytest.raises(TypeError, match=r"Told\.examples is not declared"):
        report(type("Told", (), {"__annotations__": {"examples": kind}}))


def test_what_was_not_declared_is_no_report() -> None:
    with pytest.raises(TypeError, match="dict is no report"):
        classes_of(dict)
