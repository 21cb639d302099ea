"""Tables on S3 give the examples and the fingerprint of those on a disk, and no message tells a credential."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from raycloak.coordinator.config.sections import DatasetConfig
from raycloak.coordinator.planning.references import descriptor
from raycloak.metrics.errors import DatasetError
from raycloak.workers.inputs.datasets import slice_digest
from raycloak.workers.inputs.fingerprint import data_marks
from tests.coordinator.checkpoints.test_storage import needs_moto


def facts(base: Path, path: str) -> tuple[bytes, bytes]:
    described = descriptor(DatasetConfig(kind="parquet", path=path, fingerprint_key="data.key"))
    opened = described.open_slices(base)
    everything = np.arange(len(opened.examples))
    return slice_digest(opened.examples, everything), data_marks(described, opened, base).fingerprint


@needs_moto
def test_csv_and_tokenised_text_are_read_from_s3_with_and_without_a_fingerprint(tmp_path: Path, bucket_urls):
    (tmp_path / "data.key").touch(mode=0o600)
    (tmp_path / "data.key").write_text("0f" * 32)
    (tmp_path / "rows.csv").write_text("a,b,labels\n1,2.5,0\n3,4,1\n")
    pq.write_table(pa.table({"input_ids": [[1, 2], [3]], "labels": [0, 1]}), tmp_path / "rows.parquet")
    url = next(bucket_urls)
    filesystem, root = fs.FileSystem.from_uri(url)
    for name in ("rows.csv", "rows.parquet"):
        with filesystem.open_output_stream(f"{root}/{name}") as stream:
            stream.write((tmp_path / name).read_bytes())
    stem, _, query = url.partition("?")
    kinds = {"rows.csv": {"kind": "csv"}, "rows.parquet": {"kind": "hf", "max_length": 3, "vocabulary": 9}}
    for name, fields in kinds.items():
        found = set()
        for path in (name, f"{stem}/{name}?{query}"):
            for key in (None, "data.key"):
                part = DatasetConfig.model_validate({**fields, "path": path, "fingerprint_key": key})
                found.add(slice_digest(descriptor(part).open(tmp_path), np.arange(2)))
        assert len(found) == 1


@needs_moto
def test_tables_on_s3_are_those_on_a_disk(tmp_path: Path, bucket_urls):
    (tmp_path / "data").mkdir()
    (tmp_path / "data.key").touch(mode=0o600)
    (tmp_path / "data.key").write_text("0f" * 32)
    url = next(bucket_urls)
    filesystem, root = fs.FileSystem.from_uri(url)
    for part in range(3):
        file = tmp_path / "data" / f"part-{part}.parquet"
        rng = np.random.default_rng(part)
        pq.write_table(pa.table({"a": rng.normal(size=9), "b": rng.normal(size=9), "labels": np.arange(9)}), file)
        with filesystem.open_output_stream(f"{root}/data/part-{part}.parquet") as stream:
            stream.write(file.read_bytes())
    stem, _, query = url.partition("?")
    one = "data/part-1.parquet"
    for on_disk, below in (("data", "data"), (one, one), ("data", "data/*.parquet")):
        assert facts(tmp_path, f"{stem}/{below}?{query}") == facts(tmp_path, on_disk)
    for wrong in (f"{stem}/none?{query}", f"{stem.replace('packages', 'none')}/data?{query}"):
        with pytest.raises(DatasetError) as caught:
            facts(tmp_path, wrong)
        assert caught.value.code == "dataset_unreadable"
        assert "secret" not in str(caught.value)
        assert query not in str(caught.value)
