"""A dataset in memory becomes a file for local workers, whatever its tensors are; what it is not is said by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.config.sections import DPConfig
from raycloak.coordinator.runs.trainer import Trainer
from raycloak.metrics.errors import DatasetError, ModelError
from raycloak.workers.inputs.datasets import dataset_form
from raycloak.workers.inputs.in_memory import export_in_memory, require_first, unused_keys
from raycloak.workers.models.models import ModelSource
from tests.workers.inputs.given_dataset import Given


def exported(dataset: Any, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    found = export_in_memory(dataset, folder / "examples.npz").open(folder)
    return found.batch(np.arange(len(found)))


def refusal(dataset: Any, folder: Path) -> DatasetError:
    with pytest.raises(DatasetError) as caught:
        export_in_memory(dataset, folder / "examples.npz")
    assert not (folder / "examples.npz").exists()
    return caught.value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_any_float_of_torch_becomes_float32(dtype: torch.dtype, tmp_path: Path):
    values = torch.tensor([[0.5, -2.0], [1.0, 0.25]])
    features, labels = exported(TensorDataset(values.to(dtype), torch.tensor([0, 1])), tmp_path)
    assert (features.dtype, features.tolist(), labels.tolist()) == (np.float32, values.tolist(), [0, 1])


def test_a_tensor_of_a_graph_is_read_as_it_is(tmp_path: Path):
    values = torch.ones(3, 2, requires_grad=True) * 2
    assert exported(Given([(row, 0) for row in values]), tmp_path)[0].tolist() == [[2, 2]] * 3


def test_a_tensor_without_plain_numbers_is_refused_with_a_code(tmp_path: Path):
    error = refusal(Given([(torch.eye(2).to_sparse(), 0)]), tmp_path)
    assert (error.code, "sparse" in error.message, "to_dense" in error.remedy) == ("dataset_dtype", True, True)
    assert refusal(Given([(torch.ones(2, dtype=torch.complex64), 0)]), tmp_path).code == "dataset_dtype"


def test_a_loader_is_told_to_give_its_dataset(tmp_path: Path):
    dataset = TensorDataset(torch.ones(4, 2), torch.zeros(4, dtype=torch.int64))
    error = refusal(DataLoader(dataset, batch_size=2), tmp_path)
    assert error.code == "dataset_array"
    assert "a DataLoader is not a map-style dataset" in error.message
    assert "loader.dataset" in error.remedy
    assert "loader" not in refusal(iter([1]), tmp_path).remedy


@pytest.mark.parametrize(
    ("bad", "code", "said"),
    [
        ((1.0, None), "dataset_dtype", "example 2 of the dataset has a value of type NoneType where numbers belong."),
        ((1.0, "yes"), "dataset_dtype", "example 2 of the dataset has a value of type str where numbers belong."),
        ((["a", "b"], 0), "dataset_dtype", "example 2 of the dataset has a list of str_ where numbers belong."),
        (([[1.0], [1.0, 2.0]], 0), "dataset_array", "example 2 of the dataset has lists of different lengths."),
        ((1.0, 0, 7), "dataset_array", "example 2 of the dataset is not a pair."),
        ({"label": None, "x": 1.0}, "dataset_array", "example 2 of the dataset has no labels, or nothing beside them."),
        ({"input_ids": [1]}, "dataset_array", "example 2 of the dataset has no input_ids or no labels."),
        (
            {"input_ids": [1], "token_type_ids": [1], "label": 0},
            "dataset_array",
            "example 2 of the dataset has token types other than 0, which have no place in its features.",
        ),
    ],
)
def test_the_one_example_that_is_none_is_named(bad: Any, code: str, said: str, tmp_path: Path):
    error = refusal(Given([(1.0, 0), (2.0, 1), bad, bad]), tmp_path)
    assert (error.code, error.message) == (code, said)


class Failing(Given):
    """A dataset that fails at one example."""

    def __getitem__(self, index: int) -> Any:
        return {"x": self._items[index]}["y" if index == 2 else "x"]


def test_a_failure_of_the_dataset_has_a_code_and_names_the_example(tmp_path: Path):
    error = refusal(Failing([(1.0, 0)] * 4), tmp_path)
    assert error.code == "dataset_function"
    assert error.message == "example 2 of the dataset fails with KeyError: 'y'."
    assert isinstance(error.__cause__, KeyError)


def test_pixels_may_have_labels_of_their_own(tmp_path: Path):
    masks = torch.arange(2 * 4 * 4).reshape(2, 4, 4) % 3
    _, labels = exported(TensorDataset(torch.ones(2, 1, 4, 4), masks), tmp_path)
    assert labels.tolist() == masks.tolist()


def test_a_void_example_is_refused_here_unless_the_dataset_allows_it(tmp_path: Path):
    items = [(np.array([1.0, np.nan]), 0), (np.array([1.0, 2.0]), 1)]
    assert refusal(Given(items), tmp_path).code == "dataset_void"
    described = export_in_memory(Given(items, allow_void=True), tmp_path / "examples.npz")
    assert described.allow_void
    assert dataset_form(described.open(tmp_path)).feature_shape == (2,)


def test_what_a_tokenised_example_has_beside_its_ids_is_named(tmp_path: Path):
    item = {"input_ids": [1, 2], "attention_mask": [1, 0], "labels": 1, "text": "secret", "idx": 3}
    dataset = Given([item, item], vocabulary=9)
    features, labels = exported(dataset, tmp_path)
    assert (features.tolist(), labels.tolist()) == ([[1, -1]] * 2, [1, 1])
    assert unused_keys(dataset) == ("idx", "text")
    assert unused_keys(Given([(1, 2)])) == ()


@pytest.mark.parametrize(
    ("dataset", "code"),
    [
        (DataLoader(TensorDataset(torch.ones(4, 2), torch.zeros(4))), "dataset_array"),
        (Given([]), "dataset_empty"),
        (Given([(torch.ones(2), 0, 1)]), "dataset_array"),
        (Given([(torch.ones(2), "yes")]), "dataset_dtype"),
        (Given([(torch.ones(2), None)]), "dataset_dtype"),
        (Given([{"input_ids": [1, 2]}]), "dataset_array"),
    ],
)
def test_a_program_is_told_of_its_first_example_before_a_cluster_starts(dataset: Any, code: str, tmp_path: Path):
    assert refusal(dataset, tmp_path).code == code
    settings = RunConfig(expected_batch_size=1, steps=1, dp_config=DPConfig(target_epsilon=1.0))
    doors = (
        lambda: require_first(dataset),
        lambda: Trainer(settings, model_init_fn=lambda: torch.nn.Linear(2, 2), train_dataset=dataset),
    )
    for door in doors:
        with pytest.raises(DatasetError) as caught:
            door()
        assert caught.value.code == code
    require_first(Given([(torch.ones(2), 0), "no example, and not looked at"]))


def test_a_program_that_gives_a_module_is_told_to_give_its_function():
    for given in (torch.nn.Linear(2, 2), 3):
        with pytest.raises(ModelError, match=f"model_function: {type(given).__name__} is a"):
            ModelSource.of(given)
