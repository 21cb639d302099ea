"""What stays of closed clients, and what is forgotten."""

import pytest

from raycloak.coordinator.service import retention
from raycloak.metrics.service_errors import ServiceNotFoundError, ServiceQueueFullError, ServiceValidationError
from tests.coordinator.service.scripted import GIVEN, SENT, World

FB, OPT, SAVE = "forward_backward", "optim_step", "save_state"
TABLES = ("operations", "artifacts", "used_ids", "batches")


def worked(site, config=GIVEN):
    """Return a client that has made a step, and saved it."""
    client = site.create(config=config)
    site.run()
    if config is SENT:
        site.send(client, "a", "b")
        site.send(client, "c")
    else:
        site.submit(client, FB)
    site.submit(client, OPT)
    site.submit(client, SAVE)
    site.run()
    return client


def close(site, client):
    """Close a client, and have its driver end."""
    site.ask(site.desk.close_client, "north", client)
    site.run()


def rows(site, client):
    """Return how many rows of a client there are, by table."""
    found = {each: site.database.run(f"SELECT COUNT(*) FROM {each} WHERE client_id = ?", (client,)) for each in TABLES}
    return {table: count for table, ((count,),) in found.items() if count}


@pytest.fixture
def clocked(make_site, tmp_path):
    """Return a maker of sites that remember two closed clients, and whose clock goes on."""
    world, times = World(tmp_path / "world"), iter(range(10**6))

    def make(url=None, **limits):
        limits = {"closed_clients_per_tenant": 2, "active_clients": 16, **limits}
        return make_site(url=url, world=world, clock=lambda: float(next(times)), limits=limits)

    return make


def test_guarantee_of_closed_clients_the_newest_stay_and_others_lose_nothing(clocked, store_url):
    site = clocked(store_url)
    live, other = worked(site, SENT), site.create("south")
    gone = [worked(site, config) for config in (GIVEN, SENT)]
    site.create(key="of the first")
    kept = [worked(site, config) for config in (SENT, GIVEN)]
    for client in (*gone, *kept):
        close(site, client)
    before = {client: rows(site, client) for client in (live, *kept)}
    assert all(rows(site, client) for client in gone), "so many are remembered until another one is created"
    site.create()
    for client in gone:
        with pytest.raises(ServiceNotFoundError):
            site.client(client)
    site.ask(site.desk.tick)
    assert [(rows(site, client), site.store.client(client)) for client in gone] == [({}, None)] * 2
    assert {client: rows(site, client) for client in (live, *kept)} == before
    assert [each.step for each in site.ask(site.desk.artifacts, "north", kept[0])] == [1]
    listed = {each.client_id for each in site.ask(site.desk.clients, "north")}
    assert {live, *kept} < listed
    assert not listed & {*gone, other}
    # The ids of a client that goes on are counted as before.
    site.send(live, "a")
    site.submit(live, OPT)
    site.run()
    with pytest.raises(ServiceValidationError, match="participations_exceeded"):
        site.send(live, "a")


def test_a_forgotten_client_is_not_made_again_by_its_request_while_a_row_of_it_is_left(clocked):
    site = clocked(closed_clients_per_tenant=0)
    client = site.create(key="once")
    close(site, client)
    site.create()
    with pytest.raises(ServiceNotFoundError):
        site.create(key="once")
    assert site.ask(site.store.clients_by_status) == {"INITIALIZING": 1}


def test_a_client_whose_driver_has_not_ended_is_not_forgotten(clocked):
    site = clocked(closed_clients_per_tenant=0)
    client = worked(site)
    site.ask(site.desk.close_client, "north", client)
    site.create()
    assert site.client(client).status == "TERMINATED"
    site.run()
    site.create()
    with pytest.raises(ServiceNotFoundError):
        site.client(client)


def test_what_is_forgotten_goes_in_small_parts_and_another_process_goes_on(clocked, monkeypatch):
    monkeypatch.setattr(retention, "_ROWS_AT_ONCE", 3)
    site = clocked(closed_clients_per_tenant=0)
    client = worked(site, SENT)
    all_rows = sum(rows(site, client).values())
    assert all_rows == 4 + 1 + 3 + 2
    close(site, client)
    site.create()
    site.ask(site.desk.tick)
    assert sum(rows(site, client).values()) == all_rows - 3
    site = clocked()
    for _ in range(3):
        site.ask(site.desk.tick)
    assert (rows(site, client), site.store.client(client)) == ({}, None)


def test_a_client_that_is_forgotten_while_its_batches_are_looked_at_goes_once(clocked):
    site = clocked()
    client = worked(site, SENT)
    close(site, client)
    site = clocked(closed_clients_per_tenant=0)
    site.create(key="another")
    site.ask(site.desk.tick)
    assert (rows(site, client), site.store.client(client)) == ({}, None)


def test_batches_count_for_their_tenant_until_the_directory_of_their_run_has_none(clocked):
    limits = {"closed_clients_per_tenant": 0, "stored_batch_bytes": 12}
    site = clocked(**limits)
    client = worked(site, SENT)
    site.world.keeping.add(site.store.client(client).run_dir)
    close(site, client)
    other = site.create(config=SENT)
    site.run()
    site.ask(site.desk.tick)
    assert rows(site, client) == {"batches": 2}
    with pytest.raises(ServiceQueueFullError, match="batches_full"):
        site.send(other, "a")
    # The operator deletes them, and starts the service again.
    site.world.keeping.clear()
    site = clocked(**limits)
    site.ask(site.desk.tick)
    assert site.store.client(client) is None
    site.send(other, "a")


def test_the_service_keeps_no_file_of_a_closed_client_whose_driver_has_ended(clocked):
    site = clocked(active_clients=1)
    client, waiting = worked(site, SENT), site.create(config=SENT)
    folder = site.batches / client
    assert len(list(folder.iterdir())) == 2
    site.ask(site.desk.close_client, "north", client)
    assert folder.exists(), "its driver may read them still"
    site.run()
    assert not folder.exists()
    site.send(waiting, "a")
    (left,) = (site.batches / waiting).iterdir()
    site.ask(site.desk.drivers.stop)
    site.run()
    site.ask(site.desk.close_client, "north", waiting)
    assert not left.exists()
    # Its directory could not be removed before the service was killed.
    left.parent.mkdir()
    left.touch()
    clocked()
    assert not left.exists()
