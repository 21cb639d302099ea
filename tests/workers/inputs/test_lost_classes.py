"""No class of a folder of images is lost in silence: what is not read is counted, and one name has one class."""

import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycloak.metrics.errors import DatasetError
from raycloak.workers.inputs.descriptor import DatasetDescriptor


def described(**fields: Any) -> DatasetDescriptor:
    return DatasetDescriptor(**{"kind": "imagefolder", "path": "pets", "size": (4, 6), "scale": 255.0, **fields})


def save(folder: Path, *names: str) -> None:
    image_module = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    for name in names:
        path = folder / "pets" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            image_module.new("RGB", (6, 4)).save(file, "jpeg")


def labels_of(folder: Path, **fields: Any) -> list[int]:
    examples = described(**fields).open(folder)
    labels: list[int] = examples.batch(np.arange(len(examples)))[1].tolist()
    return labels


def test_a_picture_as_windows_saves_it_from_the_web_is_read(tmp_path: Path):
    save(tmp_path, "cat/a.jpg", "dog/a.jfif", "dog/b.JFIF", "horse/a.jpe")
    assert labels_of(tmp_path) == [0, 1, 1, 2]


def test_a_class_of_which_nothing_is_read_is_refused_and_gives_no_other_its_number(tmp_path: Path):
    save(tmp_path, "cat/a.jpg", "horse/a.jpg")
    dog = tmp_path / "pets" / "dog"
    dog.mkdir()
    with pytest.raises(DatasetError, match="folder 'dog' is empty"):
        described().open(tmp_path)
    # A split may lack a class that is listed.
    listed = ("cat", "dog", "horse")
    assert labels_of(tmp_path, class_names=listed) == [0, 2]
    for name in ("a.heic", "b.heic"):
        (dog / name).touch()
    for names in ((), listed):
        with pytest.raises(DatasetError, match=r"'dog' has no image that is read: 2 files are left out: 2 \.heic"):
            described(class_names=names).open(tmp_path)


def test_files_that_are_no_images_are_counted_by_their_endings(tmp_path: Path):
    save(tmp_path, "cat/a.jpg", "dog/a.jpg")
    assert described().open_slices(tmp_path).left_out == ()
    for name in (".DS_Store", "notes.txt", "cat/LICENSE"):
        (tmp_path / "pets" / name).touch()
    assert described().open_slices(tmp_path).left_out == (
        f"{tmp_path / 'pets'}: 3 files are left out: 1 .txt, 1 without an ending, 1 whose name starts with . or _",
    )


@pytest.mark.parametrize(("written", "listed"), [("NFD", "NFC"), ("NFC", "NFD")])
def test_a_folder_is_its_class_in_whichever_form_of_unicode_either_is_written(
    written: str, listed: str, tmp_path: Path
):
    folder, name = (unicodedata.normalize(form, "Müll") for form in (written, listed))
    save(tmp_path, f"{folder}/a.jpg", "Zug/a.jpg")
    assert sorted(labels_of(tmp_path, class_names=(name, "Zug"))) == [0, 1]
    opened = described().open_slices(tmp_path)
    assert opened.tokenizer == described(class_names=(name, "Zug")).open_slices(tmp_path).tokenizer, "one list"


def test_a_path_is_found_in_whichever_form_of_unicode_it_is_written(tmp_path: Path):
    composed, decomposed = (unicodedata.normalize(form, "größe") for form in ("NFC", "NFD"))
    for stored, asked in ((composed, decomposed), (decomposed, composed)):
        folder = tmp_path / unicodedata.name(stored[2]) / stored
        folder.mkdir(parents=True)
        (folder / f"{stored}.csv").write_text("a,labels\n1,0\n")
        for path in (asked, f"{asked}/{asked}.csv"):
            descriptor = DatasetDescriptor(kind="csv", path=path, features=())
            assert len(descriptor.open(folder.parent)) == 1
