"""The storage of packages: all or nothing, on a disk and on S3."""

import importlib.util
from pathlib import Path

import pytest

from raycloak.coordinator.checkpoints.storage import (
    MANIFEST,
    RUN_MANIFEST,
    SIGNATURE,
    STORAGE_ERRORS,
    PackageStorage,
    located,
    split_location,
    storage_of,
)
from raycloak.metrics.errors import ConfigError

LAST = {RUN_MANIFEST: b"r", MANIFEST: b"m", SIGNATURE: b"s"}
needs_moto = pytest.mark.skipif(importlib.util.find_spec("moto") is None, reason="moto is not installed")


@pytest.fixture(params=["local", pytest.param("s3", marks=needs_moto)])
def location(request, tmp_path):
    if request.param == "local":
        return str(tmp_path / "packages")
    return next(request.getfixturevalue("bucket_urls"))


@pytest.fixture
def storage(location):
    return PackageStorage.open(location)


def write(storage, step, content=b"payload"):
    draft = storage.draft(step)
    with draft.sink("a.enc") as sink:
        sink.write(content)
    return draft.publish(LAST)


def read(storage, name, file):
    with storage.reader(name, file) as stream:
        return stream.read()


def test_an_empty_storage_has_no_packages(storage):
    assert storage.names() == ()
    storage.sweep()
    assert storage.names() == ()


def test_a_published_package_is_listed_read_and_deleted(storage):
    assert write(storage, 50) == "step-000050.tssp"
    assert write(storage, 7) == "step-000007.tssp"
    assert write(storage, 1_000_000) == "step-1000000.tssp"
    assert storage.names() == ("step-000007.tssp", "step-000050.tssp", "step-1000000.tssp")
    assert storage.files("step-000050.tssp") == {"a.enc": 7, MANIFEST: 1, SIGNATURE: 1, RUN_MANIFEST: 1}
    assert read(storage, "step-000050.tssp", "a.enc") == b"payload"
    storage.delete("step-000050.tssp")
    assert storage.names() == ("step-000007.tssp", "step-1000000.tssp")
    assert storage.files("step-000050.tssp") == {}


def test_a_package_that_is_there_is_never_written_to_again(storage):
    names = [write(storage, 5, content) for content in (b"first", b"second", b"third")]
    assert names == ["step-000005.tssp", "step-000005-2.tssp", "step-000005-3.tssp"]
    assert [read(storage, name, "a.enc") for name in names] == [b"first", b"second", b"third"]
    assert storage.names() == tuple(names)


def test_a_package_is_not_there_before_it_is_whole(storage):
    draft = storage.draft(5)
    with draft.sink("a.enc") as sink:
        sink.write(b"payload")
    assert storage.names() == ()
    draft.publish({RUN_MANIFEST: b"r", MANIFEST: b"m", SIGNATURE: b"s"})
    assert storage.names() == ("step-000005.tssp",)


def test_what_a_dead_writer_left_is_swept_and_nothing_else(storage, location):
    write(storage, 4)
    draft = storage.draft(5)
    with draft.sink("a.enc") as sink:
        sink.write(b"payload")
    after = PackageStorage.open(location)
    after.sweep()
    assert after.names() == ("step-000004.tssp",)
    assert set(after._folders()) == {"step-000004.tssp"}
    assert write(after, 5) == "step-000005.tssp"


def test_a_discarded_draft_leaves_nothing(storage):
    draft = storage.draft(5)
    with draft.sink("a.enc") as sink:
        sink.write(b"payload")
    draft.discard()
    assert storage.names() == ()
    assert storage.files("step-000005.tssp") == {}


@needs_moto
def test_on_s3_the_signature_is_what_makes_a_package(bucket_urls):
    storage = PackageStorage.open(next(bucket_urls))
    storage.draft(5).publish({RUN_MANIFEST: b"r", MANIFEST: b"m"})
    assert storage.names() == ()
    storage.draft(5).publish(LAST)
    assert storage.names() == ("step-000005-2.tssp",)


@needs_moto
def test_a_bucket_that_refuses_is_a_storage_error(bucket_urls):
    url = next(bucket_urls)
    storage = PackageStorage.open(url.replace("packages", "no-such-bucket"))
    with pytest.raises(STORAGE_ERRORS):
        write(storage, 1)


def test_local_folders_are_private(tmp_path):
    storage = PackageStorage.open(str(tmp_path / "packages"))
    name = write(storage, 1)
    assert (tmp_path / "packages" / name).stat().st_mode & 0o777 == 0o700


def test_other_folders_and_files_are_no_packages(tmp_path):
    storage = PackageStorage.open(str(tmp_path))
    for name in ("step-5.tssp", "step-000005.tssp.bak", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / SIGNATURE).touch()
    (tmp_path / "step-000006.tssp").touch()
    assert storage.names() == ()
    storage.sweep()
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("location", ["ftp://x/y", "s3://"])
def test_a_location_that_is_neither_path_nor_bucket_is_refused(location):
    with pytest.raises(ConfigError, match="storage"):
        PackageStorage.open(location)


@pytest.mark.parametrize(
    ("location", "parts"),
    [
        ("/a/b/step-000001.tssp", ("/a/b", "step-000001.tssp")),
        ("/a/b/step-000001.tssp/", ("/a/b", "step-000001.tssp")),
        ("step-000001.tssp", (".", "step-000001.tssp")),
        ("/x?y/p.tssp", ("/x?y", "p.tssp")),
        ("s3://b/p/s.tssp?region=x", ("s3://b/p?region=x", "s.tssp")),
    ],
)
def test_a_packages_location_is_split(location, parts):
    assert split_location(location) == parts


@pytest.mark.parametrize(
    ("storage", "folder", "package"),
    [
        ("packages", "/base/packages/ab12", "/base/packages/ab12/step-000003.tssp"),
        ("/srv/packages/", "/srv/packages/ab12", "/srv/packages/ab12/step-000003.tssp"),
        ("s3://b/models", "s3://b/models/ab12", "s3://b/models/ab12/step-000003.tssp"),
        (
            "s3://b/models/?region=x&scheme=http",
            "s3://b/models/ab12?region=x&scheme=http",
            "s3://b/models/ab12/step-000003.tssp?region=x&scheme=http",
        ),
    ],
)
def test_runs_and_packages_have_places_of_their_own_before_a_urls_query(storage, folder, package):
    assert storage_of(storage, "ab12", Path("/base")) == folder
    assert located(folder, "step-000003.tssp") == package
    assert split_location(package) == (folder, "step-000003.tssp")
