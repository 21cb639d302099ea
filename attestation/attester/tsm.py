"""Collects evidence of this process's guest, through the kernel's report interface (configfs-tsm).

Linux 6.7 and later give Intel TDX and AMD SEV-SNP guests one interface (Documentation/ABI/testing/configfs-tsm-report).
A process makes a folder below ``/sys/kernel/config/tsm/report`` and writes 64 bytes to its ``inblob``. It then reads
the quote or report from its ``outblob``. A counter shows whether another process wrote in between.

Only one thing is verified here: that the answer carries the 64 bytes. The receiver appraises the rest.
"""

import errno
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from raycloak.attestation.attester.attester import CpuEvidence
from raycloak.attestation.core.evidence import REPORT_DATA_BYTES, QuoteFamily
from raycloak.attestation.snp.cert_table import certificates_in, endorsement_chain
from raycloak.attestation.snp.report import parse_report
from raycloak.attestation.tdx.quote import parse_quote
from raycloak.metrics.errors import EvidenceError

TSM_REPORTS: Final = "sys/kernel/config/tsm/report"
TEE_NODES: Final = {
    TSM_REPORTS: "evidence through configfs-tsm",
    "dev/tdx_guest": "Intel TDX guest",
    "dev/sev-guest": "AMD SEV-SNP guest",
}
"""The paths that a guest with a trusted execution environment has, below the root of its file system."""

TSM_REMEDY: Final = (
    "Run the worker in an Intel TDX or AMD SEV-SNP guest with Linux 6.7 or later and configfs mounted at "
    "/sys/kernel/config."
)
DEADLINE_S: Final = 30.0
PAUSE_S: Final = 0.05

_FAMILIES: Final[dict[str, QuoteFamily]] = {"tdx_guest": "tdx", "sev_guest": "sev_snp"}
# A busy or interrupted platform may answer later. No other error goes away.
_RETRIED = (errno.EBUSY, errno.EWOULDBLOCK, errno.EINTR, errno.ETIMEDOUT)


class _Raced(Exception):
    """An error: another process wrote to the entry while it was read."""


def tee_nodes(root: Path = Path("/")) -> dict[str, str]:
    """Return the `TEE_NODES` that exist below ``root``, with their meanings."""
    return {node: meaning for node, meaning in TEE_NODES.items() if (root / node).exists()}


class ReportTree:
    """The few operations of a file system that the interface consists of."""

    def make(self, entry: Path) -> None:
        """Make a folder. The kernel fills it with attributes."""
        entry.mkdir()

    def remove(self, entry: Path) -> None:
        """Remove a folder. Its attributes go with it."""
        entry.rmdir()

    def read(self, attribute: Path) -> bytes:
        """Read all of an attribute. Its size is not known before, and any part may bring an error."""
        with attribute.open("rb", buffering=0) as file:
            return file.readall()

    def write(self, attribute: Path, data: bytes) -> None:
        """Write an attribute in one call, which the kernel requires."""
        with os.fdopen(os.open(attribute, os.O_WRONLY | os.O_CLOEXEC), "wb", buffering=0) as file:
            file.write(data)


class TsmReports:
    """The `raycloak.attestation.attester.attester.EvidenceSource` of a TDX or SEV-SNP guest.

    Args:
        root: root of the file system that has the kernel's interface.
        endorsement: a file with the certificate of an SEV-SNP machine's endorsement key, PEM or DER, if the host does
            not hand it to its guests.
        privilege_level: VMPL of the report if the interface lets the guest choose, 0 to 3; None leaves it.
        deadline_s: seconds for which a busy platform is asked again.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        *,
        endorsement: Path | None = None,
        privilege_level: int | None = None,
        deadline_s: float = DEADLINE_S,
        tree: ReportTree | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._root = root
        self._reports = root / TSM_REPORTS
        self._endorsement = endorsement
        self._privilege_level = privilege_level
        self._deadline_s = deadline_s
        self._tree = tree or ReportTree()
        self._clock = clock
        self._sleep = sleep

    def collect(self, report_data: bytes) -> CpuEvidence:
        """Return evidence over 64 bytes of report data, with its certificates.

        Guarantee: the evidence carries exactly ``report_data``, also if several processes ask at once.

        Raises:
            EvidenceError: ``tee_unavailable`` if this is no such guest, or the process may not ask. ``tee_busy`` if
                the platform gives no answer in time. ``tee_report`` for an unusable answer.
        """
        if len(report_data) != REPORT_DATA_BYTES:
            raise ValueError(f"report data has {REPORT_DATA_BYTES} bytes")
        # A folder per request, so that processes do not write into each other's.
        entry = self._reports / f"raycloak-{os.getpid()}-{secrets.token_hex(8)}"
        self._make(entry)
        try:
            family, quote, auxiliary = self._ask(entry, report_data)
        finally:
            # A leftover entry costs only its name. The evidence, or its error, counts for more.
            with suppress(OSError):
                self._tree.remove(entry)
        answered = parse_quote(quote).report.report_data if family == "tdx" else parse_report(quote).report_data
        if answered != report_data:
            raise EvidenceError("tee_report", "the platform's answer is over other report data than it was asked for")
        return CpuEvidence(quote, family, self._certificates(family, quote, auxiliary))

    def _make(self, entry: Path) -> None:
        try:
            self._tree.make(entry)
        except FileNotFoundError:
            raise self._unavailable(f"{self._reports} does not exist", TSM_REMEDY) from None
        except PermissionError:
            raise self._unavailable(
                f"this process may not write to {self._reports}", "Run the worker as root."
            ) from None
        except OSError as error:
            remedy = "Load the module tdx_guest or sev-guest."
            raise self._unavailable(f"{self._reports} has no provider: {error.strerror}", remedy) from None

    def _unavailable(self, fact: str, remedy: str) -> EvidenceError:
        found = tee_nodes(self._root)
        nodes = ", ".join(f"/{node} is {'there' if node in found else 'missing'}" for node in TEE_NODES)
        return EvidenceError("tee_unavailable", f"no evidence of hardware can be had: {fact} ({nodes}).", remedy)

    def _ask(self, entry: Path, report_data: bytes) -> tuple[QuoteFamily, bytes, bytes]:
        """Return provider, quote and auxiliary data; ask again while the platform is busy or another process writes."""
        deadline = self._clock() + self._deadline_s
        while True:
            try:
                return self._ask_once(entry, report_data)
            except _Raced:
                cause = "another process writes to the entry"
            except OSError as error:
                if error.errno not in _RETRIED:
                    said = f"{error.filename or entry}: {error.strerror}"
                    raise EvidenceError("tee_report", f"the platform gives no evidence: {said}.") from None
                cause = error.strerror or "busy"
            if self._clock() >= deadline:
                raise EvidenceError(
                    "tee_busy", f"the platform gave no evidence within {self._deadline_s:g} s: {cause}.", "Try again."
                )
            self._sleep(PAUSE_S)

    def _ask_once(self, entry: Path, report_data: bytes) -> tuple[QuoteFamily, bytes, bytes]:
        provider = self._text(entry / "provider")
        family = _FAMILIES.get(provider)
        if family is None:
            raise EvidenceError("tee_report", f"'{provider}' is not a platform whose evidence is understood.")
        # The kernel counts every write. Another count at the end means that another process wrote as well.
        expected = self._generation(entry)
        if self._privilege_level is not None:
            self._tree.write(entry / "privlevel", str(self._privilege_level).encode())
            expected += 1
        self._tree.write(entry / "inblob", report_data)
        expected += 1
        quote = self._tree.read(entry / "outblob")
        try:
            auxiliary = self._tree.read(entry / "auxblob")
        # The kernel shows this attribute only for providers that fill it.
        except FileNotFoundError:
            auxiliary = b""
        if self._generation(entry) != expected:
            raise _Raced
        return family, quote, auxiliary

    def _text(self, attribute: Path) -> str:
        return self._tree.read(attribute).decode("ascii", "replace").strip()

    def _generation(self, entry: Path) -> int:
        text = self._text(entry / "generation")
        if not text.isdecimal():
            raise EvidenceError("tee_report", f"{entry / 'generation'} is '{text}' and no number.")
        return int(text)

    def _certificates(self, family: QuoteFamily, quote: bytes, auxiliary: bytes) -> tuple[bytes, ...]:
        if family == "tdx":
            return ()
        if self._endorsement is None:
            return endorsement_chain(auxiliary, parse_report(quote))
        try:
            return certificates_in(self._endorsement.read_bytes())
        except OSError as error:
            raise EvidenceError("tee_report", f"cannot read {self._endorsement}: {error.strerror}.") from None
