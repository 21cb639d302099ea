"""Writes docs/pictures/: the verdict of the demo, and the page of its run. `make pictures` makes them anew.

The verdict is drawn as a terminal shows it, the page as a browser without a window does. Both are of one run with a
state folder of its own, whose place is shown as the usual one.
"""

import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from PIL import Image
from rich.console import Console
from rich.terminal_theme import TerminalTheme

from raycloak.coordinator.cli.views.verdict import verdict_table
from raycloak.coordinator.record.run_list import find_run
from raycloak.coordinator.record.run_reader import read_run
from raycloak.coordinator.record.verdict import Verdict
from raycloak.coordinator.report.pdf import apart, browser, headless
from tests.layout import ROOT

FOLDER: Final = ROOT / "docs" / "pictures"
LARGEST_BYTES: Final = 100_000
SHOWN_HOME: Final = Path("~/.local/share/raycloak/runs")
_COLUMNS, _PAGE = 100, (860, 1510)
_INK: Final = TerminalTheme((255, 255, 255), (31, 35, 40), [(31, 35, 40)] * 8)
# Without the fonts that rich's own format loads from a server, and without a window around the text.
_SVG: Final = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 21px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}
</defs>
<rect width="{width}" height="{height}" rx="8" fill="#ffffff" stroke="#d0d7de" />
<g transform="translate({terminal_x}, 16)" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def draw_verdict(run_dir: Path, output: Path) -> None:
    """Draw the verdict of a run as an SVG."""
    stored = read_run(run_dir).verdict
    assert stored is not None, "the demo has ended"
    metrics = {key: value for key, value in stored.items() if key != "run_dir"}
    shown = Verdict.of({"run_dir": SHOWN_HOME / run_dir.name, "metrics": metrics})
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(verdict_table(shown))
    output.write_text(console.export_svg(title="", theme=_INK, code_format=_SVG, unique_id="verdict"), encoding="utf-8")


def draw_page(run_dir: Path, output: Path) -> None:
    """Draw the beginning of the page of a run as a PNG of 64 colours."""
    with tempfile.TemporaryDirectory() as profile:
        page, draft = Path(profile) / "report.html", Path(profile) / "page.png"
        written = (run_dir / "report.html").read_text(encoding="utf-8")
        page.write_text(written.replace(str(run_dir), str(SHOWN_HOME / run_dir.name)), encoding="utf-8")
        size = f"--window-size={_PAGE[0]},{_PAGE[1]}"
        subprocess.run(
            [*headless(browser(), Path(profile)), size, "--hide-scrollbars", f"--screenshot={draft}", page.as_uri()],
            env=apart(Path(profile)),
            capture_output=True,
            check=True,
            timeout=120,
        )
        Image.open(draft).convert("RGB").quantize(64).save(output, optimize=True)


def main() -> None:
    """Run the demo, and write both pictures."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        os.environ["RAYCLOAK_HOME"] = home
        subprocess.run([sys.executable, "-m", "raycloak", "demo"], check=True)
        run_dir = find_run("last")
        draw_verdict(run_dir, FOLDER / "verdict.svg")
        draw_page(run_dir, FOLDER / "report.png")
    for path in sorted(FOLDER.iterdir()):
        assert path.stat().st_size < LARGEST_BYTES, f"{path.name} has {path.stat().st_size} bytes"


if __name__ == "__main__":
    main()
