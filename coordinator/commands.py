"""The frame of every ``raycloak`` command: shared options, owned streams, and errors as exit codes."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from coordinator.output import Output, command_output
from metrics.errors import ConfigError, RaycloakError
from raycloak_layout import PackageShadowedError

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a dotted key; may be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on standard output.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def execute(as_json: bool, debug: bool, body: Callable[[Output], int]) -> NoReturn:
    """Run ``body`` with the standard streams owned by the command; every outcome becomes an exit code."""
    with command_output(as_json, debug) as output:
        code = _guard(output, body)
    raise typer.Exit(code)


def _guard(output: Output, body: Callable[[Output], int]) -> int:
    try:
        return body(output)
    except RaycloakError as error:
        output.error(error)
        return error.exit_code
    except PackageShadowedError as error:
        output.error(ConfigError("package_shadowed", str(error)), error)
        return ConfigError.exit_code
    except KeyboardInterrupt as error:
        output.error(
            RaycloakError(
                "interrupted", "stopped by the user.", "What was charged stays charged; resume a run with --resume."
            ),
            error,
        )
        return RaycloakError.exit_code
    except MemoryError as error:
        output.error(RaycloakError("out_of_memory", "there is not enough memory for that.", "Ask for less."), error)
        return RaycloakError.exit_code
    except Exception as error:  # noqa: BLE001 - the last resort: a defect still ends in one line
        output.unexpected(error)
        return RaycloakError.exit_code
