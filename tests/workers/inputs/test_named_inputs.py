"""Several inputs by name travel as one array of features, and a model gets each back, bit for bit."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

from raycloak.metrics.errors import ConfigError, DatasetError, ModelError
from raycloak.workers.gradients.gradient_parts import GradientParts
from raycloak.workers.gradients.model_checks import check_trainable
from raycloak.workers.gradients.probes import Probes, odd_ids
from raycloak.workers.inputs.datasets import DatasetForm, dataset_form
from raycloak.workers.inputs.descriptor import DatasetDescriptor
from raycloak.workers.inputs.in_memory import export_in_memory
from raycloak.workers.inputs.named_inputs import InputSource, NamedInput, outlined, packed, unpacked
from raycloak.workers.models.fed_by_name import fed_by_name
from raycloak.workers.models.losses import cross_entropy
from raycloak.workers.models.models import trainable_tensors
from tests.workers.inputs.given_dataset import Given

INPUTS = (
    NamedInput(name="ids", shape=(3,), dtype="int64", vocabulary=50),
    NamedInput(name="t", shape=(), dtype="float32"),
    NamedInput(name="x", shape=(2, 2), dtype="float32"),
)
WIDTH = 3 + 1 + 4


def parts_of(count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {
        "x": rng.normal(size=(count, 2, 2)).astype(np.float32),
        "t": rng.normal(size=count).astype(np.float32),
        "ids": rng.integers(0, 50, (count, 3)),
    }


class Several(nn.Module):
    """A model of three inputs by name."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 4)
        self.head = nn.Linear(4 + 1 + 4, 3)
        self._mixes = mixes

    def forward(self, x: Tensor, t: Tensor, ids: Tensor) -> Tensor:
        joined = torch.cat([self.words(ids).mean(1), t[:, None], x.flatten(1)], dim=1)
        return self.head(joined - joined.mean(0) if self._mixes else joined)


def form_of(inputs: tuple[NamedInput, ...]) -> DatasetForm:
    return DatasetForm(
        num_examples=9,
        feature_shape=(1, WIDTH),
        feature_dtype="int64",
        label_shape=(),
        label_dtype="int64",
        inputs=inputs,
    )


def test_guarantee_packing_loses_nothing():
    parts = parts_of(5)
    # Numbers whose bits a conversion would change.
    parts["x"].reshape(-1)[:6] = [np.nan, -0.0, np.inf, -np.inf, 1e-45, 3.4e38]
    parts["ids"][0] = [-1, 2**40, 0]
    found = packed(parts, INPUTS)
    assert (found.shape, found.dtype) == ((5, 1, WIDTH), np.int64)
    for name, part in unpacked(found, INPUTS).items():
        assert part.dtype == parts[name].dtype
        assert part.tobytes() == parts[name].tobytes()
    assert packed(parts_of(0), INPUTS).shape == (0, 1, WIDTH)


def test_a_model_gets_its_inputs_by_name_and_keeps_the_names_of_its_parameters():
    parts, model = parts_of(4), Several()
    expected = model(**{name: torch.from_numpy(part) for name, part in parts.items()})
    names = trainable_tensors(model)
    fed = fed_by_name(model, INPUTS)
    assert fed is model
    assert trainable_tensors(fed) == names
    assert torch.equal(fed(torch.from_numpy(packed(parts, INPUTS))), expected)
    # Who calls it with the inputs themselves goes on to.
    assert torch.equal(fed(**{name: torch.from_numpy(part) for name, part in parts.items()}), expected)
    assert fed_by_name(nn.Linear(1, 1), ())._forward_pre_hooks == {}


def test_an_examples_gradient_is_that_of_a_model_with_one_tensor():
    torch.manual_seed(0)
    parts, model = parts_of(6), Several()
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    found = GradientParts(fed_by_name(model, INPUTS), cross_entropy)(torch.from_numpy(packed(parts, INPUTS)), labels)
    alone = []
    for row in range(6):
        model.zero_grad()
        one = {name: torch.from_numpy(part[row : row + 1]) for name, part in parts.items()}
        cross_entropy(model(**one), labels[row : row + 1]).sum().backward()
        alone.append([tensor.grad.clone() for tensor in model.parameters()])
    for part, expected in zip(found, zip(*alone, strict=True), strict=True):
        rows = torch.stack([each.reshape(-1) for each in expected])
        assert torch.allclose(part.squares().float(), rows.square().sum(1), rtol=1e-4)


def test_probes_draw_each_input_over_its_own_range():
    probes = Probes(form_of(INPUTS), odd_ids=odd_ids(nn.Identity(), 2))
    seen = [pair.before.features for pair in probes.draws(64)]
    parts = unpacked(torch.cat(seen).numpy(), INPUTS)
    assert (parts["ids"].min() >= 0, parts["ids"].max() < 50, len(np.unique(parts["ids"])) > 20) == (True, True, True)
    assert (np.unique(parts["t"]).size > 50, np.isfinite(parts["x"]).all()) == (True, True)
    pair = next(iter(probes.draws(4)))
    before, after = (unpacked(each.features.numpy(), INPUTS) for each in (pair.before, pair.after))
    for name in before:
        assert not np.array_equal(before[name][0], after[name][0])
        assert np.array_equal(before[name][1:], after[name][1:])
    filled = [unpacked(next(iter(filling.filled.values())).numpy(), INPUTS) for filling in probes.fillings(4)]
    assert {49, -1, 0} <= {int(each["ids"][0, 0]) for each in filled}
    assert any(np.isnan(each["x"]).any() for each in filled)


def test_a_model_of_several_inputs_is_checked_as_any_other():
    check_trainable(fed_by_name(Several(), INPUTS), form_of(INPUTS), cross_entropy)
    with pytest.raises(ModelError) as caught:
        check_trainable(fed_by_name(Several(mixes=True), INPUTS), form_of(INPUTS), cross_entropy)
    assert caught.value.code == "mixing_layer"
    with pytest.raises(ModelError, match=r"ids \[n, 3\] \(int64\), x \[n, 2, 2\] \(float32\)"):
        check_trainable(fed_by_name(Several(), INPUTS[::2]), form_of(INPUTS[::2]), cross_entropy)


def test_a_model_that_wants_several_inputs_says_how_they_are_named():
    form = DatasetForm(num_examples=9, feature_shape=(4,), feature_dtype="float32", label_shape=(), label_dtype="int64")
    with pytest.raises(ModelError, match=r"missing 2 required positional arguments.*dataset\.inputs"):
        check_trainable(Several(), form, cross_entropy)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_table_gives_inputs_by_the_names_of_columns(kind: str, tmp_path: Path):
    (tmp_path / "data.csv").write_text("t,a1,b,ids,y,c\n7,1.5,2,3,0,9\n8,2.5,4,5,1,9\n")
    columns = {"t": [7, 8], "a1": [1.5, 2.5], "b": [2, 4], "ids": [3, 5], "y": [0, 1], "c": [9, 9]}
    pq.write_table(pa.table(columns), tmp_path / "data.parquet")
    given = tuple(
        InputSource(name=name, features=asked, vocabulary=vocabulary)
        for name, asked, vocabulary in (("ids", ("ids",), 6), ("t", ("t",), None), ("x", ("a1", "b"), None))
    )
    described = DatasetDescriptor(kind=kind, path=f"data.{kind}", features=(), labels="y", inputs=given)
    opened = described.open_slices(tmp_path)
    form = dataset_form(opened.examples)
    assert [(each.name, each.shape, each.dtype) for each in form.inputs] == [
        ("ids", (), "int64"),
        ("t", (), "float32"),
        ("x", (2,), "float32"),
    ]
    features, labels = opened.examples.batch(np.arange(2))
    parts = unpacked(features, form.inputs)
    assert {name: part.tolist() for name, part in parts.items()} == {
        "ids": [3, 5],
        "t": [7, 8],
        "x": [[1.5, 2], [2.5, 4]],
    }
    assert (labels.tolist(), opened.features) == ([0, 1], ("ids", "t", "a1", "b"))
    low = described.model_copy(update={"inputs": (InputSource(name="ids", features=("ids",), vocabulary=5),)})
    with pytest.raises(DatasetError, match="an id outside its vocabulary"):
        low.open(tmp_path)


def test_an_archive_gives_inputs_by_the_names_of_arrays(tmp_path: Path):
    parts = parts_of(4)
    np.savez(tmp_path / "data.npz", images=parts["x"], t=parts["t"], ids=parts["ids"], y=np.zeros((4, 2, 2), np.int64))
    given = (
        InputSource(name="ids", features=("ids",), vocabulary=50),
        InputSource(name="t", features=("t",)),
        InputSource(name="x", features=("images",)),
    )
    described = DatasetDescriptor(kind="npz", path="data.npz", features=(), labels="y", inputs=given)
    dataset = described.open(tmp_path)
    features, labels = dataset.batch(np.arange(4))
    assert dataset_form(dataset).inputs == INPUTS
    assert labels.shape == (4, 2, 2)
    for name, part in unpacked(features, INPUTS).items():
        assert np.array_equal(part, parts[name])
    short = np.zeros(3, np.float32)
    np.savez(tmp_path / "data.npz", images=parts["x"], t=short, ids=parts["ids"], y=np.zeros(4, np.int64))
    with pytest.raises(DatasetError, match="array 't': 3 features but 4 labels"):
        described.open(tmp_path)


def test_tokenised_text_gives_its_columns_by_name_cut_and_padded(tmp_path: Path):
    table = {
        "input_ids": [[5, 6, 7], [8]],
        "token_type_ids": [[0, 0, 1], [0]],
        "pooled": [[0.5, 1.5], [2.5, 3.5]],
        "labels": [1, 0],
    }
    pq.write_table(pa.table(table), tmp_path / "pairs.parquet")
    given = (
        InputSource(name="ids", features=("input_ids",), vocabulary=9, padding=3),
        InputSource(name="pooled", features=("pooled",)),
        InputSource(name="types", features=("token_type_ids",), vocabulary=2),
    )
    described = DatasetDescriptor(kind="hf", path="pairs.parquet", features=(), inputs=given, max_length=2)
    dataset = described.open(tmp_path)
    parts = unpacked(dataset.batch(np.arange(2))[0], dataset_form(dataset).inputs)
    assert {name: part.tolist() for name, part in parts.items()} == {
        "ids": [[5, 6], [8, 3]],
        "types": [[0, 0], [0, 0]],
        "pooled": [[0.5, 1.5], [2.5, 3.5]],
    }


MODULE = """
import numpy as np

class Named:
    vocabulary = {"ids": 50}
    def __len__(self):
        return 6
    def batch(self, ids):
        return {"x": np.ones((len(ids), 2), np.float32), "ids": ids[:, None] % 50}, ids % 2

class Restless(Named):
    def batch(self, ids):
        features, labels = super().batch(ids)
        return ({**features, "more": features["x"]} if len(ids) else features), labels

class Odd(Named):
    def batch(self, ids):
        return {"not a name": np.ones(len(ids), np.float32)}, ids
"""


def test_a_function_of_the_users_own_gives_inputs_by_name(tmp_path: Path):
    (tmp_path / "own.py").write_text(MODULE)

    def described(function: str, **vocabularies: int) -> DatasetDescriptor:
        given = tuple(InputSource(name=name, features=(), vocabulary=most) for name, most in vocabularies.items())
        return DatasetDescriptor(kind="module", function=f"own:{function}", inputs=given)

    dataset = described("Named", ids=50).open(tmp_path)
    inputs = dataset_form(dataset).inputs
    assert [(each.name, each.vocabulary) for each in inputs] == [("ids", 50), ("x", None)]
    parts = unpacked(dataset.batch(np.array([4, 1]))[0], inputs)
    assert (parts["ids"].tolist(), parts["x"].tolist()) == ([[4], [1]], [[1, 1], [1, 1]])
    with pytest.raises(ConfigError, match="input 'ids' holds integers"):
        described("Named").open(tmp_path)
    with pytest.raises(DatasetError, match="named 'not a name'"):
        described("Odd").open(tmp_path)
    with pytest.raises(DatasetError, match="other names, types or shapes"):
        described("Restless", ids=50).open(tmp_path).batch(np.array([1]))


@pytest.mark.parametrize("form", ["a pair", "a mapping"])
def test_a_trainer_takes_inputs_by_name(form: str, tmp_path: Path):
    parts = {name: torch.from_numpy(part) for name, part in parts_of(4).items()}
    features = [{name: part[row] for name, part in parts.items()} for row in range(4)]
    items = [(each, row) if form == "a pair" else {**each, "labels": row} for row, each in enumerate(features)]
    described = export_in_memory(Given(items, vocabulary={"ids": 50}), tmp_path / "examples.npz")
    dataset = described.open(tmp_path)
    assert dataset_form(dataset).inputs == INPUTS
    found, labels = dataset.batch(np.arange(4))
    assert labels.tolist() == [0, 1, 2, 3]
    assert torch.equal(torch.from_numpy(unpacked(found, INPUTS)["x"]), parts["x"])
    with pytest.raises(ConfigError, match="input 'ids' holds integers"):
        export_in_memory(Given(items), tmp_path / "examples.npz")
    short = [*items[:3], ({"x": parts["x"][0]}, 1) if form == "a pair" else {"x": parts["x"][0], "labels": 1}]
    with pytest.raises(DatasetError, match="the same inputs"):
        export_in_memory(Given(short, vocabulary={"ids": 50}), tmp_path / "examples.npz")


def test_a_name_that_no_argument_can_have_is_refused():
    with pytest.raises(DatasetError, match="'a b'"):
        outlined({"a b": np.ones(1, np.float32)}, {}, "data")
