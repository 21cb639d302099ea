"""The settings of a service: what is refused before it starts. How a client's configuration is completed: test_desk."""

import asyncio

import pytest
from pydantic import ValidationError

from raycloak.coordinator.config.section import validated
from raycloak.coordinator.service.limits import Slots
from raycloak.coordinator.service.settings import ServiceSettings, load_settings
from raycloak.metrics.errors import ConfigError
from raycloak.metrics.service_errors import ServiceStateError
from tests.coordinator.service.scripted import SENT, settings

HASH = "0" * 64


def test_a_file_is_read_whole(tmp_path):
    path = tmp_path / "service.yaml"
    path.write_text(
        "bind: 127.0.0.1:0\n"
        "run: {num_workers: 2}\n"
        "datasets: {digits: {dataset: {kind: digits}}}\n"
        f"tenants: {{a: {{token_sha256: [{{sha256: '{HASH}', expires: 2027-01-01}}], datasets: [digits]}}}}\n"
    )
    (token,) = load_settings(path).tenants["a"].token_sha256
    assert token.expires.isoformat() == "2027-01-01T00:00:00+00:00"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bind": "0.0.0.0:1"}, "tls is required"),
        ({"bind": "[::]:1"}, "tls is required"),
        ({"bind": "example.org:1"}, "tls is required"),
        ({"nonsense": 1}, "nonsense: there is no such field"),
        ({"limits": {"active_client": 1}}, "limits.active_clients"),
        ({"run": {"model": "m:f"}}, "run.model is for a client"),
        ({"run": {"evaluation": {}}}, "run.evaluation is for a client"),
        ({"run": {"num_worker": 1}}, "run.num_worker: there is no such field; did you mean num_workers?"),
        ({"datasets": {"d": {"dataset": {"kind": "csv", "paths": "x"}}}}, "did you mean datasets.d.dataset.path?"),
        ({"run": {"num_workers": 0}}, "run.num_workers"),
        ({"datasets": {"d": {"dataset": SENT["dataset"]}}}, "not registered"),
        ({"tenants": {}}, "tenants"),
        ({"tenants": {"a": {}}}, "needs token_sha256 or certificates"),
        ({"tenants": {"a": {"token_sha256": [{"sha256": "plain"}]}}}, "sha256"),
        ({"tenants": {"a": {"certificates": ["x"]}}}, "tls.client_ca"),
        ({"tenants": {"a": {"token_sha256": [{"sha256": HASH}], "datasets": ["none"]}}}, "no none in datasets"),
        ({"tenants": {"a": {"token_sha256": [{"sha256": HASH}], "models": ["none"]}}}, "no none in models"),
        ({"tenants": {n: {"token_sha256": [{"sha256": HASH}]} for n in "ab"}}, "share a token"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_used_are_refused_with_the_field(change, said):
    raw = settings().model_dump(mode="json", exclude_unset=True)
    with pytest.raises(ConfigError, match="config") as refusal:
        validated(ServiceSettings, {**raw, **change})
    assert said in str(refusal.value)


def test_public_data_needs_no_account_anywhere_and_private_data_none_on_this_machine():
    public = {"open": {"dataset": {"kind": "digits", "public": True}}}
    tenants = {"a": {"token_sha256": [{"sha256": HASH}]}}
    away = settings(bind="0.0.0.0:1", tls={"certificate": "c", "key": "k"}, datasets=public, tenants=tenants)
    assert away.datasets["open"].account is settings().datasets["digits"].account is None


@pytest.mark.parametrize("field", ["store", "run"])
def test_guarantee_settings_hold_no_password(field: str):
    url = "postgresql://u:hidden@h/d"
    with pytest.raises(ValidationError, match="it has a password: put it into") as wrong:
        settings(**{field: url if field == "store" else {"ledger": {"url": url}}})
    assert "hidden" not in str(wrong.value)


def test_slots_are_counted_for_each_tenant():
    slots = Slots(1, lambda: ServiceStateError("full", "there is none."))

    async def take():
        async with slots.taken("a"), slots.taken("b"):
            with pytest.raises(ServiceStateError):
                async with slots.taken("a"):
                    pass
        async with slots.taken("a"):
            pass

    asyncio.run(take())
