"""The first look of `plan` and `run`: all that a run needs from this machine, before heavy libraries and Ray.

Ports, secret file, account, witness and state folder would else be found wrong a minute later, by the run alone.
"""

import os
import socket
import sys
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

from raycloak.coordinator.config import home
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.config.secret_variables import require_none_needed
from raycloak.coordinator.ledger.entries import LedgerKeys
from raycloak.coordinator.ledger.witness import open_witness
from raycloak.coordinator.planning.payer import account_of, data_name, existing_account, named_marks, payers_ledger
from raycloak.coordinator.planning.references import preflight, require_in_place
from raycloak.metrics.errors import BudgetError, ConfigError
from raycloak.metrics.file_errors import file_error
from raycloak.metrics.server import parse_bind
from raycloak.metrics.traces import tracing_is_on

SECRET_DIGITS = 64


def first_look(config: RunConfig, base: Path, run_secret: Path | None = None, resumes: bool = False) -> None:
    """Refuse a run that this machine cannot make, before anything starts or is charged.

    Guarantee: writes nothing, reads no secret, and asks ledger and witness to read alone.

    Args:
        base: folder that relative paths start from.
        run_secret: the user's own, if there is one.
        resumes: whether an earlier execution of the run may be in the ledger.

    Raises:
        ConfigError, BudgetError: as `preflight`; as `require_in_place` where the run starts a Ray of its own;
            ``secret_variable``, ``tracing``, ``home_unusable``, ``relative_home``, ``run_secret``, ``metrics_bind``,
            ``bind``, ``logger_library``, ``ledger_missing``, ``witness_unavailable``, or why the account would refuse
            a new run.
    """
    preflight(config, base)
    # Asked of Ray only where it is loaded: this look comes before it.
    ray = sys.modules.get("ray")
    is_local = not os.environ.get("RAY_ADDRESS") and not (ray is not None and ray.is_initialized())
    # What the vaults of a machine open, this user may not even see.
    if is_local and config.boundary is None:
        # The workers will be on this machine, in a Ray that is started for the run.
        require_in_place(config, base)
    require_none_needed(config)
    tracing_is_on()
    for tool in config.loggers.tools:
        require_library(tool)
    _check_home(home.home_path())
    if run_secret is not None and config.boundary is None:
        _check_secret(run_secret)
    _check_port(config.metrics.bind, "metrics_bind", "metrics.bind")
    if config.attestation.bind is not None:
        _check_port(config.attestation.bind, "bind", "attestation.bind")
    if (location := config.ledger.witness) is not None:
        # Any key will do: a witness that holds nothing for it answers so.
        with closing(open_witness(location, LedgerKeys.of((), bytes(32)))) as witness:
            witness.newest()
        if Path(location).is_dir() and not os.access(location, os.W_OK | os.X_OK):
            raise BudgetError(
                "witness_unavailable", f"the witness's folder {location} cannot be written to.", "Let this user in."
            )
    # With a secret of the user's own, the run may be registered as well.
    _check_account(config, base, resumes or run_secret is not None)


def require_library(tool: str) -> None:
    """Require the library of a logger without importing it; ConfigError ``logger_library`` names its extra."""
    if find_spec(tool) is None:
        raise ConfigError(
            "logger_library",
            f"the logger {tool} needs a library that is not installed.",
            f"Install it: pip install 'raycloak[{tool}]'.",
        )


def _check_home(path: Path) -> None:
    """Require that the state folder can be written to, or made."""
    nearest = next(each for each in (path, *path.parents) if os.path.lexists(each))
    error: OSError
    if not nearest.is_dir():
        error = NotADirectoryError(20, "Not a directory")
    elif not os.access(nearest, os.W_OK | os.X_OK):
        error = PermissionError(13, "Permission denied")
    else:
        return
    raise file_error("home_unusable", "use the state folder", path, error)


def _check_secret(path: Path) -> None:
    """Require a file of the right size that can be opened; the orchestrator alone reads it."""
    try:
        with path.open("rb"):
            size = path.stat().st_size
    except OSError as error:
        raise file_error("run_secret", "read", path, error) from None
    # White space around the digits is allowed.
    if size < SECRET_DIGITS:
        raise ConfigError(
            "run_secret",
            f"{path} must hold {SECRET_DIGITS} hexadecimal digits, and has {size} bytes.",
            "Make one: (umask 077; openssl rand -hex 32 > FILE).",
        )


def _check_port(bind: str, code: str, field: str) -> None:
    """Require that a server could listen at ``bind`` now."""
    host, port = parse_bind(bind)
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # A port that a server has just left is free, although the kernel still holds it.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        raise ConfigError(
            code,
            f"{field}: cannot listen on {bind}: {error.strerror or error}.",
            f"Choose another {field}, of this machine; port 0 takes a free one.",
        ) from None


def _check_account(config: RunConfig, base: Path, may_be_registered: bool) -> None:
    """Require that the account would admit a new run, as far as its terms tell; the plan knows what is left."""
    with payers_ledger(config) as ledger:
        view = ledger.view() if ledger else None
    if view is None:
        return  # A new account.
    name = config.ledger.account
    if name is None:
        dataset = config.dataset
        if dataset is None or dataset.fingerprint_key is not None or dataset.kind == "sealed":
            return  # Data that is known by its content, which only those who open it can tell.
        name = account_of(view, config, named_marks(dataset, base), data_name(dataset, base))
    try:
        existing_account(view, config, name)
    except BudgetError as error:
        # An account that admits no new run still serves those it has.
        if not (may_be_registered and error.code in ("account_closed", "account_not_shared")):
            raise
