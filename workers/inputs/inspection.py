"""Facts of a dataset that no example shows: how many texts are cut to their length, and what an image's file says.

Hides how each kind's source is read again for its owner. No worker uses it: its results are only for the owner.
"""

from pathlib import Path

import numpy as np

from raycloak.workers.inputs.datasets import Taken
from raycloak.workers.inputs.descriptor import DatasetDescriptor
from raycloak.workers.inputs.file_sets import FileSet
from raycloak.workers.inputs.images import SUFFIXES, ImageFacts, image_facts
from raycloak.workers.inputs.text_data import TEXT_SUFFIXES, Tokenizer, read_texts
from raycloak.workers.inputs.token_rows import row_lengths, token_files


def cut_examples(descriptor: DatasetDescriptor, base: Path) -> int | None:
    """Return how many examples of text are longer than ``max_length``; None for data that is never cut.

    Raises:
        ConfigError: as opening the dataset.
    """
    if descriptor.max_length is None or descriptor.kind == "text_blocks":
        return None
    assert descriptor.path is not None, "text has a path"
    if descriptor.kind == "hf":
        lengths = row_lengths(token_files(descriptor.path, base, hashed=False), descriptor)
    else:
        assert descriptor.tokenizer is not None, "text comes with a tokenizer"
        tokenizer = Tokenizer.load(descriptor.tokenizer, base)
        files = FileSet(descriptor.path, base, TEXT_SUFFIXES, hashed=False)
        texts = [read_texts(file, where, descriptor, Taken())[0] for where, file in files.opened()]
        lengths = np.concatenate([tokenizer.lengths(each) for each in texts])
    return int(np.count_nonzero(lengths > descriptor.max_length))


def images_by_name(descriptor: DatasetDescriptor, base: Path) -> dict[str, ImageFacts]:
    """Return the facts of each image by its name; none for other data."""
    if descriptor.kind != "imagefolder":
        return {}
    assert descriptor.path is not None, "images have a path"
    files = FileSet(descriptor.path, base, SUFFIXES, hashed=False)
    return {where: image_facts(file) for where, file in files.opened()}
