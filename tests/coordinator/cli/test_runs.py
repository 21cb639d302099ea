"""`raycloak runs` and `raycloak top`: lists, one run, comparisons and the live picture, from run directories alone."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from contextlib import contextmanager

import pytest
from rich.console import Console
from rich.live import Live

from raycloak.coordinator.cli.views import top
from raycloak.coordinator.cli.views.runs import WIDE, RunsTable, age_text
from raycloak.coordinator.cli.views.top import TALL, TopView
from raycloak.coordinator.record.folder import run_lock
from raycloak.coordinator.record.run_list import list_runs
from tests.conftest import ROOT
from tests.coordinator.record.run_logs import LoggedRun
from tests.protocol import trained

DEADLINE_S = 60
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def begun(steps=100, done=30, **fields):
    """Return a run that has committed some steps."""
    run = LoggedRun(**fields)
    run.admit(steps=steps)
    for step in range(done):
        result = {"evaluation_accuracy": 0.5 + step / 100} if step % 10 == 9 else {}
        run.step(step, **result)
    return run


def shown(view, width=120, height=40):
    console = Console(width=width, height=height, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(view)
    return captured.get()


def test_a_list_has_every_run_and_its_filters(raycloak):
    assert "No such run in" in raycloak("runs", "list")[1]
    begun(name="digits", run_id="ab" * 8)
    begun(name="digits-large", run_id="cd" * 8).folder.mark("done")
    code, out, _ = raycloak("runs", "list")
    assert code == 0
    rows = [line.split() for line in out.splitlines() if re.search("abababab|cdcdcdcd", line)]
    assert [(row[0], row[4], *row[5:8]) for row in rows] == [
        ("digits", "killed", "30/100", "1.200/8", "4.000"),
        ("digits-large", "done", "30/100", "1.200/8", "4.000"),
    ]
    assert all(row[8:11] == ["79.0%", "SIMULATED", "its"] for row in rows)
    code, out, _ = raycloak("runs", "list", "--json", "--name", "digits*", "--status", "done")
    assert [each["run_id"] for each in json.loads(out)["runs"]] == ["cd" * 8]
    assert json.loads(raycloak("runs", "list", "--json", "--name", "mnist")[1]) == {"runs": []}
    assert raycloak("runs", "list", "--status", "lost")[0] == 2


def test_a_narrow_list_folds_no_figure_and_still_says_simulated():
    begun(name="a-run-with-a-long-name-of-its-own")
    LoggedRun(run_id="cd" * 8).folder.mark("void")
    text = shown(RunsTable(list_runs(), LoggedRun(run_id="ef" * 8).path.parent, time.time()), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "30/100   1.200/8   4.000  79.0%" in text
    assert "Evidence: 1 SIMULATED, 1 –" in text
    assert "account" not in text
    assert "account" in shown(RunsTable(list_runs(), ROOT, 0.0), width=WIDE)
    assert [age_text(seconds) for seconds in (5, 65, 7300, 90_000)] == ["5 s", "1 min", "2 h", "1 d"]


def test_a_run_that_cannot_be_read_is_listed_with_its_reason(raycloak):
    run = begun()
    (run.path / "run.json").write_text("{}")
    code, out, _ = raycloak("runs", "list")
    assert code == 0
    assert "cannot be read: " in out
    assert "not_a_run" in out
    assert "not_a_run" in json.loads(raycloak("runs", "list", "--json")[1])["runs"][0]["problem"]


def test_one_run_is_shown_with_digests_terms_and_incidents(raycloak):
    run = begun()
    run.write("departure", code="evidence_expired")
    run.folder.write_verdict('{"private": true, "privacy_epsilon_one_worker": null, "warnings": ["Mind the gap."]}')
    code, out, _ = raycloak("runs", "show", "abab")
    assert code == 0
    for part in (
        "killed: no process executes it",
        "30 of 100",
        "1 left (evidence_expired)",
        "Mind the gap.",
        "Incidents",
    ):
        assert part in out
    assert re.search(r"ε one worker +│ unbounded", out)
    facts = json.loads(raycloak("runs", "show", "last", "--json")[1])
    assert facts["config"]["name"] == "run"
    assert (facts["departures"], facts["problems"], facts["state"]) == ({"evidence_expired": 1}, [], "killed")
    assert facts["config_digest"] in out


def test_a_part_that_cannot_be_read_leaves_the_others(raycloak):
    run = begun()
    (run.path / "config.yaml").write_text("[")
    (run.path / "manifest.json").write_text("{")
    (run.path / "measurements.json").write_text("{}")
    code, out, _ = raycloak("runs", "show", "run")
    assert code == 0
    assert out.count("cannot be read") >= 3
    assert "30 of 100" in out
    assert raycloak("runs", "show", "nobody")[0] == 2


def test_a_comparison_names_what_differs_and_what_is_no_sum(raycloak):
    begun()
    begun(run_id="cd" * 8, seed=7, done=20)
    code, out, _ = raycloak("runs", "compare", "abab", "cdcd")
    assert code == 0
    assert re.search(r"seed +│ 0 +│ 7 ", out)
    assert "The parameters are not the same bytes. Their first 20 steps gave the same bytes." in out
    assert "neither add nor rank their ε" in " ".join(out.split())
    found = json.loads(raycloak("runs", "compare", "abab", "cdcd", "--json")[1])
    assert (found["configuration"], found["same_bytes"], found["same_steps"]) == ({"seed": [0, 7]}, False, 20)
    for arguments in (["abab"], ["abab", "abab"]):
        code, _, err = raycloak("runs", "compare", *arguments)
        assert (code, "two different runs" in err) == (2, True)


def test_a_real_run_is_pictured_with_its_own_figures(tmp_path, raycloak):
    """The events and files are those that a run writes."""
    run = trained(tmp_path / "site", steps=2)
    run.coordinator.order.folder.mark("done")
    snapshot = top.RunWatch(run.folder).look()
    facts, plan = top.facts(snapshot), run.finished.plan
    assert (facts["state"], facts["steps"], facts["planned_steps"], facts["workers"]) == ("done", 2, 2, 3)
    assert (facts["epsilon_planned"], facts["epsilon_cap"]) == (plan.epsilon_outsiders, plan.epsilon_cap)
    assert facts["epsilon_charged"] == run.finished.charged_epsilon
    assert snapshot.course.model_digest == run.digests[-1]
    assert snapshot.course.delta == plan.delta
    times = snapshot.course.times()
    assert times.whole >= times.charge + times.compute + times.reduce > 0
    assert "2 of 2 · 100%" in shown(TopView(snapshot))
    shown_facts = json.loads(raycloak("runs", "show", str(run.folder), "--json")[1])
    assert (shown_facts["model_digest"], shown_facts["steps"]) == (run.digests[-1], 2)


def look(run, now=None, monkeypatch=None):
    watch = top.RunWatch(run.path)
    if now is not None:
        monkeypatch.setattr(top.time, "time", lambda: now)
    return watch.look()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60)])
def test_a_picture_fits_the_terminal_in_every_state(width, height, monkeypatch):
    run = LoggedRun(name="a-name", num_workers=3)
    with run_lock(run.folder.record.run_id):
        assert "starting for" in shown(TopView(look(run)), width, height)
    run.admit(account="patients")
    with run_lock(run.folder.record.run_id):
        assert "time left: not known yet" in shown(TopView(look(run)), width, height)
    for step in range(40):
        run.step(step, evaluation_accuracy=0.5 + step / 100 if step % 5 == 4 else None, attempts=2)
    for _ in range(20):
        run.write("departure", code="a_code_that_is_long_enough_to_be_cut_somewhere")
    with run_lock(run.folder.record.run_id):
        text = shown(TopView(look(run, run.time.now + 2.0, monkeypatch), "q ends"), width, height)
    lines = text.splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    for part in (
        "training, begun",
        "SIMULATED evidence",
        "40 of 100 · 40%",
        "1.600 charged of the cap 8",
        "to patients by all its runs",
        "0:58 left",
        "1.0 steps/s · 20 examples/s",
        "charge 100 ms",
        "other 200 ms",
        "3 of 3 workers, 8 virtual",
        "20 left",
        "89.0% at step 40",
    ):
        assert part in text
    assert ("▇" in text or "█" in text, "this run claims 4.000, δ 1e-05" in text) == (True, height >= TALL)
    run.admit()
    with run_lock(run.folder.record.run_id):
        assert "resumed" in shown(TopView(look(run)), width, height)
    run.folder.mark("stopped")
    assert "stopped: raycloak run CONFIG --resume finishes it" in " ".join(shown(TopView(look(run)), width).split())


def test_guarantee_what_others_charged_never_stands_against_a_runs_own_plan(raycloak):
    """2.56 of a cap of 3 are charged, of which this run has a part: its own plan costs 2."""
    run = LoggedRun()
    run.admit(steps=4, account="patients", epsilon_planned=2.0, epsilon_cap=3.0)
    run.step(0, epsilon=0.75)
    run.step(1, epsilon=2.56)
    (line,) = [line for line in shown(TopView(look(run)), height=TALL - 1).splitlines() if "2.560 charged" in line]
    assert "2.560 charged of the cap 3" in line
    assert ("▇·" in line, "█" in line) == (True, False), "a full bar is an account that is spent"
    listed = raycloak("runs", "list")[1]
    assert re.search(r"2/4 +2\.560/3 +2\.000 ", listed)
    assert json.loads(raycloak("runs", "list", "--json")[1])["runs"][0]["epsilon_cap"] == 3.0
    run.folder.write_verdict('{"privacy_epsilon": 2.0, "privacy_epsilon_charged": 2.56, "epsilon_cap": 3.0}')
    run.folder.mark("done")
    assert re.search(r" 2\.560/3 +2\.000 ", raycloak("runs", "list")[1])
    assert re.search(r"ε charged to the account +│ 2\.560", raycloak("runs", "show", "last")[1])


def test_a_run_without_privacy_or_with_a_loss_says_so(monkeypatch):
    run = LoggedRun()
    run.admit(privacy="not_private", exactness="not_exact", epsilon_planned=None)
    run.step(0, epsilon=None, evaluation_loss=0.75)
    with run_lock(run.folder.record.run_id):
        text = shown(TopView(look(run, run.time.now + 100.0, monkeypatch)))
    for part in ("NOT PRIVATE", "NOT EXACT", "loss", "0.75 at step 1", "no step for 1:40"):
        assert part in text
    assert "charged" not in text


def test_without_a_terminal_top_is_one_snapshot(raycloak):
    run = begun()
    with run_lock(run.folder.record.run_id):
        code, out, _ = raycloak("top", "last")
        facts = json.loads(raycloak("top", str(run.path), "--json")[1])
    assert (code, "30 of 100" in out, "\x1b" in out) == (0, True, False)
    assert (facts["state"], facts["steps"], facts["steps_per_second"]) == ("running", 30, pytest.approx(1.0))
    assert "killed: no process executes it" in raycloak("top", "last")[1]
    assert raycloak("top", "nobody")[0] == 2


class Terminal:
    """A pseudo-terminal, and all that was written to it."""

    def __init__(self):
        self.master, self.slave = pty.openpty()
        self._text = ""

    def wait_for(self, part):
        deadline = time.monotonic() + DEADLINE_S
        while part not in self.text:
            assert time.monotonic() < deadline, self.text
            self.read(0.05)

    def read(self, seconds):
        if select.select([self.master], [], [], seconds)[0]:
            self._text += os.read(self.master, 65536).decode(errors="replace")

    @property
    def text(self):
        return ESCAPES.sub("", self._text)

    def press(self, key):
        os.write(self.master, key)

    def close(self):
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal():
    made = Terminal()
    yield made
    made.close()


@contextmanager
def watched(run, terminal, monkeypatch):
    """Show a run on the terminal from a thread; yields the snapshots that it ended with."""
    ended = []
    monkeypatch.setattr(top, "EVERY_S", 0.02)
    with open(os.dup(terminal.slave)) as keys, open(os.dup(terminal.slave), "w") as out:
        monkeypatch.setattr(sys, "stdin", keys)
        console = Console(file=out, force_terminal=True, width=100, height=30)
        watch = top.RunWatch(run.path)
        thread = threading.Thread(
            target=lambda: ended.append(top.live_picture(console, watch, watch.look())), daemon=True
        )
        thread.start()
        yield ended, thread
        deadline = time.monotonic() + DEADLINE_S
        while thread.is_alive():
            assert time.monotonic() < deadline
            terminal.read(0.02)


def test_the_picture_follows_a_run_from_its_start_to_its_end(terminal, monkeypatch):
    run = LoggedRun()
    with run_lock(run.folder.record.run_id), watched(run, terminal, monkeypatch) as (ended, _):
        terminal.wait_for("no member is admitted yet")
        run.admit(steps=2)
        terminal.wait_for("0 of 2")
        run.step(0)
        terminal.wait_for("1 of 2")
        run.step(1)
        run.folder.mark("done")
    assert [(each.state, each.course.steps) for each in ended] == [("done", 2)]


def test_a_run_that_is_killed_ends_the_picture(terminal, monkeypatch):
    run = begun()
    lock = run_lock(run.folder.record.run_id)
    lock.__enter__()
    with watched(run, terminal, monkeypatch) as (ended, _):
        terminal.wait_for("30 of 100")
        lock.__exit__(None, None, None)
    assert [each.state for each in ended] == ["killed"]


def test_q_ends_the_picture_and_leaves_the_terminal_as_it_was(terminal, monkeypatch):
    run, before = begun(), termios.tcgetattr(terminal.slave)
    with run_lock(run.folder.record.run_id), watched(run, terminal, monkeypatch) as (ended, thread):
        terminal.wait_for("q ends")
        terminal.press(b"x")
        terminal.read(0.1)
        assert thread.is_alive()
        terminal.press(b"yq")
    assert [each.state for each in ended] == ["running"]
    assert termios.tcgetattr(terminal.slave) == before


def test_ctrl_c_while_the_first_picture_is_shown_gives_the_screen_back(monkeypatch):
    run, refresh = begun(), Live.refresh

    def interrupted(live):
        refresh(live)
        raise KeyboardInterrupt

    monkeypatch.setattr(Live, "refresh", interrupted)
    stream = io.StringIO()
    console, watch = Console(file=stream, force_terminal=True, width=100, height=30), top.RunWatch(run.path)
    with run_lock(run.folder.record.run_id):
        assert top.live_picture(console, watch, watch.look()).course.steps == 30
    picture, given_back, _ = stream.getvalue().partition("\x1b[?1049l")
    assert "30 of 100" in picture
    assert given_back


@pytest.mark.parametrize("named", ["last", "mine", "abab"])
def test_the_commands_that_change_or_watch_a_run_take_its_name(raycloak, named):
    run = LoggedRun("mine")
    run.folder.mark("done")
    for command, code in (
        (("discard", named), "run_done"),
        (("attest", "revoke", named, "--member", "worker-0"), "run_done"),
        (("attest", "observe", named), "not_a_run"),
    ):
        error = json.loads(raycloak(*command, "--json")[1])["error"]
        assert error["code"] == code
        # The right run: it is over, or has no manifest.
        assert str(run.path) in error["message"]


def test_the_command_on_a_terminal_ends_with_ctrl_c_and_keeps_the_last_picture(terminal):
    run = begun()
    with run_lock(run.folder.record.run_id):
        command = subprocess.Popen(
            [sys.executable, "-m", "raycloak", "top", "last"],
            stdin=terminal.slave,
            stdout=terminal.slave,
            stderr=terminal.slave,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"},
            start_new_session=True,
        )
        terminal.wait_for("q ends")
        command.send_signal(signal.SIGINT)
        deadline = time.monotonic() + DEADLINE_S
        while command.poll() is None:
            assert time.monotonic() < deadline
            terminal.read(0.05)
        # After the screen was given back; a read gives some of it alone.
        while "30 of 100" not in terminal._text.partition("\x1b[?1049l")[2]:
            assert time.monotonic() < deadline, terminal.text
            terminal.read(0.05)
    assert (command.returncode, "error" in terminal.text) == (0, False)
