"""The messages between the service and a driver: commands, and reports. Infinity and NaN become null."""

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, get_args

from pydantic import BeforeValidator

from raycloak.attestation.core.messages import Message
from raycloak.attestation.processes.failure import Failed


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Figure = Annotated[float | None, BeforeValidator(_finite)]
"""A number; None where there is none, or it is no finite one."""


class Begin(Message):
    """The first command: the run to execute.

    Attributes:
        config: a `RunConfig` as plain data; it names model and dataset.
        base: absolute folder that relative paths and ``module:function`` names start from.
        run_secret: file of the run secret; None has the orchestrator generate one.
        run_id: of a run to resume; None begins a new one. A run that never charged anything is begun anew.
    """

    DOMAIN: ClassVar[str] = "raycloak/driver/begin/v1"
    config: dict[str, Any]
    base: Path
    run_secret: Path | None
    run_id: str | None


class Allow(Message):
    """Watermarks: steps below ``computed`` may be charged, and those below ``released`` reduced.

    They only rise; but ``released`` falls back to a step that was reported as held, and both to the finished steps of a
    run that is over.

    Attributes:
        held: whether the next step to be computed is to wait; workers that compute it now leave it.
    """

    DOMAIN: ClassVar[str] = "raycloak/driver/allow/v1"
    computed: int
    released: int
    held: bool = False


class Batches(Message):
    """The files of the examples that were sent for a step; they come before the step is allowed."""

    DOMAIN: ClassVar[str] = "raycloak/driver/batches/v1"
    step: int
    files: tuple[Path, ...]


class Save(Message):
    """A command to save the state after ``after`` finished steps."""

    DOMAIN: ClassVar[str] = "raycloak/driver/save/v1"
    id: str
    after: int


class Copy(Message):
    """A command to write the weights after ``after`` finished steps to the file ``path``, for who gives the command."""

    DOMAIN: ClassVar[str] = "raycloak/driver/copy/v1"
    id: str
    after: int
    path: Path


class Load(Message):
    """A command to go on from ``package``, a location as :class:`Saved` has it, after ``after`` finished steps."""

    DOMAIN: ClassVar[str] = "raycloak/driver/load/v1"
    id: str
    after: int
    package: str


class Close(Message):
    """A command to end: a run whose steps are all finished is complete, another one is stopped."""

    DOMAIN: ClassVar[str] = "raycloak/driver/close/v1"


class PhaseBegun(Message):
    """A report of what the driver does, in a few words."""

    DOMAIN: ClassVar[str] = "raycloak/driver/phase/v1"
    words: str


class Notice(Message):
    """A report of one line for a watcher, such as a worker that left."""

    DOMAIN: ClassVar[str] = "raycloak/driver/notice/v1"
    line: str


class Opened(Message):
    """A report of which run it is, before anything is charged."""

    DOMAIN: ClassVar[str] = "raycloak/driver/opened/v1"
    run_id: str
    run_dir: Path


class Ready(Message):
    """A report that members are admitted; steps that are allowed begin.

    Attributes:
        finished_steps: steps behind the model that this execution starts from; steps that an earlier driver finished
            and sealed are not reported again.
        charged_steps: that the ledger has charged to this run.
        epsilon: of the account by now. It, ``epsilon_cap``, ``epsilon_planned``, ``delta`` and ``noise_multiplier`` are
            None if the run is not private.
        manifest: the run's public contract.
    """

    DOMAIN: ClassVar[str] = "raycloak/driver/ready/v1"
    finished_steps: int
    steps: int
    charged_steps: int
    delta: Figure
    epsilon_cap: Figure
    epsilon_planned: Figure
    epsilon: Figure
    noise_multiplier: Figure
    sample_rate: float
    max_grad_norm: float
    accountant: str
    private: bool
    virtual_workers: int
    evidence_class: str
    account: str
    manifest: dict[str, Any]


class Spent(Message):
    """A report that a measurement was charged and released; ``epsilon`` is the account's, by its receipt.

    The step that it precedes may be held, or never come.
    """

    DOMAIN: ClassVar[str] = "raycloak/driver/spent/v1"
    epsilon: Figure


class Computed(Message):
    """A report that step ``step``, from 0, is charged, computed, masked and bound.

    Attributes:
        epsilon: of the account, as the receipt has it; None if the run is not private.
        loss: mean of the model before the step: exact over the drawn examples if the run is not private; else as a
            measurement of this very model released it, or None.
        tokens: of the drawn examples; None if the run is private, or examples are no rows of tokens.
    """

    DOMAIN: ClassVar[str] = "raycloak/driver/computed/v1"
    step: int
    epsilon: Figure
    loss: Figure
    tokens: int | None = None


class HeldStep(Message):
    """A report that step ``step``, from 0, is held: nobody computes it, and it is not released unless allowed anew.

    Attributes:
        epsilon: of the account, as the receipt of the step has it; None if the run is not private, or the step may not
            be charged.
    """

    DOMAIN: ClassVar[str] = "raycloak/driver/held/v1"
    step: int
    epsilon: Figure


class ReleasedStep(Message):
    """A report that step ``step``, from 0, is finished; see `StepReport` and :class:`Computed`.

    Attributes:
        model_digest: hexadecimal digest of the parameters that it gave.
        seconds: wall time of the step without its waits.
        grad_norm: l2 norm of the average gradient; None if the run is private.
    """

    DOMAIN: ClassVar[str] = "raycloak/driver/released/v1"
    step: int
    model_digest: str
    epsilon: Figure
    seconds: float
    evaluation_accuracy: Figure
    evaluation_loss: Figure
    loss: Figure
    grad_norm: Figure = None


class Saved(Message):
    """A report that :class:`Save` ``id`` is done.

    Attributes:
        package: location of the sealed package; hexadecimal digests of it and of its parameters follow.
        step: finished steps behind the state.
    """

    DOMAIN: ClassVar[str] = "raycloak/driver/saved/v1"
    id: str
    package: str
    package_digest: str
    model_digest: str
    step: int


class Copied(Message):
    """A report that :class:`Copy` ``id`` is done; ``model_digest`` is hexadecimal."""

    DOMAIN: ClassVar[str] = "raycloak/driver/copied/v1"
    id: str
    model_digest: str


class Loaded(Message):
    """A report that :class:`Load` ``id`` is done; ``step`` counts the finished steps behind the loaded state."""

    DOMAIN: ClassVar[str] = "raycloak/driver/loaded/v1"
    id: str
    model_digest: str
    step: int


class Refused(Message):
    """A report that a save, a copy or a load was refused; nothing has changed, and the run goes on."""

    DOMAIN: ClassVar[str] = "raycloak/driver/refused/v1"
    id: str
    code: str
    message: str
    remedy: str


class Over(Message):
    """A report that no further step is computed. The driver goes on: what was released can be saved, copied and loaded.

    Attributes:
        ending: ``cap_exceeded`` or ``early_stopped``.
    """

    DOMAIN: ClassVar[str] = "raycloak/driver/over/v1"
    ending: str


class Ended(Message):
    """The last report of an execution that did not fail.

    Attributes:
        ending: ``complete``, ``cap_exceeded`` or ``early_stopped``: the run is over. ``stopped``: it can be resumed.
        metrics: the verdict; None if no step is finished.
    """

    DOMAIN: ClassVar[str] = "raycloak/driver/ended/v1"
    ending: str
    metrics: dict[str, Any] | None


Command = Begin | Allow | Batches | Save | Copy | Load | Close
Report = (
    PhaseBegun | Notice | Opened | Ready | Spent | Computed | HeldStep | ReleasedStep | Saved | Copied | Loaded
    | Refused | Over | Ended | Failed
)  # fmt: skip

COMMANDS: Final[tuple[type[Command], ...]] = get_args(Command)
REPORTS: Final[tuple[type[Report], ...]] = get_args(Report)
