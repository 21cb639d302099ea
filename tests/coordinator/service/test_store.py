"""The store on each kind of database: transactions, one owner, what it refuses to open."""

import sqlite3
import subprocess
import sys

import pytest

from raycloak.coordinator.service import databases
from raycloak.coordinator.service.databases import OwnedFolder, open_database
from raycloak.coordinator.service.store import ClientRow, Store
from raycloak.metrics.errors import ConfigError, RunFailedError
from tests.coordinator.service.scripted import SENT, Site


@pytest.fixture
def refused(monkeypatch):
    """Return what tells the code with which an owner is refused that does not wait for another to leave."""

    def refused(own, *place):
        with monkeypatch.context() as patch:
            patch.setattr(databases, "OWNER_DEADLINE_S", 0.0)
            with pytest.raises(ConfigError) as refusal:
                own(*place)
        return refusal.value.code

    return refused


def test_the_desk_works_on_each_kind_of_database(tmp_path, store_url):
    site = Site(tmp_path, url=store_url)
    client, sender = site.create(), site.create(config=SENT)
    pair = site.submit(client, "forward_backward"), site.submit(client, "optim_step")
    save = site.submit(client, "save_state", metadata={"a": "ε"})
    site.send(sender, "a", "b")
    site.submit(sender, "optim_step")
    queued = site.submit(client, "forward_backward")
    site.cancel(queued)
    site.run()
    site.close()
    site = Site(tmp_path, url=store_url, world=site.world)
    assert [site.get(each).state for each in (*pair, save, queued)] == ["done"] * 3 + ["cancelled"]
    assert site.get(save).save_state.artifact.metadata == {"a": "ε"}
    assert site.client(sender).step == 1
    assert site.ask(site.desk.queued_by_kind) == ({}, 1000.0)
    assert len(site.ask(site.desk.changes, "north", client, 0).changes) == 5
    site.close()


def test_ids_beyond_one_statement_are_counted_or_none_is(tmp_path, store_url):
    site = Site(tmp_path, url=store_url)
    with site.store.transaction():
        ids = [number.to_bytes(16) for number in range(1200)]
        assert site.store.count_ids("c", 0, ids, 1) is None
        assert site.store.used_in_step("c", ids[1199]) == (1, 0)
        new = [number.to_bytes(16) for number in range(2000, 3100)]

        def counted():
            with site.store.part():
                assert site.store.count_ids("c", 1, [*new, ids[7]], 1) == ids[7]
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            counted()
        assert site.store.used_in_step("c", new[0]) == (0, -1)
    site.close()


def test_a_transaction_that_raises_leaves_nothing(tmp_path, store_url):
    site = Site(tmp_path, url=store_url)
    row = ClientRow("c", "north", "k", b"", "n", "{}", "{}", 0, 0, 0, 1, 0.0, 0.0)

    def added():
        with site.desk.book.turn():
            site.store.add(row)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        added()
    assert site.store.client("c") is None
    site.close()


def test_a_store_has_one_owner(store_url, refused):
    database = open_database(store_url)
    assert refused(open_database, store_url) == "store_taken"
    database.close()
    # A server notices the end of a connection a little later.
    open_database(store_url).close()


def test_a_folder_is_free_when_its_owner_was_killed(tmp_path, refused):
    script = (
        "import sys, time; from pathlib import Path\n"
        "from raycloak.coordinator.service.databases import OwnedFolder\n"
        "owned = OwnedFolder(Path(sys.argv[1])); print('owns', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script, tmp_path / "f"], stdout=subprocess.PIPE) as owner:
        assert owner.stdout.readline() == b"owns\n"
        assert refused(OwnedFolder, tmp_path / "f") == "store_taken"
        owner.kill()
        owner.wait()
        OwnedFolder(tmp_path / "f").close()


@pytest.mark.parametrize("url", ["sqlite:///relative", "mysql://nobody@host/x", "postgresql://nobody@127.0.0.1:1/x"])
def test_a_url_that_cannot_be_used_is_refused_without_its_text(url):
    with pytest.raises(ConfigError, match="store_url") as refusal:
        open_database(url)
    assert "nobody" not in str(refusal.value)


def test_the_file_is_private_and_another_programs_database_is_left_alone(tmp_path):
    path = tmp_path / "d" / "s.sqlite"
    Store(open_database(f"sqlite:///{path}")).close()
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="store_exposed"):
        open_database(f"sqlite:///{path}")
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    other.chmod(0o600)
    database = open_database(f"sqlite:///{other}")
    with pytest.raises(ConfigError, match="store_foreign"):
        Store(database)
    assert database.run(database.tables) == [("theirs",)]
    database.close()


@pytest.mark.server
def test_a_server_that_may_lose_what_it_acknowledged_is_refused(postgres):
    postgres.reload("full_page_writes", "off")
    try:
        with pytest.raises(ConfigError, match="store_not_durable"):
            open_database(postgres.url())
    finally:
        postgres.reload("full_page_writes", "on")


@pytest.mark.server
def test_a_lost_server_fails_by_name(tmp_path, postgres):
    site = Site(tmp_path, url=postgres.url())
    own = site.database.run("SELECT pg_backend_pid()")[0][0]
    postgres.execute(f"SELECT pg_terminate_backend({own})")
    with pytest.raises(RunFailedError, match="store_failed"):
        site.create()
    site.close()
