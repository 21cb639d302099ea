"""The start of the command."""

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_ctrl_c_while_the_command_loads_ends_it_without_a_traceback():
    program = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class PressCtrlC(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "raycloak.coordinator.cli.app":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, PressCtrlC())
from raycloak.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=300, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")
