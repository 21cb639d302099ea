"""Rows beyond memory give the bytes that rows in memory give, and nobody reads or changes them on the disk."""

import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from raycloak.metrics.errors import DatasetError
from raycloak.workers.inputs import rows
from raycloak.workers.inputs.datasets import Batch, Dataset, dataset_form, slice_digest
from raycloak.workers.inputs.rows import ScratchDataset, gathered, in_turn


def chunks(count: int, width: int = 5, of: int = 37, dtype: Any = np.float32) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(2)
    features = (rng.normal(size=(count, width)) * 50).astype(dtype)
    labels = rng.integers(0, 9, count)
    return [(features[start : start + of], labels[start : start + of]) for start in range(0, count, of)]


def both(given: list[tuple[np.ndarray, np.ndarray]], monkeypatch: pytest.MonkeyPatch, **how: Any) -> list[Dataset]:
    in_memory = gathered(given, "rows", **how)
    monkeypatch.setattr(rows, "MEMORY_BYTES", 400)
    scratch = gathered(given, "rows", **how)
    assert isinstance(scratch, ScratchDataset)
    assert not isinstance(in_memory, ScratchDataset)
    return [in_memory, scratch]


@pytest.mark.parametrize("width", [1, 5, 3000])
@pytest.mark.parametrize(
    ("dtype", "how"), [(np.float32, {}), (np.uint8, {"scale": 3.0}), (np.int16, {"numbers": True})]
)
def test_the_same_examples_give_the_same_bytes_in_memory_and_in_a_scratch_file(width, dtype, how, monkeypatch):
    pair = both(chunks(1000, width, dtype=dtype), monkeypatch, **how)
    assert dataset_form(pair[0]) == dataset_form(pair[1])
    drawn = np.random.default_rng(1).integers(0, 1000, 90)
    for ids in (np.arange(1000), np.arange(3, 1000, 8), drawn, drawn[:0], np.full(4, 999)):
        one, other = (dataset.batch(ids) for dataset in pair)
        assert [part.dtype for part in one] == [part.dtype for part in other]
        assert [part.tobytes() for part in one] == [part.tobytes() for part in other]
    assert len({slice_digest(dataset, np.arange(1, 1000, 3)) for dataset in pair}) == 1


def test_labels_of_several_numbers_and_images_keep_their_shapes(monkeypatch):
    pixels = np.arange(2 * 3 * 4 * 60, dtype=np.uint8).reshape(60, 2, 3, 4)
    targets = np.arange(120.0).reshape(60, 2)
    one, other = both([(pixels[:50], targets[:50]), (pixels[50:], targets[50:])], monkeypatch)
    for first, second in zip(one.batch(np.array([55, 2])), other.batch(np.array([55, 2])), strict=True):
        assert np.array_equal(first, second)
        assert first.shape == second.shape


def test_a_scratch_file_has_no_name_and_shows_no_example(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(rows, "MEMORY_BYTES", 100)
    marker = np.full((200, 8), 0x5EC12E75, np.uint32)
    dataset = gathered([(marker, np.zeros(200))], "rows")
    assert isinstance(dataset, ScratchDataset)
    assert list(tmp_path.iterdir()) == []
    stored = os.pread(dataset._file.fileno(), 2**20, 0)
    assert len(stored) > marker.nbytes
    assert marker[0].tobytes()[:8] not in stored


def test_every_read_returns_the_bytes_that_were_written_or_is_refused(monkeypatch):
    monkeypatch.setattr(rows, "MEMORY_BYTES", 100)
    dataset = gathered(chunks(3000), "rows")
    assert isinstance(dataset, ScratchDataset)
    descriptor, first = dataset._file.fileno(), os.pread(dataset._file.fileno(), 20_000, 0)
    block = dataset._rows * dataset._record + rows._TAG
    swapped = os.pread(descriptor, block, block)
    for change in (bytes([first[9] ^ 1]), swapped):
        os.pwrite(descriptor, change, 9 if len(change) == 1 else 0)
        with pytest.raises(DatasetError, match="data_changed"):
            dataset.batch(np.array([0]))
        os.pwrite(descriptor, first, 0)
        dataset.batch(np.array([0]))
    os.ftruncate(descriptor, len(first))
    with pytest.raises(DatasetError, match="data_changed"):
        dataset.batch(np.array([2999]))


def test_a_scratch_file_is_read_ahead_and_gives_the_bytes_of_memory(monkeypatch):
    groups = [np.arange(start, start + 7) for start in (0, 2990, 400)]
    in_memory = gathered(chunks(3000), "rows")
    monkeypatch.setattr(rows, "MEMORY_BYTES", 100)
    scratch = gathered(chunks(3000), "rows")
    started, read = {int(group[0]): threading.Event() for group in groups}, ScratchDataset.batch
    assert scratch.batch(groups[0][:0])[0].shape == in_memory.batch(groups[0][:0])[0].shape
    with pytest.raises(IndexError):
        list(in_turn(scratch, [groups[0], np.array([3000])]))

    def watched(dataset: ScratchDataset, ids: NDArray[np.int64]) -> Batch:
        started[int(ids[0])].set()
        return read(dataset, ids)

    monkeypatch.setattr(ScratchDataset, "batch", watched)
    found = in_turn(scratch, groups)
    expected = in_turn(in_memory, groups)
    for next_one in (*groups[1:], None):
        for part, other in zip(next(found), next(expected), strict=True):
            assert part.dtype == other.dtype
            assert part.tobytes() == other.tobytes()
        # While this thread does nothing.
        assert next_one is None or started[int(next_one[0])].wait(60)
    assert next(found, None) is None


def test_code_of_a_user_never_reads_beside_the_model():
    calls: list[int] = []

    class Own:
        def __len__(self) -> int:
            return 10

        def batch(self, ids: NDArray[np.int64]) -> Batch:
            calls.append(threading.get_ident())
            return np.zeros((len(ids), 1)), np.zeros(len(ids))

    batches = in_turn(Own(), [np.arange(3), np.arange(3)])
    next(batches)
    assert calls == [threading.get_ident()]
    assert len(list(batches)) == 1
    assert set(calls) == {threading.get_ident()}


def test_a_disk_that_is_full_is_named(monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rows, "MEMORY_BYTES", 100)
    monkeypatch.setattr(ScratchDataset, "_append", full)
    with pytest.raises(DatasetError, match=r"dataset_scratch: cannot write .*No space left.*Make room"):
        gathered(chunks(3000), "rows")


def test_a_dataset_without_rows_or_with_rows_of_other_shapes_is_refused():
    for given, code in (
        ([], "dataset_empty"),
        ([(np.empty((0, 2)), np.empty(0))], "dataset_empty"),
        ([(np.ones((2, 2)), np.ones(2)), (np.ones((2, 3)), np.ones(2))], "dataset_array"),
        ([(np.ones((2, 2)), np.ones(3))], "dataset_lengths"),
    ):
        with pytest.raises(DatasetError) as caught:
            gathered(given, "rows")
        assert caught.value.code == code
