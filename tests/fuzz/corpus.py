"""Makes the seeds of the fuzz targets, from simulated evidence and from an index of recorded evidence."""

import io
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from raycloak.attestation.core.evidence import CollateralBundle, Presentation
from raycloak.attestation.core.hpke import HpkeKey
from raycloak.attestation.core.hybrid_signature import HybridSigner
from raycloak.attestation.core.keys import AgreementKey, IdentityKey
from raycloak.attestation.policy.policy import simulated_policy
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor
from raycloak.attestation.vectors.check import answers_of, references_of
from raycloak.attestation.vectors.index import VectorCase, read_index
from raycloak.coordinator.proof.bundle import RecordPart, RecordParts, put_bundle
from raycloak.metrics.errors import RaycloakError
from tests.simulators.gpu import SimulatedGpuVendor
from tests.simulators.switch import simulated_switch

NOW = 1_800_000_000
Seed = tuple[str, bytes]
_EVIDENCE = {"tdx": "tdx_quote", "sev_snp": "snp_report", "nvidia_gpu": "gpu_report"}


def write_corpus(folder: Path, index: Path | None) -> None:
    """Write every seed to ``folder/TARGET/NUMBER``, where libFuzzer finds it and adds its own."""
    seeds = [*simulated(), *(recorded(index) if index else ())]
    for number, (target, data) in enumerate(seeds):
        (folder / target).mkdir(parents=True, exist_ok=True)
        (folder / target / f"seed-{number}").write_bytes(data)


def simulated() -> Iterator[Seed]:
    """Yield one or more seeds for every target that needs a form."""
    vendor, gpus = SimulatedVendor.create(), SimulatedGpuVendor.create()
    gpu, references, collateral = gpus.gpu(), gpus.references(), vendor.collateral(NOW).tdx[0]
    quote = vendor.platform().quote(bytes(64), bytes(48))
    policy = simulated_policy(vendor, bytes(range(48)))
    manifests = [each for each in (references.driver, references.vbios) if each]
    answers = gpus.ocsp(gpu, NOW)
    bundle = CollateralBundle(tdx=(collateral,), gpu_rims=tuple(manifests), gpu_ocsp=answers)
    yield "tdx_quote", quote
    yield "gpu_report", gpu.report(bytes(32))
    yield "gpu_evidence", gpu.evidence(bytes(32))
    yield "switch_evidence", simulated_switch(gpus, [gpu.device_id]).evidence(bytes(32))
    yield "device_ids", 2 * gpu.device_id + bytes(8)
    yield from (("gpu_rim", each) for each in manifests)
    yield from (("gpu_ocsp", each) for each in answers)
    yield "tdx_collateral", collateral.encode()
    yield "collateral_bundle", bundle.encode()
    yield "policy", policy.encode()
    yield "policy", b"accepted_classes: [intel_tdx]\nanchors: [intel_tdx]\ntdx:\n  measurements: []\n"
    registers = b", ".join(b"rtmr%d: any" % number for number in range(4))
    yield "policy", b"accepted_classes: [intel_tdx]\nanchors: [intel_tdx]\ntdx: {measurements: [], %s}\n" % registers
    yield "presentation", _presentation(quote, gpu.evidence(bytes(32)))
    yield (
        "index",
        b'{"cases": [{"id": "a", "family": "tdx", "evidence": "b", "encoding": "raw", "at": "2027-01-15T08:00:00Z"}]}',
    )
    yield from (("encoding", kind + b"\n" + b"0x00ff") for kind in (b"raw", b"hex", b"base64"))
    yield "encoding", b'json:/a/0\n{"a": ["00ff", [1, 2]]}'
    yield "json_bytes", b"[0, 255]"
    yield "snp_report", bytes(1184)
    yield "snp_report", b"\3".ljust(0x34, b"\0") + b"\1".ljust(1184 - 0x34, b"\0")
    # One entry of four bytes, and the one of zeros that ends the table.
    yield "snp_cert_table", bytes(range(16)) + b"\x30\0\0\0\4\0\0\0" + bytes(24) + b"leaf"
    yield "certificates", vendor.platform().chain_pem.encode()
    yield "certificates", vendor.root_der
    yield "bundle", _bundle()


def _bundle() -> bytes:
    parts = RecordParts({"manifest.json": RecordPart.of(b"{}\n"), "ledger.jsonl": RecordPart.of(bytes(1000))})
    put_bundle(sink := io.BytesIO(), "run", parts, HybridSigner.generate(), NOW)
    return sink.getvalue()


def _presentation(quote: bytes, gpu: bytes) -> bytes:
    return Presentation(
        nonce=bytes(32),
        run_id="run",
        member_id="worker-0",
        role="worker",
        manifest_digest=bytes(32),
        hpke_key=HpkeKey.generate().public,
        mask_key=AgreementKey.generate().public,
        identity_key=IdentityKey.generate().public,
        known_answer=bytes(32),
        quote=quote,
        gpu_evidence=(gpu,),
    ).encode()


def recorded(index: Path) -> Iterator[Seed]:
    """Return the evidence of an index's cases, what they are judged with, and indexes of one case each."""
    document = json.loads(index.read_bytes())
    for case in document["cases"][:: max(1, len(document["cases"]) // 10)]:
        yield "index", json.dumps({"default_policy": document.get("default_policy", {}), "cases": [case]}).encode()
    for case in read_index(index):
        with suppress(RaycloakError):  # a case may be about a file that is not of its stated form
            yield from _of_case(case)


def _of_case(case: VectorCase) -> Iterator[Seed]:
    yield _EVIDENCE[case.fields.family], case.evidence()
    if case.fields.collateral:
        yield "tdx_collateral", case.file(case.fields.collateral)
    references = references_of(case)
    yield from (("gpu_rim", each) for each in (references.driver, references.vbios) if each)
    yield from (("gpu_ocsp", each) for each in answers_of(case))
