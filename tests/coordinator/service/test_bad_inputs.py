"""What bad input gets: the error that is named for it, nothing charged, and a client that goes on.

From the caller's program over gRPC to the desk; drivers alone are scripted. What a run says of packages is in
tests/coordinator/training/test_state_requests.py.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pytest

import raycloak
from raycloak.coordinator.client import connection
from tests.coordinator.service.scripted import HASH, KEYS, TEXT
from tests.coordinator.service.serving import Served
from tests.owner import key_service
from tests.protocol import whole_run
from tests.sent import PRIVATE, SENT, data_keys

SOON = 60.0
LARGEST = 1600
"""Bytes of a batch that the service takes."""
ROWS = {**TEXT, "model": "m:f", "dataset": SENT}
TOKENS = {**ROWS, "dataset": SENT | {"shape": [4], "vocabulary": 10, "classes": None, "label_kind": "token"}}
NEVER = "c" + "0" * 16


def rows(count=2, first=0, **changes):
    """Return a good batch of rows, with some parts changed; a part that is None is left out."""
    good = {
        "example_ids": [f"patient-{first + number}" for number in range(count)],
        "features": np.zeros((count, 6), np.float32),
        "labels": np.zeros(count, int),
    }
    return {name: part for name, part in (good | changes).items() if part is not None}


def tokens(**changes):
    """Return a good batch of tokens, with some parts changed."""
    good = {"example_ids": [1, 2], "input_ids": np.zeros((2, 4), int), "labels": np.zeros((2, 4), int)}
    return good | changes


@dataclass
class Place:
    """A service that all tests share, and a data owner whose runs have ``manifest``."""

    served: Served
    keys: raycloak.DataKeys

    @property
    def charged(self):
        """Return all charges of all runs."""
        return {run: self.served.world.facts(run, "charge") for run in self.served.world.runs()}

    def config(self, config):
        """Return a client's configuration with the owner's contract where it sends its data."""
        if isinstance(config["dataset"], str):
            return config
        return {**config, "key_service": self.keys.key_service(KEYS[0])}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    token = {"token_sha256": [{"sha256": HASH(b"south").hexdigest()}], "datasets": [], "models": [], "code": []}
    both = [
        {"sha256": HASH(b"north").hexdigest()},
        {"sha256": HASH(b"of-last-year").hexdigest(), "expires": "2020-01-01"},
    ]
    north = {"datasets": ["digits"], "models": ["gpt"], "code": ["m:f"], "key_services": KEYS, "token_sha256": both}
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("RAYCLOAK_HOME", str(folder / "home"))
        owner = stack.enter_context(key_service(folder))
        fields = {"dataset": SENT, "key_service": owner.section(), "dp_config": PRIVATE, "expected_batch_size": 12}
        run = whole_run(folder / "home", **fields)
        manifest = run.coordinator.admitted().manifest
        run.events.close()
        for actor in run.session.control.actors.values():
            actor.handle.close()
        keys = data_keys(owner, manifest.ledger_key, manifest.account, folder)
        limits = {"batch_bytes": LARGEST, "queued_operations": 8, "request_bytes": 2**16}
        served = Served(folder, tenants={"north": north, "south": token}, limits=limits)
        served.world.manifest = json.loads(manifest.encode())
        yield Place(served, keys)
        served.stop()


class Caller:
    """A caller with a training client, in a test of its own."""

    def __init__(self, place: Place, config, token_file, monkeypatch) -> None:
        self.place, self.token_file, self.monkeypatch = place, token_file, monkeypatch
        self.sends = not isinstance(config["dataset"], str)
        self.of_tokens = config is TOKENS
        token_file.write_text("north")
        credentials = raycloak.ServiceCredentials(token_file=token_file)
        self.service = raycloak.ServiceClient(place.served.address, credentials)
        self.client = self.create(config)
        self.in_step = False

    def create(self, config=TEXT, **fields):
        """Create a training client."""
        return self.service.create_training_client(self.place.config({**config, **fields}), data_keys=self.place.keys)

    def forward(self, *batch):
        """Compute, and return the result."""
        done = self.client.forward_backward(*batch).result(SOON)
        self.in_step = True
        return done

    def step(self, *batch):
        """Make a step."""
        if not self.in_step:
            self.forward(*batch)
        self.in_step = False
        return self.client.optim_step().result(SOON)

    def sample(self, prompts=("a",), **fields):
        """Ask for text that is not going to be written."""
        return self.client.sample(list(prompts), **fields).result(SOON)

    def with_token(self, token):
        """Ask with another token."""
        self.token_file.write_text(token)
        try:
            return self.client.refresh()
        finally:
            self.token_file.write_text("north")

    def with_version(self, version):
        """Ask as a client of another version would."""
        with self.monkeypatch.context() as patch:
            patch.setattr(connection, "VERSION", version)
            return self.client.refresh()

    def load(self, refusal):
        """Load an artifact that the run refuses."""
        artifact = self.client.artifacts()[-1].artifact_id
        self.place.served.world.load_refusal = refusal
        try:
            return self.client.load_state(artifact).result(SOON)
        finally:
            self.place.served.world.load_refusal = ""

    def saved(self):
        """Make a step, and save it."""
        self.step()
        return self.client.save_state().result(SOON)

    def of_another_run(self):
        """Load an artifact of another client of the same tenant."""
        with self.create() as other:
            other.forward_backward()
            other.optim_step()
            artifact = other.save_state().result(SOON)
        return lambda: self.client.load_state(artifact.artifact_id).result(SOON)


def nothing(here):
    """Need nothing before."""


AUTH, STATE, FIELD, NONE, FAILED, RIGHT, LINK = (
    raycloak.ServiceAuthenticationError,
    raycloak.ServiceStateError,
    raycloak.ServiceValidationError,
    raycloak.ServiceNotFoundError,
    raycloak.FutureFailedError,
    raycloak.ServicePermissionError,
    raycloak.ServiceConnectionError,
)


def sent(field, batch, code="batch", before=nothing, config=ROWS):
    """Return the case of a batch that is refused."""
    return config, before, lambda here: here.forward(batch), FIELD, code, field


def refused_config(field, error=FIELD, code="config", **fields):
    """Return the case of a configuration that is refused."""
    return TEXT, nothing, lambda here: here.create(**fields), error, code, field


def asked(field, code="invalid", **fields):
    """Return the case of a sample that is refused."""
    return TEXT, nothing, lambda here: here.sample(**fields), FIELD, code, field


Case = tuple[dict, Callable, Callable, type[raycloak.ServiceError], str, str | None]
CASES: dict[str, Case] = {
    # What a client sends
    "rows of another shape": sent("batch.features", rows(features=np.zeros((2, 5), np.float32))),
    "rows of no one shape": sent("batch.features", rows(features=[[0.0] * 6, [0.0]])),
    "rows of texts": sent("batch.features", rows(features=np.full((2, 6), "x"))),
    "a row that is not finite": sent("batch.features", rows(features=np.full((2, 6), np.nan))),
    "fewer rows than ids": sent("batch.features", rows(features=np.zeros((1, 6), np.float32))),
    "no rows": sent("batch.features", rows(features=None)),
    "no labels": sent("batch.labels", rows(labels=None)),
    "labels of another shape": sent("batch.labels", rows(labels=np.zeros((2, 1), int))),
    "a label above the classes": sent("batch.labels", rows(labels=[0, 3])),
    "a label below zero": sent("batch.labels", rows(labels=[0, -1])),
    "labels with fractions": sent("batch.labels", rows(labels=[0.5, 0.0])),
    "another part": sent("batch.weights", rows(weights=[1, 1])),
    "no mapping": sent("batch", [1, 2]),
    "no ids": sent("batch.example_ids", rows(example_ids=None)),
    "an empty batch": sent("batch.example_ids", rows(0)),
    "an id that is none": sent("batch.example_ids", rows(example_ids=["a", ""])),
    "an id twice in a batch": sent("batch.example_ids", rows(example_ids=["a", "a"])),
    "a text and a number that are one id": sent("batch.example_ids", rows(example_ids=["7", 7])),
    "an id twice in a step": sent("example_ids", rows(1), "id_repeated", lambda here: here.forward(rows(2))),
    "an id too often in a run": sent(
        "example_ids", rows(1), "participations_exceeded", lambda here: (here.step(rows(2)), here.step(rows(2)))
    ),
    "more examples than a step takes": sent("batch.example_ids", rows(21)),
    "more in several batches than a step takes": sent(
        "batch.example_ids", rows(12, first=12), before=lambda here: here.forward(rows(12))
    ),
    "a batch of more bytes than the service takes": sent("batch", rows(20), "invalid"),
    "a token beyond the vocabulary": sent("batch.input_ids", tokens(input_ids=np.full((2, 4), 10)), config=TOKENS),
    "a token below zero": sent("batch.input_ids", tokens(input_ids=np.full((2, 4), -2)), config=TOKENS),
    "tokens with fractions": sent("batch.input_ids", tokens(input_ids=np.full((2, 4), 0.5)), config=TOKENS),
    "a text of another length": sent("batch.input_ids", tokens(input_ids=np.zeros((2, 5), int)), config=TOKENS),
    "a label beyond the vocabulary": sent("batch.labels", tokens(labels=np.full((2, 4), 10)), config=TOKENS),
    "a mask of another shape": sent("batch.attention_mask", tokens(attention_mask=np.ones((2, 1))), config=TOKENS),
    "no batch where data is sent": (ROWS, nothing, lambda here: here.forward(), FIELD, "invalid", "batch"),
    "a batch where data is registered": (TEXT, nothing, lambda here: here.forward(rows()), FIELD, "batch", "batch"),
    # The order of steps
    "a second forward_backward": (TEXT, lambda here: here.forward(), Caller.forward, STATE, "step_pending", None),
    "optim_step alone": (TEXT, nothing, lambda h: h.client.optim_step().result(SOON), STATE, "no_gradient", None),
    "a step without noise": (
        TEXT,
        lambda here: here.forward(),
        lambda here: here.client.optim_step(apply_dp_noise=False).result(SOON),
        FIELD,
        "invalid",
        "apply_dp_noise",
    ),
    "a load inside a step": (
        TEXT,
        lambda here: (here.saved(), here.forward()),
        lambda here: here.load(""),
        STATE,
        "step_pending",
        None,
    ),
    # Artifacts
    "an unknown artifact": (
        TEXT,
        nothing,
        lambda here: here.client.load_state(f"{here.client.client_id}.99").result(SOON),
        NONE,
        "not_found",
        "artifact",
    ),
    "no name of an artifact": (
        TEXT,
        nothing,
        lambda h: h.client.load_state("../x").result(SOON),
        NONE,
        "not_found",
        "artifact",
    ),
    "an unknown artifact to pull": (
        TEXT,
        nothing,
        lambda h: h.service.pull_artifact(f"{NEVER}.1"),
        NONE,
        "not_found",
        "client",
    ),
    "an artifact of another run": (
        TEXT,
        lambda here: setattr(here, "ask", here.of_another_run()),
        lambda here: here.ask(),
        NONE,
        "not_found",
        "artifact",
    ),
    "a package of another run in its place": (
        TEXT,
        Caller.saved,
        lambda h: h.load("package_other_run"),
        FAILED,
        "package_other_run",
        None,
    ),
    "a package newer than the ledger": (
        TEXT,
        Caller.saved,
        lambda h: h.load("ledger_rolled_back"),
        FAILED,
        "ledger_rolled_back",
        None,
    ),
    "an unknown client": (TEXT, nothing, lambda h: h.service.get_client(NEVER), NONE, "not_found", "client"),
    "an unknown future": (TEXT, nothing, lambda h: h.client.future("x.1"), NONE, "not_found", "future"),
    "too many notes": (
        TEXT,
        nothing,
        lambda h: h.client.save_state({str(n): "" for n in range(33)}),
        FIELD,
        "metadata",
        "metadata",
    ),
    "notes that are none": (TEXT, nothing, lambda h: h.client.save_state("epoch"), FIELD, "metadata", "metadata"),
    "a name of an artifact that is a number": (
        TEXT,
        nothing,
        lambda h: h.client.load_state(5),
        FIELD,
        "request",
        "artifact_id",
    ),
    "a name of an artifact that is no text": (
        TEXT,
        nothing,
        lambda h: h.client.load_state("\ud800"),
        FIELD,
        "request",
        "artifact_id",
    ),
    "noise that is neither on nor off": (
        TEXT,
        lambda here: here.forward(),
        lambda here: here.client.optim_step("off"),
        FIELD,
        "request",
        "apply_dp_noise",
    ),
    "a save before a step": (TEXT, nothing, lambda h: h.client.save_state().result(SOON), FAILED, "no_state", None),
    # Samples
    "a sample before a step": (TEXT, nothing, Caller.sample, FAILED, "no_state", None),
    "a sample of a model without text": (ROWS, nothing, Caller.sample, FIELD, "invalid", "model"),
    "no prompt": asked("prompts", prompts=[]),
    "an empty prompt": asked("prompts", prompts=[""]),
    "a prompt that is a number": asked("prompts", "request", prompts=[7]),
    "no tokens": asked("max_tokens", max_tokens=0),
    "more tokens than a sampler writes": asked("max_tokens", max_tokens=4097),
    "more texts than a sampler writes": asked("completions", num_completions=65),
    "more tokens than there are numbers": asked("max_tokens", "request", max_tokens=2**40),
    "a temperature that is none": asked("temperature", temperature=float("nan")),
    "a probability above one": asked("top_p", top_p=1.5),
    "an empty stop": asked("stop", stop=[""]),
    "a giant prompt": asked("request", "too_large", prompts=["x" * 2**17]),
    # Configurations
    "an unknown field": refused_config("stepz", stepz=3),
    "no steps": refused_config("steps", steps=0),
    "more steps than there are numbers": refused_config("steps", steps=2**64),
    "more passes than there are numbers": refused_config("epochs", steps=None, epochs=1e20),
    "what the service decides": refused_config("num_workers", num_workers=5),
    "a path of the service": refused_config("dataset", dataset={"kind": "npz", "path": "/etc"}),
    "no noise": refused_config("dp_config.noise_multiplier", dp_config={"noise_multiplier": 0.0, "epsilon_cap": 1.0}),
    "an unknown dataset": refused_config("dataset", NONE, "not_found", dataset="faces"),
    "an unknown model": refused_config("model", NONE, "not_found", model="gpt-9"),
    "code of nobody": refused_config(None, RIGHT, "code", model="os:abort"),
    "a giant configuration": refused_config("request", code="too_large", model="m:" + "f" * 2**17),
    # Callers
    "credentials that have expired": (TEXT, nothing, lambda h: h.with_token("of-last-year"), AUTH, "expired", None),
    "unknown credentials": (TEXT, nothing, lambda h: h.with_token("west"), AUTH, "unauthenticated", None),
    "no credentials": (TEXT, nothing, lambda h: h.with_token(""), AUTH, "no_token", None),
    "another tenant": (TEXT, nothing, lambda h: h.with_token("south"), NONE, "not_found", "client"),
    "a client of another version": (TEXT, nothing, lambda h: h.with_version("99.0.0"), LINK, "other_version", None),
    "a client of no version": (TEXT, nothing, lambda h: h.with_version(""), LINK, "other_version", None),
}


@pytest.mark.parametrize("case", CASES)
def test_guarantee_bad_input_gets_its_error_costs_nothing_and_leaves_the_client_usable(
    case, place, tmp_path, monkeypatch
):
    config, before, bad, error, code, where = CASES[case]
    here = Caller(place, config, tmp_path / "token", monkeypatch)
    with here.service, here.client:
        before(here)
        charged = place.charged
        with pytest.raises(raycloak.ServiceError) as refusal:
            bad(here)
        told = refusal.value
        assert (type(told), told.code) == (error, code), told
        assert (getattr(told, "field", None) or getattr(told, "resource", None)) == where
        assert told.message
        assert {run: place.charged.get(run) for run in charged} == charged
        good = () if not here.sends else (tokens(),) if here.of_tokens else (rows(2, first=40),)
        step = here.client.step
        assert here.step(*good).step == step + 1
        assert here.client.error is None
