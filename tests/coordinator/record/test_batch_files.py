"""The batches beside a run: kept before a charge, found again, and refused by name if they are others."""

import os

import pytest

from raycloak.attestation.core.canonical import digest
from raycloak.coordinator.record.batch_files import FOLDER, INDEX, BatchFiles, sent_sets
from raycloak.metrics.errors import ConfigError, ProtocolError, RefusedError


@pytest.fixture
def files(tmp_path):
    (tmp_path / "run").mkdir()
    return BatchFiles(tmp_path / "run")


def sent(folder, *contents):
    paths = tuple(folder / f"{i}-{content.decode()}" for i, content in enumerate(contents))
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths


def test_batches_are_kept_in_their_order_and_named_once(files, tmp_path):
    given = sent(tmp_path, b"one", b"two")
    kept = files.keep(3, given)
    assert kept == (digest(b"one"), digest(b"two"))
    assert files.keep(3, given) == kept
    for path in given:
        path.unlink()
    assert files.read(3, kept) == (b"one", b"two")
    assert files.sets(3) == (kept,)
    assert files.sets(4) == ()
    other = files.keep(3, sent(tmp_path, b"two"))
    assert files.sets(3) == (kept, other), "what was charged once is still named"
    assert sent_sets((tmp_path / "run" / INDEX).read_bytes().splitlines()) == {3: (kept, other)}


def test_a_line_that_a_crash_cut_is_none_and_the_next_one_takes_its_place(files, tmp_path):
    first = files.keep(0, sent(tmp_path, b"one"))
    index = tmp_path / "run" / INDEX
    with index.open("ab") as file:
        file.write(index.read_bytes()[:20])
    assert (files.sets(0), files.sets(1)) == ((first,), ())
    second = files.keep(1, sent(tmp_path, b"two"))
    assert sent_sets(index.read_bytes().splitlines()) == {0: (first,), 1: (second,)}


def test_a_file_system_without_links_gets_copies(files, tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError

    monkeypatch.setattr(os, "link", refused)
    assert files.read(0, files.keep(0, sent(tmp_path, b"one"))) == (b"one",)


def test_an_altered_file_is_named_and_sent_again_it_is_whole(files, tmp_path):
    given = sent(tmp_path, b"one")
    kept = files.keep(0, given)
    path = tmp_path / "run" / FOLDER / f"{kept[0].hex()}.batch"
    path.unlink()
    path.write_bytes(b"other")
    with pytest.raises(RefusedError, match="batch_altered"):
        files.read(0, kept)
    assert files.read(0, files.keep(0, given)) == (b"one",)
    path.unlink()
    with pytest.raises(RefusedError, match="batch_missing"):
        files.read(0, kept)


def test_what_cannot_be_read_is_refused_by_name(files, tmp_path):
    with pytest.raises(RefusedError, match="batch_missing"):
        files.keep(0, (tmp_path / "nowhere",))
    (tmp_path / "run" / INDEX).write_bytes(b"{}\n")
    with pytest.raises(ConfigError, match="not_a_run"):
        files.sets(0)
    with pytest.raises(ProtocolError, match="malformed"):
        sent_sets([b'{"batches":[],"step":0}'])
