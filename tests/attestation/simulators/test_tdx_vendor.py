import json
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography import x509

from raycloak.attestation.core.canonical import length_prefixed
from raycloak.attestation.simulators.tdx_vendor import VENDOR_FILE, SimulatedVendor, code_measurement
from raycloak.metrics.errors import ConfigError
from tests.attestation.conftest import NOW

ROOT = Path(__file__).resolve().parents[3]


def test_the_root_is_stable_and_its_file_private(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "simulator"
    first = SimulatedVendor.load_or_create(folder)
    assert SimulatedVendor.load_or_create(folder).root_der == first.root_der
    assert SimulatedVendor.load_or_create(tmp_path / "b").root_der != first.root_der
    assert stat.S_IMODE((folder / VENDOR_FILE).stat().st_mode) == 0o600
    assert [path.name for path in folder.iterdir()] == [VENDOR_FILE]


def test_concurrent_creators_agree_on_one_root(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        vendors = list(pool.map(lambda _: SimulatedVendor.load_or_create(tmp_path), range(8)))
    assert len({vendor.root_der for vendor in vendors}) == 1


def test_a_key_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    SimulatedVendor.load_or_create(tmp_path)
    (tmp_path / VENDOR_FILE).chmod(0o640)
    with pytest.raises(ConfigError, match="mode 0640") as refused:
        SimulatedVendor.load_or_create(tmp_path)
    assert refused.value.code == "simulator_state"


def test_a_damaged_key_file_is_refused_and_kept(tmp_path: Path) -> None:
    SimulatedVendor.load_or_create(tmp_path)
    path = tmp_path / VENDOR_FILE
    content = json.loads(path.read_bytes())
    swapped = content | {"root": content["root"] | {"key_pkcs8": content["platform_ca"]["key_pkcs8"]}}
    damaged = content | {"root": content["root"] | {"key_pkcs8": "00"}}
    texts = ["", "{}", *(json.dumps(each, sort_keys=True, separators=(",", ":")) for each in (swapped, damaged))]
    for text in texts:
        path.write_text(text)
        with pytest.raises(ConfigError, match="damaged"):
            SimulatedVendor.load_or_create(tmp_path)
        assert path.read_text() == text


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot use"):
        SimulatedVendor.load_or_create(tmp_path / "file")


def test_every_certificate_says_that_it_is_a_simulator() -> None:
    vendor = SimulatedVendor.create()
    collateral = vendor.tdx_collateral(NOW)
    texts = (vendor.platform().chain_pem, collateral.tcb_info_issuer_chain, collateral.pck_crl_issuer_chain)
    for certificate in x509.load_pem_x509_certificates("".join(texts).encode()):
        organization = certificate.subject.get_attributes_for_oid(x509.NameOID.ORGANIZATION_NAME)
        assert [name.value for name in organization] == ["SIMULATOR - NOT A TEE"]


def tree(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_py", ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_the_measurement_covers_names_and_content_of_the_code_alone(tmp_path: Path) -> None:
    base = {"workers__a_py": "1", "metrics__sub__b_py": "2", "main_py": "3"}
    variants = {
        "content": base | {"workers__a_py": "2"},
        "name": {"workers__c_py": "1", "metrics__sub__b_py": "2", "main_py": "3"},
        "more": base | {"coordinator__d_py": ""},
        "root module": base | {"more_py": ""},
        "moved": base | {"workers__a_py": "2", "metrics__sub__b_py": "1"},
    }
    values = {name: code_measurement(tree(tmp_path / name, **files)) for name, files in variants.items()}
    reference = code_measurement(tree(tmp_path / "base", **base))
    assert len({reference, *values.values()}) == len(variants) + 1
    others = tree(tmp_path / "others", **base, notes_txt="x", workers__notes_txt="z")
    assert code_measurement(others) == reference


def test_the_measurement_is_of_the_imported_code() -> None:
    assert code_measurement() == code_measurement(ROOT / "raycloak")
    assert len(code_measurement()) == 48


def test_threads_that_ask_first_at_once_get_one_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or one process would have two, where its files are replaced meanwhile."""
    both = threading.Barrier(2)
    read = []

    def measured(*fields: bytes | str | int) -> bytes:
        read.append(fields)
        with suppress(threading.BrokenBarrierError):
            both.wait(0.3)
        return length_prefixed(*fields)

    monkeypatch.setattr("raycloak.attestation.simulators.tdx_vendor.length_prefixed", measured)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: code_measurement(tmp_path), range(2)))
    assert found[0] == found[1]
    assert len(read) == 1


def test_a_machine_has_the_same_identity_in_every_execution_and_shares_it_with_no_other(tmp_path):
    """Keys are counted by machine over a whole run, whose executions each make platforms anew."""
    first, second = (SimulatedVendor.load_or_create(tmp_path / "simulator") for _ in range(2))
    assert first.platform("node-1").instance_id == second.platform("node-1").instance_id
    identities = {first.platform(name).instance_id for name in ("node-1", "node-2", None, None)}
    assert len(identities) == 4
