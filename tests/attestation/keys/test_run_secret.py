"""The run secret at rest, and the run id that follows from it."""

import os
import re
import stat

import pytest

from raycloak.attestation.core.keys import Secret
from raycloak.attestation.keys.run_secret import create_secret, destroy_secret, exposure, load_secret, run_id_of
from raycloak.metrics.errors import ConfigError


def test_a_file_of_64_hexadecimal_digits_is_read(tmp_path):
    for text in ("ab" * 32, "AB" * 32, f"  {'ab' * 32}\n"):
        (tmp_path / "secret").write_text(text)
        assert load_secret(tmp_path / "secret").reveal() == b"\xab" * 32


@pytest.mark.parametrize(
    "content", [b"", b"ab" * 31, b"ab" * 33, b"zz" * 32, b"ab" * 16 + b" " + b"ab" * 16, b"\xff" * 64]
)
def test_any_other_content_is_a_config_error_that_does_not_repeat_it(tmp_path, content):
    path = tmp_path / "secret"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load_secret(path)
    assert error.value.code == "run_secret"
    assert "abab" not in str(error.value)


def test_a_missing_file_or_a_folder_is_a_config_error(tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(ConfigError) as error:
            load_secret(path)
        assert error.value.code == "run_secret"
        assert re.search("No such file|Is a directory", error.value.message)


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)])
def test_a_secret_that_others_can_read_is_warned_of_and_used(tmp_path, mode, warned):
    path = tmp_path / "secret"
    path.write_text("ab" * 32)
    path.chmod(mode)
    warning = exposure(path)
    assert (warning is not None) == warned
    if warning is not None:
        assert warning.startswith(f"warning: {path} has mode {mode:04o}. ")
        assert warning.endswith(f"Run chmod 600 {path}")
        assert "abab" not in warning
    assert load_secret(path).reveal() == b"\xab" * 32


def test_of_a_secret_that_is_not_there_the_loader_speaks(tmp_path):
    assert exposure(tmp_path / "absent") is None


def test_the_run_id_follows_from_the_secret_alone():
    first, same, other = (Secret(byte * 32) for byte in (b"\xab", b"\xab", b"\xac"))
    assert run_id_of(first) == run_id_of(same) == "47b3e6261ff0043d"
    assert run_id_of(other) != run_id_of(first)


def test_a_created_secret_is_random_private_and_can_be_loaded(tmp_path):
    mask = os.umask(0)
    try:
        path, secret = create_secret(tmp_path)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.name == f"{run_id_of(secret)}.secret"
    assert load_secret(path).reveal() == secret.reveal()
    assert create_secret(tmp_path)[1].reveal() != secret.reveal()


def test_a_destroyed_secret_is_overwritten_and_gone(tmp_path):
    path, secret = create_secret(tmp_path)
    remains = tmp_path / "hard link"
    remains.hardlink_to(path)
    destroy_secret(path)
    assert not path.exists()
    assert secret.reveal().hex() not in remains.read_text()
    assert set(remains.read_bytes()) == {ord("0")}
