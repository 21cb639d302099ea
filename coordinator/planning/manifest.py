"""Builds the manifest of a run from its configuration and from the facts of its prepared workers."""

from pathlib import Path

from raycloak.attestation.core.evidence import CollateralBundle
from raycloak.attestation.core.hybrid_signature import SignerPublic
from raycloak.attestation.keys.halves import ServiceContract
from raycloak.attestation.orchestrator.run_terms import RunTerms, SparseMasks
from raycloak.attestation.policy.policy import Policy
from raycloak.attestation.sealed.sealed_data import SealedSource
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.config.sections import SCHEDULES, OptimizerConfig
from raycloak.coordinator.planning.masks import MaskPlan
from raycloak.coordinator.planning.model_source import loss_spec
from raycloak.workers.inputs.descriptor import DatasetDescriptor
from raycloak.workers.inputs.user_code import source_digest
from raycloak.workers.messages import WorkerFacts
from raycloak.workers.terms.built_in_rules import RULES
from raycloak.workers.terms.manifest import (
    BY_HAND,
    Computation,
    Manifest,
    OptimizerSpec,
    ParameterGroup,
    UserCode,
    settings_text,
)
from raycloak.workers.terms.measurement import Measurement
from raycloak.workers.terms.mechanism import Mechanism
from raycloak.workers.terms.model_digest import frozen_digest


def build_computation(
    config: RunConfig,
    model: str,
    dataset: DatasetDescriptor,
    facts: WorkerFacts,
    mechanism: Mechanism,
    measurements: tuple[Measurement, ...] = (),
    metrics: tuple[UserCode, ...] = (),
    base: Path | str = ".",
) -> Computation:
    """Build the part of the manifest that determines the bytes of the weights.

    Guarantee: no part of it depends on the number of workers, ranges or nodes, on paths or on time.

    Args:
        base: folder that the names of an update rule and schedule of the user's own start from.

    Raises:
        ConfigError: ``module_function`` if one of them is not there.
    """
    return Computation(
        mechanism=mechanism,
        measurements=measurements,
        largest_rows=config.micro_batch_size or facts.largest_rows,
        model=model,
        model_code=facts.model_code,
        loss=loss_spec(config.loss),
        loss_code=facts.loss_code,
        augment_code=facts.augment_code,
        tensors=facts.tensors,
        initial_parameters=facts.initial_parameters,
        frozen=frozen_digest(facts.contents),
        optimizer=optimizer_spec(config.optimizer, base),
        numerics=facts.numerics,
        dataset=dataset.identity_digest(),
        tokenizer=facts.tokenizer,
        metrics=metrics,
        epoch_steps=config.epoch_steps,
    )


def optimizer_spec(config: OptimizerConfig, base: Path | str) -> OptimizerSpec:
    """Return the update rule and schedule of a run, with the digests of what is the user's own.

    Raises:
        ConfigError: ``module_function``.
    """
    given = config.model_dump(exclude={"settings", "groups"})
    return OptimizerSpec(
        **given,
        settings=settings_text(config.settings),
        groups=tuple(
            ParameterGroup(
                params=group.patterns,
                learning_rate=group.learning_rate,
                weight_decay=group.weight_decay,
                settings=settings_text(group.settings),
            )
            for group in config.groups
        ),
        code=b"" if config.name in (*RULES, BY_HAND) else source_digest(config.name, base),
        schedule_code=b"" if config.schedule in SCHEDULES else source_digest(config.schedule, base),
    )


def epochs(config: RunConfig) -> int:
    """Return the number of key epochs of the planned steps."""
    return -(-config.planned_steps // config.epoch_steps)


def build_manifest(
    computation: Computation,
    *,
    run_id: str,
    account: str,
    known_answer: bytes,
    policy_digest: bytes,
    ledger_key: bytes,
    orchestrator_key: SignerPublic,
    dataset_fingerprint: bytes = b"",
    key_service: ServiceContract | None = None,
    keys_per_machine: int | None = None,
    mask_colluders: int | None = None,
    code: bytes = b"",
) -> Manifest:
    """Build the run's contract, but for the commitments to its keys: these derive from what it returns.

    `Manifest.with_keys` adds them.
    """
    return Manifest(
        run_id=run_id,
        computation=computation,
        known_answer=known_answer,
        policy_digest=policy_digest,
        account=account,
        ledger_key=ledger_key,
        orchestrator_key=orchestrator_key.ed25519,
        orchestrator_ml_dsa=orchestrator_key.ml_dsa_65,
        key_commitments=(),
        dataset_fingerprint=dataset_fingerprint,
        key_service=key_service,
        keys_per_machine=keys_per_machine,
        mask_colluders=mask_colluders,
        code=code,
    )


def run_terms(
    manifest: Manifest,
    policy: Policy,
    collateral: CollateralBundle,
    sealed: SealedSource | None = None,
    evaluation: SealedSource | None = None,
    charged: bool = False,
    masks: MaskPlan | None = None,
) -> RunTerms[Manifest]:
    """Return the orchestrator's view of ``manifest``; ``charged`` as in `RunTerms`."""
    return RunTerms(
        contract=manifest,
        policy=policy,
        collateral=collateral,
        sealed=sealed,
        evaluation=evaluation,
        charged=charged,
        masks=SparseMasks(masks.colluding_workers, manifest.computation.releases) if masks else None,
    )
