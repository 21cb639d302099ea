"""The terms on which a machine's worker vault serves: what of its settings a run has to meet.

All of it is checked before it matters: the code before it runs, the place before data is opened, the noise before the
mechanism is tried, the rest before evidence leaves, without which there are no keys.
"""

from pathlib import Path
from typing import Final

from raycloak.coordinator.vaults.settings import DataPlace, WorkerSettings, policy_not_served
from raycloak.metrics.errors import RefusedError
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

    def place_of(self, setup: WorkerSetup) -> DataPlace:
        """Return the place that data lies at; RefusedError ``data_not_served`` if it may not be opened as stated."""
        dataset = setup.dataset
        shown = dataset.path if dataset.path is not None else dataset.kind
        # The file of an audit names other files, which nobody has listed.
        places = () if dataset.kind == "canaries" else self._settings.data
        place = next((each for each in places if _lies_at(setup, each)), None)
        if place is None:
            raise RefusedError("data_not_served", f"the vault opens no data at {shown}.", _NAME_IT)
        if dataset.public and not place.public:
            raise RefusedError("data_not_served", f"the vault knows the data at {shown} as private.", _NAME_IT)
        return place

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

    def _known_place(self) -> DataPlace:
        if self.place is None:
            raise RefusedError("data_not_served", "the vault has opened no data.", "Prepare the worker first.")
        return self.place


def _lies_at(setup: WorkerSetup, place: DataPlace) -> bool:
    path = setup.dataset.path
    if path is None:
        return setup.dataset.kind == place.path
    if "://" in path:
        return path == place.path or path.startswith(place.path.rstrip("/") + "/")
    # Links lead where the file is; what is named has no say.
    return (Path(setup.base) / path).resolve().is_relative_to(Path(place.path).resolve())
