"""The folders of the product, for tests that read its source."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("attestation", "coordinator", "metrics", "workers")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
