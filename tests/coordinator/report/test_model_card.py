"""The model card: the hub's format, the verdict's claim, nothing of the site."""

import json

import pytest
import yaml

from raycloak.coordinator.record.run_reader import read_run
from raycloak.coordinator.report.facts import plain
from raycloak.coordinator.report.model_card import model_card
from tests.coordinator.report.test_document import edit


def card_of(folder):
    return model_card(read_run(folder))


def front_of(card):
    return yaml.safe_load(card.split("---\n")[1])


def test_the_hub_reads_the_card_and_its_results(ended):
    hub = pytest.importorskip("huggingface_hub", reason="the hub's own reader of cards is not installed")
    card = hub.ModelCard(card_of(ended))
    verdict = json.loads((ended / "verdict.json").read_text())
    results = {each.metric_type: each.metric_value for each in card.data.eval_results}
    assert results == {"accuracy": verdict["evaluation_accuracy"], "f1": verdict["evaluation_f1"]}
    assert card.data.library_name == "raycloak"
    assert card.data.tags == ["raycloak", "differential-privacy"]


def test_the_card_has_no_path_of_the_site(ended):
    card = card_of(ended)
    assert str(ended) not in card
    assert str(ended.parent) not in card
    assert "examples.npz" not in card
    assert "| ε | " in card
    assert "SIMULATED" in card


def test_without_a_verdict_nothing_is_claimed(copied):
    folder = copied()
    (folder / "verdict.json").unlink()
    card = card_of(folder)
    assert "NO VERDICT: nothing is claimed" in card
    assert "model-index" not in front_of(card)
    assert "differential-privacy" not in front_of(card)["tags"]


def test_a_model_that_is_not_private_is_not_tagged_so(copied):
    folder = copied()
    edit(folder, "verdict.json", private=False)
    card = card_of(folder)
    assert "NOT PRIVATE: it may reveal any example" in card
    assert front_of(card)["tags"] == ["raycloak"]


def test_markdown_in_a_name_is_shown_and_not_obeyed():
    assert plain("<b>[a](http://x)|`y`\n# z") == r"\<b\>\[a\](http://x)\|\`y\` \# z"
