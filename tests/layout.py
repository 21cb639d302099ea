"""The folders of the product, for tests that read its source."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("attestation", "coordinator", "metrics", "workers")
LAB = ROOT / "lab" / "raycloak_lab"
SOURCES = sorted(path for folder in (*(ROOT / package for package in PACKAGES), LAB) for path in folder.rglob("*.py"))
