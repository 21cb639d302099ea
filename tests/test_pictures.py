"""The pictures in docs/pictures/ are small, load nothing, and say what stands behind them."""

import re
from pathlib import Path

import pytest

from tests.layout import ROOT
from tests.pictures import FOLDER, LARGEST_BYTES

PICTURES = sorted(FOLDER.iterdir())


def test_there_are_two_and_each_is_shown_in_a_document() -> None:
    assert [path.name for path in PICTURES] == ["report.png", "verdict.svg"]
    shown = "".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    assert all(f"docs/pictures/{path.name}" in shown for path in PICTURES)


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_picture_is_small(path: Path) -> None:
    assert path.stat().st_size < LARGEST_BYTES


def test_the_verdict_says_that_its_evidence_is_simulated_and_loads_nothing() -> None:
    drawn = (FOLDER / "verdict.svg").read_text().replace("&#160;", " ")
    assert "SIMULATED: no hardware vouches for the workers" in drawn
    assert re.findall(r"https?://[^\"]+", drawn) == ["http://www.w3.org/2000/svg"]
    assert "~/.local/share/raycloak/runs/digits-" in drawn
