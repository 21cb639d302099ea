"""The results of an undisturbed run, a memory of checks of models, a local S3, and ledgers on each database."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow import fs

from tests.checked_once import checked_once as checked_once
from tests.protocol import trained


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> list[str]:
    """Return the small run's parameter digests after each of its three steps."""
    return trained(tmp_path_factory.mktemp("undisturbed")).digests


@pytest.fixture(scope="session")
def bucket_urls() -> Iterator[Iterator[str]]:
    """Yield URLs of empty prefixes in the bucket ``packages`` of a moto server on this machine."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    query = f"scheme=http&endpoint_override={host}:{port}&region=us-east-1"
    bucket, _ = fs.FileSystem.from_uri(f"s3://key:secret@packages?{query}&allow_bucket_creation=true")
    bucket.create_dir("packages")
    yield (f"s3://key:secret@packages/{number}?{query}" for number in itertools.count())
    server.stop()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.server)])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of a ledger that does not exist yet, on each kind of database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'state' / 'ledger.sqlite'}"
    return request.getfixturevalue("postgres").url()
