"""Pipelines of Ray Data: the order of their rows, and a whole build on a Ray of its own."""

import json
import random
import stat
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raycloak.coordinator.cluster.pipelines import _ORDER, build_folder, with_order
from raycloak.coordinator.config.run import load_config
from raycloak.coordinator.planning.references import descriptor
from raycloak.metrics.errors import ConfigError, DatasetError
from raycloak.workers.inputs.built_rows import PipelineIndex
from tests.test_snippets import ROOT, blocks_of

# What a task calls: it fails where another process of the user could read the rows.
NEIGHBOUR = """
from tests.private_memory import memory_is_private


def share(age):
    assert memory_is_private()
    return age / 100
"""


def ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = with_order(pa.Table.from_pylist(rows)).sort_by(_ORDER).drop(_ORDER).to_pylist()
    return found


def test_the_order_of_rows_follows_from_their_content_alone():
    rows = [{"a": number / 7, "b": [number, 1], "c": str(number)} for number in range(50)]
    mixed = random.Random(1).sample(rows, len(rows))
    assert ordered(rows) == ordered(mixed)
    assert sorted(ordered(rows), key=lambda row: row["a"]) == rows
    assert ordered(rows) != rows


def test_numpy_rows_become_lists_and_tensors_are_refused():
    vectors, images = (np.arange(count).reshape(shape) for count, shape in ((6, (3, 2)), (12, (3, 2, 2))))
    for kind in (pa.FixedShapeTensorArray.from_numpy_ndarray,):
        table = with_order(pa.table({"a": kind(vectors)}))
        assert table.column("a").to_pylist() == vectors.tolist()
        with pytest.raises(DatasetError, match="dataset_array: column 'a'"):
            with_order(pa.table({"a": kind(images)}))


def test_a_build_replaces_no_folder(tmp_path: Path):
    (tmp_path / "built").mkdir()
    with pytest.raises(ConfigError, match="built_exists"):
        build_folder("pipeline:rows", tmp_path, tmp_path / "built")


def test_guarantee_a_pipeline_runs_on_a_ray_of_its_own_and_leaves_its_rows_alone(run_python):
    """A build ignores the cluster that is there: the rows of its owner must enter no shared object store."""
    pytest.importorskip("pandas", reason="needs pandas (pip install 'raycloak[data]')")
    folder = run_python.folder
    blocks = blocks_of((ROOT / "docs" / "data.md").read_text(), "docs/data.md")
    (pipeline,) = (block.body for block in blocks if block.language == "python" and "ray.data" in block.body)
    # Tasks find what stands beside the pipeline, too.
    (folder / "neighbour.py").write_text(NEIGHBOUR)
    (folder / "pipeline.py").write_text(
        pipeline.replace('row["age"] / 100', 'neighbour.share(row["age"])') + "\n\nimport neighbour\n"
    )
    ages = list(range(15, 50))
    (folder / "patients.csv").write_text("age,ill\n" + "".join(f"{age},{age % 2}\n" for age in ages))
    (dataset,) = (block.body for block in blocks if block.language == "yaml" and "ray_data" in block.body)
    (folder / "config.yaml").write_text(
        f"{dataset}\nmodel: models:none\nexpected_batch_size: 10\ndp_config: {{noise_multiplier: 2, epsilon_cap: 8}}\n"
    )
    # Sockets have short paths.
    with tempfile.TemporaryDirectory(prefix="rc") as scratch:
        nobody = {"RAY_ADDRESS": "192.0.2.1:6379", "TMPDIR": scratch}
        done = run_python("-m", "raycloak", "data", "build", "config.yaml", "--json", environment=nobody)
        assert done.code == 0, done.stderr[-3000:]
        assert list(Path(scratch).iterdir()) == []
    expected = [{"age": age / 100, "outcome": ["well", "ill"][age % 2]} for age in ages if age >= 18]
    built = folder / "patients-built"
    index, told = PipelineIndex.load(built), json.loads(done.stdout)
    assert (told["rows"], told["manifest_digest"]) == (len(expected), index.made_by().hex())
    assert stat.S_IMODE(built.stat().st_mode) == 0o700
    config = load_config(folder / "config.yaml")
    assert config.dataset is not None
    features, labels = descriptor(config.dataset).open(folder).batch(np.arange(len(expected)))
    assert features.tolist() == np.float32([row["age"] for row in ordered(expected)]).tolist()
    assert labels.tolist() == [["well", "ill"].index(row["outcome"]) for row in ordered(expected)]
