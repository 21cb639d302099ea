"""The results of an undisturbed run, a memory of checks of models, a local S3, and ledgers on each database."""

import itertools
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pyarrow import fs

from tests.checked_once import checked_once as checked_once
from tests.protocol import WholeRun, trained


@pytest.fixture(scope="session")
def plain(tmp_path_factory) -> WholeRun:
    """Return the small run of three steps, which nothing disturbed: for tests that only look at it."""
    return trained(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def done(plain: WholeRun, tmp_path: Path) -> WholeRun:
    """Return that run with files of the test's own, for what comes after it."""
    shutil.copytree(plain.home, tmp_path, dirs_exist_ok=True)
    return replace(plain, home=tmp_path, folder=tmp_path / plain.folder.name)


@pytest.fixture(scope="session")
def undisturbed(plain: WholeRun) -> list[str]:
    """Return the small run's model digests after each of its three steps."""
    return plain.digests


@pytest.fixture(scope="session")
def bucket_urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Iterator[str]]:
    """Yield URLs of empty prefixes in the bucket ``packages`` of a moto server on this machine.

    The keys are in a file, as those of a user: no URL may have them.
    """
    from moto.server import ThreadedMotoServer

    file = tmp_path_factory.mktemp("aws") / "credentials"
    file.touch(0o600)
    file.write_text("[default]\naws_access_key_id = key\naws_secret_access_key = secret\n")
    patch = pytest.MonkeyPatch()
    patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    query = f"scheme=http&endpoint_override={host}:{port}&region=us-east-1"
    bucket, _ = fs.FileSystem.from_uri(f"s3://packages?{query}&allow_bucket_creation=true")
    bucket.create_dir("packages")
    yield (f"s3://packages/{number}?{query}" for number in itertools.count())
    server.stop()
    patch.undo()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.server)])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of a ledger that does not exist yet, on each kind of database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'state' / 'ledger.sqlite'}"
    return request.getfixturevalue("postgres").url()
