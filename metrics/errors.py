"""The one exception tree.

RaycloakError                      everything below; carries a stable code, a sentence, and what to do
├── ConfigError          exit 2    the user's input cannot be used
│   ├── DatasetError               the data cannot be opened, or does not fit the run
│   └── ModelError                 the model cannot be trained privately
├── RefusedError         exit 3    a promise would be broken
│   ├── BudgetError                the ledger does not charge
│   ├── EvidenceError              evidence or keys are not accepted; the code is the refusal
│   └── ProtocolError              a message does not match what its receiver holds
│       └── SenderError            the same, and the receiver knows whose message it is
└── RunFailedError       exit 4    the run could not continue; says who, which step, the cause and what was spent

A message never carries data-dependent text: workers answer codes from a fixed list.
"""

import errno
from typing import Any

MORE_MEMORY = (
    "Lower micro_batch_size, or virtual_workers where the model itself is large, or give the workers more memory; the "
    "expected batch and its charge stay."
)
"""The remedy when a worker runs out of memory: neither field changes the expected batch of examples."""

# Torch's allocator for CPUs and its map of a file raise a plain RuntimeError, as does a library under it. On a full GPU
# cuDNN finds no engine that fits, and cuBLAS, which takes memory as it starts, does not start.
_NO_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "Cannot allocate memory",
    "std::bad_alloc",
    "ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "unable to find an engine",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` says that memory could not be had: from Python, NumPy, torch or the kernel."""
    # By name, so that this module imports no torch.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if _is_accelerators(error):
        return "out of memory" in str(error)
    return type(error) is RuntimeError and any(text in str(error) for text in _NO_MEMORY)


def is_gpu_error(error: BaseException) -> bool:
    """Return whether ``error`` says that a GPU failed for good: every later call of the process fails too."""
    return _is_accelerators(error) and not is_out_of_memory(error)


def _is_accelerators(error: BaseException) -> bool:
    return type(error).__name__ == "AcceleratorError"


class RaycloakError(Exception):
    """The base of all errors that a user may catch.

    Args:
        code: stable machine-readable name, for example ``cap_exceeded``.
        message: one sentence that says what is wrong.
        remedy: a sentence that says what the reader can do; may be empty.

    Attributes:
        step: the step that did not finish, if the error ended a run that had begun to train.
        spent_epsilon: what the account had been charged by then, if known.
        result: the result so far, as `Trainer.train` returns it, if a step had finished.
    """

    exit_code = 4
    step: int | None = None
    spent_epsilon: float | None = None
    result: dict[str, Any] | None = None

    def __init__(self, code: str, message: str, remedy: str = "") -> None:
        super().__init__(code, message, remedy)
        self.code = code
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        text = f"{self.code}: {self.message}"
        return f"{text} {self.remedy}" if self.remedy else text

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, self.message, self.remedy)


class ConfigError(RaycloakError):
    """An error of the user's input: it cannot be used as it is."""

    exit_code = 2


class DatasetError(ConfigError):
    """An error of a dataset: it cannot be opened, or does not fit the run."""


class ModelError(ConfigError):
    """An error of a model: it cannot be trained under per-example clipping."""


class RefusedError(RaycloakError):
    """A refusal: to continue would break a promise."""

    exit_code = 3


class BudgetError(RefusedError):
    """A refusal by the ledger: it does not charge, or its record cannot be trusted."""


class EvidenceError(RefusedError):
    """A refusal of evidence or of a key package; ``code`` says why."""


class ProtocolError(RefusedError):
    """A refusal of a message that does not match what its receiver holds."""


class SenderError(ProtocolError):
    """A refusal of a message whose sender is known.

    Args:
        member_id: the sender, as the receiver's roster names it.
    """

    def __init__(self, code: str, message: str, remedy: str = "", member_id: str = "") -> None:
        super().__init__(code, message, remedy)
        self.member_id = member_id

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, self.message, self.remedy, self.member_id)


class RunFailedError(RaycloakError):
    """The end of a run: one of its phases failed for good.

    Args:
        code: the cause: ``out_of_memory``, ``gpu_error``, ``preempted``, ``unreachable``, ``refused``,
            ``worker_error`` ...
        message: one sentence that names who failed, in which step and phase.
        remedy: a sentence that says what to do next.
        step: the step that did not commit, if any.
        spent_epsilon: what the ledger had charged by then, if known.
    """

    def __init__(
        self, code: str, message: str, remedy: str = "", step: int | None = None, spent_epsilon: float | None = None
    ) -> None:
        super().__init__(code, message, remedy)
        self.step = step
        self.spent_epsilon = spent_epsilon

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, self.message, self.remedy, self.step, self.spent_epsilon)
