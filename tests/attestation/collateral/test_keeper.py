"""Collateral from the service that a policy names: what is fetched, when, and what is kept of it."""

import errno
import json
import ssl
import threading
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from raycloak.attestation.collateral.https_get import FetchError, https_get
from raycloak.attestation.collateral.keeper import CollateralKeeper, CollateralRefresh, FetchedCollateral, ends_at
from raycloak.attestation.core.evidence import Collateral, CollateralBundle
from raycloak.attestation.core.messages import parse
from raycloak.attestation.policy.collateral_service import CollateralService
from raycloak.attestation.policy.explain import explain
from raycloak.attestation.policy.policy import load_policy
from raycloak.attestation.simulators.tdx_vendor import COLLATERAL_LIFETIME_S, SimulatedVendor
from raycloak.attestation.tdx.rules import RTMRS
from raycloak.metrics.errors import ConfigError, EvidenceError
from tests.attestation.collateral_site import published
from tests.attestation.conftest import NOW
from tests.simulators.tdx import CollateralVariant

OPEN_REGISTERS = dict.fromkeys(RTMRS, "any")


class Desk:
    """A verifier whose policy names a service, with a clock of its own."""

    def __init__(self, session, site, folder):
        self.session, self.site, self.folder, self.now = session, site, folder, NOW
        self.family = json.loads(site.collateral.tcb_info)["fmspc"]
        self.policy = self.naming(intel=site.url, tdx_families=(bytes.fromhex(self.family),))

    def naming(self, **fields):
        return self.session.policy.model_copy(update={"collateral_service": CollateralService(**fields)})

    def keeper(self, given=None):
        return CollateralKeeper(self.policy, self.folder, given, clock=lambda: self.now)

    def publish(self, at, **variant):
        self.site.collateral = self.session.vendor.tdx_collateral(at, CollateralVariant(**variant))


@pytest.fixture
def desk(session, tmp_path):
    with published(session.vendor.tdx_collateral(NOW)) as site:
        yield Desk(session, site, tmp_path / "collateral")


def stale(keeper):
    with pytest.raises(EvidenceError) as error:
        keeper.current()
    assert error.value.code == "collateral_stale"
    return error.value.message


# --- what is fetched


def test_what_is_fetched_judges_evidence_as_the_vendors_own_does(desk):
    collateral = desk.keeper().current()
    assert collateral == CollateralBundle(tdx=(desk.site.collateral,)), "each document is the exact text that is signed"
    envelope = desk.session.member().envelope()
    assert desk.session.appraise(envelope, collateral=collateral).evidence_class == "simulated"
    paths = [path.partition("/v4")[2] for path in desk.site.asked]
    assert paths == ["/pckcrl?ca=platform&encoding=der", "/rootcacrl", f"/tcb?fmspc={desk.family}", "/qe/identity"]


def test_recorded_collateral_of_intels_is_fetched_as_it_was_recorded(vectors, tmp_path):
    recorded = Collateral.from_json((vectors / "tdx" / "collateral" / "00806f_2025-05.json").read_text())
    with published(recorded) as site:
        (tmp_path / "policy.yaml").write_text(
            f"accepted_classes: [intel_tdx]\nanchors: [intel_tdx]\ntdx: {json.dumps(OPEN_REGISTERS)}\n"
            f"collateral_service: {{intel: '{site.url}', tdx_families: ['00806f050000']}}\n"
        )
        policy = load_policy(tmp_path / "policy.yaml")
        at = datetime.fromisoformat(json.loads(recorded.tcb_info)["issueDate"]).timestamp() + 3600
        keeper = CollateralKeeper(policy, tmp_path, clock=lambda: at)
        assert keeper.current().tdx == (recorded,)


def test_amds_lists_are_fetched_and_files_add_what_no_service_publishes(desk):
    crl = desk.site.collateral.root_ca_crl
    desk.site.lists["/vcek/v1/Genoa/crl"] = crl
    desk.policy = desk.naming(amd=desk.site.url, snp_lists=("vcek/Genoa",))
    given = CollateralBundle(
        tdx=(desk.site.collateral,),
        snp_vcek_crls=(b"own",),
        snp_vlek_crls=(b"other",),
        gpu_rims=(b"rim",),
        gpu_ocsp=(b"ocsp",),
    )
    found = desk.keeper(given).current()
    assert found == given.model_copy(update={"snp_vcek_crls": (crl, b"own")})


# --- when


def test_it_is_fetched_again_before_it_ends_and_not_sooner(desk):
    keeper = desk.keeper()
    first = keeper.current()
    asked = len(desk.site.asked)
    desk.now += COLLATERAL_LIFETIME_S // 2
    desk.publish(desk.now)
    assert keeper.current() == first
    assert len(desk.site.asked) == asked
    desk.now = NOW + COLLATERAL_LIFETIME_S * 2 // 3 + 1
    assert keeper.due
    assert keeper.current().tdx == (desk.site.collateral,)
    assert not keeper.due


def test_what_was_fetched_serves_a_restart_without_a_network_until_it_ends(desk):
    first = desk.keeper().current()
    desk.site.answers = dict.fromkeys(_paths(), 503)
    desk.now = ends_at(first) - 1
    restarted = desk.keeper()
    assert restarted.current() == first
    assert "status 503" in restarted.problem
    desk.now += 1
    message = stale(restarted)
    assert "cannot be fetched from 127.0.0.1" in message
    assert "ended at" in message


def test_a_mirror_that_gives_what_has_ended_takes_nothing_away(desk):
    """It may have lost its own source; before, what it gave took the place of what was still good."""
    keeper = desk.keeper()
    first = keeper.current()
    desk.now += COLLATERAL_LIFETIME_S * 2 // 3 + 1
    desk.publish(desk.now - COLLATERAL_LIFETIME_S - 1)
    assert keeper.current() == first
    assert "ended at" in keeper.problem
    assert desk.keeper().current() == first, "on disk too"


def test_a_list_that_cannot_be_read_takes_nothing_away(desk):
    desk.site.lists["/vcek/v1/Genoa/crl"] = desk.site.collateral.root_ca_crl
    desk.policy = desk.naming(amd=desk.site.url, snp_lists=("vcek/Genoa",))
    keeper = desk.keeper()
    first = keeper.current()
    desk.now += COLLATERAL_LIFETIME_S * 2 // 3 + 1
    desk.site.lists["/vcek/v1/Genoa/crl"] = b"<html>Sorry</html>"
    assert keeper.current() == first
    assert "cannot be read" in keeper.problem


def test_a_full_disk_ends_neither_the_service_nor_its_collateral(desk, monkeypatch, caplog):
    """Before, the thread that renews it ended with a traceback, and evidence was refused once the former had ended."""
    keeper = desk.keeper()
    keeper.current()
    taken = []
    refresh = CollateralRefresh(keeper, taken.append, threading.Lock())
    desk.now = NOW + COLLATERAL_LIFETIME_S * 2 // 3 + 1
    desk.publish(desk.now)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("raycloak.attestation.collateral.keeper.write_whole", full)
    refresh.look()
    assert taken == [CollateralBundle(tdx=(desk.site.collateral,))]
    assert "No space left on device" in caplog.text


def test_what_is_on_disk_and_says_nothing_is_fetched_anew(desk):
    desk.keeper().current()
    (file,) = desk.folder.iterdir()
    kept = parse(FetchedCollateral, file.read_bytes().strip())
    hollow = kept.bundle.tdx[0].model_copy(update={"tcb_info": "[]"})
    file.write_bytes(kept.model_copy(update={"bundle": CollateralBundle(tdx=(hollow,))}).encode() + b"\n")
    assert desk.keeper().current() == kept.bundle


def test_a_service_that_is_down_is_not_asked_at_every_question(desk):
    first = desk.keeper().current()
    desk.site.answers = dict.fromkeys(_paths(), 500)
    desk.now = ends_at(first) - 600
    keeper, asked = desk.keeper(), len(desk.site.asked)
    for _ in range(5):
        keeper.current()
    assert len(desk.site.asked) == asked + 1
    desk.now += 61
    keeper.current()
    assert len(desk.site.asked) == asked + 2


def test_another_service_or_family_is_another_file(desk):
    desk.keeper().current()
    desk.policy = desk.naming(intel=desk.site.url, tdx_families=(b"\0" * 6,))
    assert "of another family" in stale(desk.keeper())


# --- what is refused


def _paths():
    return [f"/sgx/certification/v4/{name}" for name in ("pckcrl", "rootcacrl")] + [
        f"/tdx/certification/v4/{name}" for name in ("tcb", "qe/identity")
    ]


@pytest.mark.parametrize("path", _paths())
def test_what_cannot_be_had_is_named(path, desk):
    desk.site.answers[path] = 404
    assert "status 404" in stale(desk.keeper())
    assert not list(desk.folder.iterdir())


def answering(body, headers=()):
    def answer(handler):
        handler.send_response(200)
        for name, value in headers:
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


NO_DOCUMENTS = [
    *(b"", b"[]", b"{", b'{"a" 1}', b"\xff\xfe", b'{"tcbInfo": ' + b"[" * 100_000),
    *(b'{"tcbInfo": {}}', b'{"tcbInfo": {}, "signature": "xy"}', b'{"tcbInfo": {}, "signature": "00"}'),
    b'{"signature": "00", "signature": "00"}',
]


@pytest.mark.parametrize("body", NO_DOCUMENTS, ids=range(len(NO_DOCUMENTS)))
def test_an_answer_that_is_no_signed_document_is_refused(body, desk):
    desk.site.answers["/tdx/certification/v4/tcb"] = answering(body)
    assert "tcbInfo" in stale(desk.keeper())


def test_an_answer_without_the_chain_of_its_signer_is_refused(desk):
    body, _ = desk.site.honest("/tdx/certification/v4/tcb")
    desk.site.answers["/tdx/certification/v4/tcb"] = answering(body)
    assert "no chain of its signer" in stale(desk.keeper())


def test_nothing_is_kept_that_is_not_signed_under_a_root_of_the_policy(desk):
    desk.site.collateral = SimulatedVendor.create().tdx_collateral(NOW)
    assert "root that the policy does not know" in stale(desk.keeper())
    genuine = desk.session.vendor.tdx_collateral(NOW)
    for changes in (
        {"tcb_info": genuine.tcb_info.replace("UpToDate", "OutOfDate")},
        {"qe_identity": genuine.qe_identity.replace('"isvprodid":2', '"isvprodid":3')},
        {"tcb_info_signature": bytes(64)},
        {"pck_crl": genuine.root_ca_crl},
        {"root_ca_crl": b"no list"},
        {"qe_identity_issuer_chain": genuine.tcb_info_issuer_chain[:200]},
    ):
        desk.site.collateral = genuine.model_copy(update=changes)
        assert "collateral of family" in stale(desk.keeper())
    assert not list(desk.folder.iterdir())


def test_a_service_that_goes_back_to_older_collateral_changes_nothing(desk):
    desk.publish(NOW, evaluation_number=20)
    keeper = desk.keeper()
    newest = keeper.current()
    desk.now += COLLATERAL_LIFETIME_S * 2 // 3 + 1
    desk.publish(desk.now, evaluation_number=19)
    assert keeper.current() == newest
    assert "evaluation number 19, where 20" in keeper.problem


def test_answers_are_bounded_in_size_and_time_and_never_come_from_elsewhere(desk):
    def endless(handler):
        handler.send_response(200)
        handler.end_headers()
        while not ended.is_set():
            handler.wfile.write(bytes(65_536))

    def silent(handler):
        ended.wait(120)

    def elsewhere(handler):
        handler.send_response(302)
        handler.send_header("Location", f"{desk.site.url}/sgx/certification/v4/rootcacrl")
        handler.end_headers()

    ended = threading.Event()
    desk.site.answers = {"/endless": endless, "/silent": silent, "/elsewhere": elsewhere}
    for path, why in (("endless", "more than 100000 bytes"), ("silent", "within 0.2 s"), ("elsewhere", "status 302")):
        with pytest.raises(FetchError, match=why):
            https_get(f"{desk.site.url}/{path}", deadline_s=0.2 if path == "silent" else 120, max_bytes=100_000)
    ended.set()
    assert "/sgx/certification/v4/rootcacrl" not in desk.site.asked


def test_a_certificate_that_no_authority_vouches_for_is_refused(session, tmp_path):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*_self_signed(tmp_path))
    with published(session.vendor.tdx_collateral(NOW), context) as site:
        with pytest.raises(FetchError, match=r"(?i)certificate verify failed"):
            https_get(f"{site.url}/tcb")
        assert not site.asked


def _self_signed(folder):
    key, name = generate_private_key(SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    start = datetime.now(UTC) - timedelta(days=1)
    builder = builder.serial_number(1).not_valid_before(start).not_valid_after(start + timedelta(days=2))
    certificate = builder.sign(key, SHA256())
    (folder / "cert.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    (folder / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return folder / "cert.pem", folder / "key.pem"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"intel": "https://a.example"},
        {"tdx_families": ["00806f050000"]},
        {"intel": "http://a.example", "tdx_families": ["00806f050000"]},
        {"intel": "ftp://127.0.0.1", "tdx_families": ["00806f050000"]},
        {"intel": "https://user:word@a.example", "tdx_families": ["00806f050000"]},
        {"intel": "https://a.example?x=1", "tdx_families": ["00806f050000"]},
        {"intel": "https://a.example", "tdx_families": ["00806f"]},
        {"amd": "https://a.example"},
        {"amd": "https://a.example", "snp_lists": ["vcek/Naples"]},
        {"amd": "https://a.example", "snp_lists": ["vcek/Genoa"], "intel_root_crl": "https://b.example"},
        {"intel": "https://a.example", "tdx_families": ["00806f050000"], "ca": "platform"},
    ],
    ids=str,
)
def test_a_service_that_is_not_named_fully_or_safely_is_refused(fields, tmp_path):
    policy = {"accepted_classes": ["intel_tdx"], "anchors": ["intel_tdx"], "tdx": OPEN_REGISTERS}
    (tmp_path / "policy.yaml").write_text(json.dumps(policy | {"collateral_service": fields}))
    with pytest.raises(ConfigError, match="collateral_service"):
        load_policy(tmp_path / "policy.yaml")


def test_the_policy_says_in_words_what_is_fetched_from_where(desk):
    texts = {each.text: each.warning for each in explain(desk.policy) if each.topic == "collateral"}
    assert any(desk.site.url in text and desk.family in text for text in texts)
    assert [warning for text, warning in texts.items() if "without TLS" in text] == [True]
    silent = [each.text for each in explain(desk.session.policy) if each.topic == "collateral"]
    assert silent == ["Verifiers fetch nothing from a network; they use the files they are given."]


# --- a service that runs for long


def test_a_verifier_that_runs_for_long_is_handed_newer_collateral_outside_of_its_turn(desk):
    taken, turn = [], threading.Lock()
    keeper = desk.keeper()
    keeper.current()
    refresh = CollateralRefresh(keeper, lambda bundle: taken.append((bundle, turn.locked())), turn)
    refresh.look()
    assert taken == []
    desk.now = NOW + COLLATERAL_LIFETIME_S * 2 // 3 + 1
    desk.publish(desk.now)
    desk.site.answers["/tdx/certification/v4/tcb"] = lambda handler: handler.send_error(503 if turn.locked() else 500)
    refresh.look()
    assert "status 500" in keeper.problem, "the turn is free while the network is asked"
    desk.site.answers.clear()
    desk.now += 61
    refresh.look()
    assert taken[-1] == (CollateralBundle(tdx=(desk.site.collateral,)), True)
    refresh.start()
    refresh.stop()
