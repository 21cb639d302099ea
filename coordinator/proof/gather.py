"""Gathers a run's record on its site: from the run directory, the ledger and the storage of its packages.

This is the only module of the room that opens what is not a file of the run: it needs the site's libraries and state.
"""

from pathlib import Path
from typing import TypeVar

from raycloak.attestation.orchestrator.documents import read_documents
from raycloak.attestation.policy.policy import Policy
from raycloak.attestation.sealed.package_keys import PackageSigner, TrustStore
from raycloak.coordinator.checkpoints.storage import STORAGE_ERRORS, PackageStorage, one_line, storage_of
from raycloak.coordinator.config import home
from raycloak.coordinator.proof.bundle import (
    DOCUMENTS,
    LEDGER,
    MANIFEST,
    OPTIONAL,
    PACKAGE,
    PACKAGE_FILES,
    REQUIRED,
    RecordPart,
    RecordParts,
)
from raycloak.coordinator.proof.trust import Trust
from raycloak.coordinator.record.folder import RunFolder
from raycloak.coordinator.vaults.machine_ledger import ledger_to_read
from raycloak.metrics.errors import ConfigError
from raycloak.metrics.file_errors import file_error
from raycloak.workers.terms.manifest import Manifest

T = TypeVar("T")


def site_signer() -> PackageSigner:
    """Return the signer of this site's packages and bundles."""
    return PackageSigner.load_or_create(home.home() / "signer")


def gather(run_dir: Path) -> tuple[Manifest, RecordParts]:
    """Return the manifest of a run and all parts of its record.

    Raises:
        ConfigError: ``not_a_run``, ``run_incomplete``, ``storage``, or ``run_file`` if a part cannot be read.
        BudgetError: ``chain_broken`` if the ledger cannot be trusted.
    """
    folder, manifest = _opened(run_dir)
    # Its log was exported when it stopped last, if ever; ledger and packages have gone on since.
    if folder.record.status == "running":
        raise ConfigError(
            "run_incomplete",
            f"the run in {run_dir} is under way, or was killed.",
            "Let it end, or resume it: raycloak run CONFIG --resume.",
        )
    try:
        found = {name: RecordPart.at(folder.path / name) for name in REQUIRED if name != LEDGER}
        found |= {name: RecordPart.at(folder.path / name) for name in OPTIONAL if (folder.path / name).exists()}
    except FileNotFoundError as error:
        raise _incomplete(run_dir, Path(error.filename).name) from None
    except OSError as error:
        raise file_error("run_file", "read", run_dir, error) from None
    with ledger_to_read(folder.config()) as ledger:
        lines = ledger.extract(manifest.account)
    found[LEDGER] = RecordPart.of(b"".join(line + b"\n" for line in lines))
    found |= _packages(folder)
    return manifest, RecordParts(found)


def trust_of(run_dir: Path) -> Trust:
    """Return what an auditor of a run must believe; the site hands it over on another channel than the run.

    Raises:
        ConfigError: as :func:`gather`.
        EvidenceError: ``log_broken`` if the documents cannot be read.
    """
    folder, manifest = _opened(run_dir)
    if not (folder.path / DOCUMENTS).exists():
        raise _incomplete(run_dir, DOCUMENTS)
    known = read_documents(RecordParts({DOCUMENTS: RecordPart.at(folder.path / DOCUMENTS)}).lines(DOCUMENTS))
    # Found by the digest in the manifest, so it is the policy of the run whoever wrote the file.
    policy = known.get(manifest.policy_digest)
    if policy is None:
        raise _incomplete(run_dir, "document of its policy")
    with ledger_to_read(folder.config()) as ledger:
        ledger_key = ledger.public_key
    return Trust(
        orchestrators=(manifest.log_owner,),
        ledger=ledger_key,
        signers=TrustStore.of("site", site_signer().public),
        policy=policy.open(Policy),
    )


def _opened(run_dir: Path) -> tuple[RunFolder, Manifest]:
    folder = RunFolder.open(run_dir)
    manifest = folder.manifest()
    if manifest is None:
        raise _incomplete(run_dir, MANIFEST)
    return folder, manifest


def _incomplete(run_dir: Path, name: str) -> ConfigError:
    return ConfigError(
        "run_incomplete",
        f"{run_dir} has no {name}: the run was killed before it wrote one.",
        "Resume the run and let it end: raycloak run CONFIG --resume.",
    )


def _packages(folder: RunFolder) -> dict[str, RecordPart]:
    location = storage_of(folder.config().checkpoint.storage, folder.record.run_id, folder.base)
    try:
        storage = PackageStorage.open(location)
        return {
            f"{PACKAGE}{name}/{file}": RecordPart.of(_read(storage, name, file))
            for name in storage.names()
            for file in PACKAGE_FILES
        }
    except STORAGE_ERRORS as error:
        raise ConfigError("storage", f"cannot read {location}: {one_line(error)}.", "Check the storage.") from None


def _read(storage: PackageStorage, name: str, file: str) -> bytes:
    with storage.reader(name, file) as source:
        return bytes(source.read())
