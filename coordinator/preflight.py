"""Preflight: early checks of all that a configuration names beside data and model."""

from pathlib import Path

from attestation.package_keys import load_recipients
from coordinator.config import RunConfig
from coordinator.key_service import given_contract
from coordinator.ledger_address import usable_url
from coordinator.ledger_witness import open_witness
from coordinator.sealed_terms import require_public


def preflight(config: RunConfig, base: Path) -> None:
    """Refuse a configuration that names something unusable, before anything starts or is charged.

    Guarantee: connects to nothing and writes nothing.

    Args:
        base: folder that relative paths start from.

    Raises:
        ConfigError: ``evaluation_not_public``, ``ledger_url``, ``witness``, ``recipient`` or ``key_service``.
    """
    if config.evaluation is not None:
        require_public(config.evaluation.dataset.kind, config.evaluation.dataset.public)
    if config.ledger.url is not None:
        usable_url(config.ledger.url)
    if config.ledger.witness is not None:
        open_witness(config.ledger.witness, bytes(32)).close()
    load_recipients([base / path for path in config.checkpoint.recipients])
    given_contract(config.key_service, base)
