"""The name of the machine of a simulated platform."""

import pytest

from raycloak.coordinator.cluster import machine_names
from raycloak.coordinator.cluster.machine_names import machine_name

ID = "0123456789abcdef" * 2


@pytest.fixture
def machine_id(tmp_path, monkeypatch):
    path = tmp_path / "machine-id"
    path.write_text(f"{ID}\n")
    monkeypatch.setattr(machine_names, "_MACHINE_ID", path)
    return path


def test_a_machine_has_one_name_in_every_process_and_it_does_not_tell_the_systems_id(machine_id):
    name = machine_name(None, None)
    assert name == machine_name("another actor", None)
    assert ID not in name
    machine_id.write_text(ID[::-1])
    assert machine_name(None, None) != name


def test_the_operators_label_comes_first(machine_id):
    assert machine_name(None, "rack-1") == "label rack-1" != machine_name(None, "rack-2")
    assert machine_name(None, ID) != machine_name(None, None)


@pytest.mark.parametrize("content", ["", "uninitialized", "0123"])
def test_nodes_without_label_and_id_count_as_one_machine(machine_id, content):
    machine_id.write_text(content)
    assert machine_name(None, None) == "unnamed"
    machine_id.unlink()
    assert machine_name(None, None) == "unnamed"
