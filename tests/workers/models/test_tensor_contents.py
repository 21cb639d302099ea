"""Every parameter and buffer of a model counts in what it is identified by, and no second copy is made to hash it."""

import hashlib
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from raycloak.metrics.errors import ModelError, ProtocolError
from raycloak.workers.models.models import tensor_contents
from raycloak.workers.terms.model_digest import ATTRIBUTES, check_same_tensors, frozen_digest

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
SIDE = 7_072
"""A float32 matrix of as many rows and columns has 200 MB."""


class Holding(nn.Module):
    """A trained layer, a frozen one, two buffers and a tensor that is neither."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trained = nn.Linear(2, 2)
        self.frozen = nn.Embedding.from_pretrained(torch.randn(5, 3), freeze=True)
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("left_out", torch.ones(2, dtype=torch.bfloat16), persistent=False)
        self.plain = torch.zeros(2, dtype=torch.bool)


FROZEN = {"frozen.weight", "kept", "left_out", "plain"}


def test_every_tensor_is_stated_once_with_the_hash_of_its_bytes():
    module = Holding()
    found = {each.name: each for each in tensor_contents(module) if each.dtype != ATTRIBUTES}
    assert set(found) == {"trained.weight", "trained.bias", *FROZEN}
    assert {name for name, each in found.items() if not each.trained} == FROZEN
    weight = found["frozen.weight"]
    assert (weight.dtype, weight.shape) == ("float32", (5, 3))
    assert weight.content == hashlib.sha256(module.frozen.weight.detach().numpy().tobytes()).digest()
    assert (found["left_out"].dtype, found["kept"].dtype, found["plain"].dtype) == ("bfloat16", "int64", "bool")


@pytest.mark.parametrize("name", sorted(FROZEN))
def test_another_byte_of_any_frozen_tensor_is_another_digest_and_is_named(name):
    before, module = tensor_contents(Holding()), Holding()
    tensor = dict([*module.named_parameters(), *module.named_buffers(), ("plain", module.plain)])[name]
    with torch.no_grad():
        tensor.view(-1)[-1] = 0 if tensor.view(-1)[-1] else 1
    after = tensor_contents(module)
    assert frozen_digest(before) != frozen_digest(after)
    with pytest.raises(ProtocolError, match=f"model_mismatch: tensor '{name}' of"):
        check_same_tensors(before, after)


def test_trained_tensors_are_named_but_left_to_the_parameter_digest():
    before, module = tensor_contents(Holding()), Holding()
    nn.init.zeros_(module.trained.bias)
    after = tensor_contents(module)
    assert frozen_digest(before) == frozen_digest(after)
    with pytest.raises(ProtocolError, match=r"'trained[.]bias'"):
        check_same_tensors(before, after)


def test_a_tensor_that_is_there_on_one_side_alone_is_named():
    found = [each for each in tensor_contents(Holding()) if each.dtype != ATTRIBUTES]
    for one, other in ((found, found[:-1]), (found[:-1], found)):
        with pytest.raises(ProtocolError, match="tensor 'plain' of"):
            check_same_tensors(one, other)
    with pytest.raises(ProtocolError, match=r"tensor 'trained.weight' or tensor 'trained.bias'"):
        check_same_tensors(found, found[1:])
    check_same_tensors(tensor_contents(Holding()), tensor_contents(Holding()))


def test_shape_and_dtype_count_beside_the_bytes():
    class One(nn.Module):
        def __init__(self, value: Tensor) -> None:
            super().__init__()
            self.register_buffer("value", value)

    zeros = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.zeros(()), torch.zeros(0)]
    assert len({frozen_digest(tensor_contents(One(value))) for value in zeros}) == len(zeros)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(3 * 2**20).reshape(3, 2**20).t(),
        torch.arange(2**20 + 5).reshape(1, 1, -1),
        torch.arange(2**21).reshape(2**21, 1)[::2],
        torch.complex(torch.arange(3.0), torch.ones(3)).conj(),
    ],
    ids=["transposed", "one long row", "every other", "conjugated"],
)
def test_layout_in_memory_does_not_count(value):
    """Cut into pieces or not, the bytes are those of the elements in C order."""
    module = nn.Module()
    module.register_buffer("value", value)
    found, *_ = tensor_contents(module)
    assert found.content == hashlib.sha256(value.resolve_conj().contiguous().numpy().tobytes()).digest()


@pytest.mark.parametrize(
    "value", [torch.eye(3).to_sparse(), torch.empty(3, device="meta")], ids=["sparse", "without storage"]
)
def test_a_tensor_without_plain_bytes_is_refused_by_name(value):
    module = nn.Module()
    module.register_buffer("value", value)
    with pytest.raises(ModelError, match="tensor_layout: tensor 'value'"):
        tensor_contents(module)


def _memory(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


@pytest.mark.parametrize("kind", ["whole", "transposed", "mapped"])
def test_hashing_a_large_tensor_makes_no_second_copy(tmp_path, kind):
    """The peak of resident memory, beside 200 MB of a tensor, grows by less than an eighth of it."""
    if not CLEAR_REFS.exists():
        pytest.skip("needs Linux, where a process can reset the peak of its memory")
    path, size = tmp_path / "rows", SIDE * SIDE
    if kind == "mapped":
        with path.open("wb") as file:
            file.truncate(4 * size)
        value = torch.from_file(str(path), shared=True, size=size).reshape(SIDE, SIDE)
        value.sum()  # brings every page in, so that pages of the file itself do not count
    else:
        value = torch.ones(SIDE, SIDE)
    module = nn.Module()
    module.register_buffer("value", value.t() if kind == "transposed" else value)
    small = nn.Module()
    small.register_buffer("value", torch.ones(3, 3).t())
    tensor_contents(small)  # what is loaded or allocated once is not counted
    CLEAR_REFS.write_text("5")
    before = _memory("VmRSS")
    tensor_contents(module)
    assert before >= 4 * size
    assert _memory("VmHWM") - before < 4 * size // 8
