"""A client's encoder with the adapter at its server: over real channels, under simulated evidence."""

import json
import threading
import time

import pytest
import torch

from raycloak.attestation.policy.policy import simulated_policy
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor, code_measurement
from raycloak.coordinator.config import home
from raycloak.metrics.errors import BudgetError, ConfigError, EvidenceError, ModelError, ProtocolError, RefusedError
from raycloak_lab.adapter import encrypted_adapter, places
from raycloak_lab.adapter.connection import AdapterAddress, AdapterConnection
from raycloak_lab.adapter.encrypted_adapter import EncryptedAdapter, _replaced
from raycloak_lab.encrypted.parameters import SET_F
from tests.lab.adapter.conftest import TOKENS, identity


def states(batch=3, length=50):
    return torch.randn(batch, length, 16, generator=torch.Generator().manual_seed(batch))


def test_the_encoder_computes_what_the_adapted_one_does(site, encoder, adapted):
    seen = []
    given = states()
    with site() as served, EncryptedAdapter(encoder, served.address, progress=lambda *each: seen.append(each)) as model:
        found = model(given)
        assert model.simulated
        # 150 tokens are two blocks; query and value of the first layer share theirs.
        assert model.traffic.blocks == 4
        assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    expected = adapted(given)
    assert (found - expected).abs().max() < 1e-2 * (expected - encoder(given)).abs().max()
    assert not found.requires_grad
    assert torch.equal(encoder(given), encoder(given)), "a hook was left behind"


class Slow:
    """A session whose answer to a block comes only once the layer's next block was encrypted."""

    def __init__(self, session, blocks):
        self.sent, self._encrypted = [], 0
        self._changed = threading.Condition()
        self._blocks, self._encrypt, self._answer = blocks, session._keys.encrypt, session._answer
        session._keys.encrypt, session._answer = self.encrypt, self.answer

    def encrypt(self, tokens):
        batch = self._encrypt(tokens)
        with self._changed:
            self._encrypted += 1
            self._changed.notify()
        return batch

    def answer(self, batch, names):
        self.sent.append(tuple(names))
        due = len(self.sent) + (len(self.sent) % self._blocks > 0)
        with self._changed:
            assert self._changed.wait_for(lambda: self._encrypted >= due, 60), "the server waits for the client"
        return self._answer(batch, names)


def test_the_client_encrypts_the_next_block_while_the_server_computes_one(site, encoder, adapted):
    given = states(1, 3 * TOKENS)
    with site() as served, EncryptedAdapter(encoder, served.address) as model:
        slow = Slow(model._session, 3)
        found = model(given)
        assert slow.sent == [("layers.0.query", "layers.0.value")] * 3 + [("layers.1.query",)] * 3
    expected = adapted(given)
    assert (found - expected).abs().max() < 1e-2 * (expected - encoder(given)).abs().max()


@pytest.mark.parametrize("failing", range(1, 5))
def test_nothing_is_sent_behind_a_refusal(site, encoder, failing):
    """Another block of the layer is encrypted and waits by then; the server would charge for it."""
    with site() as served, EncryptedAdapter(encoder, served.address) as model:
        slow = Slow(model._session, 4)
        answer, error = model._session._answer, RefusedError("adapter_failed", "as a test wants it.", "Nothing.")

        def refused(batch, names):
            given = answer(batch, names)
            if len(slow.sent) == failing:
                raise error
            return given

        model._session._answer = refused
        with pytest.raises(RefusedError) as refusal:
            model(states(1, 4 * TOKENS))
        assert refusal.value is error
        assert len(slow.sent) == failing
        assert served.desk.tokens_left("me") == 2**20 - TOKENS * failing
        model._session._answer = slow._answer
        assert model(states(1)).shape == (1, 50, 16)


def test_an_error_of_the_clients_own_costs_at_most_the_block_under_way(site, encoder):
    told = []

    def tell(*done):
        told.append(done)
        if len(told) == 1:
            raise KeyError("the client's own")

    with site() as served, EncryptedAdapter(encoder, served.address, progress=tell) as model:
        with pytest.raises(KeyError, match="the client's own"):
            model(states(4, TOKENS))
        assert 1 <= model.traffic.blocks <= 2
        assert model(states(1)).shape == (1, 50, 16)


def test_a_base_and_its_adapted_model_in_one_autocast_have_their_own_parameters(encoder):
    """Autocast keeps the casts of a parameter's values by the parameter."""
    own = encoder.layers[0]["query"].weight
    replaced = torch.nn.Parameter(own.detach() + 1, requires_grad=False)
    given = states(1)
    encoder.layers[1]["value"].weight = own
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = encoder(given)
        with _replaced(encoder, {"layers.0.query.weight": replaced}):
            found = encoder(given)
            assert encoder.layers[1]["value"].weight is replaced
        assert torch.equal(encoder(given), before)
    assert encoder.layers[0]["query"].weight is own
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        encoder.layers[0]["query"].weight = encoder.layers[1]["value"].weight = replaced
        assert torch.equal(found, encoder(given))


def test_a_request_that_is_lost_on_its_way_ends_no_session(site, encoder, monkeypatch):
    lost = RefusedError("adapter_unreachable", "as a network has it.", "Nothing.")
    with site() as served, EncryptedAdapter(encoder, served.address) as model, monkeypatch.context() as patch:
        patch.setattr(model._session._connection, "call", lambda *_: (_ for _ in ()).throw(lost))
        with pytest.raises(RefusedError):
            model(states(1))
        patch.undo()
        assert model(states(1)).shape == (1, 50, 16)


def test_a_refusal_of_a_call_that_was_not_read_leaves_the_session_usable(site, encoder):
    with site() as served, EncryptedAdapter(encoder, served.address) as model:
        other = AdapterConnection(AdapterAddress.parse(served.address), identity())
        held = [threading.Event() for _ in range(4)]
        calls = [other.start("Apply", _late(event)) for event in held]
        while served.server.open_calls("me") < 4:
            time.sleep(0.01)
        with pytest.raises(RefusedError) as refusal:
            model(states(1))
        assert refusal.value.code == "busy"
        for event, call in zip(held, calls, strict=True):
            event.set()
            with pytest.raises(ProtocolError):
                call()
        other.close()
        while served.server.open_calls("me"):
            time.sleep(0.01)
        assert model(states(1)).shape == (1, 50, 16)


def _late(event):
    event.wait(60)
    yield from ()


def test_tokens_behind_the_mask_are_not_sent(site, encoder, adapted):
    given, mask = states(), torch.ones(3, 50)
    mask[:, 20:] = 0
    with site() as served, EncryptedAdapter(encoder, served.address) as model:
        found = model(given, attention_mask=mask)
        assert model.traffic.blocks == 2
        assert model.traffic.tokens == 120
    assert (found - adapted(given, mask)).abs().max() < 2e-2 * adapted(given, mask).abs().max()


def test_the_clients_log_has_fingerprint_parameters_and_release_and_the_secret_is_gone(site, encoder):
    with site() as served:
        with EncryptedAdapter(encoder, served.address) as model:
            fingerprint = model._session._keys.fingerprint.hex()
            assert len(served.worker._sessions) == 1
        assert not served.worker._sessions, "the worker kept the keys of a session that ended"
    folder = places.adapters_folder() / "sessions"
    (log,) = folder.glob("*/evidence.jsonl")
    kinds = {}
    for line in log.read_text().splitlines():
        entry = json.loads(line)
        kinds[entry.get("kind")] = entry.get("body")
    assert list(kinds)[:5] == ["session", "admitted", "adapter_keys", "released", "finished"]
    assert kinds["adapter_keys"]["fingerprint"] == fingerprint
    assert kinds["adapter_keys"]["parameters"] == SET_F.digest().hex()
    assert not list(folder.glob("*.secret"))


def test_keys_stay_here_if_the_clients_policy_refuses_the_worker(site, encoder):
    vendor = SimulatedVendor.load_or_create(home.simulator_folder())
    strict = simulated_policy(vendor, bytes(len(code_measurement())))
    with site() as served:
        with pytest.raises(EvidenceError) as refusal:
            EncryptedAdapter(encoder, served.address, policy=strict)
        assert refusal.value.code == "measurement_unknown"
        assert all(each.keys is None for each in served.worker._sessions.values())


def test_a_server_with_another_key_is_refused(site, encoder):
    with site() as served:
        other = "ab" * 32 + served.address[64:]
        with pytest.raises(RefusedError) as refusal:
            EncryptedAdapter(encoder, other)
    assert refusal.value.code == "adapter_unreachable"


def test_a_client_that_the_settings_do_not_name_is_refused(site, encoder, monkeypatch, tmp_path):
    with site() as served:
        monkeypatch.setenv("RAYCLOAK_HOME", str(tmp_path / "stranger"))
        with pytest.raises(EvidenceError) as refusal:
            EncryptedAdapter(encoder, served.address)
    assert refusal.value.code == "peer_not_bound"


def test_a_spent_budget_is_refused_for_ever(site, encoder):
    # Half a block more can answer nothing.
    with site(of_client=TOKENS * 3 // 2) as served, EncryptedAdapter(encoder, served.address) as model:
        model(states(1))
        assert model.tokens_left == 0
        with pytest.raises(BudgetError) as refusal:
            model(states(1))
        assert refusal.value.code == "tokens_spent"
    with site(of_client=TOKENS * 3 // 2) as served, EncryptedAdapter(encoder, served.address) as again:
        assert again.tokens_left == 0
        with pytest.raises(BudgetError):
            again(states(1))


def test_generation_is_refused_with_the_reason(site, encoder):
    with site() as served, EncryptedAdapter(encoder, served.address) as model:
        with pytest.raises(ModelError, match="round trip") as refusal:
            model.generate()
        assert refusal.value.code == "generation_refused"


def test_another_base_model_is_refused(site, encoder):
    encoder.layers[1]["query"] = torch.nn.Linear(16, 8)
    with site() as served, pytest.raises(ModelError) as refusal:
        EncryptedAdapter(encoder, served.address)
    assert refusal.value.code == "adapter_base"


def test_a_model_in_training_mode_is_refused(site, encoder):
    with site() as served, EncryptedAdapter(encoder, served.address) as model:
        encoder.train()
        for call in (lambda: model(states(1)), lambda: EncryptedAdapter(encoder, served.address)):
            with pytest.raises(ModelError, match="training mode"):
                call()
        assert model.traffic.blocks == 0


@pytest.mark.parametrize("text", ["", "127.0.0.1:1", "ab@127.0.0.1:1", "zz" * 32 + "@127.0.0.1:1", "ab" * 32 + "@"])
def test_an_address_without_the_workers_key_is_refused(encoder, text):
    with pytest.raises(ConfigError) as refusal:
        EncryptedAdapter(encoder, text)
    assert refusal.value.code == "adapter_address"


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_states_that_are_not_finite_are_refused_by_name_and_the_session_goes_on(site, encoder, number):
    given = states()
    given[0, 1, 2] = number
    with site() as served, EncryptedAdapter(encoder, served.address) as model:
        with pytest.raises(ModelError) as refusal:
            model(given)
        assert refusal.value.code == "states_not_finite"
        assert served.desk.tokens_left("me") == 2**20
        model(states())


def test_a_closed_adapter_says_so(site, encoder):
    with site() as served:
        with EncryptedAdapter(encoder, served.address) as model:
            pass
        with pytest.raises(RefusedError) as refusal:
            model(states())
        assert refusal.value.code == "adapter_closed"


class Told:
    """A lock that tells when somebody finds it taken."""

    def __init__(self):
        self._lock, self.found_taken = threading.Lock(), threading.Event()

    def __enter__(self):
        if not self._lock.acquire(blocking=False):
            self.found_taken.set()
            self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()


def test_calls_of_two_threads_do_not_meet_in_one_model(site, encoder, adapted, monkeypatch):
    """Each would add its deltas to the other's, and nothing would say so."""
    lock, given, found = Told(), states(1), []
    monkeypatch.setattr(encrypted_adapter, "_CALLS", lock)
    with site() as served, EncryptedAdapter(encoder, served.address) as other:
        thread = threading.Thread(target=lambda: found.append(other(given)))

        def tell(done, _):
            if done == 1:
                thread.start()
                assert lock.found_taken.wait(60)

        with EncryptedAdapter(encoder, served.address, progress=tell) as model:
            found.append(model(given))
            thread.join(60)
    expected = adapted(given)
    assert all((each - expected).abs().max() < 1e-2 * expected.abs().max() for each in found)
    assert len(found) == 2
