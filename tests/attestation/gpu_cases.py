"""Reads the GPU cases of an index of recorded evidence, for the tests of the GPU verifier alone."""

import base64
import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from attestation.evidence import EvidenceClass
from attestation.gpu import GpuClaims, GpuReferences, verify_gpu
from attestation.gpu_rules import GpuRules
from attestation.roots import pinned_anchors
from metrics.errors import EvidenceError


def _pointed(folder: Path, name: str) -> bytes:
    """A file, or ``file#pointer``: base64 inside a JSON document."""
    path, _, pointer = name.partition("#")
    raw = (folder / path).read_bytes()
    return base64.b64decode(_at(json.loads(raw), pointer)) if pointer else raw


def _at(document: Any, pointer: str) -> Any:
    for part in pointer.split("/")[1:]:
        document = document[int(part) if isinstance(document, list) else part]
    return document


def _decoded(folder: Path, name: str, encoding: str) -> bytes:
    if encoding.startswith("json:"):
        return _pointed(folder, f"{name}#{encoding.removeprefix('json:')}")
    raw = (folder / name).read_bytes()
    return raw if encoding == "raw" else bytes.fromhex(raw.decode().strip())


@dataclass(frozen=True)
class GpuCase:
    """One case, with everything `verify_gpu` takes."""

    case_id: str
    report: bytes
    chain: tuple[bytes, ...]
    nonce: bytes
    rims: GpuReferences
    ocsp: tuple[bytes, ...]
    rules: GpuRules
    now: int
    expected: str | None

    def verify(self, **changes: Any) -> GpuClaims:
        arguments: dict[str, Any] = {
            "anchors": pinned_anchors(EvidenceClass.NVIDIA_GPU),
            "accepted": (EvidenceClass.NVIDIA_GPU,),
            "rules": self.rules,
            "nonce": self.nonce,
            "rims": self.rims,
            "ocsp": self.ocsp,
            "now": self.now,
        } | changes
        return verify_gpu(arguments.pop("report", self.report), arguments.pop("chain", self.chain), **arguments)

    def refusal(self, **changes: Any) -> str | None:
        try:
            self.verify(**changes)
        except EvidenceError as error:
            return error.code
        return None


def load_gpu_cases(folder: Path) -> dict[str, GpuCase]:
    index = json.loads((folder / "INDEX.json").read_text())
    defaults = index["default_policy"]["nvidia_gpu"]
    cases = (case for case in index["cases"] if case["family"] == "nvidia_gpu")
    return {case["id"]: _load(folder, case, defaults) for case in cases}


def _load(folder: Path, case: dict[str, Any], defaults: dict[str, Any]) -> GpuCase:
    rim = case["rim"] or {}
    pem = b"\n".join(_pointed(folder, name) for name in case["chain"])
    return GpuCase(
        case_id=case["id"],
        report=_decoded(folder, case["evidence"], case["encoding"]),
        chain=tuple(each.public_bytes(Encoding.DER) for each in x509.load_pem_x509_certificates(pem)),
        nonce=bytes.fromhex(case["nonce"]),
        rims=GpuReferences(**{kind: (folder / name).read_bytes() if name else None for kind, name in rim.items()}),
        ocsp=tuple(base64.b64decode((folder / name).read_bytes()) for name in case["ocsp"] or ()),
        rules=GpuRules(**(defaults | case["policy"])),
        now=int(datetime.fromisoformat(case["at"]).timestamp()),
        expected=case["refusal"],
    )
