"""A page as PDF, printed by a Chromium without a window.

Assumes nothing of the page: it may load nothing, and its print style sheet decides what paper it is for.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from raycloak.attestation.processes.deadline import Deadline
from raycloak.attestation.processes.program import run
from raycloak.metrics.errors import ConfigError, RaycloakError

BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
DEADLINE_S: Final = 120.0
"""A page is printed in a second; a browser that hangs must not hang its caller."""


def browser() -> str:
    """Return the path of an installed Chromium; ConfigError ``no_chromium`` if there is none."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        raise ConfigError(
            "no_chromium",
            f"a PDF is printed by Chromium, and none of {', '.join(BROWSERS)} is on the PATH.",
            "Install chromium, or leave out --pdf and print the page from any browser.",
        )
    return found


def headless(program: str, profile: Path) -> list[str]:
    """Return how ``program`` is started without a window, on a profile of its own and without a network."""
    # Chromium refuses its sandbox to root. Nothing foreign is opened: the page has neither script nor address.
    unboxed = ["--no-sandbox"] if os.geteuid() == 0 else []
    quiet = ["--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    return [program, *quiet, *unboxed, f"--user-data-dir={profile}"]


def apart(profile: Path) -> dict[str, str]:
    """Return the environment in which a browser writes to its ``profile`` alone, and nothing for its user to keep."""
    # A profile of its own does not keep crash reports and settings of the desktop out of the user's folders.
    return os.environ | {"XDG_CONFIG_HOME": str(profile), "XDG_CACHE_HOME": str(profile)}


def print_pdf(page: Path, output: Path) -> Path:
    """Print the HTML file ``page`` to ``output``.

    Raises:
        ConfigError: ``no_chromium``.
        RaycloakError: ``pdf_failed`` if the browser did not write it within two minutes.
    """
    program = browser()
    with tempfile.TemporaryDirectory(prefix="raycloak-pdf-") as profile:
        draft = Path(profile) / "page.pdf"
        asked = ["--no-pdf-header-footer", f"--print-to-pdf={draft}", page.resolve().as_uri()]
        try:
            command = [*headless(program, Path(profile)), *asked]
            exited, _ = run(command, Deadline(DEADLINE_S), environment=apart(Path(profile)))
            said = f"it ended with {exited.how}"
        except TimeoutError:
            said = f"it took more than {DEADLINE_S:.0f} s"
        if not draft.exists():
            raise RaycloakError(
                "pdf_failed", f"{program} did not print {page}: {said}", "Print the page from any browser."
            )
        shutil.move(draft, output)
    return output
