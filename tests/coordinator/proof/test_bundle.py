"""The bundle: one file in one form, each byte of which is fixed or signed."""

import hashlib
import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from raycloak.attestation.core.canonical import canonical_json
from raycloak.coordinator.proof.bundle import (
    INDEX,
    SIGNATURE,
    RecordPart,
    RecordParts,
    check_index,
    put_bundle,
    read_bundle,
    write_bundle,
)
from raycloak.coordinator.proof.case import ProofCase
from raycloak.coordinator.proof.claims import Broken, ClaimOutcome, Report
from raycloak.coordinator.proof.history import History
from raycloak.coordinator.proof.verify import CHECKS, verify_bundle, verify_parts
from raycloak.metrics.errors import ConfigError, RaycloakError
from raycloak.workers.terms.manifest import Manifest
from tests.coordinator.proof.proof_cases import UNSIGNED, Proved, established_case, joined, parts_of

MADE_AT = 1_800_000_000
BLOCK = 512


@pytest.fixture(scope="module")
def content(record) -> bytes:
    sink = io.BytesIO()
    put_bundle(sink, record.manifest.run_id, record.parts, record.site.signer, MADE_AT)
    return sink.getvalue()


@pytest.fixture
def bundle(content, tmp_path) -> Path:
    path = tmp_path / "run.bundle"
    path.write_bytes(content)
    return path


def _open_claims(report: Report) -> dict[str, ClaimOutcome]:
    return {claim.name: claim.outcome for claim in report.claims if claim.outcome is not ClaimOutcome.PROVED}


def test_every_claim_about_a_bundle_is_proved_but_of_files_that_nobody_signs(bundle, record):
    report = verify_bundle(bundle, record.trust)
    assert _open_claims(report) == dict.fromkeys(UNSIGNED, ClaimOutcome.NOT_COVERED), report.facts()
    assert [claim.name for claim in report.claims] == [check.name for check in CHECKS]
    assert report.run_id == record.manifest.run_id
    assert report.facts()["verified"]
    assert all(check.derive.__doc__ for check in CHECKS), "each claim is one sentence"


def test_a_run_directory_is_verified_as_its_bundle_is_but_for_the_sites_signature(record):
    report = verify_parts(record.parts, record.trust)
    assert _open_claims(report) == dict.fromkeys({"bundle", *UNSIGNED}, ClaimOutcome.NOT_COVERED)


def test_a_file_that_nobody_signs_is_never_proved_and_no_other_claim_follows_from_it(record):
    """Its unsigned fields can be edited, and the report says so."""
    metrics = [json.loads(line) for line in record.lines("metrics.jsonl")]
    edited = {
        "metrics.jsonl": joined([json.dumps(each | {"seconds": 1e9}).encode() for each in metrics]),
        "verdict.json": canonical_json(json.loads(record.contents["verdict.json"]) | {"evaluation_accuracy": 1.0}),
    }
    edited["verdict.json"] += b"\n"
    without = {name: content for name, content in record.contents.items() if name not in UNSIGNED}
    reports = [verify_parts(parts_of(each), record.trust) for each in (record.contents, without | edited, without)]
    as_it_is, of_edited, of_none = ({claim.name: claim for claim in report.claims} for report in reports)
    for name in UNSIGNED:
        assert {each[name].outcome for each in (as_it_is, of_edited, of_none)} == {ClaimOutcome.NOT_COVERED}
        assert "nobody signs it" in of_edited[name].says
        assert "may have been edited" in of_edited[name].says
        assert any(name in limit and "may have been edited" in limit for limit in reports[1].limits)
    rest = [
        {name: each for name, each in found.items() if name not in UNSIGNED} for found in (as_it_is, of_edited, of_none)
    ]
    assert rest[0] == rest[1] == rest[2]


def test_two_bundles_of_one_record_have_the_same_bytes_and_any_tar_program_opens_them(
    content, bundle, record, tmp_path
):
    write_bundle(tmp_path / "again", record.manifest.run_id, read_parts(bundle), record.site.signer, MADE_AT)
    again = (tmp_path / "again").read_bytes()
    # ML-DSA signs with fresh randomness; everything else is the same.
    assert len(again) == len(content)
    assert sum(a != b for a, b in zip(content, again, strict=True)) <= 2 * 3309
    with tarfile.open(bundle) as archive:
        assert archive.getnames() == [INDEX, SIGNATURE, *sorted(record.contents)]
        assert archive.extractfile("manifest.json").read() == record.contents["manifest.json"]


def read_parts(path: Path) -> RecordParts:
    found = dict(read_bundle(path).by_name)
    return RecordParts({name: part for name, part in found.items() if name not in (INDEX, SIGNATURE)})


def accepted(path: Path, record: Proved) -> bool:
    try:
        check_index(read_bundle(path), record.trust.signers)
    except (Broken, RaycloakError):
        return False
    return True


def test_no_byte_of_a_bundle_can_be_changed(content, bundle, record):
    """A sample of headers and padding, of index, signature and each part, flipped one after the other.

    A part is compared with one SHA-256 in the index, so one byte of it stands for all.
    """
    assert accepted(bundle, record)
    places, at = set(range(len(content) - 2 * BLOCK, len(content), 7)), 0
    with tarfile.open(bundle) as archive:
        for info in archive:
            assert info.offset == at, "headers and parts leave no gap"
            end = info.offset_data + info.size
            at = end + -end % BLOCK
            # Most of a header is zeros, of which every seventh is enough.
            places |= {*range(info.offset, info.offset + 160, 2), *range(info.offset + 160, info.offset + BLOCK, 11)}
            places |= {*range(info.offset_data, end, max(1, info.size // 60)), end - 1, *range(end, at, 17)}
    assert len(places) > 2000
    with bundle.open("r+b") as file:
        for place in sorted(places):
            file.seek(place)
            file.write(bytes([content[place] ^ 1]))
            file.flush()
            assert not accepted(bundle, record), f"byte {place} was changed"
            file.seek(place)
            file.write(content[place : place + 1])
    assert accepted(bundle, record)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content[:-BLOCK],
        lambda content: content + bytes(BLOCK),
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: content[BLOCK:],
    ],
)
def test_a_bundle_that_is_cut_off_or_continued_fails_as_a_whole(content, bundle, record, change):
    bundle.write_bytes(change(content))
    report = verify_bundle(bundle, record.trust)
    assert {claim.outcome for claim in report.claims} == {ClaimOutcome.FAILED}
    assert report.claims[0].name == "bundle"


def _archive(path: Path, *members: tuple[str, bytes, dict]) -> Path:
    with path.open("wb") as sink:
        for name, content, fields in members:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), 0
            for field, value in fields.items():
                setattr(info, field, value)
            sink.write(info.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % BLOCK))
        sink.write(bytes(2 * BLOCK))
    return path


@pytest.mark.parametrize(
    "member",
    [
        ("../manifest.json", b"x", {}),
        ("/etc/passwd", b"x", {}),
        ("packages/../../x/manifest.json", b"x", {}),
        ("packages/step-000001.tssp/parameters.safetensors.enc", b"x", {}),
        ("run.log", b"x", {}),
        ("manifest.json", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}),
        ("manifest.json", b"x", {"mode": 0o4755}),
        ("manifest.json", b"x", {"uid": 1000}),
        ("manifest.json", b"", {"size": 2**60}),
        ("manifest.json" * 40, b"x", {}),
    ],
)
def test_a_part_with_a_path_a_type_or_a_size_of_its_own_is_refused(member, record, tmp_path):
    path = _archive(tmp_path / "bundle", (INDEX, b"{}", {}), (SIGNATURE, b"{}", {}), member)
    with pytest.raises(Broken, match=r"is no part of a bundle|not in the form of a bundle|longer than the file"):
        read_bundle(path)
    report = verify_bundle(path, record.trust)
    assert {claim.outcome for claim in report.claims} == {ClaimOutcome.FAILED}


def test_a_file_that_cannot_be_read_is_the_users_mistake(record, tmp_path):
    with pytest.raises(ConfigError, match="bundle_file"):
        verify_bundle(tmp_path / "missing", record.trust)
    (tmp_path / "there").touch()
    with pytest.raises(ConfigError, match="bundle_exists"):
        write_bundle(tmp_path / "there", "run", record.parts, record.site.signer, MADE_AT)


# --- changes by the site itself, which signs the bundle again


@pytest.fixture(scope="module")
def established(record) -> ProofCase:
    return established_case(record)


READERS = {
    "manifest.json": ("manifest", "contract"),
    "evidence.jsonl": ("evidence log",),
    "documents.jsonl": ("evidence log", "contract", "members' evidence", "rosters", "documents"),
    "ledger.jsonl": ("ledger",),
    "measurements.json": ("measurements",),
    "parameters.safetensors": ("released model",),
    "packages": ("packages",),
}
"""The claims that read a part, of which one must fail."""
BY_NAME = {check.name: check for check in CHECKS}


def refused(established: ProofCase, record: Proved, name: str, content: bytes) -> bool:
    case = ProofCase(parts_of(record.contents | {name: content}), record.trust, None)
    # What earlier claims established does not depend on a part that only later ones read.
    case.log, case.documents, case.history = established.log, established.documents, established.history
    case.released = established.released
    if name != "ledger.jsonl":
        case.extract = established.extract
    case.__dict__["own_claim"] = established.own_claim
    if name == "manifest.json" and manifest_of(case) is not None:
        # The first session names the manifest, so the rest of the log need not be replayed.
        case.history = History(case.manifest, case.manifest.digest(), record.trust.policy, established.documents)
        case.history.follow(established.log.entries[0])
    try:
        for reader in READERS[name.split("/")[0]]:
            BY_NAME[reader].derive(case)
    except (Broken, RaycloakError):
        return True
    return False


def manifest_of(case: ProofCase) -> Manifest | None:
    try:
        return case.manifest
    except Broken:
        return None


def _flips(name: str, content: bytes) -> set[int]:
    """Return places in each field of the first line of every kind, and a sample of the rest."""
    most = {"documents.jsonl": 60, "evidence.jsonl": 150, "ledger.jsonl": 150}.get(name, 250)
    places = {*range(0, len(content), max(1, len(content) // most)), len(content) - 1}
    kinds, start = set(), 0
    for line in content.splitlines(keepends=True):
        kind = json.loads(line).get("kind", "") if name.endswith(".jsonl") else name
        if kind not in kinds and name != "documents.jsonl":
            # The byte before and after each colon: the end of a field's name, and the first byte of its value.
            marks = [i for i, byte in enumerate(line) if byte == ord(":")]
            places |= {start + i + away for i in marks for away in (-2, 2)}
        kinds.add(kind)
        start += len(line)
    return {place for place in places if place < len(content)}


def test_not_even_the_site_can_change_a_byte_of_what_others_signed(established, record):
    """The index is signed again with each change; the claims that read the part must find it."""
    for name, content in record.contents.items():
        if name in UNSIGNED:
            continue
        assert not refused(established, record, name, content)
        for place in sorted(_flips(name, content)):
            changed = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
            assert refused(established, record, name, changed), f"{name}, byte {place}"


@pytest.mark.parametrize("name", ["manifest.json", "evidence.jsonl", "documents.jsonl", "ledger.jsonl"])
def test_a_part_that_is_missing_empty_or_too_long_fails_its_claim(record, name):
    without = {each: content for each, content in record.contents.items() if each != name}
    for contents in (without, without | {name: b""}, without | {name: record.contents[name] + b"\n"}):
        assert verify_parts(parts_of(contents), record.trust).failed


def test_a_part_is_never_read_beyond_its_bound(record):
    def unreadable():
        raise AssertionError("it was opened")

    parts = RecordParts(record.parts.by_name | {"manifest.json": RecordPart(2**40, unreadable)})
    first, *_ = verify_parts(parts, record.trust).claims
    assert first.outcome is ClaimOutcome.FAILED
    assert "are the most" in first.says


def test_a_part_that_shrinks_while_it_is_written_is_noticed(record, tmp_path):
    parts = RecordParts({"manifest.json": replace(RecordPart.of(b"abc"), size=5)})
    with pytest.raises(Broken, match="shorter"):
        write_bundle(tmp_path / "bundle", "run", parts, record.site.signer, MADE_AT)
    assert list(tmp_path.iterdir()) == []


def test_a_change_of_a_part_after_the_index_was_signed_names_the_part(content, bundle, record):
    marked = content.replace(b'"event":"step"', b'"event":"Step"', 1)
    assert hashlib.sha256(marked).digest() != hashlib.sha256(content).digest()
    bundle.write_bytes(marked)
    failed = {claim.name: claim.record for claim in verify_bundle(bundle, record.trust).failed}
    assert failed["bundle"] == "metrics.jsonl"
