import base64
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from raycloak.attestation.collateral.files import load_collateral
from raycloak.attestation.core.evidence import CollateralBundle
from raycloak.metrics.errors import ConfigError
from tests.attestation.conftest import NOW, Session
from tests.simulators.snp import SimulatedAmd
from tests.simulators.snp_pki import AuthorityKeys


@pytest.fixture
def folder(session: Session, amd_keys: AuthorityKeys, tmp_path: Path) -> Path:
    """Return files of every kind, in every form they may have."""
    crl = SimulatedAmd("Genoa", amd_keys).crl(NOW)
    (tmp_path / "tdx.json").write_bytes(session.collateral.tdx[0].encode())
    (tmp_path / "list.crl").write_bytes(crl)
    (tmp_path / "list.pem").write_bytes(x509.load_der_x509_crl(crl).public_bytes(Encoding.PEM))
    (tmp_path / "driver.xml").write_bytes(b"<rim/>")
    (tmp_path / "answer.der").write_bytes(b"\x30\x03\x02\x01\xff")
    (tmp_path / "answer.b64").write_bytes(base64.encodebytes(b"\x30\x03\x02\x01\xff"))
    return tmp_path


def load(folder: Path, text: str) -> CollateralBundle:
    path = folder / "collateral.yaml"
    path.write_text(text)
    return load_collateral(path)


def test_every_file_is_read_in_each_of_its_forms(session: Session, folder: Path) -> None:
    crl, answer = (folder / "list.crl").read_bytes(), (folder / "answer.der").read_bytes()
    found = load(
        folder,
        "tdx: [tdx.json]\nsnp_vcek_crls: [list.crl]\nsnp_vlek_crls: [list.pem]\n"
        "gpu_rims: [driver.xml]\ngpu_ocsp: [answer.der, answer.b64]\n",
    )
    assert found == CollateralBundle(
        tdx=session.collateral.tdx,
        snp_vcek_crls=(crl,),
        snp_vlek_crls=(crl,),
        gpu_rims=(b"<rim/>",),
        gpu_ocsp=(answer, answer),
    )
    assert load(folder, "{}") == CollateralBundle()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "tdx: tdx.json",
        "tdx: [1]",
        "unknown: []",
        "tdx: []\ntdx: []",
        "tdx: [absent.json]",
        "tdx: [list.crl]",
        "tdx: [driver.xml]",
        "snp_vlek_crls: [absent.crl]",
        'gpu_rims: ["a\\0b"]',
        "{",
    ],
)
def test_what_is_no_collateral_is_refused(folder: Path, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(folder, text)
    assert refused.value.code == "collateral"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load_collateral(tmp_path / "absent.yaml")
