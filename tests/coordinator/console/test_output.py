"""Standard output belongs to the result: nothing else reaches it, and errors are one line."""

import json
import logging
import math
import re
import threading
from pathlib import Path

import pytest
from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from raycloak.coordinator.console.output import Diversion, attach_log, command_output, divert_logger
from raycloak.metrics.errors import ConfigError, RunFailedError

NOISY = """
import os, subprocess, sys
from raycloak.coordinator.console.output import attach_log, command_output, leave_stdout
with command_output(as_json=True, debug=False) as output:
    print("from python")
    os.write(1, b"from native code\\n")
    subprocess.run(["echo", "from a child"])
    output.result({"steps": 3}, "never shown")
    print("later")
leave_stdout()
print("from an exit handler")
os.write(1, b"native at exit\\n")
"""


def test_json_stdout_carries_one_object_and_nothing_else(run_python):
    done = run_python("-c", NOISY)
    assert done.code == 0
    assert json.loads(done.stdout) == {"steps": 3}
    assert done.stdout.count("\n") == 1
    for stray in ("from native code", "from a child", "from an exit handler", "native at exit"):
        assert stray in done.stderr
    assert "from python" not in done.stderr


def test_what_is_printed_before_and_after_a_log_is_attached_ends_there(tmp_path, capfd):
    log = tmp_path / "run.log"
    with command_output(as_json=False, debug=False):
        print("before")
        attach_log(log)
        print("after")
    assert log.read_text() == "before\nafter\n"
    assert capfd.readouterr().out == ""


def test_a_log_that_finds_no_room_hides_no_error(capfd):
    with command_output(as_json=True, debug=False) as output:
        attach_log(Path("/dev/full"))
        print("lost")
        output.error(RunFailedError("unreachable", "worker-1 is gone.", "Start again."))
    captured = capfd.readouterr()
    assert captured.err == "error: unreachable: worker-1 is gone. Start again.\n"
    assert json.loads(captured.out)["error"]["code"] == "unreachable"


def test_streams_are_given_back(capfd):
    with pytest.raises(ZeroDivisionError), command_output(as_json=True, debug=False):
        _ = 1 / 0
    print("mine again")
    assert capfd.readouterr().out == "mine again\n"


def test_attach_log_without_a_command_does_nothing(tmp_path):
    attach_log(tmp_path / "run.log")
    assert not (tmp_path / "run.log").exists()


def test_a_logger_that_outlives_the_command_still_writes_to_the_log(tmp_path):
    diversion = Diversion()
    diversion.attach(tmp_path / "run.log")
    assert diversion.write("one\n") == 4
    diversion.write("two\n")
    assert (tmp_path / "run.log").read_text() == "one\ntwo\n"


def test_what_ray_says_goes_to_a_log_of_its_own(tmp_path, capfd):
    logger = logging.getLogger("ray")
    kept = logger.handlers[:], logger.propagate
    try:
        with command_output(as_json=False, debug=False):
            divert_logger("ray")
            print("of the run")
            thread = threading.Thread(target=print, args=("(raylet) A worker died",), name="ray_listen_error_messages")
            thread.start()
            thread.join()
            logging.getLogger("ray.util").warning("a node is %s", "gone")
            attach_log(tmp_path / "run.log")
        logger.warning("after the command")
    finally:
        logger.handlers[:], logger.propagate = kept
    assert (tmp_path / "run.log").read_text() == "of the run\n"
    printed, logged = (tmp_path / "ray.log").read_text().splitlines()
    assert printed == "(raylet) A worker died"
    assert re.fullmatch(r".*WARNING test_output.py:\d+ -- a node is gone", logged)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("after the command\n")
    assert captured.err.count("\n") == 1


def test_loggers_are_left_alone_where_no_command_owns_the_output():
    before = logging.getLogger("ray").handlers[:]
    divert_logger("ray")
    assert logging.getLogger("ray").handlers == before


def test_a_person_gets_the_view_and_json_gets_the_data(capfd):
    data = {"path": Path("/a"), "infinite": math.inf, "digest": b"\x01\xff", "pairs": ((1, math.nan),)}
    with command_output(as_json=False, debug=False) as output:
        output.result(data, Text("the view"))
    assert capfd.readouterr().out == "the view\n"
    with command_output(as_json=True, debug=False) as output:
        output.result(data, Text("the view"))
    shown = json.loads(capfd.readouterr().out)
    assert shown == {"path": "/a", "infinite": None, "digest": "01ff", "pairs": [[1, None]]}


def test_text_of_others_cannot_command_the_terminal(capfd):
    """A record could clear the screen, and draw a table in which nothing failed."""
    hostile = "first\x1b[2Jsecond\x9b2J\u202ethird"
    with command_output(as_json=False, debug=True) as output:
        output.result({}, Group(Text(hostile), Panel(hostile)))
        output.announce(hostile)
        output.error(ConfigError("config", hostile, "Mend it."))
    captured = capfd.readouterr()
    assert captured.out.count("first\ufffd[2Jsecond\ufffd2J\ufffdthird") == 2
    assert not set("\x1b\x9b\u202e") & set(captured.out + captured.err)


@pytest.mark.parametrize("as_json", [False, True])
def test_an_announcement_reaches_the_person_and_the_log(as_json, tmp_path, capfd):
    with command_output(as_json, debug=False) as output:
        output.announce("metrics: http://127.0.0.1:9464/metrics")
        attach_log(tmp_path / "run.log")
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "metrics: http://127.0.0.1:9464/metrics\n")
    assert (tmp_path / "run.log").read_text() == captured.err


def test_an_error_is_one_line_on_stderr(capfd):
    with command_output(as_json=False, debug=False) as output:
        output.error(ConfigError("config", "two\nlines", "Mend it."))
    captured = capfd.readouterr()
    assert captured.err == "error: config: two lines Mend it.\n"
    assert captured.out == ""


def test_an_error_with_json_is_an_object_too(capfd):
    with command_output(as_json=True, debug=False) as output:
        output.error(RunFailedError("unreachable", "worker-1 is gone.", "Start again.", step=7, spent_epsilon=1.5))
    assert json.loads(capfd.readouterr().out) == {
        "error": {
            "code": "unreachable",
            "message": "worker-1 is gone.",
            "remedy": "Start again.",
            "exit_code": 4,
            "step": 7,
            "spent_epsilon": 1.5,
        }
    }


@pytest.mark.parametrize("debug", [False, True])
def test_a_traceback_is_shown_only_with_debug(debug, tmp_path, capfd):
    log = tmp_path / "run.log"
    with command_output(as_json=False, debug=debug) as output:
        output.attach_log(log)
        try:
            _ = 1 / 0
        except ZeroDivisionError as error:
            output.unexpected(error)
    shown = capfd.readouterr().err
    assert ("Traceback" in shown) is debug
    assert shown.splitlines()[-1].startswith("error: unexpected: ZeroDivisionError: division by zero. The traceback")
    assert "Traceback" in log.read_text()


def test_progress_leaves_stdout_to_the_result(capfd):
    for as_json in (False, True):
        with command_output(as_json, debug=False) as output:
            output.progress.print("step 1")
        captured = capfd.readouterr()
        assert (captured.out, captured.err) == ("", "step 1\n")
