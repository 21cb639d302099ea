"""Files that take another's place as a whole."""

from contextlib import suppress
from pathlib import Path

from raycloak.attestation.files.whole import whole_file, write_whole


def test_no_reader_sees_a_part_of_a_file_and_a_failure_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")
    with suppress(RuntimeError), whole_file(path) as file:
        file.write(b"half")
        file.flush()
        assert path.read_bytes() == b"old"
        raise RuntimeError
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"
    with whole_file(path, 0o600) as file:
        file.write(b"new")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o600)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
