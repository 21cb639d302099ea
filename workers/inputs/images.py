"""A folder of images as examples: one folder for each class, as ``cats/1.jpg``.

Hides how a file becomes pixels: decoding, channels and size. Pillow, the extra ``images``, does this; it is imported
when the first image is decoded.

An example is uint8 [channels, height, width]. Its label is the place of its folder among the classes. The order is by
class, then by name. Frames beyond the first and the orientation that a camera noted are ignored. An image of more than
8 bits a channel in one channel, as scanners write them, is refused: Pillow would cut each larger value to white.
"""

import io
import unicodedata
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import PurePosixPath
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.metrics.errors import ConfigError, DatasetError
from raycloak.workers.inputs.datasets import Arrays, Taken
from raycloak.workers.inputs.file_sets import FileSet, left_out_text
from raycloak.workers.inputs.unit_names import unit_names

Channels = Literal["grey", "rgb"]
TOO_DEEP = "has more than 8 bits a channel"
DEPTH_REMEDY = "Bring its values to 0 .. 255 by public bounds, or give arrays (kind npz)."
SUFFIXES = (
    *(".bmp", ".gif", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"),
    *(".jpg", ".jpeg", ".jpe", ".jfif"),  # one format: a browser on Windows saves pictures as .jfif
)

# Images of one chunk: bounds the memory beside the rows.
_CHUNK = 64
_CHANNELS = {"grey": 1, "rgb": 3}
# Of Pillow's names for how pixels are kept.
_MODES = {"grey": "L", "rgb": "RGB"}
# The modes of more than 8 bits start so: I;16, I;16B, I, F.
_DEEP = ("I", "F")
# Of EXIF: the tag of a camera's orientation, and its values for a picture that is shown turned or mirrored.
_ORIENTATION = 0x0112
_TURNED = range(2, 9)


class DeepImageError(Exception):
    """An image of more than 8 bits a channel."""


def image_classes(files: FileSet, declared: tuple[str, ...], unit: str | None = None) -> tuple[str, ...]:
    """Return the public list of classes: the declared one, or else the sorted names of the folders.

    Names are in one form of Unicode: an umlaut may be written as one letter or as two.

    Args:
        unit: if there are any, each image lies in a folder of its unit below that of its class.

    Raises:
        DatasetError: ``dataset_array`` if an image lies in no folder of a class, or a folder has none that is read;
            ``dataset_label`` if a folder is not in the declared list.
    """
    depth = 2 if unit is None else 3
    deep = next((name for name in files.names if len(PurePosixPath(name).parts) != depth), None)
    if deep is not None and unit is not None:
        raise DatasetError(
            "dataset_unit",
            f"{files.text} has images that are not in a folder of their {unit} in a folder of their class.",
            "Put each image of one into one folder of its name, such as cats/17/1.jpg, in each class that it has.",
        )
    if deep is not None:
        raise DatasetError(
            "dataset_array",
            f"{files.text} has images that are not in a folder of their class.",
            "Put each image into a folder that is named after its class, such as cats/1.jpg.",
        )
    found = sorted({class_of(name) for name in files.names})
    _require_no_lost_class(files, set(found), declared)
    classes = tuple(unicodedata.normalize("NFC", name) for name in declared)
    unknown = [name for name in found if classes and name not in classes]
    if unknown:
        raise DatasetError(
            "dataset_label", f"{files.text}: folder '{unknown[0]}' is not in dataset.classes.", "Complete the list."
        )
    return classes or tuple(found)


def class_of(name: str) -> str:
    """Return the class of an image by its name below the dataset's folder."""
    return unicodedata.normalize("NFC", PurePosixPath(name).parts[0])


def _require_no_lost_class(files: FileSet, found: set[str], declared: tuple[str, ...]) -> None:
    """Refuse a folder that would be no class because nothing in it is read: the next class would take its number."""
    inside = [name for name in files.left_out if len(PurePosixPath(name).parts) > 1 and not name.startswith((".", "_"))]
    lost = next((name for name in inside if class_of(name) not in found), None)
    if lost is not None:
        folder = PurePosixPath(lost).parts[0]
        own = [name for name in inside if PurePosixPath(name).parts[0] == folder]
        raise DatasetError(
            "dataset_array",
            f"{files.text}: folder '{folder}' has no image that is read: {left_out_text(own)}.",
            f"Read are {', '.join(SUFFIXES)}. Convert the images, or move the folder away.",
        )
    # A split may lack images of a class that is listed.
    if files.empty and not declared:
        raise DatasetError(
            "dataset_array",
            f"{files.text}: folder '{files.empty[0]}' is empty, so it would be no class.",
            "List all classes in dataset.classes, or remove the folder.",
        )


def image_rows(
    files: FileSet, classes: tuple[str, ...], size: tuple[int, int], channels: Channels, taken: Taken
) -> Iterator[Arrays]:
    """Yield pixels [n, channels, height, width], uint8, and class numbers [n], in chunks.

    Args:
        size: height and width; an image of another size is resized, whatever its proportions.
        taken: gets the units: images in folders of one name are one, whatever their class.

    Raises:
        DatasetError: ``dataset_unreadable`` for a file that is no image, ``dataset_dtype`` for one of more than 8 bits
            a channel; its name stays here, since it may tell of a person.
    """
    if taken.units is not None:
        folders = [PurePosixPath(name).parts[1] for name in files.names]
        taken.units.add(unit_names(folders, f"{files.text}, the folders below those of the classes"))
    pixels: list[NDArray[np.uint8]] = []
    labels: list[int] = []
    for name, (_, file) in zip(files.names, files.opened(), strict=True):
        folder = PurePosixPath(name).parts[0]
        try:
            pixels.append(decoded(file, size, channels))
        except DeepImageError:
            raise DatasetError(
                "dataset_dtype",
                f"an image in {files.text}, folder '{folder}', {TOO_DEEP}, and 8 are read.",
                f"{DEPTH_REMEDY} 'raycloak data check' names it, on the owner's machine.",
            ) from None
        except Exception:  # noqa: BLE001 - a damaged image raises what the decoder of its format raises
            raise DatasetError(
                "dataset_unreadable",
                f"an image in {files.text}, folder '{folder}', cannot be decoded.",
                "'raycloak data check' names it, on the owner's machine.",
            ) from None
        labels.append(classes.index(class_of(name)))
        if len(pixels) == _CHUNK:
            yield np.stack(pixels), np.array(labels, np.int64)
            pixels, labels = [], []
    if pixels:
        yield np.stack(pixels), np.array(labels, np.int64)


def decoded(file: BinaryIO, size: tuple[int, int], channels: Channels) -> NDArray[np.uint8]:
    """Return one image as [channels, height, width]; DeepImageError for one of more than 8 bits a channel."""
    image_module = _pillow()
    # All bytes at once: a decoder may read a file lazily, and after it was closed.
    with image_module.open(io.BytesIO(file.read())) as image:
        if image.mode.startswith(_DEEP):
            raise DeepImageError
        plain = image.convert(_MODES[channels])
    height, width = size
    if plain.size != (width, height):
        plain = plain.resize((width, height), image_module.Resampling.BILINEAR)
    pixels = np.asarray(plain, np.uint8).reshape(height, width, _CHANNELS[channels])
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """Facts of one image that its pixels do not show.

    Attributes:
        fault: why the file is not read as an image, to follow its name; empty for one that is.
        turned: whether a camera noted that it is shown turned or mirrored.
        several: whether it has frames or pages beyond the first.
    """

    fault: str
    turned: bool = False
    several: bool = False


def image_facts(file: BinaryIO) -> ImageFacts:
    """Return what is wrong with a file as an image, and what is ignored in it."""
    image_module = _pillow()
    try:
        with image_module.open(io.BytesIO(file.read())) as image:
            image.load()
            turned = False
            # Damaged tags raise what they like, and no pixel depends on them.
            with suppress(Exception):
                turned = image.getexif().get(_ORIENTATION) in _TURNED
            # Only formats that may have several frames count them.
            several = getattr(image, "n_frames", 1) > 1
            return ImageFacts(TOO_DEEP if image.mode.startswith(_DEEP) else "", turned, several)
    except Exception:  # noqa: BLE001 - as in :func:`image_rows`
        return ImageFacts("is no image, or damaged")


def decoder_digest(classes: tuple[str, ...]) -> bytes:
    """Return a SHA-256 of all beside the files that decides which examples they give.

    Two versions of a decoder may give other pixels. Workers whose digests differ do not train together.
    """
    image_module = _pillow()
    from PIL import features

    codecs = [f"{codec} {features.version(codec)}" for codec in ("jpg", "libjpeg_turbo", "zlib", "webp", "libtiff")]
    return digest(length_prefixed("raycloak/images/v1", image_module.__version__, *codecs, *classes))


def _pillow() -> Any:
    if find_spec("PIL") is None:
        raise ConfigError("images_missing", "images need Pillow.", "On every node, run: pip install 'raycloak[images]'")
    from PIL import Image

    return Image
