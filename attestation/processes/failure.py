"""A failure as a message: how an error of this package leaves one process and is raised in another."""

from typing import ClassVar, Final, Self

from raycloak.attestation.core.messages import Message
from raycloak.metrics import errors
from raycloak.metrics.errors import RaycloakError, RunFailedError, is_out_of_memory

_KINDS: Final[dict[str, type[RaycloakError]]] = {
    kind.__name__: kind
    for kind in (
        RaycloakError,
        errors.ConfigError,
        errors.DatasetError,
        errors.ModelError,
        errors.RefusedError,
        errors.BudgetError,
        errors.EvidenceError,
        errors.ProtocolError,
        RunFailedError,
    )
}


class Failed(Message):
    """A report that a call or a whole child failed.

    Attributes:
        error: the class in `raycloak.metrics.errors`.
        code, message, remedy: see `RaycloakError`.
        epsilon: of the account by then, if known.
        step: the step that did not finish, if any had begun.
    """

    DOMAIN: ClassVar[str] = "raycloak/process/failed/v1"
    error: str
    code: str
    message: str
    remedy: str
    epsilon: float | None
    step: int | None

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Describe an error. One that is none of this package's is told by its type alone: its text may be data."""
        if not isinstance(error, RaycloakError):
            error = _described(error)
        kind = next(each.__name__ for each in type(error).__mro__ if _KINDS.get(each.__name__) is each)
        return cls(
            error=kind,
            code=error.code,
            message=error.message,
            remedy=error.remedy,
            epsilon=error.spent_epsilon,
            step=error.step,
        )

    @property
    def exit_code(self) -> int:
        """The exit code of a command that ends with this error."""
        return _KINDS.get(self.error, RaycloakError).exit_code

    def raised(self) -> RaycloakError:
        """Return the error, to be raised."""
        error = _KINDS.get(self.error, RaycloakError)(self.code, self.message, self.remedy)
        error.step, error.spent_epsilon = self.step, self.epsilon
        return error


def _described(error: BaseException) -> RaycloakError:
    if is_out_of_memory(error):
        return out_of_memory()
    if isinstance(error, KeyboardInterrupt):
        return RaycloakError("interrupted", "the process was stopped at once.", "Start it again.")
    return RaycloakError("unexpected", f"{type(error).__name__}.", "The log of the process has the traceback.")


def out_of_memory() -> RunFailedError:
    """Return the error for a process that had too little memory, whether it was refused some or was killed."""
    return RunFailedError("out_of_memory", "the process had too little memory.", "Give it more memory, or less to do.")
