"""What a report says of a run whose examples a client sent."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from raycloak.coordinator.record.run_reader import RunData, read_run
from raycloak.coordinator.report.ai_act import documentation_of
from raycloak.coordinator.report.facts import data_rows, limits_of, sampling_rows
from raycloak.coordinator.report.members import evidence_of
from raycloak.coordinator.report.model_card import model_card

SENT = {"kind": "sent", "shape": [64], "classes": 3, "max_participations": 2, "max_examples_per_step": 40}


@pytest.fixture
def sent(copied) -> Path:
    """A run directory whose configuration, manifest and verdict are those of such a run."""
    folder = copied()
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config |= {"dataset": SENT, "measurements": {}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def as_sent(run: RunData) -> RunData:
    assert run.manifest is not None
    computation = run.manifest.computation
    mechanism = computation.mechanism.model_copy(update={"sample_rate": 1.0, "max_participations": 2})
    changed = computation.model_copy(update={"mechanism": mechanism, "measurements": ()})
    return replace(run, manifest=run.manifest.model_copy(update={"computation": changed}))


def test_a_report_says_how_often_an_example_is_used_and_by_whose_word(sent: Path):
    run = as_sent(read_run(sent))
    assert run.manifest is not None
    mechanism = run.manifest.computation.mechanism
    rows = dict(sampling_rows(run))
    assert "sampling" not in rows
    assert rows["amplification"].startswith("none is claimed")
    assert rows["participations"].startswith(f"2 of {mechanism.steps} steps at most, and ε pays for 2: by the word of")
    most = mechanism.steps * mechanism.num_examples
    assert rows["δ"].endswith(f"one over the most examples that all steps could have is {1 / most:.2g}")
    data = dict(data_rows(run))
    assert (data["place"], data["kept"]) == ("none: a client sends it", "encrypted for attested workers")
    assert data["examples of a step, at most"].startswith(f"{mechanism.num_examples:,}")
    verdict = run.opened_verdict()
    assert verdict is not None
    limits = " ".join(limits_of(run, replace(verdict, max_participations=2)))
    assert "no example took part in more than 2 steps" in limits
    assert "A client chose the examples of each step" in limits
    assert "The data was not sealed" not in limits


def test_a_model_card_says_that_a_client_sent_the_examples(sent: Path):
    run = as_sent(read_run(sent))
    assert run.manifest is not None
    most = run.manifest.computation.mechanism.num_examples
    assert f"Up to {most:,} examples a step, which a client sent." in model_card(run)


def test_technical_documentation_does_not_say_that_examples_are_drawn(sent: Path):
    run = read_run(sent)

    def said(of: RunData) -> str:
        chapters = documentation_of(of, evidence_of(run)).chapters
        return " ".join(each.text for chapter in chapters for duty in chapter.duties for each in duty.statements)

    assert "each step draws" in said(run)
    assert "A client sends up to" in said(as_sent(run))
    for words in ("each step draws", "is drawn with probability", "described under Article 10"):
        assert words in said(run)
        assert words not in said(as_sent(run))
