"""Blocks that a small device has in turn: the bytes of a device that has them all; see `tagged_devices.py`."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raycloak.metrics.errors import ModelError
from raycloak.workers.evaluation import Scorer
from raycloak.workers.gradients.model_checks import check_trainable
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.placement import check_placed, devices_of, place
from raycloak.workers.gradients.row_memory import _micro_batch_bytes, scored_rows
from raycloak.workers.gradients.streaming import BlockStream, Home, streams_of
from raycloak.workers.gradients.sum_engines import PrivateEvaluationEngine
from raycloak.workers.inputs.datasets import ArrayDataset
from raycloak.workers.inputs.hub_files import quiet
from raycloak.workers.models.compute_mode import ComputeMode
from raycloak.workers.models.losses import cross_entropy
from raycloak.workers.models.models import read_flat, twin_of
from raycloak.workers.models.text_model import recomputed_blocks
from tests.workers.gradients.model_zoo import CLASSES, LENGTH, VOCABULARY, Case
from tests.workers.gradients.tagged_devices import FromHost, devices, on_host, tagged
from tests.workers.gradients.test_compute_modes import text_model
from tests.workers.gradients.test_placement import batches, form_of, summed
from tests.workers.terms.test_measurement import measurement

LAYERS = 3
"""Of each device: two have room there."""


class Classes(nn.Module):
    """A text model with the labels of a classifier."""

    def __init__(self, text: nn.Module) -> None:
        super().__init__()
        self.text = text

    def forward(self, ids: Tensor) -> Tensor:
        return self.text(ids).mean(1)[:, :CLASSES]


def case_of(kind: str = "llama lora", again: bool = True, layers: int = LAYERS) -> Case:
    """Return a model of so many blocks in bfloat16, frozen but for its adapters.

    Args:
        again: whether a backward pass computes the blocks again.
    """
    sizes = {"vocab_size": VOCABULARY, "n_layer" if kind.startswith("gpt2") else "num_hidden_layers": layers}
    with quiet():
        text = text_model(kind, narrow=True, **sizes)
    ComputeMode("float32", again).apply(text)
    return Case(Classes(text), (LENGTH,), text=True)


def small(module: nn.Module, count: int = 1, spared: bool = True) -> nn.Module:
    """Lay a model over devices that lack a byte for all of it, or have any number of them."""
    on_host(module)
    if spared:
        place(module, devices(count), lambda device: 2**40, beside=2**40)
        assert len(list(streams_of(module))) == count, "on each device, blocks take turns"
    else:
        place(module, devices(count))
    if count > 1:
        check_placed(module, form_of(Case(module, (LENGTH,), text=True)), VOCABULARY)
    return module


def streamed(module: nn.Module) -> list[Home]:
    return [home for stream in streams_of(module) for home in stream.homes()]


@pytest.mark.parametrize("kind", ["llama lora", "gpt2 lora"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_sum_has_the_bytes_of_a_device_that_holds_the_model(kind: str, count: int) -> None:
    pin_numerics()
    found = set[bytes]()
    for in_flight in (0, 1, 2, 4):
        case = case_of(kind, layers=count * LAYERS)
        parameters = read_flat(case.module)
        with tagged():
            module = small(case.module, count, spared=in_flight > 0)
            assert devices_of(module) == tuple(devices(count))
            found.add(summed(module, case, parameters, in_flight or None))
    assert len(found) == 1
    assert np.frombuffer(found.pop()).any()


class Scaled(nn.Sequential):
    """Layers in a row, each perhaps scaled: the backward pass needs the scale itself, and of a layer a view."""

    def __init__(self, scales: bool) -> None:
        super().__init__(*(nn.Linear(6, 6, bias=False) for _ in range(LAYERS)))
        for each in self:
            each.scale = nn.Parameter(torch.randn(6)) if scales else None
        self.requires_grad_(False)

    def forward(self, values: Tensor) -> Tensor:
        for each in self:
            values = each(values).tanh()
            values = values if each.scale is None else values * each.scale
        return values


def test_guarantee_whichever_blocks_have_run_since_a_backward_pass_takes_the_bits_of_the_host_or_fails() -> None:
    """Nobody computes these blocks again, and of all but the last a backward pass needs what has left the device."""
    given = torch.randn(4, 6)
    for scales in (False, True):
        found = []
        for streams in (False, True):
            torch.manual_seed(2)
            module = Scaled(scales)
            with tagged():
                on_host(module)
                if streams:
                    BlockStream(module, list(module), devices(1)[0]).begin()
                else:
                    place(module, devices(1))
                there = given.to(devices(1)[0]).requires_grad_()
                loss = module(there).square().sum()
                if streams and scales:
                    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                        loss.backward()
                    continue
                loss.backward()
                found.append(there.grad.cpu())
        assert found[0].any()
        assert torch.equal(found[0], found[-1])


def test_a_device_has_room_for_two_blocks_and_what_is_not_of_blocks() -> None:
    pin_numerics()
    case = case_of()
    parameters = read_flat(case.module)
    with tagged():
        module = small(case.module)
        frozen = {id(each) for each in module.parameters() if not each.requires_grad}
        blocks = recomputed_blocks(module)
        of_block = [sum(each.nbytes for each in block.parameters() if not each.requires_grad) for block in blocks]
        homes = streamed(module)
        assert {id(home.parameter) for home in homes} < frozen
        assert sum(home.host.nbytes for home in homes) == sum(of_block)
        (stream,) = streams_of(module)
        assert stream.spared == sum(of_block) - 2 * of_block[0]
        with FromHost() as copies:
            summed(module, case, parameters)
        hosts = {id(home.host) for home in homes}
        assert copies.sources
        assert {id(each) for each in copies.sources} <= hosts, "no adapter is copied"
        assert of_block[0] <= copies.peak <= 2 * of_block[0]


def test_a_tensor_that_other_layers_have_too_stays_on_the_device() -> None:
    case = case_of()
    attention = recomputed_blocks(case.module)[2].self_attn
    case.module.also = nn.Linear(1, 1)
    case.module.also.weight = attention.k_proj.weight
    with tagged():
        module = small(case.module)
        assert module.also.weight.device == devices(1)[0]
        assert id(module.also.weight) not in {id(home.parameter) for home in streamed(module)}


def test_a_device_with_room_for_a_model_and_a_micro_batch_has_all_of_it() -> None:
    with tagged():
        module = case_of().module
        place(module, devices(1), lambda device: 2**30, beside=2**20)
        assert not list(streams_of(module))


@pytest.mark.parametrize(
    ("again", "free", "advised"), [(False, 20_000, True), (True, 1_000, False)], ids=["held", "too small for two"]
)
def test_what_does_not_fit_even_so_is_refused_with_the_numbers(again: bool, free: int, advised: bool) -> None:
    with tagged(), pytest.raises(ModelError, match=r"model_too_large.* GB of meta:0, which has 0\.0 GB") as refused:
        place(case_of(again=again).module, devices(1), lambda device: free)
    assert ("gradient_checkpointing: true" in str(refused.value.remedy)) is advised


def test_the_checks_before_a_run_look_at_a_streamed_model() -> None:
    pin_numerics()
    case = case_of()
    with tagged():
        check_trainable(small(case.module), form_of(case), cross_entropy, vocabulary=VOCABULARY)


def test_a_write_to_a_streamed_tensor_is_found() -> None:
    pin_numerics()
    case = case_of()
    parameters = read_flat(case.module)
    norm = recomputed_blocks(case.module)[1].input_layernorm

    def write(layer: nn.Module, given: object, output: Tensor) -> None:
        layer.weight.mul_(1.0)

    with tagged():
        module = small(case.module)
        norm.register_forward_hook(write)
        with pytest.raises(ModelError, match=r"buffer_update.*input_layernorm"):
            summed(module, case, parameters)


def test_twins_measure_and_score_with_the_same_base_and_the_same_bytes() -> None:
    pin_numerics()
    of = measurement("evaluation", 2)
    found = []
    for spared in (False, True):
        case = case_of()
        parameters, rows = read_flat(case.module), batches(case)
        with tagged():
            module = small(case.module, spared=spared)
            measuring, scoring = twin_of(module), twin_of(module)
            assert list(streams_of(measuring)) == list(streams_of(scoring)) == list(streams_of(module))
            engine = PrivateEvaluationEngine(of, measuring, cross_entropy, devices(1)[0])
            scorer = Scorer(scoring, cross_entropy, "loss", 2, devices(1)[0])
            sums = [summed(module, case, parameters)]
            # In turn: each finds the blocks where another left them.
            sums += [torch.cat(engine.clipped_sum(parameters, rows)).numpy().tobytes()]
            scorer.load(parameters)
            sums += [scorer.scores(ArrayDataset(*rows[0][:2]), np.arange(3)), summed(module, case, parameters)]
            found.append(sums)
    assert found[0] == found[1]


def test_the_memory_of_rows_counts_no_block() -> None:
    """So the largest micro-batch, which the manifest has, is the same wherever the blocks are."""
    pin_numerics()
    found = set[tuple[int, int]]()
    for spared in (False, True, True):
        case = case_of()
        with tagged():
            module = small(case.module, spared=spared)
            rows = scored_rows(module, form_of(case), cross_entropy, VOCABULARY, 2**16)
            measured = _micro_batch_bytes(module, form_of(case), cross_entropy, 4, True, VOCABULARY)
            found.add((rows, measured))
    assert len(found) == 1
