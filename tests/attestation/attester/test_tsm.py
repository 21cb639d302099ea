"""Collecting evidence through the kernel's report interface, of which a folder plays the part."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st

from raycloak.attestation.attester.tsm import TEE_NODES, TSM_REPORTS, ReportTree, TsmReports
from raycloak.attestation.core.evidence import EvidenceClass
from raycloak.attestation.snp.cert_table import endorsement_chain, read_table
from raycloak.attestation.snp.report import SnpReport, parse_report
from raycloak.attestation.snp.rules import SnpRules
from raycloak.attestation.snp.verify import verify_snp
from raycloak.attestation.tdx.quote import parse_quote
from raycloak.attestation.trust.roots import Anchor, VerifierTerms
from raycloak.metrics.errors import EvidenceError
from tests.attestation.conftest import MEASUREMENT, NOW, Session
from tests.simulators.snp import ReportVariant, SimulatedAmd, SimulatedMachine
from tests.simulators.snp_pki import AuthorityKeys

REPORT_DATA = bytes(range(64))
VCEK = UUID("63da758d-e664-4564-adc5-f4b93be8accd")
VLEK = UUID("a8074bc2-a25a-483e-aae6-39c045a0b8a1")
CA = UUID("4ab7b379-bbac-4fe4-a02f-05aef327c782")


class Kernel(ReportTree):
    """A tree of real folders and files, with what the kernel does when they are made, written and removed.

    Args:
        quote: makes ``outblob`` of what is in ``inblob``.
        failures: errors of the next reads of ``outblob``, in order.
        intruders: how many of the next reads of ``outblob`` see a write of another process behind them.
    """

    def __init__(self, provider: str, quote: Callable[[bytes], bytes], auxblob: bytes | None = None) -> None:
        self.provider = provider
        self.quote = quote
        self.auxblob = auxblob
        self.failures: list[int] = []
        self.intruders = 0
        self.written: list[tuple[str, bytes]] = []

    def make(self, entry: Path) -> None:
        super().make(entry)
        (entry / "provider").write_text(f"{self.provider}\n")
        (entry / "generation").write_text("0\n")
        for name in ("inblob", "privlevel"):
            (entry / name).touch()

    def remove(self, entry: Path) -> None:
        for attribute in entry.iterdir():
            attribute.unlink()
        super().remove(entry)

    def write(self, attribute: Path, data: bytes) -> None:
        super().write(attribute, data)
        self.written.append((attribute.name, data))
        self.advance(attribute.parent)

    def read(self, attribute: Path) -> bytes:
        if attribute.name == "outblob":
            if self.failures:
                raise OSError(self.failures.pop(0), "injected", str(attribute))
            self.answer(attribute.parent)
        return super().read(attribute)

    def answer(self, entry: Path) -> None:
        (entry / "outblob").write_bytes(self.quote((entry / "inblob").read_bytes()))
        if self.auxblob is not None:
            (entry / "auxblob").write_bytes(self.auxblob)
        if self.intruders:
            self.intruders -= 1
            self.advance(entry)

    def advance(self, entry: Path) -> None:
        generation = entry / "generation"
        generation.write_text(f"{int(generation.read_text()) + 1}\n")


class Clock:
    """A clock whose time passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps = 0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sleeps += 1


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / TSM_REPORTS).mkdir(parents=True)
    return tmp_path


def source(root: Path, kernel: ReportTree, clock: Clock, **options: Any) -> TsmReports:
    return TsmReports(root, tree=kernel, clock=clock, sleep=clock.sleep, **options)


def table(*entries: tuple[UUID, bytes]) -> bytes:
    """Return a host's table of certificates, filled up with zeros as its pages are."""
    header, blobs, start = b"", b"", 24 * (len(entries) + 1)
    for name, blob in entries:
        header += name.bytes + (start + len(blobs)).to_bytes(4, "little") + len(blob).to_bytes(4, "little")
        blobs += blob
    return (header + bytes(24) + blobs).ljust(16384, b"\0")


@pytest.fixture(scope="module")
def amd(amd_keys: AuthorityKeys) -> SimulatedAmd:
    return SimulatedAmd("Genoa", amd_keys)


@pytest.fixture(scope="module")
def machine(amd: SimulatedAmd) -> SimulatedMachine:
    return amd.machine()


@pytest.fixture
def tdx(session: Session) -> Kernel:
    return Kernel("tdx_guest", lambda data: session.platform.quote(data, MEASUREMENT) + bytes(100))


@pytest.fixture
def snp(machine: SimulatedMachine) -> Kernel:
    vek, ca = machine.certificates
    return Kernel("sev_guest", lambda data: machine.report(data, MEASUREMENT), table((CA, ca), (VCEK, vek)))


def test_a_tdx_guest_collects_a_quote_over_the_report_data(root: Path, tdx: Kernel, clock: Clock) -> None:
    found = source(root, tdx, clock).collect(REPORT_DATA)
    assert (found.quote_family, found.certificates) == ("tdx", ())
    assert parse_quote(found.quote).report.report_data == REPORT_DATA
    assert tdx.written == [("inblob", REPORT_DATA)]


def test_an_snp_guest_collects_a_report_that_verifies_with_the_hosts_certificates(
    root: Path, snp: Kernel, clock: Clock, amd: SimulatedAmd, machine: SimulatedMachine
) -> None:
    found = source(root, snp, clock).collect(REPORT_DATA)
    assert found.quote_family == "sev_snp"
    assert found.certificates == machine.certificates
    anchor = Anchor(evidence_class=EvidenceClass.SIMULATED, family="sev_snp", root_der=amd.root_der)
    terms = VerifierTerms((anchor,), (EvidenceClass.SIMULATED,), NOW)
    rules = SnpRules(measurements=(MEASUREMENT,))
    claims = verify_snp(found.quote, found.certificates, {"VCEK": (amd.crl(NOW),)}, rules, terms)
    assert claims.report_data == REPORT_DATA


def test_an_entry_is_removed_whatever_comes_of_it(root: Path, tdx: Kernel, clock: Clock) -> None:
    source(root, tdx, clock).collect(REPORT_DATA)
    tdx.failures = [errno.EIO]
    with pytest.raises(EvidenceError):
        source(root, tdx, clock).collect(REPORT_DATA)
    assert list((root / TSM_REPORTS).iterdir()) == []


def test_an_entry_that_cannot_be_removed_hides_neither_evidence_nor_its_error(
    root: Path, tdx: Kernel, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(_: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(tdx, "remove", busy)
    assert source(root, tdx, clock).collect(REPORT_DATA).quote
    tdx.failures = [errno.EIO]
    with pytest.raises(EvidenceError, match="gives no evidence"):
        source(root, tdx, clock).collect(REPORT_DATA)


def test_the_privilege_level_is_asked_for_where_one_is_given(root: Path, snp: Kernel, clock: Clock) -> None:
    source(root, snp, clock, privilege_level=2).collect(REPORT_DATA)
    assert snp.written == [("privlevel", b"2"), ("inblob", REPORT_DATA)]


@pytest.mark.parametrize("code", [errno.EBUSY, errno.EWOULDBLOCK, errno.EINTR, errno.ETIMEDOUT])
def test_a_busy_platform_is_asked_again(root: Path, tdx: Kernel, clock: Clock, code: int) -> None:
    tdx.failures = [code, code]
    assert source(root, tdx, clock).collect(REPORT_DATA).quote
    assert clock.sleeps == 2


def test_a_platform_that_stays_busy_is_given_up_at_the_deadline(root: Path, tdx: Kernel, clock: Clock) -> None:
    tdx.failures = [errno.EBUSY] * 100
    with pytest.raises(EvidenceError, match="within 2 s: injected") as refused:
        source(root, tdx, clock, deadline_s=2.0).collect(REPORT_DATA)
    assert refused.value.code == "tee_busy"
    assert 2.0 <= clock.now < 2.1


def test_evidence_is_not_taken_where_another_process_wrote_in_between(root: Path, tdx: Kernel, clock: Clock) -> None:
    tdx.intruders = 2
    assert source(root, tdx, clock).collect(REPORT_DATA).quote
    assert clock.sleeps == 2
    tdx.intruders = 10**6
    with pytest.raises(EvidenceError, match="another process"):
        source(root, tdx, clock, deadline_s=0.2).collect(REPORT_DATA)


def test_an_answer_over_other_report_data_is_not_taken(root: Path, session: Session, clock: Clock) -> None:
    kernel = Kernel("tdx_guest", lambda data: session.platform.quote(data[::-1], MEASUREMENT))
    with pytest.raises(EvidenceError, match="other report data"):
        source(root, kernel, clock).collect(REPORT_DATA)


def test_an_answer_in_no_known_format_is_not_taken(root: Path, clock: Clock) -> None:
    for provider in ("tdx_guest", "sev_guest"):
        with pytest.raises(EvidenceError) as refused:
            source(root, Kernel(provider, lambda data: b"?"), clock).collect(REPORT_DATA)
        assert refused.value.code == "evidence_malformed"


@pytest.mark.parametrize(("attribute", "content"), [("provider", "arm_cca_guest"), ("generation", "many")])
def test_attributes_that_cannot_be_understood_are_named(
    root: Path, tdx: Kernel, clock: Clock, attribute: str, content: str
) -> None:
    class Odd(Kernel):
        def make(self, entry: Path) -> None:
            super().make(entry)
            (entry / attribute).write_text(content)

    with pytest.raises(EvidenceError, match=content) as refused:
        source(root, Odd("tdx_guest", tdx.quote), clock).collect(REPORT_DATA)
    assert refused.value.code == "tee_report"


def test_other_errors_name_the_attribute(root: Path, tdx: Kernel, clock: Clock) -> None:
    tdx.failures = [errno.EIO]
    with pytest.raises(EvidenceError, match="outblob: injected"):
        source(root, tdx, clock).collect(REPORT_DATA)


def test_without_the_interface_the_missing_nodes_are_named(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError) as refused:
        TsmReports(tmp_path).collect(REPORT_DATA)
    assert refused.value.code == "tee_unavailable"
    for node in TEE_NODES:
        assert f"/{node} is missing" in refused.value.message
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/sev-guest").touch()
    with pytest.raises(EvidenceError, match="/dev/sev-guest is there"):
        TsmReports(tmp_path).collect(REPORT_DATA)


def test_a_folder_that_may_not_be_written_or_has_no_provider_says_so(root: Path, clock: Clock) -> None:
    class Failing(ReportTree):
        def __init__(self, code: int) -> None:
            self.code = code

        def make(self, entry: Path) -> None:
            raise OSError(self.code, "injected", str(entry))

    for code, text in ((errno.EACCES, "may not write"), (errno.EPERM, "may not write"), (errno.ENXIO, "no provider")):
        with pytest.raises(EvidenceError, match=text) as refused:
            source(root, Failing(code), clock).collect(REPORT_DATA)
        assert refused.value.code == "tee_unavailable"


def test_a_plain_folder_is_no_interface(root: Path) -> None:
    with pytest.raises(EvidenceError, match="provider"):
        TsmReports(root).collect(REPORT_DATA)
    assert list((root / TSM_REPORTS).iterdir()) == []


def test_report_data_has_64_bytes(root: Path) -> None:
    with pytest.raises(ValueError, match="64 bytes"):
        TsmReports(root).collect(bytes(63))


# The host's table of certificates


def test_the_certificate_is_the_one_of_the_key_that_signed(machine: SimulatedMachine) -> None:
    vek, ca = machine.certificates
    both = table((VLEK, ca), (VCEK, vek))
    for kind, expected in (("VCEK", (vek,)), ("VLEK", (ca,))):
        report = parse_report(machine.report(REPORT_DATA, MEASUREMENT, ReportVariant(key_kind=kind)))
        assert endorsement_chain(both, report) == expected


def test_certificates_may_be_pem_that_is_filled_up_with_zeros(machine: SimulatedMachine) -> None:
    pem = machine.chain[0].public_bytes(Encoding.PEM) + bytes(7)
    report = parse_report(machine.report(REPORT_DATA, MEASUREMENT))
    assert endorsement_chain(table((VCEK, pem)), report) == machine.certificates[:1]


@pytest.mark.parametrize("auxblob", [None, b"", bytes(4096), table((CA, b"x"))])
def test_a_host_that_hands_out_no_certificate_is_named_with_what_to_ask_amd_for(
    root: Path, machine: SimulatedMachine, clock: Clock, auxblob: bytes | None
) -> None:
    kernel = Kernel("sev_guest", lambda data: machine.report(data, MEASUREMENT), auxblob)
    with pytest.raises(EvidenceError, match="RAYCLOAK_ENDORSEMENT") as refused:
        source(root, kernel, clock).collect(REPORT_DATA)
    assert machine.chip_id.hex() in refused.value.message
    file = root / "vek.pem"
    file.write_bytes(machine.chain[0].public_bytes(Encoding.PEM))
    found = source(root, kernel, clock, endorsement=file).collect(REPORT_DATA)
    assert found.certificates == machine.certificates[:1]
    file.write_text("?")
    for path in (file, root / "absent"):
        with pytest.raises(EvidenceError) as refused:
            source(root, kernel, clock, endorsement=path).collect(REPORT_DATA)
        assert refused.value.code == "tee_report"


def test_damaged_tables_are_refused(machine: SimulatedMachine) -> None:
    vek = machine.certificates[0]
    good = table((VCEK, vek))
    beyond = bytearray(good)
    beyond[20:24] = (len(good)).to_bytes(4, "little")
    endless = VCEK.bytes + bytes(4) + b"\1" + bytes(3)
    crowd = table(*((UUID(int=number), b"") for number in range(1, 70)))
    for damaged in (
        crowd,
        good.ljust(2**20 + 1, b"\0"),
        bytes(beyond),
        endless,
        good[:23],
        table((VCEK, vek), (VCEK, vek)),
        b"\1" * 48,
    ):
        with pytest.raises(EvidenceError) as refused:
            read_table(damaged)
        assert refused.value.code == "tee_report"


@pytest.fixture(scope="module")
def report(machine: SimulatedMachine) -> SnpReport:
    return parse_report(machine.report(REPORT_DATA, MEASUREMENT))


@given(st.binary(max_size=300), st.booleans())
def test_any_table_is_read_or_refused(report: SnpReport, data: bytes, starts_well: bool) -> None:
    entry = VCEK.bytes + (24).to_bytes(4, "little") + (8).to_bytes(4, "little")
    with pytest.raises(EvidenceError):
        endorsement_chain(entry + data if starts_well else data, report)
