"""A whole run of a configuration by ``raycloak run``, in a state folder of its own."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent


def verdict_of(folder: Path, config: dict[str, Any], phrase: str) -> dict[str, Any]:
    """Run ``config`` in ``folder``, and return its verdict.

    Args:
        phrase: of which the run secret is the SHA-256.
    """
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text(hashlib.sha256(phrase.encode()).hexdigest(), encoding="utf-8")
    with tempfile.TemporaryDirectory() as home:
        command = [sys.executable, "-m", "raycloak", "run", str(folder / "config.yaml"), "--json"]
        done = subprocess.run(
            [*command, "--run-secret", str(secret)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "RAYCLOAK_HOME": home},
            stdout=subprocess.PIPE,
            encoding="utf-8",
            check=True,
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found
