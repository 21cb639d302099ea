"""`benchmarks/gpu/report.py`: a section that fails or is skipped leaves the other results, and the check fails."""

import json

import pytest
import torch

from benchmarks.gpu.__main__ import BUDGET_S, sections
from benchmarks.gpu.engine import Repeats
from benchmarks.gpu.place import Place
from benchmarks.gpu.report import Found, Report, Section


@pytest.fixture
def report(tmp_path):
    return Report(tmp_path / "new" / "report.json", Place(torch.device("cpu")), budget_s=100)


def _stored(report):
    return json.loads(report.path.read_text(encoding="utf-8"))


def _failing():
    raise RuntimeError("no such kernel")


def test_a_report_names_the_card_and_holds_dataclasses_as_fields(report):
    found = Repeats(True, True, True, True, False, 1.0, 0.0, 1e-3)
    report.add(Section("repeats", 1, lambda: Found({"mlp": found})))
    assert report.passed
    stored = _stored(report)
    assert (stored["card"], stored["passed"]) == ("none", True)
    assert stored["sections"]["repeats"]["figures"]["mlp"]["other_place"] is False


def test_a_section_that_fails_leaves_the_results_before_it_and_those_after_it_run(report):
    report.add(Section("first", 1, lambda: Found({"number": 1})))
    report.add(Section("second", 1, _failing))
    assert _stored(report)["sections"]["first"]["figures"] == {"number": 1}
    report.add(Section("third", 1, lambda: Found({"number": 3})))
    stored = _stored(report)
    assert "no such kernel" in stored["sections"]["second"]["failed"]
    assert stored["sections"]["third"]["figures"] == {"number": 3}
    assert not stored["passed"]


def test_a_section_without_time_is_skipped_and_the_check_has_not_passed(report):
    report.add(Section("long", 101, _failing))
    assert "skipped" in _stored(report)["sections"]["long"]
    assert not report.passed


def test_a_section_that_needs_a_gpu_is_skipped_without_one_and_the_check_has_not_passed(report):
    report.add(Section("speed", 1, _failing, needs_gpu=True))
    assert "skipped" in _stored(report)["sections"]["speed"]
    assert not report.passed


def test_the_sections_fit_into_the_budget_and_all_but_the_whole_run_into_six_minutes():
    *sooner, last = sections(Place(torch.device("cpu")))
    assert last.name == "whole_run"
    assert sum(each.needs_s for each in sooner) <= 360
    assert sum(each.needs_s for each in (*sooner, last)) <= BUDGET_S


def test_a_fault_is_not_passed(report):
    report.add(Section("rows", 1, lambda: Found({}, ["a row is added with twice its square"])))
    assert not report.passed


@pytest.mark.parametrize(
    ("changed", "faults"),
    [
        ({}, 0),
        ({"other_place": False}, 0),
        ({"again": False}, 1),
        ({"new_engine": False}, 1),
        ({"other_process": False}, 1),
        ({"beside_others": False}, 1),
        ({"norm_of_one": 1.0000001}, 1),
        ({"norm_of_one": float("nan")}, 1),
        ({"distance_from_cpu": 0.01}, 1),
    ],
)
def test_every_broken_promise_of_a_sum_is_a_fault(changed, faults):
    kept = dict.fromkeys(("again", "new_engine", "other_process", "beside_others", "other_place"), True)
    found = Repeats(**{**kept, "norm_of_one": 1.0, "distance_from_cpu": 1e-7, "far": 1e-3, **changed})
    assert len(found.faults()) == faults


def test_a_check_of_no_section_has_not_passed(report):
    assert not report.passed
