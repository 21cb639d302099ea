"""A ledger and its witness: told apart by machine and file system, and by nothing that cannot be known."""

import socket
from pathlib import Path

import pytest

from raycloak.coordinator.ledger import location
from raycloak.coordinator.ledger.location import HERE, StoragePlace, is_apart
from raycloak.coordinator.ledger.store import LedgerStore
from tests.postgres import PostgresServer

ELSEWHERE = {"db.example": "192.0.2.7", "witness.example": "192.0.2.8", "witness-of-db.example": "192.0.2.7"}


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let some names stand for other machines; no name server is asked."""
    genuine = socket.getaddrinfo

    def resolve(host: str, port: object, *rest: int, **more: int) -> object:
        if host.endswith(".invalid"):
            raise socket.gaierror(-2, "Name or service not known")
        return genuine(ELSEWHERE.get(host, host), port, *rest, **more)

    monkeypatch.setattr(location.socket, "getaddrinfo", resolve)


def own_address() -> str:
    """Return an address of this machine that is no loopback one, if it has any."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.8.8.8", "localhost", "::1", "::ffff:127.0.0.1", "0.0.0.0", own_address()),
        *("/run/postgresql", "@abstract", ""),
        *("unknown.invalid", "a" * 80),
    ],
)
def test_guarantee_a_host_of_this_machine_is_told_as_such_and_so_is_one_that_nobody_knows(host: str) -> None:
    assert HERE in StoragePlace(host=host).machines()


@pytest.mark.parametrize(
    ("witness", "ledger", "apart"),
    [
        (StoragePlace(host="witness.example"), StoragePlace(path=Path("/")), True),
        (StoragePlace(host="witness.example"), StoragePlace(host="db.example"), True),
        (StoragePlace(host="witness.example"), StoragePlace(host="/run/postgresql"), True),
        (StoragePlace(host="witness-of-db.example"), StoragePlace(host="db.example"), False),
        (StoragePlace(host="127.0.0.1"), StoragePlace(host="db.example"), True),
        (StoragePlace(host="127.0.0.1"), StoragePlace(host="/run/postgresql"), False),
        (StoragePlace(host="127.0.0.1"), StoragePlace(path=Path("/")), False),
        (StoragePlace(path=Path("/")), StoragePlace(host="db.example"), True),
        (StoragePlace(path=Path("/")), StoragePlace(host="127.0.0.1"), False),
        (StoragePlace(path=Path("/")), StoragePlace(path=Path("/")), False),
        (StoragePlace(path=Path("/proc")), StoragePlace(path=Path("/")), True),
    ],
)
def test_a_witness_is_apart_from_its_ledger_on_another_machine_or_file_system(
    witness: StoragePlace, ledger: StoragePlace, apart: bool
) -> None:
    assert is_apart(witness, ledger) is apart


def test_a_folder_over_a_network_is_on_no_storage_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(location, "network_file_system", lambda path, _: "nfs4" if path == Path("/mnt") else "")
    assert is_apart(StoragePlace(path=Path("/mnt")), StoragePlace(host="127.0.0.1"))


@pytest.mark.server
def test_a_ledger_on_a_server_is_where_its_connection_leads(postgres: PostgresServer, tmp_path: Path) -> None:
    store = LedgerStore(postgres.url())
    assert store.place() == StoragePlace(host=str(postgres._folder))
    assert store.place().machines() == {HERE}
    store.close()
    embedded = LedgerStore(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    assert embedded.place() == StoragePlace(path=tmp_path / "ledger.sqlite")
    embedded.close()
