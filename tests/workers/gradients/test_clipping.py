"""One example moves a clipped sum by at most C, whatever it contains; and nothing but the sum shows what was drawn."""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from raycloak.metrics.errors import ConfigError, ModelError, RefusedError
from raycloak.workers.gradients import clipping
from raycloak.workers.gradients.clipping import (
    BLOCK_MARGIN,
    CLIP_MARGIN,
    MAX_ROWS,
    ClippedSum,
    GradientEngine,
)
from raycloak.workers.gradients.gradient_parts import named_operations
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.parts import DensePart
from raycloak.workers.gradients.taps import Recording
from raycloak.workers.inputs.datasets import ArrayDataset
from raycloak.workers.models.losses import cross_entropy
from raycloak.workers.models.models import read_flat
from raycloak.workers.terms.mechanism import Mechanism
from tests.drawn import batches_of, spare_of
from tests.workers.gradients.model_zoo import ZOO

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def pinned() -> None:
    pin_numerics()


def mechanism(dimension: int, rows: int = 8, batches: int = 3, clip: float = 0.5, private: bool = True) -> Mechanism:
    return Mechanism(
        private=private,
        num_examples=40,
        virtual_workers=2,
        sample_rate=0.5,
        steps=1,
        max_grad_norm=clip,
        noise_multiplier=1.0,
        honest_share=1.0,
        expected_batch_size=10.0,
        dimension=dimension,
        ring_bits=32,
        gamma_log2=-12,
        clamp=100.0,
        sigma=2.0**21,
        micro_batch_size=rows,
        micro_batches=batches,
        overflow_probability=0.0,
    )


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Unflatten(1, (1, 6, 6)),
        nn.Conv2d(1, 4, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64, 5),
        nn.Tanh(),
        nn.Linear(5, 3),
    )


def examples(count: int = 40) -> ArrayDataset:
    draw = np.random.default_rng(3)
    return ArrayDataset(draw.random((count, 36), dtype=np.float32), draw.integers(0, 3, count))


def engine_of(module: nn.Module, **changes) -> tuple[GradientEngine, Mechanism, np.ndarray]:
    parameters = read_flat(module)
    plan = mechanism(len(parameters), **changes)
    return GradientEngine(copy.deepcopy(module), cross_entropy, plan), plan, parameters


def true_gradient(module: nn.Module, data: ArrayDataset, example: int) -> np.ndarray:
    features, labels = map(torch.tensor, data.batch(np.array([example])))
    module.zero_grad()
    cross_entropy(module(features), labels).sum().backward()
    return np.concatenate([tensor.grad.double().numpy().reshape(-1) for tensor in module.parameters()])


def total_of(
    batches: list[torch.Tensor], valid: list[torch.Tensor], sizes: list[int], clip: float | None
) -> np.ndarray:
    clipped = ClippedSum(sizes, clip, CPU)
    for rows, mask in zip(batches, valid, strict=True):
        clipped.add([DensePart(part) for part in torch.split(rows, sizes, dim=1)], mask)
    return torch.cat(clipped.pieces()).numpy()


def _exact_norm(rows: np.ndarray, norm: float) -> np.ndarray:
    wide = rows.astype(np.float64)
    return (wide / np.linalg.norm(wide, axis=1, keepdims=True) * norm).astype(np.float32)


def adversarial(kind: str, clip: float) -> tuple[np.ndarray, list[int]]:
    """Rows [n, d] float32 and the sizes they are cut into."""
    draw = np.random.default_rng(7)
    normal = draw.standard_normal((64, 9000)).astype(np.float32)
    match kind:
        case "huge":
            return np.sign(normal) * np.float32(3.4e38), [4000, 5000]
        case "tiny":
            return normal * np.float32(1e-30), [9000]
        case "denormal":
            return normal * np.float32(1e-44), [9000]
        case "exactly_c":
            return _exact_norm(normal, clip), [1, 8998, 1]
        case "all_aligned":
            return np.repeat(_exact_norm(normal[:1, :300], clip * 1.5), 1024, axis=0), [300]
        case "mixed_scales":
            return normal * (10.0 ** draw.uniform(-40, 37, normal.shape)).astype(np.float32), [4096, 4096, 808]
        case "many_parameters":
            return draw.standard_normal((4, 300_000)).astype(np.float32), [299_999, 1]
        case "one_coordinate":
            return np.eye(64, 9000, dtype=np.float32) * np.float32(clip), [9000]
    raise ValueError(kind)


@pytest.mark.parametrize("clip", [1.0, 0.1, 3.7e-9, 1e20])
@pytest.mark.parametrize(
    "kind",
    ["huge", "tiny", "denormal", "exactly_c", "all_aligned", "mixed_scales", "many_parameters", "one_coordinate"],
)
def test_one_example_moves_the_sum_by_at_most_c(kind: str, clip: float) -> None:
    rows, sizes = adversarial(kind, clip)
    batches = list(torch.tensor(rows).chunk(4))
    valid = [torch.ones(len(batch), dtype=torch.bool) for batch in batches]
    whole = total_of(batches, valid, sizes, clip)
    largest = 0.0
    for batch in range(len(batches)):
        for row in {0, len(batches[batch]) // 2, len(batches[batch]) - 1}:
            valid[batch][row] = False
            without = total_of(batches, valid, sizes, clip)
            valid[batch][row] = True
            # 80-bit differences: the rounding of the check is far below the margin of 2^-16.
            moved = whole.astype(np.longdouble) - without
            largest = max(largest, float(np.sqrt((moved * moved).sum()) / np.longdouble(clip)))
    assert largest <= 1.0
    # Weights are float32 numbers rounded down: a row of more than C times 2^126 counts less, or not at all.
    if kind in ("all_aligned", "exactly_c") or (kind, clip) == ("huge", 1e20):
        assert largest > (1 - 2.0**-15) / (1 + BLOCK_MARGIN)


def test_the_target_leaves_room_for_rounding_and_needs_it() -> None:
    """With many aligned rows the float64 totals round: a target of C itself lets one row move them by more than C."""
    rows = torch.full((2**14, 1), 0.7)
    everyone = torch.ones(2**14, dtype=torch.bool)
    without = everyone.clone()
    without[-1] = False

    def moved(clip: float) -> float:
        return float(total_of([rows], [everyone], [1], clip)[0] - total_of([rows], [without], [1], clip)[0])

    bounds = (0.1, 0.3, 0.7 / 3, 0.55)
    assert all(moved(clip) <= clip for clip in bounds)
    assert any(moved(clip / (1 - CLIP_MARGIN) * (1 + BLOCK_MARGIN)) > clip for clip in bounds)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", [1.0, None])
def test_a_non_finite_gradient_contributes_zero(bad: float, clip: float | None) -> None:
    rows = torch.tensor(np.random.default_rng(1).standard_normal((6, 5000)), dtype=torch.float32)
    valid = torch.ones(6, dtype=torch.bool)
    absent = valid.clone()
    absent[[2, 4]] = False
    expected = total_of([rows], [absent], [4999, 1], clip)
    poisoned = rows.clone()
    poisoned[2, 4999] = bad
    poisoned[4, :] = bad
    assert np.array_equal(total_of([poisoned], [valid], [4999, 1], clip), expected)
    assert np.isfinite(expected).all()


def test_the_content_of_invalid_rows_cannot_matter() -> None:
    rows = torch.randn(4, 100, generator=torch.Generator().manual_seed(2))
    valid = torch.tensor([True, False, True, False])
    expected = total_of([rows], [valid], [100], 1.0)
    for content in (0.0, 1e38, math.nan, math.inf):
        changed = rows.clone()
        changed[1] = changed[3] = content
        assert np.array_equal(total_of([changed], [valid], [100], 1.0), expected)


def test_what_the_bound_was_not_derived_for_is_refused() -> None:
    clipped = ClippedSum([1], 1.0, CPU)
    clipped.add([DensePart(torch.zeros(MAX_ROWS, 1))], torch.ones(MAX_ROWS, dtype=torch.bool))
    with pytest.raises(RefusedError, match="proof_bound"):
        clipped.add([DensePart(torch.zeros(1, 1))], torch.ones(1, dtype=torch.bool))
    for clip in (2.0**-101, 2.0**101):
        with pytest.raises(RefusedError, match="proof_bound"):
            ClippedSum([1], clip, CPU)
    module = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"batch_too_large: .* 131136 rows in a step.*more virtual workers"):
        GradientEngine(module, cross_entropy, mechanism(6, rows=64, batches=2**11 + 1))


def test_the_engine_sums_the_clipped_gradient_of_each_example() -> None:
    module, data = network(), examples()
    engine, plan, parameters = engine_of(module)
    drawn = np.array([1, 4, 5, 9, 13, 22, 23, 30, 31, 38])
    expected = np.zeros(len(parameters))
    for example in drawn:
        gradient = true_gradient(module, data, example)
        target = plan.max_grad_norm / (1 + BLOCK_MARGIN)
        expected += gradient * min(1.0, target / np.linalg.norm(gradient))
    found = torch.cat(engine.clipped_sum(parameters, batches_of(data, drawn, plan))).numpy()
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=3e-5, atol=1e-6)
    assert any(np.linalg.norm(true_gradient(module, data, each)) > plan.max_grad_norm for each in drawn)


def test_without_privacy_the_plain_sum_comes_out() -> None:
    module, data = network(), examples()
    engine, plan, parameters = engine_of(module, private=False, clip=1e-3)
    expected = sum(true_gradient(module, data, example) for example in range(20))
    found = torch.cat(engine.clipped_sum(parameters, batches_of(data, np.arange(20), plan))).numpy()
    np.testing.assert_allclose(found, expected, rtol=3e-5, atol=1e-6)


@pytest.mark.parametrize(("rows", "batches"), [(1, 24), (5, 5), (24, 1)])
def test_the_sum_does_not_depend_on_the_micro_batch_beyond_rounding(rows: int, batches: int) -> None:
    module, data, drawn = network(), examples(), np.arange(3, 23)
    reference, plan, parameters = engine_of(module)
    expected = torch.cat(reference.clipped_sum(parameters, batches_of(data, drawn, plan))).numpy()
    engine, other, _ = engine_of(module, rows=rows, batches=batches)
    found = torch.cat(engine.clipped_sum(parameters, batches_of(data, drawn, other))).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_the_same_arguments_give_the_same_bytes() -> None:
    module, data, drawn = network(), examples(), np.arange(17)
    first, plan, parameters = engine_of(module)
    parameters.setflags(write=False)
    once = torch.cat(first.clipped_sum(parameters, batches_of(data, drawn, plan))).numpy()
    torch.cat(first.clipped_sum(parameters * 2, batches_of(data, drawn[:5], plan))).numpy()
    second, _, _ = engine_of(module)
    assert torch.cat(first.clipped_sum(parameters, batches_of(data, drawn, plan))).numpy().tobytes() == once.tobytes()
    assert torch.cat(second.clipped_sum(parameters, batches_of(data, drawn, plan))).numpy().tobytes() == once.tobytes()


def test_parameters_are_loaded_once_while_nobody_can_have_changed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[int] = []
    load = clipping.load_flat

    def counted(module: nn.Module, vector: np.ndarray) -> None:
        loads.append(0)
        load(module, vector)

    monkeypatch.setattr(clipping, "load_flat", counted)
    data = examples()
    engine, plan, parameters = engine_of(network())

    def sums(vector: np.ndarray) -> tuple[int, bytes]:
        loads.clear()
        found = [
            torch.cat(engine.clipped_sum(vector, batches_of(data, np.arange(17), plan))).numpy().tobytes()
            for _ in range(3)
        ]
        assert len(set(found)) == 1
        return len(loads), found[0]

    times, expected = sums(parameters)
    assert times == 3, "of an array that anybody may write to"
    parameters.setflags(write=False)
    assert sums(parameters) == (1, expected)
    assert sums(parameters) == (0, expected)
    assert sums(parameters[:]) == (3, expected), "a view, whose base may be written to"
    other = parameters * 2
    other.setflags(write=False)
    assert sums(other)[0] == 1
    with pytest.raises(RefusedError):
        torch.cat(engine.clipped_sum(other, batches_of(data, np.arange(25), plan))).numpy()
    assert sums(other)[0] == 1, "after an error"


@pytest.mark.parametrize("poison", [1e30, math.nan, math.inf])
def test_an_adversarial_example_moves_the_engines_sum_by_at_most_c(poison: float) -> None:
    features, labels = examples().batch(np.arange(40))
    features[7] = poison
    features[8, :] = np.where(np.arange(36) % 2, 1e18, -1e18)
    data = ArrayDataset(features, labels)
    engine, plan, parameters = engine_of(network())
    drawn = np.arange(20)

    def total(absent: int | None) -> np.ndarray:
        batches = batches_of(data, drawn, plan)
        marked = ((x, y, mask & (np.arange(8) + 8 * index != absent)) for index, (x, y, mask) in enumerate(batches))
        return torch.cat(engine.clipped_sum(parameters, marked)).numpy()

    whole = total(None)
    assert np.isfinite(whole).all()
    moves = [np.linalg.norm(whole - total(absent)) for absent in range(20)]
    assert max(moves) <= plan.max_grad_norm
    if not math.isfinite(poison):
        assert moves[7] == 0.0


def test_a_label_that_is_no_class_contributes_zero_and_raises_nothing() -> None:
    features, labels = examples().batch(np.arange(40))
    wrong = labels.copy()
    wrong[[3, 5]] = (77, -100)
    engine, plan, parameters = engine_of(network())
    found = torch.cat(
        engine.clipped_sum(parameters, batches_of(ArrayDataset(features, wrong), np.arange(8), plan))
    ).numpy()
    drawn = np.array([0, 1, 2, 4, 6, 7])
    expected = torch.cat(
        engine.clipped_sum(parameters, batches_of(ArrayDataset(features, labels), drawn, plan))
    ).numpy()
    # The others stand at other places of a block, which is added in float32.
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("drawn", [0, 1, 7, 8, 9, 23, 24])
def test_work_and_shapes_are_the_same_whatever_was_drawn(drawn: int) -> None:
    seen: list[tuple[int, ...]] = []
    read: list[int] = []

    class Watched(ArrayDataset):
        def batch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            read.append(len(ids))
            return super().batch(ids)

    data = Watched(*examples().batch(np.arange(40)))
    module = network()
    engine, plan, parameters = engine_of(module)
    begun = engine._gradients.begun

    def watched(features: torch.Tensor, labels: torch.Tensor) -> tuple[Recording, torch.Tensor]:
        seen.append(tuple(features.shape))
        return begun(features, labels)

    # Around the model: one that keeps what it sees is refused.
    engine._gradients.begun = watched  # type: ignore[method-assign]
    batches = batches_of(data, np.arange(drawn, dtype=np.int64), plan, spare=spare_of(examples()))
    total = torch.cat(engine.clipped_sum(parameters, batches)).numpy()
    assert seen == [(8, 36)] * 3
    assert read == [8] * 3
    assert total.any() == (drawn > 0)


def test_an_empty_draw_is_a_zero_vector() -> None:
    engine, plan, parameters = engine_of(network())
    total = torch.cat(engine.clipped_sum(parameters, batches_of(examples(), np.empty(0, np.int64), plan))).numpy()
    assert total.shape == parameters.shape
    assert not total.any()


def test_a_draw_beyond_the_capacity_or_another_number_of_batches_is_refused() -> None:
    engine, plan, parameters = engine_of(network())
    with pytest.raises(RefusedError, match="proof_bound"):
        next(batches_of(examples(), np.arange(25), plan))
    batches = list(batches_of(examples(), np.arange(3), plan))
    with pytest.raises(RefusedError, match="proof_bound"):
        torch.cat(engine.clipped_sum(parameters, batches[:2])).numpy()
    with pytest.raises(RefusedError, match="proof_bound"):
        torch.cat(engine.clipped_sum(parameters, [(x[:7], y[:7], mask[:7]) for x, y, mask in batches])).numpy()


def test_no_warning_leaves_the_engine() -> None:
    class Warns(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            warnings.warn("a row is strange", stacklevel=1)
            return x

    engine, plan, parameters = engine_of(nn.Sequential(Warns(), nn.Linear(36, 3)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cat(engine.clipped_sum(parameters, batches_of(examples(), np.arange(5), plan))).numpy()
    assert not caught


def test_frozen_tensors_are_neither_counted_nor_moved() -> None:
    module = network()
    module[1].weight.requires_grad_(False)
    frozen = module[1].weight.detach().clone()
    engine, plan, parameters = engine_of(module)
    assert len(parameters) == sum(tensor.numel() for tensor in module.parameters()) - frozen.numel()
    total = torch.cat(engine.clipped_sum(parameters + 1, batches_of(examples(), np.arange(9), plan))).numpy()
    assert total.shape == parameters.shape
    assert torch.equal(engine._module[1].weight, frozen)


def test_tied_parameters_get_one_gradient_with_both_uses() -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
    last.weight = first.weight
    module = nn.Sequential(first, nn.Tanh(), last)
    draw = np.random.default_rng(0)
    data = ArrayDataset(draw.random((4, 6), dtype=np.float32), draw.integers(0, 6, 4))
    engine, plan, parameters = engine_of(module, clip=100.0)
    found = torch.cat(engine.clipped_sum(parameters, batches_of(data, np.arange(4), plan))).numpy()
    expected = sum(true_gradient(module, data, example) for example in range(4))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_an_operation_without_deterministic_kernel_is_named() -> None:
    class Puts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.clone().put_(torch.tensor([0]), torch.ones(1))

    engine, plan, parameters = engine_of(nn.Sequential(nn.Linear(36, 3), Puts()))
    with pytest.raises(ModelError) as caught:
        torch.cat(engine.clipped_sum(parameters, batches_of(examples(), np.arange(5), plan))).numpy()
    assert caught.value.code == "nondeterministic_op"
    assert "put_" in caught.value.message


TORCH = "does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True)'. You can"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (f"put_ {TORCH}", "put_"),
        (f"scatter_add_cuda_kernel {TORCH}", "scatter_add_cuda_kernel"),
        (f"median CUDA with indices output {TORCH}", "median"),
        (f"patient: 4711 {TORCH}", None),
        (f"4711 {TORCH}", None),
        (f"tensor([1.5]) {TORCH}", None),
        (f"{'a' * 65} {TORCH}", None),
        (f"the patient\nput_ {TORCH}", None),
        ("put_ does not have a deterministic implementation", None),
    ],
)
def test_the_name_of_an_operation_is_read_from_torchs_own_sentence_alone(text: str, name: str | None) -> None:
    with pytest.raises((ModelError, RuntimeError)) as caught, named_operations(True):
        raise RuntimeError(text)
    if name is None:
        assert type(caught.value) is RuntimeError, "for the guard, which lets no text out"
    else:
        assert caught.value.message.startswith(f"operation {name} has no deterministic kernel")


def test_what_was_set_before_is_set_again() -> None:
    for deterministic in (True, False):
        with named_operations(deterministic):
            assert torch.is_deterministic_algorithms_warn_only_enabled() is not deterministic
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()


def test_a_loss_that_is_not_per_example_is_refused() -> None:
    module = nn.Linear(36, 3)
    plan = mechanism(111)
    engine = GradientEngine(copy.deepcopy(module), lambda out, y: cross_entropy(out, y).mean(), plan)
    with pytest.raises(ModelError) as caught:
        torch.cat(engine.clipped_sum(read_flat(module), batches_of(examples(), np.arange(5), plan))).numpy()
    assert caught.value.code == "loss_shape"


@pytest.mark.parametrize("name", ZOO)
def test_guarantee_however_a_sum_is_cut_into_pieces_of_whole_tensors_it_has_the_same_bytes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, found = list[list[int]](), set[bytes]()
    for most in (clipping.HOST_PIECE, 300, 1):
        monkeypatch.setattr(clipping, "HOST_PIECE", most)
        torch.manual_seed(1)
        case = ZOO[name]()
        parameters = read_flat(case.module)
        engine = GradientEngine(case.module, cross_entropy, mechanism(len(parameters), rows=4, batches=2))
        batches = [(x.numpy(), y.numpy(), np.arange(4) > 0) for x, y in (case.batch(4, seed) for seed in range(2))]
        pieces = engine.clipped_sum(parameters, batches)
        sizes.append([len(each) for each in pieces])
        found.add(torch.cat(pieces).numpy().tobytes())
    assert len(found) == 1
    assert [sum(each) for each in sizes] == [len(parameters)] * 3
    assert len(sizes[0]) == 1
    assert sizes[2] == list(engine.sizes)
