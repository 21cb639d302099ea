"""The command line, run in the test's own process."""

import pytest

from raycloak.coordinator.cli import app


@pytest.fixture
def raycloak(capfd, monkeypatch):
    """Run the command in this process; returns (exit code, stdout, stderr)."""
    monkeypatch.setattr(app, "leave_stdout", lambda: None)

    def run(*arguments):
        with pytest.raises(SystemExit) as stopped:
            app.main(arguments)
        captured = capfd.readouterr()
        return stopped.value.code, captured.out, captured.err

    return run
