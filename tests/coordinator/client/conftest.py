"""A training service in memory, and a client of it."""

import pytest

import raycloak
from tests.coordinator.client.memory_service import MemoryService

CONFIG = {
    "model": "tiny",
    "dataset": "digits",
    "expected_batch_size": 32,
    "steps": 20,
    "dp_config": {"target_epsilon": 3.0},
}


@pytest.fixture
def memory_service():
    """A service whose operations are done at once."""
    with MemoryService() as service:
        yield service


@pytest.fixture
def service(memory_service):
    """A connection to it."""
    with raycloak.ServiceClient(memory_service.address, patience_s=120) as service:
        yield service


@pytest.fixture
def training(service):
    """A training client of it."""
    return service.create_training_client(CONFIG)
