"""Rotation, backup and restore of a machine's ledger by its own user, beside Ray's user who charges through a vault."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray import apart
from tests.ray.apart import RAY, USERS, machine, result


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder that every user may enter."""
    if (reason := apart.missing()) is not None:
        pytest.skip(reason)
    made = Path(tempfile.mkdtemp(prefix="kr", dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def test_the_ledgers_user_rotates_its_key_and_every_charge_stays(folder):
    with machine(folder) as made:
        own, backup, witness = (folder / name for name in ("ledger", "backup", "witness"))
        for each in (backup, witness):
            each.mkdir()
            made.own(each, "ledger", 0o700)
        url = f"sqlite:///{own}/ledger.sqlite"
        place = ("--ledger", url, "--witness", str(witness))

        def budget(*command: str, user: int = USERS["ledger"]) -> dict:
            return result(made.run(user, "-m", "raycloak", "budget", *command, "--json"))

        def charged(run_id: str, steps: int) -> dict:
            program = ("-m", "tests.coordinator.vaults.charging", made.socket.replace("{role}", "ledger"))
            return result(made.run(RAY, *program, run_id, str(steps)))

        def copied(source: Path, target: Path) -> None:
            script = "import shutil, sys; shutil.copytree(*sys.argv[1:], dirs_exist_ok=True)"
            done = made.run(USERS["ledger"], "-c", script, str(source), str(target))
            assert done.returncode == 0, done.stderr

        budget("open", "hospital", "--epsilon-cap", "8", *place)
        made.listen("ledger", url=url, witness=str(witness), sessions=3)
        before = charged("run-a", 2)
        assert (before["charged"], before["refusal"]) == (2, "")
        # Ray's user can neither read the ledger nor rotate its key.
        assert made.run(RAY, "-m", "raycloak", "budget", "rotate", *place, "--json").returncode != 0
        copied(own, backup)
        rotated = budget("rotate", *place)
        assert rotated["former_key"] == before["key"]
        # The vaults that listen open the ledger with its new key. The run of the former one is refused.
        assert charged("run-a", 3) == {"key": rotated["key"], "charged": 2, "refusal": "ledger_key_rotated"}
        assert charged("run-b", 3) == {"key": rotated["key"], "charged": 5, "refusal": ""}
        for key in (rotated["key"], before["key"]):
            verified = budget("verify", "--public-key", key, *place)
            assert verified["rollback_covered_to"] == verified["entries"]
        # A copy from before has the former key, and forgets what was charged since.
        newest = folder / "newest"
        newest.mkdir()
        made.own(newest, "ledger", 0o700)
        copied(own, newest)
        copied(backup, own)
        refused = made.run(USERS["ledger"], "-m", "raycloak", "budget", "verify", *place, "--json")
        assert refused.returncode == 3
        assert "before a rotation" in refused.stdout
        copied(newest, own)
        assert charged("run-b", 4) == {"key": rotated["key"], "charged": 6, "refusal": ""}
