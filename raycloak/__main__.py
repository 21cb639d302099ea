"""``python -m raycloak`` is the command ``raycloak``; both start here."""

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Load the command and run it. Ctrl-C while it loads ends the process at once: nothing has begun."""
    former = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from raycloak.coordinator.cli.app import main as command

    signal.signal(signal.SIGINT, former)
    command()


if __name__ == "__main__":
    main()
