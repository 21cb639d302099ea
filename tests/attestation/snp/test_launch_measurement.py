import hashlib
import uuid
from pathlib import Path

import pytest

from raycloak.attestation.snp.launch_measurement import SnpLaunch, snp_measurement
from raycloak.metrics.errors import ConfigError

FOOTER = "96b582de-1fb2-45f7-baea-a366c55a082d"
RESET_BLOCK = "00f771de-1a7e-4fcb-890e-68c77e2fb44e"


def entry(guid: str, data: bytes) -> bytes:
    return data + (len(data) + 18).to_bytes(2, "little") + uuid.UUID(guid).bytes_le


@pytest.fixture
def ovmf(tmp_path: Path) -> Path:
    """Return the smallest firmware image that says where its processors start: one page with a footer table."""
    block = entry(RESET_BLOCK, (0x80B004).to_bytes(4, "little"))
    table = block + entry(FOOTER, b"")[:-18] + (len(block) + 18).to_bytes(2, "little") + uuid.UUID(FOOTER).bytes_le
    path = tmp_path / "OVMF.fd"
    path.write_bytes((table + bytes(32)).rjust(4096, b"\0"))
    return path


def test_the_measurement_covers_firmware_processors_and_features(ovmf: Path) -> None:
    plain = snp_measurement(SnpLaunch(ovmf, 1, "EPYC-v4"))
    assert len(plain) == 48
    assert plain == snp_measurement(SnpLaunch(ovmf, 1, "EPYC-v4"))
    others = [
        snp_measurement(SnpLaunch(ovmf, 2, "EPYC-v4")),
        snp_measurement(SnpLaunch(ovmf, 1, "EPYC-Genoa")),
        snp_measurement(SnpLaunch(ovmf, 1, "EPYC-v4", guest_features=0x21)),
    ]
    ovmf.write_bytes(b"\1" + ovmf.read_bytes()[1:])
    others.append(snp_measurement(SnpLaunch(ovmf, 1, "EPYC-v4")))
    assert len({plain, *others}) == 5


def test_the_first_page_is_measured_as_amd_specifies(ovmf: Path) -> None:
    """One page of firmware, by hand: the digest so far, the page's, its length, type and address (PAGE_INFO)."""
    page = hashlib.sha384(ovmf.read_bytes()).digest()
    info = bytes(48) + page + (0x70).to_bytes(2, "little") + b"\x01\x00" + bytes(4)
    first = hashlib.sha384(info + (2**32 - 4096).to_bytes(8, "little")).digest()
    from sevsnpmeasure.guest import calc_snp_ovmf_hash

    assert calc_snp_ovmf_hash(str(ovmf)) == first


def test_what_cannot_be_measured_is_refused(ovmf: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_bytes(bytes(4096))
    launches = (
        SnpLaunch(tmp_path / "absent", 1, "EPYC-v4"),
        SnpLaunch(empty, 1, "EPYC-v4"),
        SnpLaunch(ovmf, 1, "i486"),
        SnpLaunch(ovmf, 1, "EPYC-v4", kernel=tmp_path / "absent"),
        SnpLaunch(ovmf, 1, "EPYC-v4", kernel=ovmf),
    )
    for launch in launches:
        with pytest.raises(ConfigError) as refused:
            snp_measurement(launch)
        assert refused.value.code == "measure"
