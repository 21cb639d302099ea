"""The fuzz targets: every parser of evidence, collateral, policies and messages, with the one way each may refuse."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from raycloak.attestation.appraisal.appraisal import open_presentation
from raycloak.attestation.collateral.encoding import bytes_of, decode
from raycloak.attestation.core.canonical import read_json
from raycloak.attestation.core.evidence import Collateral, CollateralBundle, GpuEvidence, SwitchEvidence
from raycloak.attestation.core.messages import Envelope, parse
from raycloak.attestation.gpu.ocsp import find_answers
from raycloak.attestation.gpu.report import device_ids, parse_device_report
from raycloak.attestation.gpu.rim import read_rim
from raycloak.attestation.policy.policy import load_policy
from raycloak.attestation.snp.cert_table import certificates_in, read_table
from raycloak.attestation.snp.report import parse_report
from raycloak.attestation.tdx.quote import parse_quote
from raycloak.attestation.vectors.index import read_index
from raycloak.coordinator.proof.bundle import read_bundle
from raycloak.coordinator.proof.claims import Broken
from raycloak.metrics.errors import ConfigError, EvidenceError, ProtocolError

SLOW_S = 0.1


class TooSlow(Exception):
    """An input that keeps a parser busy for longer than `SLOW_S` seconds of CPU time."""


@dataclass(frozen=True)
class Target:
    """A parser under test.

    Attributes:
        parse: called with any bytes.
        refusals: the exceptions by which it may refuse them; any other one is a defect.
        own: whether the work is done by code of this repository, and not by a library below it.
    """

    name: str
    parse: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...]
    own: bool

    def __call__(self, data: bytes) -> None:
        """Run once; raises for a defect. An input that seems slow is run again, since another process may be why."""
        if self._seconds(data) > SLOW_S and min(self._seconds(data) for _ in range(3)) > SLOW_S:
            raise TooSlow(f"{self.name} needs more than {SLOW_S} s for {len(data)} bytes")

    def _seconds(self, data: bytes) -> float:
        started = time.thread_time()
        with suppress(*self.refusals):
            self.parse(data)
        return time.thread_time() - started


def _in_a_file(read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """Wrap a parser of files: each call writes one file in memory again."""
    descriptor = os.memfd_create("raycloak-fuzz")
    path = Path(f"/proc/self/fd/{descriptor}")

    def parse_file(data: bytes) -> object:
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, data, 0)
        return read(path)

    return parse_file


def _rim(data: bytes) -> object:
    rim = read_rim(data, "reference")
    return rim.stated_version, rim.stated_product


def _encoding(data: bytes) -> object:
    kind, _, content = data.partition(b"\n")
    return decode(content, kind.decode("utf-8", "replace"))


def _collateral(data: bytes) -> object:
    return Collateral.from_json(data.decode("utf-8", "replace"))


def _json_bytes(data: bytes) -> object:
    return bytes_of(read_json(data))


TARGETS = {
    target.name: target
    for target in (
        Target("tdx_quote", parse_quote, (EvidenceError,), own=True),
        Target("snp_report", parse_report, (EvidenceError,), own=True),
        Target("snp_cert_table", read_table, (EvidenceError,), own=True),
        Target("gpu_report", lambda data: parse_device_report(data, "GPU"), (EvidenceError,), own=True),
        Target("switch_evidence", lambda data: parse(SwitchEvidence, data), (ProtocolError,), own=False),
        Target("device_ids", device_ids, (EvidenceError,), own=True),
        Target("encoding", _encoding, (ValueError, LookupError), own=True),
        Target("gpu_rim", _rim, (EvidenceError,), own=False),
        Target("gpu_ocsp", lambda data: find_answers([data], ()), (), own=False),
        Target("gpu_evidence", lambda data: parse(GpuEvidence, data), (ProtocolError,), own=False),
        Target("tdx_collateral", _collateral, (EvidenceError,), own=False),
        Target("collateral_bundle", lambda data: parse(CollateralBundle, data), (ProtocolError,), own=False),
        Target(
            "presentation",
            lambda data: open_presentation(Envelope(body=data, signature=bytes(64))),
            (EvidenceError,),
            own=False,
        ),
        Target("certificates", certificates_in, (EvidenceError,), own=False),
        Target("json_bytes", _json_bytes, (ValueError,), own=False),
        Target("policy", _in_a_file(load_policy), (ConfigError,), own=False),
        Target("index", _in_a_file(read_index), (ConfigError,), own=False),
        Target("bundle", _in_a_file(read_bundle), (Broken, ConfigError), own=True),
    )
}
