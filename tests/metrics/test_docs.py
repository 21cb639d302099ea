from pathlib import Path

import pytest

from raycloak.metrics.registry import SERIES, markdown_table

METRICS = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def test_the_table_of_the_document_is_the_registry():
    assert METRICS.read_text().endswith("\n\n" + markdown_table()), "paste: python -m raycloak.metrics.registry"


@pytest.mark.parametrize("series", SERIES, ids=lambda s: s.name)
def test_every_series_is_documented(series):
    assert f"| `{series.name}` | {series.kind} |" in METRICS.read_text()
