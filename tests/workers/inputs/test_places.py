"""A place is one, however it is spelled, and two are two."""

import os
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raycloak.attestation.core.data_marks import MOST_PLACES, PLACE_BYTES, DataMarks, Likeness, joined, likeness
from raycloak.workers.inputs.descriptor import DatasetDescriptor
from raycloak.workers.inputs.fingerprint import data_marks
from raycloak.workers.inputs.places import file_places, path_place, remote_places


def marks(base: Path, **fields: Any) -> DataMarks:
    """What a dataset is known by once it was opened."""
    described = DatasetDescriptor(**fields)
    return data_marks(described, described.open_slices(base), base)


def parquet(base: Path, path: str) -> DataMarks:
    return marks(base, kind="parquet", path=path, features=("x",), labels="y")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Three parts in a folder, and code beside it."""
    (tmp_path / "parts").mkdir()
    for name in ("a", "b", "test"):
        pq.write_table(pa.table({"x": [1.0, 2.0], "y": [0, 1]}), tmp_path / "parts" / f"{name}.parquet")
    (tmp_path / "data.py").write_text(
        "import functools\n"
        "import numpy as np\n"
        "class Rows:\n"
        "    def __len__(self): return 4\n"
        "    def batch(self, ids): return np.stack([ids, ids], 1).astype(np.float32), ids % 2\n"
        "def train(): return Rows()\n"
        "def test(): return Rows()\n"
        "def of(part): return lambda: Rows()\n"
        "train_again = train\n"
        "kept = functools.cache(train)\n"
        "one, other = of(1), of(2)\n"
        "half, rest = functools.partial(Rows), functools.partial(Rows)\n"
    )
    return tmp_path


def test_guarantee_a_folder_a_pattern_a_link_and_another_folder_of_a_project_name_one_place(base: Path):
    os.link(base / "parts" / "a.parquet", base / "hard.parquet")
    (base / "soft").symlink_to(base / "parts")
    (base / "deep").mkdir()
    spelled = ["parts", "parts/", "./parts", "parts/*.parquet", "parts/a.parquet", "parts/[a].parquet", "soft"]
    spelled += ["hard.parquet", str(base / "parts"), f"file://{base / 'parts'}", "deep/../parts/a*"]
    first = parquet(base, "parts")
    assert {likeness(parquet(base, path), first) for path in spelled} == {Likeness.PLACE}
    assert likeness(parquet(base / "deep", "../parts"), first) is Likeness.PLACE
    one, two = parquet(base, "parts/a.parquet"), parquet(base, "parts/test.parquet")
    assert likeness(one, two) is None, "two files of a folder are two places"


def test_a_file_that_takes_the_place_of_a_removed_one_is_another_file_but_for_its_path(base: Path):
    """A file system soon gives the number of a removed file to another one."""
    path, status = base / "parts" / "a.parquet", (base / "parts" / "a.parquet").stat()
    before = file_places([path])
    os.utime(path, ns=(time.time_ns(), status.st_mtime_ns + 10**9))
    assert len(before & file_places([path])) == 1
    path.rename(base / "moved.parquet")
    assert not before & file_places([base / "moved.parquet"])


def test_guarantee_a_bucket_is_one_place_whatever_is_said_of_it_and_wherever(base: Path):
    same = {
        path_place(path, folder)
        for folder in (base, base / "deep")
        for path in (
            "s3://hospital/patients",
            "s3://hospital/patients/",
            "s3://hospital/./patients",
            "S3://hospital//patients?region=eu-west-1",
            "s3://key:secret@hospital/patients?endpoint_override=localhost:9000&scheme=http",
        )
    }
    assert len(same) == 1
    assert same == remote_places("s3", ["hospital/patients"])
    others = {
        path_place(path, base) for path in ("s3://hospital/nurses", "s3://other/patients", "gs://hospital/patients")
    }
    assert len(others | same) == 4
    assert path_place("gcs://b/c%20d", base) == path_place("gs://b/c d", base)


@pytest.mark.parametrize("name", ["train_again", "kept"])
def test_guarantee_a_function_under_two_names_is_one_place(base: Path, name: str):
    first = marks(base, kind="module", function="data:train")
    assert likeness(marks(base, kind="module", function=f"data:{name}"), first) is Likeness.PLACE
    assert likeness(marks(base, kind="module", function="data:test"), first) is None


@pytest.mark.parametrize("names", [("one", "other"), ("half", "rest")])
def test_functions_that_were_made_alike_are_two_places(base: Path, names: tuple[str, str]):
    first, second = (marks(base, kind="module", function=f"data:{name}") for name in names)
    assert likeness(first, second) is None


def test_a_pipeline_is_known_by_its_function_whichever_folder_it_wrote(base: Path):
    first, second, other = (
        DatasetDescriptor(kind="ray_data", path=folder, function=function, labels="y").named_places(base)
        for folder, function in (("built", "data:train"), ("built-2", "data:train"), ("built-3", "data:test"))
    )
    assert len(first & second) == 1
    assert not first & other


def test_the_parts_of_a_package_are_places_and_what_a_run_wrote_for_itself_is_none(base: Path):
    train, public = (DatasetDescriptor(kind="digits", split=split).named_places(base) for split in ("train", "public"))
    assert len(train) == len(public) == 1
    assert train != public
    for kind in ("memory", "canaries"):
        assert DatasetDescriptor(kind=kind, path="examples.npz").named_places(base) == frozenset()


def test_of_many_files_the_least_places_stand_for_all(tmp_path: Path):
    """Half of the files are recognised but with probability 2^-60, and so are all under another folder's name."""
    paths = [tmp_path / f"{number}.png" for number in range(300)]
    for path in paths:
        path.touch()
    every, half = file_places(paths), file_places(paths[::2])
    assert len(every) == MOST_PLACES - 4
    assert every & half
    (tmp_path / "copies").mkdir()
    for path in paths:
        os.link(path, tmp_path / "copies" / path.name)
    assert every & file_places((tmp_path / "copies").iterdir())
    whole = DataMarks(places=joined(every | {bytes(PLACE_BYTES)}))
    assert likeness(whole, DataMarks(places=joined(half))) is Likeness.PLACE
