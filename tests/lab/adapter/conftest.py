"""An adapter on a tiny encoder, its server on loopback, and clients with keys of their own."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.keys.run_secret import load_secret
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor
from raycloak.coordinator.config import home
from raycloak.coordinator.evidence.sources import LocalPlatform
from raycloak_lab.adapter import places
from raycloak_lab.adapter.budgets import TokenBudgets
from raycloak_lab.adapter.desk import AdapterDesk
from raycloak_lab.adapter.server import serving
from raycloak_lab.encrypted.adapter_worker import Adapter, AdapterWorker, LowRank

WIDTH, RANK, TOKENS = 16, 3, 128
NAMES = ("layers.0.query", "layers.0.value", "layers.1.query")


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYCLOAK_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="session")
def matrices():
    rng = np.random.default_rng(24)
    return {name: LowRank(rng.normal(size=(RANK, WIDTH)), rng.normal(size=(WIDTH, RANK))) for name in NAMES}


class Encoder(torch.nn.Module):
    """Two layers; query and value of the first read one tensor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        pairs = ({"query": torch.nn.Linear(WIDTH, WIDTH), "value": torch.nn.Linear(WIDTH, WIDTH)} for _ in range(2))
        self.layers = torch.nn.ModuleList(torch.nn.ModuleDict(pair) for pair in pairs)

    def forward(self, inputs_embeds, attention_mask=None):
        states = inputs_embeds
        for layer in self.layers:
            states = torch.tanh(layer["query"](states)) + layer["value"](states)
        return states if attention_mask is None else states * attention_mask[..., None]


@pytest.fixture
def encoder():
    return Encoder().eval()


@pytest.fixture
def adapted(matrices):
    """Return the same encoder with the adapter in its weights."""
    model = Encoder().eval()
    for name, each in matrices.items():
        with torch.no_grad():
            model.get_submodule(name).weight += torch.from_numpy(each.up @ each.down).float()
    return model


def identity():
    """Return this home's client key."""
    return IdentityKey.from_seed(load_secret(places.identity_file()))


class Site:
    """A served adapter.

    Attributes:
        address: for clients.
    """

    def __init__(self, worker, desk, server):
        self.worker, self.desk, self.server = worker, desk, server
        self.address = f"{desk.facts.identity_key.hex()}@127.0.0.1:{server.port}"


@pytest.fixture
def site(matrices, tmp_path):
    """Return a function that serves the adapter to this home's client, and to those given by key and name."""

    @contextmanager
    def served(of_adapter=2**20, of_client=2**20, others=None, **limits):
        source = LocalPlatform(SimulatedVendor.load_or_create(home.simulator_folder()).platform())
        worker = AdapterWorker(Adapter(matrices), TOKENS, source)
        budgets = TokenBudgets(tmp_path / "budgets.sqlite", of_adapter, of_client)
        clients = {identity().public: "me", **(others or {})}
        desk = AdapterDesk(worker, budgets, clients, **{"sessions": 8, "idle_s": 600.0, **limits})
        with serving(desk, worker.end, "127.0.0.1:0") as server:
            yield Site(worker, desk, server)
        budgets.close()

    return served
