"""A failure as a message: how an error of this package leaves one process and is raised in another."""

from typing import ClassVar, Final, Self

from raycloak.attestation.core.messages import Message
from raycloak.metrics import errors
from raycloak.metrics.errors import ProtocolError, RaycloakError, RunFailedError, SenderError, is_out_of_memory

_KINDS: Final[dict[str, type[RaycloakError]]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, RaycloakError)
}


class Failed(Message):
    """A report that a call or a whole child failed.

    Attributes:
        error: the class in `raycloak.metrics.errors`.
        code, message, remedy: see `RaycloakError`.
        epsilon: of the account by then, if known.
        step: the step that did not finish, if any had begun.
        member_id: the sender that a `SenderError` names.
    """

    DOMAIN: ClassVar[str] = "raycloak/process/failed/v1"
    error: str
    code: str
    message: str
    remedy: str
    epsilon: float | None
    step: int | None
    member_id: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Describe an error. One that is none of this package's is told by its type alone: its text may be data."""
        if is_out_of_memory(error):
            error = out_of_memory()
        elif isinstance(error, KeyboardInterrupt):
            error = RaycloakError("interrupted", "the process was stopped at once.", "Start it again.")
        elif not isinstance(error, RaycloakError):
            remedy = "The log of the process has the traceback."
            error = RaycloakError("unexpected", f"{type(error).__name__}.", remedy)
        kind = next(each.__name__ for each in type(error).__mro__ if _KINDS.get(each.__name__) is each)
        return cls(
            error=kind,
            code=error.code,
            message=error.message,
            remedy=error.remedy,
            epsilon=error.spent_epsilon,
            step=error.step,
            member_id=error.member_id if isinstance(error, SenderError) else None,
        )

    @property
    def exit_code(self) -> int:
        """The exit code of a command that ends with this error."""
        return self._kind().exit_code

    def raised(self) -> RaycloakError:
        """Return the error, to be raised; ProtocolError ``malformed`` if there is none of that class."""
        kind, told = self._kind(), (self.code, self.message, self.remedy)
        error = kind(*told, self.member_id or "") if issubclass(kind, SenderError) else kind(*told)
        error.step, error.spent_epsilon = self.step, self.epsilon
        return error

    def _kind(self) -> type[RaycloakError]:
        if self.error not in _KINDS:
            raise ProtocolError("malformed", f"a failure of unknown class {self.error[:40]!r}")
        return _KINDS[self.error]


def out_of_memory() -> RunFailedError:
    """Return the error for a process that had too little memory, whether it was refused some or was killed."""
    return RunFailedError("out_of_memory", "the process had too little memory.", "Give it more memory, or less to do.")
