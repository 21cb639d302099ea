"""A ledger in a real PostgreSQL: durable whatever the server's defaults, and a lost server is a refusal."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from raycloak.coordinator.cli import app
from raycloak.coordinator.ledger.engine import check_settings
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import RegistrationTerms
from raycloak.coordinator.ledger.store import LedgerStore
from raycloak.metrics.errors import BudgetError, ConfigError
from tests.coordinator.ledger.ledger_cases import (
    DATA,
    MANIFEST,
    PARAMETERS,
    expected_epsilon,
    mechanism,
    opened,
    receipt_of,
    spent,
)
from tests.postgres import PostgresServer

LEDGER_TABLES = ("meta", "accounts", "runs", "entries")


@pytest.fixture
def careless(postgres: PostgresServer) -> Iterator[str]:
    """Yield the URL for a role whose defaults would lose charges, admit them over the cap, and wait for ever."""
    defaults = {
        "synchronous_commit": "off",
        "default_transaction_isolation": "serializable",
        "lock_timeout": "0",
        "idle_in_transaction_session_timeout": "0",
    }
    url = postgres.url("careless")
    postgres.execute("CREATE ROLE careless SUPERUSER LOGIN")
    for name, value in defaults.items():
        postgres.execute(f"ALTER ROLE careless SET {name} = '{value}'")
    yield url
    postgres.execute("DROP OWNED BY careless CASCADE")
    postgres.execute("DROP ROLE careless")


def test_every_commit_is_synchronous_and_follows_the_one_before_whatever_the_defaults(careless: str):
    """The settings of each transaction are read on its own connection, just before it commits."""
    seen: list[tuple[str, ...]] = []
    names = ("synchronous_commit", "transaction_isolation", "transaction_read_only", "lock_timeout")
    names += ("idle_in_transaction_session_timeout",)

    def read(connection: sa.Connection) -> None:
        with connection.connection.cursor() as cursor:
            seen.append(tuple(cursor.execute(f"SHOW {name}").fetchone()[0] for name in names))

    sa.event.listen(sa.Engine, "commit", read)
    try:
        ledger = opened(careless)
        ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
        ledger.view()
        ledger.close()
    finally:
        sa.event.remove(sa.Engine, "commit", read)
    writers = [settings for settings in seen if settings[2] == "off"]
    readers = [settings for settings in seen if settings[2] == "on"]
    # Opening, the account, the run, its data and the charge.
    assert writers == [("on", "read committed", "off", "30s", "30s")] * 5
    assert {isolation for _, isolation, *_ in readers} == {"repeatable read"}


def test_a_server_that_waits_for_its_standby_to_apply_keeps_doing_so(postgres: PostgresServer):
    store = LedgerStore(f"{postgres.url()}%20-csynchronous_commit%3Dremote_apply")
    with store.write() as rows:
        assert rows._connection.exec_driver_sql("SHOW synchronous_commit").scalar() == "remote_apply"
    store.close()


def test_a_server_that_may_lose_what_it_acknowledged_is_refused(postgres_binaries: Path):
    """Also once it runs: the settings may change under a ledger that is open."""
    server = PostgresServer(postgres_binaries)
    try:
        ledger = opened(server.url())
        for step, setting in enumerate(("fsync", "full_page_writes")):
            ledger.charge("run-a", step, PARAMETERS, MANIFEST)
            server.reload(setting, "off")
            with pytest.raises(BudgetError, match=f"ledger_not_durable.*{setting} = off") as refusal:
                ledger.charge("run-a", step + 1, PARAMETERS, MANIFEST)
            assert refusal.value.exit_code == 3
            assert not ledger.status("run-a", step + 1).charged
            with pytest.raises(BudgetError, match="ledger_not_durable"):
                LedgerStore(server.url())
            server.reload(setting, "on")
        ledger.close()
    finally:
        server.stop()


@pytest.mark.parametrize("setting", ["off", "local", "remote_write"])
def test_a_commit_that_is_not_synchronous_is_refused(setting: str):
    with pytest.raises(BudgetError, match=f"ledger_not_durable.*synchronous_commit = {setting}"):
        check_settings(setting, "on", "on")


def test_tables_that_a_crash_would_empty_are_refused(postgres: PostgresServer):
    url = postgres.url()
    LedgerStore(url).close()
    schema = url.rpartition("%3D")[2]
    postgres.execute(f"ALTER TABLE {schema}.entries SET UNLOGGED")
    with pytest.raises(BudgetError, match="ledger_not_durable: entries cannot outlive a crash"):
        LedgerStore(url)


def test_the_command_verifies_a_servers_ledger_and_finds_an_edited_charge(
    postgres: PostgresServer, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(app, "leave_stdout", lambda: None)
    url = postgres.url()
    ledger = opened(url)
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    ledger.close()

    def verify() -> tuple[object, Any]:
        with pytest.raises(SystemExit) as stopped:
            app.main(["budget", "verify", "--ledger", url, "--json"])
        return stopped.value.code, json.loads(capfd.readouterr().out)

    code, facts = verify()
    assert (code, facts["entries"]) == (0, 4)
    schema = url.rpartition("%3D")[2]
    postgres.execute(f"UPDATE {schema}.entries SET body = body || ' ' WHERE sequence = 4")
    code, facts = verify()
    assert (code, facts["error"]["code"]) == (3, "chain_broken")
    assert "entry 4" in facts["error"]["message"]


def test_a_lost_connection_is_named_and_the_next_charge_makes_another(postgres: PostgresServer):
    ledger = opened(postgres.url())
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    with ledger._store.write() as rows:
        pid = rows._connection.exec_driver_sql("SELECT pg_backend_pid()").scalar()

    def disconnected() -> None:
        with ledger._store.write() as rows:
            postgres.execute(f"SELECT pg_terminate_backend({pid}, 10000)")
            rows.open_lease()

    with pytest.raises(BudgetError, match="ledger_unavailable"):
        disconnected()
    assert receipt_of(ledger, ledger.charge("run-a", 1, PARAMETERS, MANIFEST)).step == 1
    assert spent(ledger) == expected_epsilon(2)
    ledger.verify()
    ledger.close()


def test_what_the_server_acknowledged_outlives_its_sigkill(postgres_binaries: Path):
    """The server's own default loses the last commits; ours must not."""
    server = PostgresServer(postgres_binaries, {"synchronous_commit": "off", "wal_writer_delay": "10s"})
    try:
        ledger = opened(server.url())
        receipts = []
        for step in range(3):
            receipts.append(receipt_of(ledger, ledger.charge("run-a", step, PARAMETERS, MANIFEST)))
            server.kill()
            with pytest.raises(BudgetError, match="ledger_unavailable"):
                ledger.charge("run-a", step + 1, PARAMETERS, MANIFEST)
            with pytest.raises(BudgetError, match="ledger_unavailable"):
                ledger.view()
            server.start()
            assert [ledger.status("run-a", each).charged for each in range(4)] == [each <= step for each in range(4)]
        assert [receipt_of(ledger, ledger.charge("run-a", step, PARAMETERS, MANIFEST)) for step in range(3)] == receipts
        assert ledger.verify().head == ledger.view().head
        ledger.close()
    finally:
        server.stop()


def test_a_missing_right_a_missing_database_and_a_standby_are_refusals(postgres: PostgresServer):
    url = postgres.url()
    LedgerStore(url).close()
    schema = url.rpartition("%3D")[2]
    postgres.execute("CREATE ROLE reader LOGIN")
    postgres.execute(f"GRANT USAGE ON SCHEMA {schema} TO reader")
    for wrong in (
        url.replace("raycloak@", "reader@"),
        url.replace("raycloak@", "nobody@"),
        url.replace("/postgres?", "/missing?"),
        url.replace("/postgres?", ":1/postgres?"),
        f"{url}%20-cdefault_transaction_read_only%3Don",
    ):
        with pytest.raises(BudgetError, match=r"^ledger_unavailable: the ledger's storage failed: [^\n]*$"):
            LedgerStore(wrong)
    postgres.execute("DROP OWNED BY reader")
    postgres.execute("DROP ROLE reader")


@pytest.mark.parametrize(
    "tables", [["CREATE TABLE photos (id int)"], [f"CREATE TABLE {name} (a int)" for name in LEDGER_TABLES]]
)
def test_another_programs_database_is_refused(postgres: PostgresServer, tables: list[str]):
    url = postgres.url()
    schema = url.rpartition("%3D")[2]
    for statement in tables:
        postgres.execute(statement.replace("TABLE ", f"TABLE {schema}."))
    with pytest.raises(BudgetError, match="ledger_foreign"):
        LedgerStore(url)


def test_a_reader_creates_nothing(postgres: PostgresServer):
    url = postgres.url()
    with pytest.raises(ConfigError, match="ledger_missing"):
        LedgerStore(url, create=False)
    with pytest.raises(ConfigError, match="ledger_missing"):
        PrivacyLedger(url, create=False)


def test_the_database_itself_refuses_a_step_twice(postgres: PostgresServer):
    ledger = opened(postgres.url())
    ledger.register_run(RegistrationTerms("run-b", "patients", (mechanism(),), MANIFEST))
    ledger.bind_data("run-b", MANIFEST, DATA)
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    entry = ledger.history()[-1]
    with pytest.raises(sa.exc.IntegrityError), ledger._store.write() as rows:
        rows._connection.exec_driver_sql(
            "INSERT INTO entries SELECT 99, previous, kind, body, hash, signature, run_id, query, step"
            f" FROM entries WHERE sequence = {entry.sequence}"
        )
    ledger.close()


def test_a_writer_that_stops_in_its_transaction_is_rolled_back_by_the_server(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
):
    url = postgres.url()
    stopped, other = opened(url), opened(url, "run-b")
    # Long enough for a busy machine to get from one statement to the next.
    monkeypatch.setattr("raycloak.coordinator.ledger.engine.LOCK_DEADLINE_S", 2.0)

    def stops() -> None:
        with stopped._store.write() as rows:
            number = rows.open_lease()
            # Waits for the lock until the server takes it from the writer above, which says nothing.
            monkeypatch.setattr("raycloak.coordinator.ledger.engine.LOCK_DEADLINE_S", 30.0)
            other.charge("run-b", 0, PARAMETERS, MANIFEST)
            rows.own_run("run-a", number)

    with pytest.raises(BudgetError, match="ledger_unavailable"):
        stops()
    assert [run.charged_steps for run in other.view().accounts[0].runs] == [0, 1]
    stopped.charge("run-a", 0, PARAMETERS, MANIFEST)
    other.verify()
    for ledger in (stopped, other):
        ledger.close()
