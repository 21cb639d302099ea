"""Whatever a model or a loss holds counts in what it is identified by, wherever in Python it is kept."""

import argparse
import functools
import json
import sys
import types
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from raycloak.metrics.errors import ProtocolError
from raycloak.workers.models.held_values import HeldValue, held_values
from raycloak.workers.models.losses import cross_entropy
from raycloak.workers.models.models import ModelSource, build_model, tensor_contents
from raycloak.workers.terms.model_digest import check_same_tensors, frozen_digest
from tests.protocol import config, open_workload, worker_setup


class Own:
    """An object of the user's own class."""

    def __init__(self, rows: object) -> None:
        self.rows = rows


class Slotted:
    __slots__ = ("rows",)

    def __init__(self, rows: object) -> None:
        self.rows = rows


def bare(held: object) -> nn.Module:
    module = nn.Module()
    module.held = held
    return module


def hooked(held: object) -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda *_: held)
    return module


def of_class(held: object) -> nn.Module:
    return type("Local", (nn.Module,), {"held": held, "__module__": __name__})()


def of_method(held: object) -> nn.Module:
    class Local(nn.Module):
        def forward(self, _x: Tensor) -> object:
            return held

    return Local()


def from_global(held: object) -> nn.Module:
    """Beside a function that reads a table of its file."""
    scope: dict[str, Any] = {"__name__": "a_driver_s", "TABLE": held, "nn": nn}
    exec("class Local(nn.Module):\n  def forward(self, x):\n    return (lambda: TABLE)()\n", scope)
    module: nn.Module = scope["Local"]()
    return module


def unregistered(held: object) -> nn.Module:
    inner = nn.Linear(2, 2).requires_grad_(False)
    nn.init.ones_(inner.weight)
    nn.init.ones_(inner.bias)
    inner.held = held
    return bare([inner])


def cyclic(held: object) -> nn.Module:
    own = Own([])
    own.rows.extend([own, held])
    return bare(own)


PLACES: list[Callable[[Any], nn.Module]] = [
    bare,
    lambda held: bare([held]),
    lambda held: bare((1, (held,))),
    lambda held: bare({"a": {"b": held}}),
    lambda held: bare({(1, 2): held}),
    lambda held: bare(deque([held])),
    lambda held: bare(Own(held)),
    lambda held: bare(Slotted(held)),
    lambda held: bare(types.SimpleNamespace(rows=held)),
    lambda held: bare(argparse.Namespace(rows=held)),
    lambda held: bare(functools.partial(functional.linear, weight=held)),
    lambda held: bare(functools.partial(functional.linear, held)),
    lambda held: bare(lambda _x, table=held: table),
    lambda held: bare(Own(held).__init__),
    lambda held: bare(np.array([held, None], dtype=object)[:1]),
    lambda held: nn.Sequential(nn.Tanh(), bare(held)),
    hooked,
    of_class,
    of_method,
    from_global,
    unregistered,
    cyclic,
]
VALUES: list[Callable[[float], object]] = [
    lambda last: torch.tensor([1.0, last]),
    lambda last: np.array([1.0, last]),
    lambda last: np.array([(1, last)], dtype=[("a", "i4"), ("b", "f8")]),
    lambda last: [1.0, last],
    lambda last: {1.0, last},
    lambda last: f"rows {last}",
    lambda last: b"rows" + bytes([int(last)]),
    lambda last: np.float32(last),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda each: type(each(2.0)).__name__)
@pytest.mark.parametrize("place", PLACES, ids=range(len(PLACES)))
def test_another_value_is_another_digest_wherever_it_is_kept(
    place: Callable[[Any], nn.Module], value: Callable[[float], object]
) -> None:
    same, other = (place(value(last)) for last in (2.0, 3.0))
    before, after = tensor_contents(place(value(2.0))), tensor_contents(other)
    assert frozen_digest(before) == frozen_digest(tensor_contents(same))
    assert frozen_digest(before) != frozen_digest(after)
    with pytest.raises(ProtocolError, match=r"model_mismatch: (tensor|a plain value of layer) '"):
        check_same_tensors(before, after)


def weighing(weights: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(output, labels) * weights[labels]

    return loss


class Weighing(nn.Module):
    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.weights = nn.Parameter(weights)

    def forward(self, output: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(output, labels) * self.weights[labels]


@pytest.mark.parametrize(
    "loss",
    [
        weighing,
        Weighing,
        lambda weights: Weighing(weights).forward,
        lambda weights: functools.partial(functional.cross_entropy, weight=weights, reduction="none"),
        lambda weights: functools.partial(weighing, weights.numpy()),
    ],
    ids=["closure", "module", "method", "partial", "array"],
)
def test_what_a_loss_holds_counts_also_where_it_could_be_trained(loss: Callable[[Tensor], Any]) -> None:
    """No run trains a loss, so its parameters are frozen values like others."""
    module = nn.Linear(2, 3)

    def found(last: float) -> bytes:
        return frozen_digest(tensor_contents(module, loss(torch.tensor([1.0, 1.0, last]))))

    assert found(1.0) == found(1.0)
    assert found(1.0) != found(0.0)


def test_a_layer_that_is_not_registered_is_not_trained_and_counts() -> None:
    digests = []
    for shift in (0.0, 0.0, 1.0):
        torch.manual_seed(0)
        inner = nn.Linear(2, 2)
        torch.nn.init.constant_(inner.bias, shift)
        module = nn.Sequential(nn.Linear(2, 2))
        module.beside = [inner]
        digests.append(frozen_digest(tensor_contents(module)))
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


def texts(module: nn.Module) -> dict[str, str]:
    return {held.name: held.value for held in held_values(module) if isinstance(held.value, str)}


def test_what_differs_between_nodes_without_changing_a_gradient_does_not_count() -> None:
    here, there = (bare(["/home/somebody/model", name]) for name in ("/a", "/b/c"))
    assert texts(here) == texts(there)
    assert texts(bare("relative/a")) != texts(bare("relative/b"))
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    for module in (first, second):
        # Handles are numbered over the whole process.
        module.register_forward_hook(lambda *_: None)
    assert texts(first) == texts(second)


def test_numbers_in_objects_of_installed_packages_do_not_count_but_arrays_do() -> None:
    """Such an object may count its calls. `torch.Generator` and loggers are of this kind."""
    sparse = pytest.importorskip("scipy.sparse")
    one, other = (sparse.csr_matrix(np.diag([1.0, last])) for last in (2.0, 3.0))
    one.maxprint = 3
    assert set(texts(bare(one))) == {"held", "training"}
    contents = [tensor_contents(bare(each)) for each in (one, other)]
    assert frozen_digest(contents[0]) != frozen_digest(contents[1])


def test_what_is_met_twice_is_stated_once_and_referred_to() -> None:
    shared = torch.ones(3)
    module = bare([shared, shared])
    module.register_buffer("kept", shared)
    found = [held for held in held_values(module) if isinstance(held.value, Tensor)]
    assert [held.name for held in found] == ["kept"]
    assert texts(module)["held[1]"] == "is kept"


def test_a_long_chain_of_objects_is_followed_to_its_end() -> None:
    chain = Own(np.ones(3))
    for _ in range(5_000):
        chain = Own(chain)
    assert any(isinstance(held.value, np.ndarray) for held in held_values(bare(chain)))


def test_values_come_with_the_layer_that_holds_them() -> None:
    module = nn.Sequential(nn.Linear(2, 2), bare({"a": np.ones(3)}))
    found = {held.name: held for held in held_values(module, weighing(torch.ones(3)))}
    assert found["1.held['a']"].owner == "1"
    assert found["0.weight"] == HeldValue("0", "0.weight", module[0].weight, trained=True)
    assert found["loss:weights"].owner == "loss"
    assert not found["loss:weights"].trained


SETS = """
import json
from torch import nn
from raycloak.workers.models.held_values import held_values
module = nn.Module()
module.words = {"one", "two", "three", 4, None}
print(json.dumps([held[1:3] for held in held_values(module)]))
"""


def test_a_set_has_one_order_in_every_process(run_python: Any) -> None:
    found = [run_python("-c", SETS, environment={"PYTHONHASHSEED": seed}) for seed in ("1", "2")]
    assert all(done.code == 0 for done in found), found[0].stderr
    assert len({json.dumps(json.loads(done.stdout)) for done in found}) == 1


MODEL = """
from pathlib import Path
import numpy as np, torch
from torch import nn
import words
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = [torch.from_numpy(np.load(Path(__file__).parent / "rows.npy"))]
        self.head = nn.Linear(6, 3)
    def forward(self, x):
        return self.head(x + self.rows[0][-1] + words.SHIFT[-1])
def model():
    return Model()
"""
WORDS = "from pathlib import Path\nimport numpy as np\nSHIFT = np.load(Path(__file__).parent / 'shift.npy').tolist()\n"
LOSS = """
from pathlib import Path
import numpy as np, torch
W = torch.from_numpy(np.load(Path(__file__).parent / "weights.npy"))
def loss(output, labels):
    return torch.nn.functional.cross_entropy(output, labels, reduction="none") * W[labels]
"""


@pytest.mark.parametrize("changed", ["rows", "shift", "weights"])
def test_a_file_that_a_model_or_a_loss_was_built_from_is_in_the_frozen_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """The files differ in one value; the source of model and loss is the same, and so would the keys be."""
    workloads = []
    for node in ("a", "b"):
        setup = worker_setup(config(model="its_model:model", loss="its_loss:loss"), tmp_path / node)
        base = Path(setup.base)
        for name, source in (("its_model", MODEL), ("words", WORDS), ("its_loss", LOSS)):
            (base / f"{name}.py").write_text(source)
        for name in ("rows", "shift", "weights"):
            values = np.ones((5, 6) if name == "rows" else 6, np.float32)
            values.flat[2] = 2 if (name, node) == (changed, "b") else 1
            np.save(base / f"{name}.npy", values)
        monkeypatch.delitem(sys.modules, "words", raising=False)
        workloads.append(open_workload(setup))
    one, other = (each.facts for each in workloads)
    assert (one.model_code, one.loss_code) == (other.model_code, other.loss_code)
    assert frozen_digest(one.contents) != frozen_digest(other.contents)
    with pytest.raises(ProtocolError, match="model_mismatch"):
        check_same_tensors(one.contents, other.contents)
    assert workloads[0].runtime.twin() is not workloads[0].module


def test_the_examples_hold_nothing_that_differs_between_builds() -> None:
    root = Path(__file__).resolve().parents[3] / "examples"
    built = [tensor_contents(build_model(ModelSource.of("models:digits_mlp"), root, 0)) for _ in range(2)]
    assert built[0] == built[1]
