"""A package as one file: the same bytes from any storage, and no other tar is read."""

import io
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from pyarrow import fs

from raycloak.coordinator.checkpoints.package_file import PIECE_BYTES, PackageFile, file_bytes, file_pieces
from raycloak.coordinator.checkpoints.reader import package_at, verify_package, weights_of
from raycloak.coordinator.checkpoints.storage import PackageStorage, is_package
from raycloak.coordinator.checkpoints.writer import PARAMETERS
from raycloak.coordinator.service.packages import SavedPackage
from raycloak.metrics.errors import EvidenceError
from raycloak.workers.terms.manifest import TensorSpec
from tests.coordinator.checkpoints.tssp_cases import Site, run_manifest, snapshot

NAME = "step-000003.tssp"


@pytest.fixture
def site(tmp_path) -> Site:
    made = Site(tmp_path)
    assert made.publish() == NAME
    made.trust.save(tmp_path / "trust.json")
    return made


def tar_of(site: Site) -> bytes:
    return b"".join(file_pieces(site.storage, NAME))


def code_of(action: Callable[[], object]) -> str:
    with pytest.raises(EvidenceError) as refusal:
        action()
    return refusal.value.code


def test_guarantee_a_package_is_the_same_file_from_any_storage(site, bucket_urls):
    tar = tar_of(site)
    url = next(bucket_urls)
    remote, root = fs.FileSystem.from_uri(url)
    fs.copy_files(str(site.home / "packages"), root, fs.LocalFileSystem(), remote)
    assert b"".join(file_pieces(PackageStorage.open(url), NAME)) == tar
    shutil.copytree(site.home / "packages", site.home / "later")
    assert b"".join(file_pieces(PackageStorage.open(str(site.home / "later")), NAME)) == tar
    assert file_bytes(site.storage, NAME) == len(tar)


def test_a_file_verifies_and_opens_as_the_folder_does(site, tmp_path):
    path = tmp_path / "model.tssp"
    path.write_bytes(tar_of(site))
    found = PackageFile.open(path)
    folder = verify_package(site.storage, NAME, site.trust)
    with package_at(str(path), tmp_path / "trust.json") as package:
        assert package.manifest == folder.manifest
        opened = weights_of(package, package.unwrap(site.recipient), PARAMETERS)
    expected = weights_of(folder, folder.unwrap(site.recipient), PARAMETERS)
    assert opened.tobytes() == expected.tobytes()
    assert found.files(NAME) == site.storage.files(NAME)
    assert is_package(str(path))


def test_a_file_opens_with_any_tar_program(site, tmp_path):
    with tarfile.open(fileobj=io.BytesIO(tar_of(site))) as tar:
        unpacked = {member.name: tar.extractfile(member).read() for member in tar}
        assert all(member.isreg() and member.mode == 0o644 and member.mtime == 0 for member in tar)
    folder = site.home / "packages"
    assert unpacked == {f"{NAME}/{each.name}": each.read_bytes() for each in (folder / NAME).iterdir()}
    assert list(unpacked) == sorted(unpacked)


def test_a_large_package_is_sent_in_bounded_pieces(tmp_path):
    tensors = (TensorSpec(name="w", shape=(1024, 512)), TensorSpec(name="b", shape=(3,)))
    site = Site(tmp_path, run_manifest(tensors))
    site.publish_snapshot(snapshot(site.manifest), chunk_bytes=2**20)
    pieces = list(file_pieces(site.storage, NAME))
    assert max(map(len, pieces)) == PIECE_BYTES
    assert sum(map(len, pieces)) == file_bytes(site.storage, NAME) > 2**22


def member(name: str, **changes: object) -> bytes:
    """Return another tar with one member."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        info = tarfile.TarInfo(name)
        for field, value in changes.items():
            setattr(info, field, value)
        tar.addfile(info)
    return buffer.getvalue()[: 3 * 512]


def repacked(tar: bytes, format: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(tar)) as old, tarfile.open(fileobj=buffer, mode="w", format=format) as new:
        for each in old:
            new.addfile(each, old.extractfile(each))
    return buffer.getvalue()


STRANGE = {
    "empty": lambda tar: b"",
    "only an end": lambda tar: bytes(1024),
    "no end": lambda tar: tar[:-1024],
    "half an end": lambda tar: tar[:-512],
    "something behind": lambda tar: tar + b"\0",
    "cut off in a file": lambda tar: tar[:700],
    "cut off in a header": lambda tar: tar[:300],
    "a file twice": lambda tar: tar[:-1024] + tar,
    "of another tar program": lambda tar: repacked(tar, tarfile.USTAR_FORMAT),
    "with longer padding": lambda tar: repacked(tar, tarfile.GNU_FORMAT),
    "an absolute name": lambda tar: member("/etc/passwd"),
    "out of its folder": lambda tar: member("../manifest.json"),
    "out of its folder, later": lambda tar: member(f"{NAME}/../manifest.json"),
    "deeper": lambda tar: member(f"{NAME}/more/manifest.json"),
    "without a folder": lambda tar: member("manifest.json"),
    "a symbolic link": lambda tar: member(f"{NAME}/manifest.json", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "a hard link": lambda tar: member(f"{NAME}/manifest.json", type=tarfile.LNKTYPE, linkname="/etc/passwd"),
    "a device": lambda tar: member(f"{NAME}/manifest.json", type=tarfile.CHRTYPE),
    "a folder": lambda tar: member(NAME, type=tarfile.DIRTYPE),
    "a sparse file": lambda tar: member(f"{NAME}/manifest.json", type=tarfile.GNUTYPE_SPARSE),
    "a long name": lambda tar: member(f"{NAME}/{'m' * 200}.json"),
    "a huge file": lambda tar: tarfile.TarInfo(f"{NAME}/manifest.json").tobuf(tarfile.GNU_FORMAT)[:124]
    + b"\x80" + b"\xff" * 11 + bytes(376),
    "executable": lambda tar: member(f"{NAME}/manifest.json", mode=0o755),
    "with a time": lambda tar: member(f"{NAME}/manifest.json", mtime=1),
    "not ASCII": lambda tar: member(f"{NAME}/manifést.json"),
    "no tar": lambda tar: b"{}" * 600,
    "seventeen files": lambda tar: b"".join(member(f"{NAME}/a.{'b' * n}")[:512] for n in range(1, 18)) + bytes(1024),
}  # fmt: skip


@pytest.mark.parametrize("strange", STRANGE.values(), ids=STRANGE)
def test_guarantee_no_other_tar_is_read(site, tmp_path, strange):
    path = tmp_path / "model.tssp"
    path.write_bytes(strange(tar_of(site)))
    assert code_of(lambda: PackageFile.open(path)) == "package_malformed"


def test_every_flipped_byte_of_a_file_is_refused(site, tmp_path):
    tar, path = tar_of(site), tmp_path / "model.tssp"
    for place in range(0, len(tar), 101):
        path.write_bytes(tar[:place] + bytes([tar[place] ^ 1]) + tar[place + 1 :])
        with pytest.raises(EvidenceError), package_at(str(path), tmp_path / "trust.json"):
            pass


def test_a_file_named_after_another_step_is_refused(site, tmp_path):
    path = tmp_path / "step-000004.tssp"
    path.write_bytes(tar_of(site))
    with pytest.raises(EvidenceError, match="package_other_step"), package_at(str(path), tmp_path / "trust.json"):
        pass


def test_a_package_that_is_no_folder_of_files_is_not_sent(site):
    assert code_of(lambda: list(file_pieces(site.storage, "step-000009.tssp"))) == "package_malformed"
    (site.home / "packages" / NAME / "more").mkdir()
    assert code_of(lambda: list(file_pieces(site.storage, NAME))) == "package_malformed"


def test_guarantee_an_artifact_is_sent_only_if_it_is_the_package_that_was_saved(site, tmp_path):
    location = str(site.home / "packages" / NAME)
    digest = verify_package(site.storage, NAME, site.trust).manifest.digest()
    artifact = SavedPackage(location, digest)
    assert b"".join(artifact.pieces()) == tar_of(site)
    assert artifact.bytes == len(tar_of(site))
    assert code_of(lambda: SavedPackage(location, bytes(32))) == "package_file_changed"
    Path(location, "manifest.json").write_bytes(b"{}")
    assert code_of(lambda: SavedPackage(location, digest)) == "package_file_changed"
    shutil.rmtree(location)
    assert code_of(lambda: SavedPackage(location, digest)) == "package_file_missing"
    assert code_of(lambda: list(artifact.pieces())) == "package_malformed"
