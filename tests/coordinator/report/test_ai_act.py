"""Technical documentation: each statement repeats the record and names where it stands."""

import json
import re

import pytest
import yaml

from raycloak.coordinator.record.folder import RunFolder
from raycloak.coordinator.record.run_reader import read_run
from raycloak.coordinator.report.ai_act import documentation_of, shown
from raycloak.coordinator.report.members import evidence_of
from tests.coordinator.report.test_document import page_of


def documented(folder):
    run = read_run(folder)
    return documentation_of(run, evidence_of(run))


def statements(documentation):
    return [said for chapter in documentation.chapters for duty in chapter.duties for said in duty.statements]


def test_every_article_is_there_and_every_duty_leaves_a_blank(ended):
    documentation = documented(ended)
    places = [duty.place for chapter in documentation.chapters for duty in chapter.duties]
    for place in (
        "10(2)(b)",
        "10(5)",
        "13(3)(a)",
        "13(3)(f)",
        "15(4)",
        "15(5)",
        *map("Annex IV, {}".format, range(3, 10)),
    ):
        assert place in places
    assert all(duty.blank for chapter in documentation.chapters for duty in chapter.duties)


def test_every_statement_repeats_the_fields_that_it_names(ended):
    """The files are read here by other means than the documentation reads them."""
    files = {name: json.loads((ended / name).read_text()) for name in ("manifest.json", "verdict.json", "run.json")}
    files["config.yaml"] = yaml.safe_load((ended / "config.yaml").read_text())
    documentation = documented(ended)
    compared = 0
    for source in documentation.sources:
        if source.file in files and source.field != "digest":
            value = files[source.file]
            for name in source.field.split("."):
                value = value[name]
            if "epsilon" not in source.field:
                assert source.shown == shown(value), source
                compared += 1
    assert compared > 30
    said = statements(documentation)
    assert len(said) > 40
    assert all(each.sources for each in said)


def test_numbers_lead_to_the_record_in_the_same_document(ended):
    page = page_of(ended, eu_ai_act=True)
    numbers = [link for link in page.links if link.startswith("#record-")]
    assert len(numbers) > 40
    assert {link[1:] for link in numbers} <= set(page.ids)
    assert page.text.count("to be completed") > 20
    assert "Regulation (EU) 2024/1689" in page.text
    assert "Regulation (EU) 2024/1689" not in page_of(ended).text


def test_an_epsilon_is_never_stated_below_the_truth(ended):
    verdict = json.loads((ended / "verdict.json").read_text())
    (claim,) = [each for each in statements(documented(ended)) if "the run claims" in each.text][:1]
    stated = float(re.search(r"ε = ([\d.]+)", claim.text)[1])
    assert verdict["privacy_epsilon"] <= stated < verdict["privacy_epsilon"] + 0.001


@pytest.mark.parametrize("missing", ["verdict.json", "manifest.json", "evidence.jsonl"])
def test_where_the_record_is_silent_there_is_no_statement(copied, missing):
    folder = copied()
    whole = statements(documented(folder))
    (folder / missing).unlink()
    if missing == "verdict.json":
        RunFolder.open(folder).mark("running")
    fewer = documented(folder)
    assert missing not in {source.file for source in fewer.sources}
    kept = {each.text for each in statements(fewer)}
    assert len(kept) < len(whole)
    assert kept <= {each.text for each in whole}
