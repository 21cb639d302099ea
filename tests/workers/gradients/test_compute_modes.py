"""A forward pass in bfloat16, and layers that are computed again: right gradients, the proved bound, the same bytes."""

import copy
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raycloak.metrics.errors import ModelError
from raycloak.workers.gradients import model_checks, taps
from raycloak.workers.gradients.clipping import ClippedSum
from raycloak.workers.gradients.gradient_parts import GradientParts
from raycloak.workers.gradients.model_checks import check_rows, check_trainable
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.parts import Part
from raycloak.workers.gradients.row_memory import largest_rows, mechanism_of_rows
from raycloak.workers.inputs.datasets import DatasetForm
from raycloak.workers.models.compute_mode import ComputeMode, has_autocast, in_full_precision, remove_autocast
from raycloak.workers.models.losses import cross_entropy, next_token_cross_entropy
from raycloak.workers.models.models import tensor_contents
from raycloak.workers.models.text_model import TextModel
from tests.workers.gradients.model_zoo import ZOO
from tests.workers.gradients.test_gradient_parts import ROWS, brute_force, case_of
from tests.workers.gradients.test_sensitivity import largest_move

BF16 = ComputeMode("bf16")
CHECKPOINTED = ComputeMode(gradient_checkpointing=True)
FORM = DatasetForm(num_examples=100, feature_shape=(8,), feature_dtype="float32", label_shape=(), label_dtype="int64")
TEXT = DatasetForm(num_examples=100, feature_shape=(8,), feature_dtype="int64", label_shape=(8,), label_dtype="int64")


@pytest.fixture(autouse=True)
def pinned() -> Iterator[None]:
    pin_numerics()
    with warnings.catch_warnings():
        # Torch says that it takes a norm apart where input and weight are of two types; an engine shows no warning.
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        # Of PEFT's own use of transformers.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")
        yield


def in_mode(module: nn.Module, mode: ComputeMode) -> nn.Module:
    own = copy.deepcopy(module)
    mode.apply(own)
    return own


def rows_of(module: nn.Module, features: Tensor, labels: Tensor) -> Tensor:
    rows = GradientParts(copy.deepcopy(module), cross_entropy).rows(features, labels)
    return torch.cat([row.flatten(1) for row in rows], 1).double()


def parts_of(module: nn.Module, features: Tensor, labels: Tensor) -> list[Part]:
    return GradientParts(copy.deepcopy(module), cross_entropy)(features, labels)


def total_of(module: nn.Module, features: Tensor, labels: Tensor, clip: float = 0.1) -> bytes:
    total = ClippedSum([each.numel() for each in module.parameters() if each.requires_grad], clip, torch.device("cpu"))
    total.add(parts_of(module, features, labels), torch.ones(len(labels), dtype=torch.bool))
    return torch.cat(total.pieces()).numpy().tobytes()


# --- bfloat16


@pytest.mark.parametrize("name", ZOO)
def test_rows_in_bfloat16_are_those_of_brute_force_up_to_its_rounding(name: str) -> None:
    case = case_of(name)
    features, labels = case.batch(ROWS)
    expected = brute_force(case.module, features, labels)
    found = rows_of(in_mode(case.module, BF16), features, labels)
    error = float((found - expected).norm(dim=1).div(expected.norm(dim=1)).max())
    # Where rounding moves a number across the corner of a ReLU, or to another maximum of a pool or another expert, a
    # term is lost.
    assert error < (0.3 if name in ("cnn", "mixtral lora") else 0.03)
    assert error > 1e-4, "it did compute in bfloat16"


@pytest.mark.parametrize("name", ["convolutions", "own parameters", "encoder", "tied", "gpt2 lora", "llama"])
def test_two_computations_in_bfloat16_have_the_same_bytes(name: str) -> None:
    case = case_of(name)
    features, labels = case.batch(ROWS)
    module = in_mode(case.module, BF16)
    assert total_of(module, features, labels) == total_of(module, features, labels)


def test_outputs_and_gradients_of_a_model_in_bfloat16_are_float32_and_its_parameters_stay() -> None:
    module = in_mode(nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)), BF16)
    inner: list[torch.dtype] = []
    module[0].register_forward_hook(lambda _layer, _inputs, output: inner.append(output.dtype))
    before = [each.clone() for each in module.parameters()]
    rows = GradientParts(module, cross_entropy).rows(torch.randn(5, 8), torch.zeros(5, dtype=torch.int64))
    assert inner == [torch.bfloat16]
    assert module(torch.randn(5, 8)).dtype == torch.float32
    assert {each.dtype for each in (*rows, *module.parameters())} == {torch.float32}
    assert all(map(torch.equal, before, module.parameters()))
    assert not torch.is_autocast_enabled("cpu")


def test_a_forward_pass_that_fails_leaves_bfloat16_behind_it() -> None:
    module = in_mode(nn.Linear(8, 3), BF16)
    with pytest.raises(RuntimeError):
        module(torch.randn(5, 7))
    assert not torch.is_autocast_enabled("cpu")


# --- the bound, on what a real forward and backward pass leaves


class Blocks(nn.Module):
    """Blocks with every form of part, computed again in the backward pass if ``again``; the second is used twice."""

    def __init__(self, again: bool = False, reentrant: bool = False, words: int = 9, width: int = 6) -> None:
        super().__init__()
        self.again, self.reentrant = again, reentrant
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.randn(1, 8, width))
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.randn(width))
        self.head = nn.Linear(width, 3)

    def block(self, x: Tensor) -> Tensor:
        weight = self.second.weight * 2
        return x + nn.functional.gelu(self.norm(self.first(x)) * self.scale) @ weight.T + self.second(x).square()

    def run(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant) if self.again else self.block(x)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places
        return self.head(self.run(self.run(x))).mean(1) + self.head(x[:, 0])


def texts(count: int = 5) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(9, (count, 8), generator=draw), torch.randint(3, (count,), generator=draw)


def hostile(kind: str, **settings: bool) -> nn.Module:
    """Blocks whose parameters make gradients that are ordinary, large and cancelling, small, or not finite."""
    torch.manual_seed(2)
    module = Blocks(**settings)
    with torch.no_grad():
        match kind:
            case "large":
                module.places.mul_(2.0**20)
                module.second.weight.mul_(2.0**8)
            case "small":
                module.head.weight.mul_(2.0**-60)
                module.words.weight.mul_(2.0**-60)
            case "one row infinite":
                module.words.weight[int(texts()[0][1, 0])] = 1e30
    return module


@pytest.mark.parametrize("kind", ["ordinary", "large", "small", "one row infinite"])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
def test_no_row_in_bfloat16_moves_the_total_by_more_than_c(kind: str, again: bool) -> None:
    features, labels = texts()
    parts = parts_of(in_mode(hostile(kind, again=again), BF16), features, labels)
    for clip in (1.0, 2.0**-14):
        assert largest_move(parts, clip) <= 1


def test_sides_in_bfloat16_are_widened_before_they_are_measured_and_added() -> None:
    """Each part gives the same bits for bfloat16 sides as for the same numbers in float32."""
    from tests.workers.gradients.test_sensitivity import PARTS, sides

    for form in ("outer", "rows", "rows, used twice", "gram", "gram, used twice", "dense"):
        left, right = (each.bfloat16() for each in sides("ordinary", 0))
        narrow, wide = PARTS[form](left, right, 0), PARTS[form](left.float(), right.float(), 0)
        assert torch.equal(narrow.squares(), wide.squares())
        assert torch.equal(narrow.rows(), wide.rows())
        assert largest_move([narrow], 2.0**-14) <= 1


# --- layers that are computed again


@pytest.mark.parametrize("mode", [ComputeMode(), BF16], ids=["float32", "bf16"])
def test_layers_computed_again_give_the_same_bytes(mode: ComputeMode) -> None:
    features, labels = texts(ROWS)
    kept, again = (in_mode(hostile("ordinary", again=again), mode) for again in (False, True))
    assert total_of(again, features, labels) == total_of(kept, features, labels)
    if mode.precision == "float32":
        rows, expected = rows_of(again, features, labels), brute_force(kept, features, labels)
        assert float((rows - expected).norm(dim=1).div(expected.norm(dim=1)).max()) < 3e-6


def test_layers_computed_again_within_layers_computed_again_give_the_same_bytes() -> None:
    features, labels = texts(ROWS)
    nested = hostile("ordinary", again=True)
    inner = nested.block
    nested.block = lambda x: checkpoint(inner, x, use_reentrant=False)  # type: ignore[method-assign]
    found = GradientParts(nested, cross_entropy)(features, labels)
    for part, expected in zip(found, parts_of(hostile("ordinary"), features, labels), strict=True):
        assert torch.equal(part.rows(), expected.rows())


def test_the_second_pass_records_no_use_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many uses as operations of the first pass, though the blocks are tapped again in the second one."""
    closed, tapped = [], []
    genuine_close, genuine_init = taps._Record.close, taps._Record.__init__
    monkeypatch.setattr(taps._Record, "close", lambda self, *a: (closed.append(1), genuine_close(self, *a))[1])
    monkeypatch.setattr(taps._Record, "__init__", lambda self, *a: (tapped.append(1), genuine_init(self, *a))[1])
    features, labels = texts()
    counts = {}
    for again in (False, True):
        closed.clear(), tapped.clear()
        parts_of(hostile("ordinary", again=again), features, labels)
        counts[again] = len(closed), len(tapped)
    assert counts[False][0] == counts[True][0] == counts[False][1]
    assert counts[True][1] > counts[False][1]


def test_the_other_kind_of_checkpoint_is_right_or_refused() -> None:
    features, labels = texts(ROWS)
    module = hostile("ordinary", again=True, reentrant=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = rows_of(module, features, labels)
    expected = rows_of(hostile("ordinary"), features, labels)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class Overwrites(nn.Module):
    def __init__(self, again: bool) -> None:
        super().__init__()
        self.inner, self.again = nn.Linear(8, 8), again

    def block(self, x: Tensor) -> Tensor:
        x = x * 2
        found = self.inner(x)
        x.add_(1)
        return found * x.sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)[:, :3] if self.again else self.block(x)[:, :3]


@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
def test_an_input_that_is_overwritten_is_refused_also_where_it_is_computed_again(again: bool) -> None:
    with pytest.raises(ModelError, match="overwritten in place") as error:
        parts_of(Overwrites(again), torch.randn(5, 8), torch.zeros(5, dtype=torch.int64))
    assert error.value.code == "unsupported_layer"


def test_a_model_that_computes_layers_again_passes_every_check() -> None:
    form = TEXT.model_copy(update={"label_shape": ()})
    check_trainable(hostile("ordinary", again=True), form, cross_entropy, vocabulary=9)
    check_trainable(in_mode(hostile("ordinary", again=True), BF16), form, cross_entropy, vocabulary=9)


# --- models of transformers


def text_model(kind: str, narrow: bool = False, **fields: int) -> TextModel:
    """A small decoder, its adapters away from zero."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(4)
    if kind.startswith("gpt2"):
        sizes = {"vocab_size": 60, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
        inner = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | fields, bos_token_id=1, eos_token_id=1))
        targets = ["c_attn"]
    else:
        sizes = {
            "vocab_size": 60, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        }  # fmt: skip
        inner = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes | fields, bos_token_id=1, eos_token_id=2)
        )
        targets = ["q_proj", "down_proj"]
    inner = inner.to(torch.bfloat16) if narrow else inner
    if kind.endswith("lora"):
        settings = peft.LoraConfig(r=2, target_modules=targets, lora_dropout=0.0, fan_in_fan_out=targets == ["c_attn"])
        inner = peft.get_peft_model(inner, settings)
        for name, tensor in inner.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(tensor, std=0.1)
    for layer in inner.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return TextModel(inner.train())


def blocks_of_text(count: int = 5, length: int = 8) -> tuple[Tensor, Tensor]:
    ids = torch.randint(60, (count, length), generator=torch.Generator().manual_seed(1))
    return ids, ids


def token_total(module: nn.Module, features: Tensor, labels: Tensor) -> bytes:
    total = ClippedSum([each.numel() for each in module.parameters() if each.requires_grad], 0.1, torch.device("cpu"))
    total.add(GradientParts(module, next_token_cross_entropy)(features, labels), torch.ones(len(labels)) > 0)
    return torch.cat(total.pieces()).numpy().tobytes()


@pytest.mark.parametrize("mode", ["float32", "bf16"])
@pytest.mark.parametrize("kind", ["gpt2", "gpt2 lora", "llama", "llama lora"])
def test_blocks_of_transformers_computed_again_give_the_same_bytes(kind: str, mode: str) -> None:
    features, labels = blocks_of_text()
    found = []
    for again in (False, True):
        module = text_model(kind)
        ComputeMode(mode, again).apply(module)  # type: ignore[arg-type]
        found.append(token_total(module, features, labels))
    assert found[0] == found[1]


def test_a_frozen_base_in_bfloat16_with_float32_adapters_is_computed_again_and_in_bfloat16() -> None:
    module = text_model("llama lora", narrow=True)
    assert not in_full_precision(module)
    ComputeMode("bf16", True).apply(module)
    check_trainable(module, TEXT, next_token_cross_entropy, vocabulary=60)
    features, labels = blocks_of_text()
    parts = GradientParts(module, next_token_cross_entropy)(features, labels)
    assert largest_move(parts, 2.0**-10) <= 1


def test_a_frozen_base_in_bfloat16_is_compared_as_its_type_rounds() -> None:
    """Its rows alone and its whole batch come from different products, each rounded to eight bits."""
    module = text_model("llama lora", narrow=True)
    wholes = [torch.ones(2, 2)]
    assert model_checks._tolerance_of_gradients(module, wholes) == model_checks._NARROW
    assert model_checks._tolerance_of_gradients(text_model("llama lora"), wholes) == model_checks._FLOAT32_SUMS
    trained = sum(each.numel() for each in module.parameters() if each.requires_grad)
    check_trainable(module, TEXT, next_token_cross_entropy, vocabulary=60)
    check_rows(module, TEXT, next_token_cross_entropy, [mechanism_of_rows(trained, 4)], vocabulary=60)


def test_an_adapter_takes_larger_micro_batches_where_blocks_are_computed_again() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4}
    form = TEXT.model_copy(update={"feature_shape": (128,), "label_shape": (128,)})
    rows = {}
    for again in (False, True):
        module = text_model("llama lora", **sizes)
        ComputeMode(gradient_checkpointing=again).apply(module)
        rows[again] = largest_rows(module, form, next_token_cross_entropy, vocabulary=60)
    # Half of it is kept blocks; the other half are adapters' rows in place of the sides that they come from.
    assert rows[True] >= 2 * rows[False]


# --- refused


def test_a_model_without_blocks_is_not_told_to_compute_them_again() -> None:
    with pytest.raises(ModelError) as error:
        CHECKPOINTED.apply(nn.Linear(8, 3))
    assert error.value.code == "gradient_checkpointing"
    module = text_model("gpt2")
    module.model.__class__ = type("NoBlocks", (type(module.model),), {"supports_gradient_checkpointing": False})
    with pytest.raises(ModelError, match="NoBlocks") as error:
        CHECKPOINTED.apply(module)
    assert error.value.code == "gradient_checkpointing"


class OnlyFloat32(nn.Module):
    """An operation that torch has for float32 and not for bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x)
        return found + torch.complex(found, found).real * 0


def test_an_operation_without_bfloat16_is_refused_by_name() -> None:
    check_trainable(OnlyFloat32(), FORM, cross_entropy)
    with pytest.raises(ModelError, match="BFloat16") as error:
        check_trainable(in_mode(OnlyFloat32(), BF16), FORM, cross_entropy)
    assert error.value.code == "bf16_unsupported"


class MixesInBfloat16(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x)
        return found - found.mean(0) if found.dtype == torch.bfloat16 else found


def test_a_model_is_checked_in_the_precision_that_it_computes_in_and_in_float32() -> None:
    check_trainable(MixesInBfloat16(), FORM, cross_entropy)
    with pytest.raises(ModelError) as error:
        check_trainable(in_mode(MixesInBfloat16(), BF16), FORM, cross_entropy)
    assert error.value.code == "mixing_layer"

    class LosesAThousandth(nn.Linear):
        """Uses its weight once where no tap sees it, too little for the eye of bfloat16."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.004 * Hidden.apply(x, self.weight)

    check_trainable(in_mode(nn.Linear(8, 3), BF16), FORM, cross_entropy)
    with pytest.raises(ModelError) as error:
        check_trainable(in_mode(LosesAThousandth(8, 3), BF16), FORM, cross_entropy)
    assert error.value.code == "unsupported_layer"


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T.to(x.dtype) @ x


def test_the_precision_is_part_of_what_the_model_holds() -> None:
    """A worker that builds the model without it has another digest of what is frozen."""
    module = nn.Linear(8, 3)
    narrow = in_mode(module, BF16)
    assert tensor_contents(module) != tensor_contents(narrow)
    assert tensor_contents(narrow) == tensor_contents(in_mode(module, BF16))
    assert has_autocast(narrow)
    remove_autocast(narrow)
    assert not has_autocast(narrow)
    assert tensor_contents(module) == tensor_contents(narrow)


def compiled(inner: nn.Module) -> nn.Module:
    return torch.compile(inner, backend="eager")  # type: ignore[return-value]


def compiled_in_place(inner: nn.Module) -> nn.Module:
    inner.compile(backend="eager")
    return inner


class CallsCompiled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.function = torch.compile(torch.tanh, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.inner(x))


@pytest.mark.parametrize("make", [compiled, compiled_in_place, CallsCompiled])
def test_a_compiled_model_is_refused_by_name(make: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(ModelError) as error:
        check_trainable(make(nn.Linear(8, 3)), FORM, cross_entropy)
    assert error.value.code == "compiled_model"


def test_a_compiled_loss_is_refused_by_name() -> None:
    @torch.compile(backend="eager")
    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, labels, reduction="none")

    with pytest.raises(ModelError) as error:
        check_trainable(nn.Linear(8, 3), FORM, loss)
    assert error.value.code == "compiled_model"


class FromLiger(nn.Linear):
    __module__ = "liger_kernel.transformers.rms_norm"


def liger_forward(x: Tensor) -> Tensor:
    return x[:, :3]


liger_forward.__module__ = "liger_kernel.transformers.model.llama"


def test_layers_of_liger_and_forwards_that_it_replaced_are_refused_by_name() -> None:
    patched = nn.Linear(8, 3)
    patched.forward = liger_forward  # type: ignore[method-assign]
    for layer in (FromLiger(8, 3), patched):
        with pytest.raises(ModelError, match="layer '0'") as error:
            check_trainable(nn.Sequential(layer), FORM, cross_entropy)
        assert error.value.code == "liger_kernels"
