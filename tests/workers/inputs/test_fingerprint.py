"""A dataset's fingerprint changes with every byte and with the key, and with nothing else."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycloak.metrics.errors import ConfigError, DatasetError
from raycloak.workers.inputs.descriptor import DatasetDescriptor
from raycloak.workers.inputs.fingerprint import dataset_fingerprint

KEY = "0f" * 32


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a folder with a dataset of two features and its key."""
    rng = np.random.default_rng(3)
    features, others = rng.integers(0, 255, (2, 50, 4), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", images=features, others=others, labels=rng.integers(0, 3, 50))
    write_key(tmp_path / "data.key", KEY)
    return tmp_path


def write_key(path: Path, text: str, mode: int = 0o600) -> None:
    path.touch(mode=mode)
    path.write_text(text + "\n")


def fingerprint(base: Path, **fields: Any) -> bytes:
    descriptor = DatasetDescriptor(**{"kind": "npz", "path": "data.npz", "fingerprint_key": "data.key"} | fields)
    return dataset_fingerprint(descriptor, descriptor.open_slices(base), base)


def test_a_file_has_one_fingerprint_wherever_it_lies_and_whatever_a_run_reads_of_it(base: Path):
    first = fingerprint(base)
    assert len(first) == 32
    (base / "elsewhere").mkdir()
    shutil.copy(base / "data.npz", base / "elsewhere" / "other.npz")
    for same in ({"path": "elsewhere/other.npz"}, {"scale": 255.0}, {"features": ("others",)}):
        assert fingerprint(base, **same) == first
    assert fingerprint(base, fingerprint_key=str(base / "data.key")) == first


def test_any_changed_byte_and_any_other_key_give_another_fingerprint(base: Path):
    seen = {fingerprint(base)}
    with np.load(base / "data.npz") as archive:
        arrays = dict(archive)
    arrays["images"][7, 2] ^= 1
    np.savez(base / "data.npz", **arrays)
    seen.add(fingerprint(base))
    write_key(base / "other.key", "0e" + KEY[2:])
    seen.add(fingerprint(base, fingerprint_key="other.key"))
    assert len(seen) == 3


def test_examples_of_a_function_are_read_one_and_all(base: Path):
    (base / "readings.py").write_text(
        "import numpy as np\n"
        "class Readings:\n"
        "    def __init__(self, last): self.last = last\n"
        "    def __len__(self): return 30\n"
        "    def batch(self, ids):\n"
        "        features = np.stack([ids, np.where(ids == 29, self.last, ids)], axis=1).astype(np.float32)\n"
        "        return features, (ids % 2).astype(np.int64)\n"
        "def one(): return Readings(0)\n"
        "def other(): return Readings(1)\n"
    )
    fields = {"kind": "module", "path": None}
    one, again, other = (fingerprint(base, function=f"readings:{name}", **fields) for name in ("one", "one", "other"))
    assert one == again != other


def test_without_a_key_there_is_none(base: Path):
    assert fingerprint(base, fingerprint_key=None) == b""


@pytest.mark.parametrize(
    ("text", "mode", "what"), [("ff", 0o600, "64 hex"), ("zz" * 32, 0o600, "64 hex"), (KEY, 0o644, "mode 0644")]
)
def test_a_key_that_is_none_or_that_others_can_read_is_refused(base: Path, text: str, mode: int, what: str):
    write_key(base / "bad.key", text)
    (base / "bad.key").chmod(mode)
    with pytest.raises(ConfigError, match=f"fingerprint_key: .*{what}"):
        fingerprint(base, fingerprint_key="bad.key")


def test_a_missing_key_or_file_is_named(base: Path):
    with pytest.raises(ConfigError, match="fingerprint_key: cannot read"):
        fingerprint(base, fingerprint_key="none.key")
    (base / "data.npz").unlink()
    with pytest.raises(DatasetError, match="dataset_unreadable"):
        fingerprint(base)


def test_where_the_key_lies_is_no_part_of_what_the_data_is():
    here = DatasetDescriptor(kind="npz", path="a.npz")
    assert here.identity_digest() == here.model_copy(update={"fingerprint_key": "k"}).identity_digest()
