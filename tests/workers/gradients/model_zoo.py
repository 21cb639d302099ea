"""Models of the kinds that people train, small, each with ordinary examples; text models take one tensor of ids.

Each makes its tensors on the device of its input, as a model for a GPU does.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from raycloak.workers.inputs.hub_files import quiet
from raycloak.workers.models.experts import evaluate_every_expert

VOCABULARY, LENGTH, CLASSES = 61, 12, 3


@dataclass(frozen=True)
class Case:
    """A model and the shape of its features; ids if the model reads text."""

    module: nn.Module
    shape: tuple[int, ...]
    text: bool = False

    def batch(self, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Draw features and labels of ``count`` rows; some texts repeat tokens and end in padding."""
        draw = torch.Generator().manual_seed(seed)
        labels = torch.randint(CLASSES, (count,), generator=draw)
        if not self.text:
            return torch.randn(count, *self.shape, generator=draw), labels
        ids = torch.randint(1, VOCABULARY, (count, *self.shape), generator=draw)
        ids[0, 4:8] = ids[0, 3]
        ids[1, -3:] = 0
        return ids, labels


class Logits(nn.Module):
    """A language model of transformers as a model of one tensor, with an explicit mask of four dimensions."""

    def __init__(self, inner: nn.Module, causal: bool) -> None:
        super().__init__()
        self.inner, self.causal = inner, causal

    def forward(self, ids: Tensor) -> Tensor:
        count, length = ids.shape
        mask = (ids != 0)[:, None, None, :].expand(count, 1, length, length)
        if self.causal:
            mask = torch.ones(count, 1, length, length, dtype=torch.bool, device=ids.device).tril()
        floor = torch.finfo(next(self.parameters()).dtype).min
        added = torch.zeros_like(mask, dtype=next(self.parameters()).dtype).masked_fill(~mask, floor)
        return self.inner(input_ids=ids, attention_mask=added).logits


class NextToken(nn.Module):
    """The mean logit of each class over positions, so that a language model has the labels of a classifier."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.inner(ids)
        # Of a model over several devices.
        ids = ids.to(logits.device)
        own = logits[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
        return torch.stack([logits[:, :, 0].mean(1), own.mean(1), logits[:, -1, 1]], 1)


def cnn() -> Case:
    return Case(
        nn.Sequential(
            nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(inplace=True), nn.MaxPool2d(2, 1),
            nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1),
            nn.Flatten(), nn.Linear(32 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, CLASSES),
        ),
        (1, 28, 28),
    )  # fmt: skip


def mlp() -> Case:
    return Case(nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 3)), (20,))


class Convolutions(nn.Module):
    """Every kind of convolution that has a rule, and group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv1d(3, 6, 3, stride=2, padding="valid", dilation=2, groups=3)
        self.two = nn.Conv2d(1, 4, (3, 2), padding="same", padding_mode="circular", bias=False)
        self.norm = nn.GroupNorm(2, 4)
        self.depth = nn.Conv2d(4, 4, 3, padding=1, groups=4, stride=(1, 2))
        self.three = nn.Conv3d(2, 4, 2, padding=(1, 0, 1), groups=2)
        self.up = nn.ConvTranspose1d(6, 2, 3)
        self.head = nn.LazyLinear(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.up(self.one(x.reshape(len(x), 3, 16)))
        plane = self.depth(self.norm(self.two(x.reshape(len(x), 1, 6, 8))))
        space = self.three(x.reshape(len(x), 2, 3, 2, 4))
        return self.head(torch.cat([part.flatten(1).tanh() for part in (flat, plane, space)], 1))


def convolutions() -> Case:
    module = Convolutions()
    module(torch.zeros(1, 48))
    return Case(module, (48,))


class OwnParameters(nn.Module):
    """Parameters in the hands of the model itself: positions, a class token, scales, and a matrix used directly."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 8, padding_idx=0)
        self.places = nn.Embedding(LENGTH, 8)
        self.start = nn.Parameter(torch.randn(1, 1, 8))
        self.offset = nn.Parameter(torch.randn(1, LENGTH + 5, 8))
        self.scale = nn.Parameter(torch.randn(8))
        self.matrix = nn.Parameter(torch.randn(8, 8))
        self.slope = nn.PReLU(8)
        self.norm = nn.RMSNorm(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        words = (
            self.words(ids)
            + self.places(torch.arange(ids.shape[1], device=ids.device))
            + self.offset[:, : ids.shape[1]]
        )
        words = torch.cat([self.start.expand(len(ids), -1, -1), words], 1) * self.scale
        words = torch.tanh(words @ self.matrix.T) + torch.einsum("btd,de->bte", words, self.matrix)
        words = self.slope(self.norm(words).transpose(1, 2)).transpose(1, 2)
        return self.head(words.mean(1)) + functional.linear(words[:, 0], self.head.weight)


def own_parameters() -> Case:
    return Case(OwnParameters(), (LENGTH,), text=True)


class Encoder(nn.Module):
    """Torch's own transformer, with self-attention and attention to another sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.cross = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        words = self.words(ids)
        found = self.encoder(words, src_key_padding_mask=ids == 0)
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).triu(1)
        crossed, weights = self.cross(found, words, words + 1, attn_mask=causal)
        return self.head(crossed.mean(1)) + weights.square().sum(1)[:, :CLASSES]


def encoder() -> Case:
    return Case(Encoder(), (LENGTH,), text=True)


class Places(nn.Module):
    """Tables and layers over what comes from no example: pairs of places, positions for each row, an index of a buffer.

    Args:
        length: of a text; that it is the number of rows shall change nothing.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 8, padding_idx=0)
        self.near = nn.Embedding(2 * length, 2)
        self.each = nn.Embedding(length, 8)
        self.biases = nn.Parameter(torch.randn(2 * length, 2))
        self.waves = nn.Linear(1, 8)
        self.norm = nn.LayerNorm(8)
        self.one, self.other = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(2))
        self.head = nn.Linear(8, CLASSES)
        places = torch.arange(length)
        self.register_buffer("apart", places[:, None] - places[None, :] + length)
        self.register_buffer("still", torch.zeros(2))

    def forward(self, ids: Tensor) -> Tensor:
        count, length = ids.shape
        places = torch.arange(length, device=ids.device)
        words = self.words(ids) + self.each(places.expand(count, -1))
        # A table of waves, of which each is a place's: no row of it is an example's.
        waves = self.norm(self.waves(torch.log(1.0 + places.to(self.waves.weight.dtype))[:, None]))
        words = words + waves + torch.cat([self.one, self.still, self.other])
        near = self.near((places[:, None] - places[None, :]).abs()).permute(2, 0, 1)[None]
        near.div_(2.0)
        scores = (words @ words.mT)[:, None] + near.expand(count, -1, -1, -1)
        scores = scores + self.biases[self.apart.view(-1)].view(length, length, 2).permute(2, 0, 1)[None]
        sinks = self.other.reshape(1, 2, 1, 1).expand(count, -1, length, -1)
        mixed = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1].mean(1) @ words
        return self.head(mixed.tanh().mean(1))


def places(length: int) -> Case:
    return Case(Places(length), (length,), text=True)


class Written(nn.Module):
    """Looks up ids that it wrote into tensors which came from no example: by an index, by views, and as an output."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        index, turned, whole, given = (torch.zeros_like(ids) for _ in range(4))
        index[:, :4] = ids[:, :4]
        turned.T[4:] = ids.T[4:]
        whole.view(-1).copy_(ids.reshape(-1))
        torch.add(ids, 0, out=given)
        return self.head(sum(self.words(each) for each in (index, turned, whole, given)).tanh().mean(1))


def written() -> Case:
    return Case(Written(), (LENGTH,), text=True)


class Windows(nn.Module):
    """Attention within windows that the layer rolls, as Swin's: each row has several windows, and all share a table."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(1, 8)
        self.near = nn.Parameter(torch.randn(9, 2))
        self.head = nn.Linear(8, CLASSES)
        x = torch.arange(4)
        self.register_buffer("pairs", ((x[:, None] // 2 - x // 2 + 1) * 3 + x[:, None] % 2 - x % 2 + 1).flatten())

    def forward(self, images: Tensor) -> Tensor:
        count = len(images)
        grid = self.wide(images[..., None]).roll((-1, -1), (1, 2))
        windows = grid.view(count, 2, 2, 2, 2, 8).permute(0, 1, 3, 2, 4, 5).reshape(count * 4, 4, 2, 4).transpose(1, 2)
        scores = windows @ windows.mT + self.near[self.pairs].view(4, 4, 2).permute(2, 0, 1)[None]
        mixed = torch.softmax(scores, -1) @ windows
        return self.head(mixed.transpose(1, 2).reshape(count, 4, 4, 8).tanh().mean((1, 2)))


def windows() -> Case:
    return Case(Windows(), (4, 4))


def mixtral() -> Case:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16, "num_local_experts": 4,
    }  # fmt: skip
    config = transformers.MixtralConfig(**sizes, use_cache=False, bos_token_id=1, eos_token_id=2)
    case = Case(NextToken(Logits(transformers.MixtralForCausalLM(config), causal=True)), (LENGTH,), text=True)
    evaluate_every_expert(case.module.inner.inner)
    return case


def mixtral_lora() -> Case:
    """Adapters of PEFT on the matrices of all experts, on their router and on attention."""
    peft = pytest.importorskip("peft")
    case = mixtral()
    config = peft.LoraConfig(
        r=2, lora_alpha=8, target_modules=["q_proj"], lora_dropout=0.0,
        target_parameters=["experts.gate_up_proj", "experts.down_proj", "gate.weight"],
    )  # fmt: skip
    with quiet():
        case.module.inner.inner = peft.get_peft_model(case.module.inner.inner, config)
    for name, tensor in case.module.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(tensor, std=0.1)
    evaluate_every_expert(case.module.inner.inner.get_base_model())
    return case


class Tied(nn.Module):
    """An embedding that is the output layer, too, wide enough that its rows are formed one by one."""

    def __init__(self, width: int = 96, words: int = 3000) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.head = nn.Linear(width, words)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(ids))).mean(1)[:, :CLASSES]


def tied() -> Case:
    return Case(Tied(), (LENGTH,), text=True)


def bert(attention: str = "sdpa", **fields: int) -> Case:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 16,
    }  # fmt: skip
    config = transformers.BertConfig(
        **sizes | fields, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=CLASSES,
        attn_implementation=attention,
    )  # fmt: skip
    return Case(Logits(transformers.BertForSequenceClassification(config), causal=False), (LENGTH,), text=True)


def gpt2(attention: str = "sdpa", length: int = LENGTH, **fields: int) -> Case:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    config = transformers.GPT2Config(
        **sizes | fields, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        attn_implementation=attention, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return Case(NextToken(Logits(transformers.GPT2LMHeadModel(config), causal=True)), (length,), text=True)


def llama(**fields: int) -> Case:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16,
    }  # fmt: skip
    config = transformers.LlamaConfig(
        **sizes | fields, tie_word_embeddings=True, use_cache=False, bos_token_id=1, eos_token_id=2
    )
    return Case(NextToken(Logits(transformers.LlamaForCausalLM(config), causal=True)), (LENGTH,), text=True)


def with_lora(case: Case, targets: list[str], rank: int = 4) -> Case:
    """Put adapters of PEFT on some layers, with both of their factors away from zero, and freeze the rest."""
    peft = pytest.importorskip("peft")
    transposed = "c_attn" in targets
    config = peft.LoraConfig(r=rank, lora_alpha=8, target_modules=targets, lora_dropout=0.0, fan_in_fan_out=transposed)
    module = peft.get_peft_model(case.module, config)
    for name, tensor in module.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(tensor, std=0.1)
    return Case(module, case.shape, case.text)


ZOO: dict[str, Callable[[], Case]] = {
    "cnn": cnn,
    "mlp": mlp,
    "convolutions": convolutions,
    "own parameters": own_parameters,
    "encoder": encoder,
    "places": lambda: places(LENGTH),
    # As many places as rows in `test_gradient_parts.py`.
    "places like rows": lambda: places(6),
    "written": written,
    "windows": windows,
    "mixtral": mixtral,
    "mixtral lora": mixtral_lora,
    "tied": tied,
    "bert": bert,
    "bert eager": lambda: bert("eager"),
    "bert lora": lambda: with_lora(bert(), ["query", "value"]),
    "gpt2": gpt2,
    "gpt2 eager": lambda: gpt2("eager"),
    "gpt2 lora": lambda: with_lora(gpt2(), ["c_attn"]),
    "llama": llama,
    "llama lora": lambda: with_lora(llama(), ["q_proj", "down_proj"]),
}


class HiddenProduct(torch.autograd.Function):
    """A product that torch's function modes do not see."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x
