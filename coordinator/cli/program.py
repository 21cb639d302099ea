"""A console script: what typer and the operating system raise beside its commands becomes a line and an exit code."""

import typer
from typer.exceptions import Abort, TyperException

from raycloak.coordinator.console.output import command_output
from raycloak.metrics.errors import ConfigError, RaycloakError


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
