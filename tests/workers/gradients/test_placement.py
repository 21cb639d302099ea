"""A model over several devices: the bytes of the model on one, or a refusal by name.

The devices are those of `raycloak_lab.scale.tagged_devices`.
"""

from collections.abc import Callable
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raycloak.metrics.errors import ModelError
from raycloak.workers.gradients.clipping import GradientEngine, MicroBatch
from raycloak.workers.gradients.model_checks import check_trainable
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.placement import bytes_over, check_placed, devices_of, place
from raycloak.workers.gradients.row_memory import peak_bytes
from raycloak.workers.inputs.datasets import DatasetForm
from raycloak.workers.inputs.hub_files import quiet
from raycloak.workers.models.compute_mode import ComputeMode
from raycloak.workers.models.losses import cross_entropy, next_token_cross_entropy
from raycloak.workers.models.models import read_flat, twin_of
from raycloak.workers.models.text_model import TextModel
from raycloak_lab.scale.tagged_devices import Devices, devices, tagged
from tests.workers.gradients import model_zoo
from tests.workers.gradients.model_zoo import LENGTH, VOCABULARY, ZOO, Case
from tests.workers.gradients.test_clipping import mechanism
from tests.workers.gradients.test_compute_modes import text_model

ROWS, BATCHES = 3, 3


def deep(name: str) -> Case:
    """Return a model of eight blocks."""
    made = {
        "llama lora": lambda: model_zoo.with_lora(model_zoo.llama(num_hidden_layers=8), ["q_proj", "down_proj"]),
        "gpt2": lambda: model_zoo.gpt2("eager", n_layer=8),
    }
    return made[name]()


def batches(case: Case) -> list[MicroBatch]:
    found = [case.batch(ROWS, seed) for seed in range(BATCHES)]
    return [(x.numpy(), y.numpy(), np.arange(ROWS) != seed % ROWS) for seed, (x, y) in enumerate(found)]


def form_of(case: Case) -> DatasetForm:
    dtype = "int64" if case.text else "float32"
    return DatasetForm(
        num_examples=64, feature_shape=case.shape, feature_dtype=dtype, label_shape=(), label_dtype="int64"
    )


def laid(case: Case, count: int) -> nn.Module:
    """Lay the model over so many devices, and look at it as a worker does."""
    module = case.module
    place(module, devices(count))
    if count > 1:
        check_placed(module, form_of(case), VOCABULARY)
    return module


def summed(module: nn.Module, case: Case, parameters: np.ndarray, in_flight: int | None = None) -> bytes:
    plan = mechanism(len(parameters), rows=ROWS, batches=BATCHES)
    engine = GradientEngine(module, cross_entropy, plan, devices(1)[0])
    if in_flight is not None:
        engine._in_flight = in_flight
    return torch.cat([each.cpu() for each in engine.clipped_sum(parameters, batches(case))]).numpy().tobytes()


def compared(make: Callable[[], Case], counts: tuple[int, ...]) -> None:
    pin_numerics()
    found = []
    for count in (1, *counts):
        torch.manual_seed(1)
        case = make()
        parameters = read_flat(case.module)
        with tagged():
            module = laid(case, count)
            assert devices_of(module)[0] == devices(1)[0]
            assert set(devices_of(module)) == set(devices(count)), "every device holds a block"
            found.append(summed(module, case, parameters))
    assert set(found) == {found[0]}
    assert np.frombuffer(found[0]).any()


@pytest.mark.parametrize("name", ZOO)
def test_guarantee_a_model_over_two_devices_has_the_bytes_of_the_model_on_one_or_is_refused(name: str) -> None:
    split = name in ("cnn", "mlp", "mixtral") or any(each in name for each in ("bert", "gpt2", "llama", "mixtral"))
    if split:
        compared(ZOO[name], (2,))
        return
    pin_numerics()
    with tagged(), pytest.raises(ModelError, match="unsplittable_model"):
        laid(ZOO[name](), 2)


@pytest.mark.parametrize("name", ["llama lora", "gpt2"])
def test_guarantee_so_has_one_over_any_number_of_devices(name: str) -> None:
    compared(lambda: deep(name), (3, 8))


def test_guarantee_the_micro_batches_in_flight_change_no_byte() -> None:
    pin_numerics()
    found = set[bytes]()
    for count in range(1, 9):
        torch.manual_seed(3)
        case = Case(nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(8))), (6,))
        parameters = read_flat(case.module)
        with tagged():
            module = laid(case, count)
            found |= {summed(module, case, parameters, in_flight) for in_flight in range(1, 7)}
    assert len(found) == 1


def checkpointed() -> Case:
    """A frozen Llama in bfloat16 with adapters, whose blocks are computed again."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    inner = transformers.LlamaForCausalLM(config).bfloat16()
    with quiet():
        adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.0)
        inner = peft.get_peft_model(inner, adapters)
    for name, tensor in inner.named_parameters():
        if "lora" in name:
            nn.init.normal_(tensor, std=0.1)
    text = TextModel(inner.train())
    ComputeMode("float32", True).apply(text)

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text = text

        def forward(self, ids: Tensor) -> Tensor:
            return self.text(ids).mean(1)[:, :3]

    return Case(Mean(), (LENGTH,), text=True)


@pytest.mark.parametrize("tied", [False, True])
def test_a_trained_head_whose_logits_nobody_holds_keeps_its_bytes_where_it_is(tied: bool) -> None:
    """The loss computes it, from hidden states that passed to its device: the last, or the first for a tied one."""
    pin_numerics()
    found = set[bytes]()
    for count in (1, 2, 4):
        torch.manual_seed(7)
        module = text_model("llama", num_hidden_layers=4, tie_word_embeddings=tied)
        module.try_out()
        assert module.head is not None
        parameters = read_flat(module)
        ids = torch.randint(60, (2, ROWS, LENGTH)).numpy()
        plan = mechanism(len(parameters), rows=ROWS, batches=len(ids))
        with tagged():
            place(module, devices(count))
            engine = GradientEngine(module, next_token_cross_entropy, plan, devices(1)[0])
            total = engine.clipped_sum(parameters, [(each, each, np.arange(ROWS) > 0) for each in ids])
            found.add(torch.cat([each.cpu() for each in total]).numpy().tobytes())
    assert len(found) == 1
    assert np.frombuffer(found.pop()).any()


def test_blocks_that_are_computed_again_keep_their_bytes() -> None:
    compared(checkpointed, (2, 4))


def held_on(module: nn.Module, home: torch.device) -> int:
    """Return the bytes that parameters, buffers and the sum of gradients take on a device."""
    here = {id(each): each for each in (*module.parameters(), *module.buffers()) if each.device == home}
    return sum(each.nbytes + (8 * each.numel() if each.requires_grad else 0) for each in here.values())


@pytest.mark.parametrize("count", [2, 4, 8])
def test_bytes_are_balanced_within_a_block(count: int) -> None:
    case = deep("gpt2")
    # A parameter of four bytes, and eight for its part of the sum.
    blocks = [sum(each.numel() * 12 for each in block.parameters()) for block in case.module.inner.inner.transformer.h]
    stated = bytes_over(case.module, count)
    with tagged():
        module = laid(case, count)
        found = [held_on(module, home) for home in devices(count)]
    assert found == stated
    assert max(found) <= sum(found) / count + max(blocks)


def test_only_hidden_states_pass_between_devices() -> None:
    """A tied head takes the last one back to the first device; nothing is sent twice."""
    pin_numerics()
    case = deep("llama lora")
    parameters = read_flat(case.module)
    with tagged() as seen:
        module = laid(case, 4)
        seen.copied.clear()
        summed(module, case, parameters)
    hidden = ROWS * LENGTH * 16 * 4
    wide = [(source.index, home.index) for source, home, size in seen.copied if size >= hidden]
    ring = [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert sorted(wide) == sorted(BATCHES * (ring + [(home, source) for source, home in ring]))


def with_entries(change: Callable[[Devices], None]) -> bytes:
    pin_numerics()
    torch.manual_seed(5)
    case = deep("gpt2")
    parameters = read_flat(case.module)
    with tagged() as found:
        module = laid(case, 2)
        change(found)
        return summed(module, case, parameters)


def test_a_crossing_that_is_left_out_is_refused_and_one_ulp_at_a_crossing_changes_the_bytes(monkeypatch) -> None:
    right = with_entries(lambda found: None)

    def up(tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.float32 or tensor.ndim != 3:
            return tensor
        # Not the zeros of rows that are silent.
        return torch.where(tensor == 0, tensor, torch.nextafter(tensor, tensor + 1))

    assert with_entries(lambda found: setattr(found, "change", up)) != right
    monkeypatch.setattr("raycloak.workers.gradients.placement._Entry.__call__", lambda self, layer, *given: given)
    with pytest.raises(ModelError, match=r"unsplittable_model.*RuntimeError: Expected all tensors"):
        with_entries(lambda found: None)


class Skipping(nn.Module):
    """Blocks of which a late one takes what an early one gave; or which share a table."""

    def __init__(self, skips: bool = False, gates: bool = False, ties: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.head = nn.Linear(8, 3)
        self.skips, self.gates = skips, gates
        if ties:
            self.words = nn.Linear(8, 8)
            self.blocks[3].weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = first = self.words(ids).tanh()
        for block in self.blocks:
            hidden = block(hidden).tanh()
        if self.skips:
            hidden = hidden + first.to(hidden.device)
        if self.gates:
            hidden = hidden + first
        return self.head(hidden).mean(1)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"skips": True}, "more than one tensor with a gradient"),
        ({"gates": True}, "Expected all tensors to be on the same device"),
        ({"ties": True}, "share a tensor"),
    ],
)
def test_what_would_make_the_order_of_a_sum_a_matter_of_threads_is_refused(fields: dict[str, bool], says: str) -> None:
    case = Case(Skipping(**fields), (LENGTH,), text=True)
    with tagged(), pytest.raises(ModelError, match=f"unsplittable_model.*{says}"):
        laid(case, 2)


def test_a_model_that_does_not_fit_is_refused_with_the_bytes_that_it_takes_and_those_that_are_free() -> None:
    """Also on a single device. Nothing has been moved then."""
    room = dict(zip(devices(2), (10**9, 20_000), strict=True))
    for count, says in ((1, "take 0.0 GB of meta:0, which has 0.0 GB free"), (2, "of meta:1, which has 0.0 GB free")):
        case = deep("gpt2")
        with tagged(), pytest.raises(ModelError, match=f"model_too_large: parameters and sums.*{says}"):
            place(case.module, devices(count), (dict.fromkeys(devices(1), 20_000) if count == 1 else room).get)
        assert devices_of(case.module) == (torch.device("cpu"),)


def test_a_head_on_the_first_device_that_is_reached_around_the_blocks_is_refused() -> None:
    """Each device is entered and left once, and yet two of them would compute at the same time."""

    class Around(Skipping):
        def forward(self, ids: Tensor) -> Tensor:
            first = hidden = self.words(ids).tanh()
            for block in self.blocks:
                hidden = block(hidden).tanh()
            return (hidden.to(first.device) @ self.words.weight[:8].T + (first * first)[..., :8]).mean(1)[:, :3]

    module = Around()
    module.head = nn.Identity()
    with tagged(), pytest.raises(ModelError, match=r"unsplittable_model.*without the blocks"):
        laid(Case(module, (LENGTH,), text=True), 2)


def test_a_model_that_keeps_its_last_output_is_found_before_the_next_forward_pass() -> None:
    class Keeping(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            self.last = super().forward(x)
            return self.last

    pin_numerics()
    module = Keeping(*(nn.Linear(6, 6) for _ in range(3)))
    case = Case(module, (6,))
    parameters = read_flat(module)
    passes: list[Tensor] = []
    with tagged():
        place(module, devices(2))
        plan = mechanism(len(parameters), rows=ROWS, batches=BATCHES)
        engine = GradientEngine(module, cross_entropy, plan, devices(1)[0])
        module.register_forward_hook(lambda module, given, output: passes.append(output))
        with pytest.raises(ModelError, match="buffer_update"):
            engine.clipped_sum(parameters, batches(case))
    assert len(passes) == 1


def test_twins_share_frozen_tensors_where_they_are_and_compute_on_their_devices() -> None:
    pin_numerics()
    case = deep("llama lora")
    parameters = read_flat(case.module)
    with tagged():
        module = laid(case, 3)
        twin = twin_of(module)
        frozen = [each for each in module.parameters() if not each.requires_grad]
        assert {id(each) for each in frozen} <= {id(each) for each in twin.parameters()}
        for home in devices(3):
            assert held_on(twin, home) == held_on(module, home)
        assert summed(twin, case, parameters) == summed(module, case, parameters)


def test_the_checks_before_a_run_look_at_a_model_over_several_devices() -> None:
    pin_numerics()
    case = model_zoo.with_lora(model_zoo.llama(), ["q_proj", "down_proj"])
    with tagged():
        check_trainable(laid(case, 2), form_of(case), cross_entropy, vocabulary=VOCABULARY)


def test_the_memory_of_a_micro_batch_counts_what_it_does_on_one_device() -> None:
    """So the largest one, which the manifest has, has the same rows."""
    pin_numerics()
    found = []
    for count in (1, 2, 4):
        torch.manual_seed(6)
        case = deep("gpt2")
        parameters = read_flat(case.module)
        with tagged():
            module = laid(case, count)
            plan = mechanism(len(parameters), rows=ROWS, batches=1)
            engine = GradientEngine(module, cross_entropy, plan, devices(1)[0])
            batch = batches(case)[:1]
            compute = partial(engine.clipped_sum, parameters, batch)
            found.append(peak_bytes(compute, chain(module.parameters(), module.buffers())))
    assert found == [found[0]] * 3
