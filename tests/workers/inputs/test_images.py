"""A folder of images: the class is the folder, every image has one size, and what cannot be decoded is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycloak.metrics.errors import ConfigError, DatasetError
from raycloak.workers.inputs import images
from raycloak.workers.inputs.datasets import Taken, dataset_form
from raycloak.workers.inputs.descriptor import DatasetDescriptor
from raycloak.workers.inputs.file_sets import FileSet
from raycloak.workers.inputs.fingerprint import data_marks
from raycloak.workers.inputs.inspection import images_by_name


def described(**fields: Any) -> DatasetDescriptor:
    return DatasetDescriptor(**{"kind": "imagefolder", "path": "pets", "size": (4, 6), "scale": 255.0, **fields})


def faulty(base: Path) -> dict[str, str]:
    return {name: each.fault for name, each in images_by_name(described(), base).items() if each.fault}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a folder of two classes, three images of other sizes and formats, and what is no image."""
    image_module = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    rng = np.random.default_rng(4)
    for name, shape in (("dogs/b.png", (4, 6, 3)), ("cats/9.jpg", (20, 30, 3)), ("dogs/a.bmp", (8, 8))):
        (tmp_path / "pets" / name).parent.mkdir(parents=True, exist_ok=True)
        image_module.fromarray(rng.integers(0, 255, shape, dtype=np.uint8)).save(tmp_path / "pets" / name)
    (tmp_path / "pets" / ".DS_Store").touch()
    (tmp_path / "pets" / "notes.txt").touch()
    return tmp_path


def write_names(folder: Path, *names: str) -> FileSet:
    for name in names:
        (folder / "pets" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "pets" / name).touch()
    return FileSet("pets", folder, images.SUFFIXES, hashed=False)


def test_images_come_by_class_and_name_in_one_size_between_0_and_1(base: Path):
    from PIL import Image

    dataset = described().open(base)
    features, labels = dataset.batch(np.arange(3))
    assert (features.shape, features.dtype, labels.tolist()) == ((3, 3, 4, 6), np.float32, [0, 1, 1])
    form = dataset_form(dataset)
    assert (form.feature_shape, form.label_shape, form.label_dtype) == ((3, 4, 6), (), "int64")
    exact = np.asarray(Image.open(base / "pets" / "dogs" / "b.png"), np.float32).transpose(2, 0, 1) / np.float32(255)
    assert np.array_equal(features[2], exact)
    grey = described(channels="grey", scale=1.0).open(base).batch(np.arange(3))[0]
    assert (grey.shape, grey.dtype, grey.max() > 1) == ((3, 1, 4, 6), np.float32, True)


def first_byte(file: Any, size: tuple[int, int], channels: str) -> np.ndarray:
    """Stand in for a decoder: the image of a file is its first byte."""
    return np.full((1, *size), file.read()[0], np.uint8)


def test_the_marks_have_every_pixel_every_byte_and_the_class_of_every_image(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(images, "decoded", first_byte)
    monkeypatch.setattr("raycloak.workers.inputs.descriptor.decoder_digest", lambda _: bytes(32))
    base = tmp_path
    for number, name in enumerate(write_names(base, "dogs/b.png", "cats/9.jpg", "dogs/a.bmp").names):
        (base / "pets" / name).write_bytes(bytes([number, 7]))
    (base / "data.key").touch(mode=0o600)
    (base / "data.key").write_text("0f" * 32)

    def content() -> tuple[bytes, bytes]:
        descriptor = described(fingerprint_key="data.key")
        opened = descriptor.open_slices(base)
        return data_marks(descriptor, opened, base).fingerprint, opened.file_digest

    seen = [content(), content()]
    # The images stay in their order: only the class of one is another.
    (base / "pets" / "dogs" / "a.bmp").rename(base / "pets" / "cats" / "a.bmp")
    seen.append(content())
    picture = base / "pets" / "cats" / "a.bmp"
    changed = bytearray(picture.read_bytes())
    changed[-1] ^= 1
    picture.write_bytes(changed)
    seen.append(content())
    assert (seen[0] == seen[1], len(set(seen))) == (True, 3)
    # A byte that no pixel comes of changes no example.
    assert seen[2][0] == seen[3][0] != seen[0][0]


@pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\n torn"])
def test_an_unreadable_image_is_refused_without_its_name(base: Path, content: bytes):
    (base / "pets" / "cats" / "mary.png").write_bytes(content)
    with pytest.raises(DatasetError, match=r"dataset_unreadable: .*folder 'cats'") as caught:
        described().open(base)
    assert "mary" not in str(caught.value)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_an_image_of_more_than_8_bits_is_refused_and_named_to_its_owner_alone(base: Path, dtype: type):
    from PIL import Image

    # A scan of 12 bits, of which Pillow would cut nearly all values to white.
    scan = np.linspace(0, 4095, 64).reshape(8, 8).astype(dtype)
    Image.fromarray(scan).save(base / "pets" / "cats" / "mary.tiff")
    with pytest.raises(DatasetError, match=r"dataset_dtype: .*folder 'cats', has more than 8 bits") as caught:
        described().open(base)
    assert "mary" not in str(caught.value)
    assert faulty(base) == {str(base / "pets" / "cats" / "mary.tiff"): images.TOO_DEEP}


def test_damaged_tags_are_no_fault_of_an_image(base: Path, monkeypatch: pytest.MonkeyPatch):
    from PIL import Image

    def damaged(self: Image.Image) -> Image.Exif:
        raise SyntaxError("not a TIFF file")

    Image.new("RGB", (4, 4)).save(base / "pets" / "cats" / "tagged.png")
    monkeypatch.setattr(Image.Image, "getexif", damaged)
    found = images_by_name(described(), base)[str(base / "pets" / "cats" / "tagged.png")]
    assert found == images.ImageFacts("")


def test_a_folder_that_is_not_there_is_said_so(base: Path):
    with pytest.raises(DatasetError, match=r"cannot read .*/pet: No such file or directory"):
        described(path="pet").open(base)


def test_the_decoder_and_the_classes_are_in_the_manifests_digest(base: Path):
    opened = described().open_slices(base)
    declared = described(class_names=("dogs", "cats")).open_slices(base)
    assert len(opened.tokenizer) == 32
    assert opened.tokenizer != declared.tokenizer
    assert declared.examples.batch(np.arange(3))[1].tolist() == [1, 0, 0]


def test_the_classes_are_the_sorted_folders_or_the_declared_list(tmp_path: Path):
    files = write_names(tmp_path, "b/1.png", "a/2.JPG", "a/notes.txt")
    assert files.names == ("a/2.JPG", "b/1.png")
    assert images.image_classes(files, ()) == ("a", "b")
    assert images.image_classes(files, ("b", "c", "a")) == ("b", "c", "a")
    with pytest.raises(DatasetError, match=r"dataset_label: .*folder 'b' is not in"):
        images.image_classes(files, ("a",))


@pytest.mark.parametrize("name", ["1.png", "a/b/1.png"])
def test_an_image_outside_a_folder_of_its_class_is_refused(tmp_path: Path, name: str):
    with pytest.raises(DatasetError, match=r"dataset_array: .*cats/1\.jpg"):
        images.image_classes(write_names(tmp_path, "a/1.png", name), ())


def test_rows_are_the_images_in_order_with_the_number_of_their_folder(tmp_path: Path, monkeypatch):
    names = [f"{folder}/{number:03d}.png" for folder in ("a", "b") for number in range(70)]
    files = write_names(tmp_path, *names)
    for number, name in enumerate(names):
        (tmp_path / "pets" / name).write_bytes(bytes([number]))

    monkeypatch.setattr(images, "decoded", first_byte)
    found = list(images.image_rows(files, ("b", "a"), (2, 3), "grey", Taken()))
    assert np.array_equal(np.concatenate([pixels for pixels, _ in found])[:, 0, 1, 2], np.arange(140))
    assert np.concatenate([labels for _, labels in found]).tolist() == [1] * 70 + [0] * 70


def test_without_pillow_the_extra_is_named(tmp_path: Path, monkeypatch):
    write_names(tmp_path, "a/1.png")
    monkeypatch.setattr(images, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"images_missing: .*pip install 'raycloak\[images\]'"):
        described().open(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path):
    (tmp_path / "pets").mkdir()
    with pytest.raises(DatasetError, match="dataset_unreadable"):
        described().open(tmp_path)
