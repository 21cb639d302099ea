from pathlib import Path

from raycloak.metrics.registry import markdown_table

METRICS = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def test_the_table_of_the_document_is_the_registry():
    assert METRICS.read_text().endswith("\n\n" + markdown_table()), "paste: python -m raycloak.metrics.registry"
