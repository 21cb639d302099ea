"""The terms on which a machine's worker vault serves: what of its settings a run has to meet.

All of it is checked before it matters: the code before it runs, the place before data is opened, the noise before the
mechanism is tried, the rest before evidence leaves, without which there are no keys.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from raycloak.coordinator.vaults.settings import PLACELESS, DataPlace, WorkerSettings, policy_not_served
from raycloak.metrics.errors import RefusedError
from raycloak.workers.inputs.descriptor import DatasetDescriptor
from raycloak.workers.messages import WorkerSetup
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.mechanism import Mechanism

_NAME_IT: Final = "Its owner can name it in the settings of the machine's vaults."


class ServedTerms:
    """The settings of a worker's vault.

    Attributes:
        place: of the data that is open; None as long as none is.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self.place: DataPlace | None = None

    def place_of(self, dataset: DatasetDescriptor) -> DataPlace:
        """Return the place that data lies at; RefusedError ``data_not_served`` if it may not be opened as stated.

        Args:
            dataset: from :func:`located`.
        """
        if dataset.kind in PLACELESS:
            found = self._place(dataset.kind, lambda place: place.path == dataset.kind)
        elif dataset.path is None or dataset.kind == "canaries":
            # The file of an audit names other files, which nobody has listed.
            raise RefusedError("data_not_served", f"the vault opens no data of kind {dataset.kind}.", _NAME_IT)
        else:
            found = self._place_at(dataset.path)
        if dataset.public and not found.public:
            raise _known_as_private(dataset.path or dataset.kind)
        return found

    def require_public(self, split: DatasetDescriptor) -> None:
        """Require that a split may be measured on, since results on it are exact; errors as :meth:`place_of`."""
        if not self.place_of(split).public:
            raise _known_as_private(split.path or split.kind)

    def require_code(self, setup: WorkerSetup) -> None:
        """Require that the worker is held to code of the settings' list, unless that is ``any``.

        Raises:
            RefusedError: ``code_not_served`` if it would admit any other, or any at all.
        """
        listed = self._settings.code
        if listed != "any" and (setup.code is None or not {each.hex() for each in setup.code} <= set(listed)):
            raise RefusedError(
                "code_not_served", "the vault runs listed code alone, and the policy of the run lists other.", _NAME_IT
            )

    def require_noise(self, *mechanisms: Mechanism) -> None:
        """Require the least noise of the data's place; RefusedError ``noise_not_served``."""
        place = self._known_place()
        for each in mechanisms:
            if not place.public and each.noise_multiplier < place.least_noise:
                raise RefusedError(
                    "noise_not_served",
                    f"a noise multiplier of {each.noise_multiplier:g} is below {place.least_noise:g}, the least here.",
                    "Plan with a smaller epsilon, or more steps.",
                )

    def require_manifest(self, manifest: Manifest) -> None:
        """Require a ledger, an account and a policy of the settings.

        Raises:
            RefusedError: ``ledger_not_served``, ``account_not_served`` or ``policy_not_served``.
        """
        place = self._known_place()
        if manifest.ledger_key.hex() not in self._settings.ledgers:
            raise RefusedError("ledger_not_served", "the vault takes no receipt of the run's ledger.", _NAME_IT)
        if not place.public and manifest.account != place.account:
            raise RefusedError(
                "account_not_served", f"account {manifest.account} does not pay for data at {place.path}.", _NAME_IT
            )
        if manifest.policy_digest.hex() not in self._settings.policies:
            raise policy_not_served()

    def _place_at(self, path: str) -> DataPlace:
        return self._place(path, lambda place: _lies_at(path, place.path))

    def _place(self, shown: str, is_it: Callable[[DataPlace], bool]) -> DataPlace:
        place = next(filter(is_it, self._settings.data), None)
        if place is None:
            raise RefusedError("data_not_served", f"the vault opens no data at {shown}.", _NAME_IT)
        return place

    def _known_place(self) -> DataPlace:
        if self.place is None:
            raise RefusedError("data_not_served", "the vault has opened no data.", "Prepare the worker first.")
        return self.place


def located(setup: WorkerSetup) -> WorkerSetup:
    """Return a setup whose data is named by absolute paths without links.

    What is checked is then what is opened: whoever set a link could set it anew in between.
    """

    def absolute(dataset: DatasetDescriptor) -> DatasetDescriptor:
        if dataset.path is None or "://" in dataset.path:
            return dataset
        return dataset.model_copy(update={"path": str((Path(setup.base) / dataset.path).resolve())})

    evaluation = absolute(setup.evaluation) if setup.evaluation is not None else None
    return setup.model_copy(update={"dataset": absolute(setup.dataset), "evaluation": evaluation})


def _known_as_private(shown: str) -> RefusedError:
    return RefusedError("data_not_served", f"the vault knows the data at {shown} as private.", _NAME_IT)


def _lies_at(path: str, place: str) -> bool:
    """Return whether what a run names lies at a place of the settings."""
    if "://" not in path:
        return Path(place).is_absolute() and Path(path).is_relative_to(Path(place).resolve())
    # The options of a URL say which store it is.
    (named, _, options), (top, _, own) = path.partition("?"), place.partition("?")
    below = named.removeprefix(top.rstrip("/"))
    if options != own or below == named:
        return False
    # A store may take dots and escapes as a file system would.
    return not below or (below.startswith("/") and ".." not in below.split("/") and "%" not in below)
