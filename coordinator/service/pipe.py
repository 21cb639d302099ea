"""The lines between the service and a driver: commands on the driver's standard input, reports on its output.

Each line is one JSON object whose ``kind`` names its class here. Infinity and NaN become null.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The first command: the run to execute.

    Attributes:
        config: a `RunConfig` as plain data; it names model and dataset.
        base: absolute folder that relative paths and ``module:function`` names start from.
        run_secret: file of the run secret; None has the orchestrator generate one.
        run_id: of a run to resume; None begins a new one. A run that never charged anything is begun anew.
    """

    config: dict[str, Any]
    base: Path
    run_secret: Path | None
    run_id: str | None
    kind: Literal["begin"] = "begin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allow:
    """Watermarks: steps below ``computed`` may be charged, and those below ``released`` reduced.

    They only rise; but ``released`` falls back to a step that was reported as held, and both to the finished steps of a
    run that is over.

    Attributes:
        held: whether the next step to be computed is to wait; workers that compute it now leave it.
    """

    computed: int
    released: int
    held: bool = False
    kind: Literal["allow"] = "allow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The files of the examples that were sent for a step; they come before the step is allowed."""

    step: int
    files: tuple[Path, ...]
    kind: Literal["batches"] = "batches"


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A command to save the state after ``after`` finished steps."""

    id: str
    after: int
    kind: Literal["save"] = "save"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A command to write the weights after ``after`` finished steps to the file ``path``, for who gives the command."""

    id: str
    after: int
    path: Path
    kind: Literal["copy"] = "copy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A command to go on from ``package``, a location as :class:`Saved` has it, after ``after`` finished steps."""

    id: str
    after: int
    package: str
    kind: Literal["load"] = "load"


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """A command to end: a run whose steps are all finished is complete, another one is stopped."""

    kind: Literal["close"] = "close"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseBegun:
    """A report of what the driver does, in a few words."""

    words: str
    kind: Literal["phase"] = "phase"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A report of one line for a watcher, such as a worker that left."""

    line: str
    kind: Literal["notice"] = "notice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A report of which run it is, before anything is charged."""

    run_id: str
    run_dir: Path
    kind: Literal["opened"] = "opened"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A report that members are admitted; steps that are allowed begin.

    Attributes:
        finished_steps: steps behind the model that this execution starts from; steps that an earlier driver finished
            and sealed are not reported again.
        charged_steps: that the ledger has charged to this run.
        epsilon: of the account by now. It, ``epsilon_cap``, ``epsilon_planned``, ``delta`` and ``noise_multiplier`` are
            None if the run is not private.
        manifest: the run's public contract.
    """

    finished_steps: int
    steps: int
    charged_steps: int
    delta: float | None
    epsilon_cap: float | None
    epsilon_planned: float | None
    epsilon: float | None
    noise_multiplier: float | None
    sample_rate: float
    max_grad_norm: float
    accountant: str
    private: bool
    virtual_workers: int
    evidence_class: str
    account: str
    manifest: dict[str, Any]
    kind: Literal["ready"] = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """A report that a measurement was charged and released; ``epsilon`` is the account's, by its receipt.

    The step that it precedes may be held, or never come.
    """

    epsilon: float | None
    kind: Literal["spent"] = "spent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """A report that step ``step``, from 0, is charged, computed, masked and bound.

    Attributes:
        epsilon: of the account, as the receipt has it; None if the run is not private.
        loss: mean of the model before the step: exact over the drawn examples if the run is not private; else as a
            measurement of this very model released it, or None.
        tokens: of the drawn examples; None if the run is private, or examples are no rows of tokens.
    """

    step: int
    epsilon: float | None
    loss: float | None
    tokens: int | None = None
    kind: Literal["computed"] = "computed"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldStep:
    """A report that step ``step``, from 0, is held: nobody computes it, and it is not released unless allowed anew.

    Attributes:
        epsilon: of the account, as the receipt of the step has it; None if the run is not private, or the step may not
            be charged.
    """

    step: int
    epsilon: float | None
    kind: Literal["held"] = "held"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasedStep:
    """A report that step ``step``, from 0, is finished; see `StepReport` and :class:`Computed`.

    Attributes:
        digest: hexadecimal digest of the parameters that it gave.
        seconds: wall time of the step without its waits.
        grad_norm: l2 norm of the average gradient; None if the run is private.
    """

    step: int
    digest: str
    epsilon: float | None
    seconds: float
    evaluation_accuracy: float | None
    evaluation_loss: float | None
    loss: float | None
    grad_norm: float | None = None
    kind: Literal["released"] = "released"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A report that :class:`Save` ``id`` is done.

    Attributes:
        package: location of the sealed package; hexadecimal digests of it and of its parameters follow.
        step: finished steps behind the state.
    """

    id: str
    package: str
    package_digest: str
    model_digest: str
    step: int
    kind: Literal["saved"] = "saved"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A report that :class:`Copy` ``id`` is done; ``model_digest`` is hexadecimal."""

    id: str
    model_digest: str
    kind: Literal["copied"] = "copied"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A report that :class:`Load` ``id`` is done; ``step`` counts the finished steps behind the loaded state."""

    id: str
    model_digest: str
    step: int
    kind: Literal["loaded"] = "loaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A report that a save, a copy or a load was refused; nothing has changed, and the run goes on."""

    id: str
    code: str
    message: str
    remedy: str
    kind: Literal["refused"] = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """A report that no further step is computed. The driver goes on: what was released can be saved, copied and loaded.

    Attributes:
        ending: ``cap_exceeded`` or ``early_stopped``.
    """

    ending: str
    kind: Literal["over"] = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The last report of an execution that did not fail.

    Attributes:
        ending: ``complete``, ``cap_exceeded`` or ``early_stopped``: the run is over. ``stopped``: it can be resumed.
        metrics: the verdict; None if no step is finished.
    """

    ending: str
    metrics: dict[str, Any] | None
    kind: Literal["ended"] = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The last report of an execution that failed; what was charged stays charged.

    Attributes:
        code, message, remedy, exit_code: see `raycloak.metrics.errors`.
        epsilon: of the account by then, if known.
        step: the step that did not finish, if any had begun.
    """

    code: str
    message: str
    remedy: str
    exit_code: int
    epsilon: float | None
    step: int | None
    kind: Literal["failed"] = "failed"


Command = Begin | Allow | Batches | Save | Copy | Load | Close
Report = (
    PhaseBegun | Notice | Opened | Ready | Spent | Computed | HeldStep | ReleasedStep | Saved | Copied | Loaded
    | Refused | Over | Ended | Failed
)  # fmt: skip

_COMMANDS: Final[TypeAdapter[Command]] = TypeAdapter(Annotated[Command, Field(discriminator="kind")])
_REPORTS: Final[TypeAdapter[Report]] = TypeAdapter(Annotated[Report, Field(discriminator="kind")])


def command_line(command: Command) -> bytes:
    """Return the line of a command."""
    return _COMMANDS.dump_json(command) + b"\n"


def report_line(report: Report) -> bytes:
    """Return the line of a report."""
    return _REPORTS.dump_json(report) + b"\n"


def parse_command(line: bytes) -> Command:
    """Return the command of a line; ValueError if it has none."""
    return _COMMANDS.validate_json(line)


def parse_report(line: bytes) -> Report:
    """Return the report of a line; ValueError if it has none."""
    return _REPORTS.validate_json(line)


def lines_of(descriptor: int) -> Iterator[bytes]:
    """Yield the finished lines of a pipe until its end, without the newline.

    Not a file object, whose lock a thread that waits in it would keep while the interpreter ends.
    """
    kept = b""
    while more := os.read(descriptor, 65536):
        *lines, kept = (kept + more).split(b"\n")
        yield from lines
