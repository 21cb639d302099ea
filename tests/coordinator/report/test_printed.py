"""The page in a real browser: it is drawn, asks nobody for anything, and becomes a PDF."""

import json
import shutil
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from raycloak.coordinator.cli import app
from raycloak.coordinator.report import pdf
from raycloak.coordinator.report.document import write_report
from tests.coordinator.report.test_document import SECTIONS, Page

Image = pytest.importorskip("PIL.Image", reason="Pillow, which reads the picture, is not installed")
BROWSER = next((path for name in pdf.BROWSERS if (path := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
WIDTH, HEIGHT = 740, 4600  # narrow, so that a line that does not wrap would leave its margin


@pytest.fixture(autouse=True)
def _keeps_stdout(monkeypatch):
    monkeypatch.setattr(app, "leave_stdout", lambda: None)


def run(capfd, *arguments):
    with pytest.raises(SystemExit) as ended:
        app.main([*map(str, arguments), "--json"])
    said = json.loads(capfd.readouterr().out)
    return ended.value.code, said["error"]["code"] if "error" in said else said


@needs_browser
def test_a_browser_draws_the_page_and_asks_nobody_for_anything(ended, tmp_path):
    asked = []

    class Server(SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            asked.append(self.path)

    write_report(ended, tmp_path / "report.html")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        picture = tmp_path / "page.png"
        shot = ["--dump-dom", f"--screenshot={picture}", f"--window-size={WIDTH},{HEIGHT}", "--hide-scrollbars"]
        address = f"http://127.0.0.1:{server.server_port}/report.html"
        command = [*pdf.headless(BROWSER, tmp_path / "profile"), *shot, address]
        surroundings = pdf.apart(tmp_path / "profile")
        done = subprocess.run(command, env=surroundings, capture_output=True, check=True, timeout=pdf.DEADLINE_S)
        dom = done.stdout.decode()
        server.shutdown()
    assert set(asked) == {"/report.html"}
    assert [each for each in Page(dom).ids if each in SECTIONS] == SECTIONS
    pixels = np.asarray(Image.open(picture).convert("RGB")).astype(int)
    assert pixels.shape == (HEIGHT, WIDTH, 3)
    accent = (abs(pixels - (0x0B, 0x5F, 0x83)).sum(axis=2) < 30).any(axis=1)
    written = (pixels.sum(axis=2) < 300).any(axis=1)
    # Ink from the title to the last section, and the accent of rules, tiles and curves.
    assert written[:400].mean() > 0.2
    assert written.mean() > 0.3
    assert accent.sum() > 200
    assert (pixels[:, :15] == 255).all(), "nothing overflows the margins"
    assert (pixels[:, -15:] == 255).all(), "nothing overflows the margins"


@needs_browser
def test_the_command_prints_a_pdf_and_a_card_beside_the_page(ended, tmp_path, capfd):
    page = tmp_path / "board.html"
    code, written = run(capfd, "report", ended, "--output", page, "--pdf", "--model-card")
    assert code == 0
    assert written == {
        "report": str(page),
        "pdf": str(tmp_path / "board.pdf"),
        "model_card": str(tmp_path / "board-model-card.md"),
    }
    printed = (tmp_path / "board.pdf").read_bytes()
    assert printed.startswith(b"%PDF-")
    assert 3 <= printed.count(b"/Type /Page\n") <= 12
    assert (tmp_path / "board-model-card.md").read_text().startswith("---\n")


def test_without_a_browser_the_command_says_so_and_writes_nothing(copied, monkeypatch, capfd):
    folder = copied()
    monkeypatch.setenv("PATH", str(folder))
    assert run(capfd, "report", folder, "--pdf") == (2, "no_chromium")
    assert not (folder / "report.html").exists()


def test_a_browser_that_prints_nothing_is_named(copied, tmp_path, monkeypatch):
    folder = copied()
    fake = tmp_path / "bin" / "chromium"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nexit 7\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(fake.parent))
    with pytest.raises(pdf.RaycloakError, match="it ended with exit status 7") as failure:
        pdf.print_pdf(write_report(folder), folder / "report.pdf")
    assert failure.value.code == "pdf_failed"
    assert not (folder / "report.pdf").exists()


def test_what_is_no_run_is_refused_and_a_page_never_takes_the_place_of_its_pdf(ended, tmp_path, capfd):
    assert run(capfd, "report", tmp_path) == (2, "not_a_run")
    assert run(capfd, "report", ended, "--output", tmp_path / "page.pdf", "--pdf") == (2, "usage")
    assert run(capfd, "report", ended, "--output", tmp_path / "none" / "page.html") == (2, "report_file")
