"""A run with every secret that a configuration can name, and those secrets as a search looks for them."""

import hashlib
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.serialization import load_der_private_key

from raycloak.attestation.core.messages import parse
from raycloak.attestation.simulators.tdx_vendor import VendorKeys
from raycloak.coordinator.runs.demo import demo_config
from tests.ray import leaks

# In two parts, so that no copy of this file holds one.
PASSWORD = "Planted-" + "pg-password"
WITNESS_PATH = "Planted-" + "witness-path"
# No bytes in a row, which a table of all bytes would have.
RUN_SECRET, FINGERPRINT_KEY = (hashlib.sha256(name).digest() for name in (b"run secret", b"fingerprint key"))


def inputs(parent: Path) -> Path:
    """Return a new folder with data and with each secret of a run in a file of its own."""
    folder = parent / "inputs"
    folder.mkdir()
    np.savez(folder / "data.npz", images=examples(), labels=np.arange(240) % 10)
    contents = {
        "run.secret": RUN_SECRET.hex(),
        "data.key": FINGERPRINT_KEY.hex(),
        "pgpass": f"*:*:*:*:{PASSWORD}\n",
    }
    for name, content in contents.items():
        (folder / name).touch(0o600)
        (folder / name).write_text(content)
    return folder


def examples() -> np.ndarray:
    """Return the private examples, (240, 64) float32."""
    return np.random.default_rng(5).random((240, 64), np.float32)


def config(folder: Path, postgres: str, witness: str, steps: int) -> dict:
    """Return the configuration of a run that uses all of `inputs`, with a ledger at ``postgres`` and a witness."""
    return demo_config() | {
        "num_workers": 2,
        "virtual_workers": 4,
        "steps": steps,
        "expected_batch_size": 80,
        "evaluation": None,
        "dataset": {"kind": "npz", "path": "data.npz", "fingerprint_key": "data.key"},
        "ledger": {"url": f"{postgres}&passfile={folder / 'pgpass'}", "witness": witness},
    }


def needles(home: Path) -> dict[str, bytes]:
    """Return what no process of Ray's may have, of a run whose state folder is ``home``."""
    return {
        "password of the ledger": PASSWORD.encode(),
        "path of the witness": WITNESS_PATH.encode(),
        **leaks.key_needles("run secret", RUN_SECRET),
        **leaks.key_needles("key of the fingerprint", FINGERPRINT_KEY),
        **leaks.key_needles("key of the simulated platforms", vendor_key(home / "simulator")),
        **leaks.array_needles("first example", examples()[0]),
        **leaks.array_needles("last example, float64", examples()[-1].astype(np.float64)),
    }


def vendor_key(folder: Path) -> bytes:
    """Return the number that is the private key of the simulated platforms' certificate authority."""
    keys = parse(VendorKeys, (folder / "vendor.json").read_bytes())
    return load_der_private_key(keys.platform_ca.key_pkcs8, None).private_numbers().private_value.to_bytes(32)
