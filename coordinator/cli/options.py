"""The common part of all commands of ``raycloak``: options, how each is run, and the exit code of each error."""

import inspect
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.exceptions import Abort, TyperException

from raycloak.attestation.core.private_memory import keep_memory_private
from raycloak.coordinator.console.output import Output, command_output
from raycloak.metrics.errors import ConfigError, RaycloakError, is_out_of_memory

if TYPE_CHECKING:
    from raycloak.coordinator.ledger.ledger import PrivacyLedger
    from raycloak.coordinator.vaults.machine_ledger import MachineLedger

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a dotted key; may be repeated.")
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="Run directory, run name, beginning of an id, or 'last'.")]
RUN_OR_OTHER = "run: directory, name, beginning of an id, or 'last'"
_FLAGS = {
    "as_json": Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on standard output.")],
    "debug": Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")],
}
"""The options of every command."""


def command(
    group: typer.Typer, name: str | None = None
) -> Callable[[Callable[..., int | None]], Callable[..., NoReturn]]:
    """Add a function whose first parameter is the output to a group: typer sees the others, --json and --debug.

    It returns its exit code, or None for 0. It runs with the standard streams owned by the command, and every outcome
    becomes an exit code. Its memory is closed to other processes: almost every command has a key in it, if only the
    ledger's.
    """

    def added(body: Callable[..., int | None]) -> Callable[..., NoReturn]:
        @wraps(body)
        def run(*, as_json: bool, debug: bool, **options: Any) -> NoReturn:
            with command_output(as_json, debug) as output:
                code = _guard(output, lambda output: body(output, **options))
            raise typer.Exit(code)

        _, *own = inspect.signature(body).parameters.values()
        kind = inspect.Parameter.KEYWORD_ONLY
        flags = (inspect.Parameter(flag, kind, default=False, annotation=each) for flag, each in _FLAGS.items())
        run.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in own} | _FLAGS
        return group.command(name)(run)

    return added


def _guard(output: Output, body: Callable[[Output], int | None]) -> int:
    try:
        keep_memory_private()
        return body(output) or 0
    except RaycloakError as error:
        output.error(error)
        return error.exit_code
    except KeyboardInterrupt as error:
        message, remedy = "stopped by the user.", "What was charged stays charged; resume a run with --resume."
        output.error(RaycloakError("interrupted", message, remedy), error)
    except Exception as error:  # noqa: BLE001 - the last resort: a defect still ends in one line
        # A mistyped size asks for more than there is; a trace would not say so.
        if is_out_of_memory(error):
            output.error(RaycloakError("out_of_memory", "there is not enough memory for that.", "Ask for less."), error)
        else:
            output.unexpected(error)
    return RaycloakError.exit_code


def invoke(app: typer.Typer, name: str, arguments: list[str]) -> int:
    """Run the command that the arguments name, and return its exit code."""
    try:
        return int(app(args=arguments, prog_name=name, standalone_mode=False) or 0)
    except TyperException as error:
        message = " ".join(error.format_message().split()).rstrip(".")
        # A proposal ends in a question mark.
        message += "" if message.endswith("?") else "."
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else name
        with command_output("--json" in arguments, "--debug" in arguments) as output:
            output.error(ConfigError("usage", message, f"See {command} --help."))
        return ConfigError.exit_code
    except Abort:
        return RaycloakError.exit_code
    except OSError as error:  # of help or version; a command says it itself
        with command_output(as_json=False, debug=False) as output:
            output.error(RaycloakError("output_lost", f"nothing could be written: {error.strerror}.", "Make room."))
        return RaycloakError.exit_code


LOOK_S = 0.5
"""How soon a failed record ends a command that serves; a signal ends its wait at once."""


@contextmanager
def ended_by_signals() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and Ctrl-C set inside the block: they end a command that serves."""
    ended = threading.Event()
    former = {each: signal.signal(each, lambda *_: ended.set()) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield ended
    finally:
        for each, handler in former.items():
            signal.signal(each, handler)


def run_or_path(named: str) -> Path:
    """Return the run directory that a user names, or else ``named`` as a path, which is its reader's to check.

    A file goes before a run, and a run before a folder that is none.

    Raises:
        ConfigError: ``run_ambiguous``.
    """
    from raycloak.coordinator.record.run_list import find_run

    path = Path(named)
    if path.exists() and not path.is_dir():
        return path
    try:
        return find_run(named)
    except ConfigError as error:
        if error.code == "run_ambiguous":
            raise
        return path


_VAULT = "vault:"
SmallEpsilon = Annotated[
    bool, typer.Option("--yes", help="Yes, an epsilon below 0.1 is meant: data keeps the account of its first run.")
]
Account = Annotated[str, typer.Argument(help="Name of the account.")]
SomeAccount = Annotated[str | None, typer.Argument(help="Name of an account; default: all.")]
LedgerUrl = Annotated[str | None, typer.Option(help="URL of the ledger; default: the one in RAYCLOAK_HOME.")]
Witness = Annotated[
    str | None, typer.Option(metavar="PLACE", help="The ledger's witness: absolute folder, or file with its URL.")
]


def ledger_at(url: str | None, create: bool, witness: str | None = None) -> "closing[PrivacyLedger]":
    """Open the ledger at ``url``, or that of the state folder, for a block that closes it."""
    from raycloak.coordinator.config.home import ledger_url
    from raycloak.coordinator.ledger.ledger import PrivacyLedger

    return closing(PrivacyLedger(ledger_url() if url is None else url, create, witness))


def ledger_shown(url: str | None) -> "AbstractContextManager[PrivacyLedger | MachineLedger]":
    """Open a ledger to show it: at ``url``, as :func:`ledger_at`; ``vault:PATH`` is that of a vault's socket."""
    if url is None or not url.startswith(_VAULT):
        return ledger_at(url, create=False)
    from raycloak.coordinator.vaults.machine_ledger import MachineLedger

    return MachineLedger(url.removeprefix(_VAULT))


def existing_ledger(url: str | None, witness: str | None) -> "closing[PrivacyLedger]":
    """Open a ledger as :func:`ledger_at` does, to write to it; a missing one is refused."""
    with ledger_at(url, create=False):
        pass
    return ledger_at(url, create=True, witness=witness)


def hexadecimal(text: str | None) -> bytes | None:
    """Return the bytes of hexadecimal text; ConfigError ``usage`` if it is none."""
    try:
        return None if text is None else bytes.fromhex(text)
    except ValueError:
        raise ConfigError(
            "usage", f"'{text}' is not hexadecimal.", "Copy it whole: digits and a to f, an even number."
        ) from None
