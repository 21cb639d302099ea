"""The functions that `test_liger.py` runs by name, in two processes with ``TRITON_INTERPRET=1``."""

import copy
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import peft
import pytest
import torch
import transformers
import triton.language as tl
from torch import nn
from torch.nn import functional
from transformers.models.llama import modeling_llama
from triton.runtime import interpreter

from raycloak.metrics.errors import ModelError
from raycloak.workers.gradients.gradient_parts import GradientParts
from raycloak.workers.gradients.model_checks import check_briefly, check_liger
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.read_values import ReadValues
from raycloak.workers.inputs.datasets import DatasetForm
from raycloak.workers.models import liger
from raycloak.workers.models.compute_mode import ComputeMode
from raycloak.workers.models.losses import next_token_cross_entropy
from raycloak.workers.models.text_model import TextModel
from raycloak.workers.workload import PlannedWorkload
from tests.protocol import config, mechanism, open_workload, worker_setup
from tests.tiny_text import write_llama
from tests.workers.gradients.test_sensitivity import ROWS, largest_move

LENGTH, WORDS = 3, 20
FORM = DatasetForm(
    num_examples=100, feature_shape=(LENGTH,), feature_dtype="int64", label_shape=(LENGTH,), label_dtype="int64"
)
SIZES = {
    "vocab_size": WORDS, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")


def prepare():
    """Let Liger's kernels run here: on a CPU, and in an interpreter that has neither libdevice nor types of floats.

    It computes wrong numbers in bfloat16, so these stay float32.
    """
    from liger_kernel.ops import rms_norm

    liger._DEVICE = "cpu"
    rms_norm.rsqrt = lambda x: tl.math.rsqrt(x)
    convert = interpreter._implicit_cvt

    def converted(value):
        if not isinstance(value, float):
            return convert(value)
        return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)

    interpreter._implicit_cvt = converted


def model_of(family, **fields):
    torch.manual_seed(4)
    inner = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**SIZES | fields))
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj", "down_proj"], lora_dropout=0.0, bias="all")
    inner = peft.get_peft_model(inner, settings)
    for name, tensor in inner.named_parameters():
        if not tensor.requires_grad:
            nn.init.normal_(tensor, 1.0 if "norm" in name else 0.0, 0.3)
        elif "lora_B" in name:
            nn.init.normal_(tensor, std=0.3)
    return TextModel(inner.train())


def in_liger(module):
    own = copy.deepcopy(module)
    liger.use_liger(own)
    return own


def same(left, right):
    return torch.allclose(left, right, rtol=1e-5, atol=1e-5)


def cases():
    """Each function of a kernel with what torch computes in its place, and its inputs: of the rotation, as views."""
    draw = torch.Generator().manual_seed(2)
    made = partial(torch.randn, generator=draw)
    norm = modeling_llama.LlamaRMSNorm(6).requires_grad_(False)
    norm.weight.copy_(made(6))
    frequencies = made(2, 5, 2)
    cos, sin = (torch.cat([each, each], -1) for each in (frequencies.cos(), frequencies.sin()))
    heads = [made(2, 5, many, 4).transpose(1, 2) for many in (3, 1)]
    return [
        (lambda x: (liger._normed(norm, x),), lambda x: (norm(x),), [made(2, 5, 6)]),
        (lambda *x: (liger._SwiGLU.apply(*x),), lambda a, b: (functional.silu(a) * b,), [made(2, 5, 6), made(2, 5, 6)]),
        (
            lambda *x: liger._rotated(*x, cos, sin),
            lambda *x: modeling_llama.apply_rotary_pos_emb(*x, cos, sin),
            heads,
        ),
        # One token and one head: to a kernel these lie in memory as they are.
        (
            lambda *x: liger._rotated(*x, cos[:, :1], sin[:, :1]),
            lambda *x: modeling_llama.apply_rotary_pos_emb(*x, cos[:, :1], sin[:, :1]),
            [made(2, 1, 1, 4).transpose(1, 2) for _ in range(2)],
        ),
    ]


def functions():
    """Outputs and gradients are torch's up to rounding; nothing else is written, and a second backward pass agrees."""
    for own, plain, inputs in cases():
        before = [each.clone() for each in inputs]
        for each in inputs:
            each.requires_grad_()
        found, right = own(*inputs), plain(*inputs)
        assert all(map(same, found, right))
        gradients = [torch.randn_like(each) for each in found]
        given = [each.clone() for each in gradients]
        passes = [torch.autograd.grad(found, inputs, gradients, retain_graph=True) for _ in range(2)]
        assert all(map(same, passes[0], torch.autograd.grad(right, inputs, given)))
        assert all(map(torch.equal, *passes))
        assert all(map(torch.equal, gradients, given))
        assert all(map(torch.equal, (each.detach() for each in inputs), before))


def families():
    """Rows of each family are those of its own layers up to rounding, and none moves the clipped sum by more than C."""
    ids = torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    for family in FAMILIES:
        plain = model_of(family)
        own = in_liger(plain)
        assert [name for name, _ in own.named_parameters()] == [name for name, _ in plain.named_parameters()]
        assert ("liger-kernel 0.8.5" in own.libraries, "liger" in plain.libraries) == (True, False)
        for again in (False, True):
            if again:
                ComputeMode(gradient_checkpointing=True).apply(own)
            right, parts = (GradientParts(each, next_token_cross_entropy)(ids, ids) for each in (plain, own))
            assert all(same(one.rows(), other.rows()) for one, other in zip(right, parts, strict=True))
            for clip in (2.0**-10, 2.0**10):
                assert largest_move(parts, clip) <= 1


def checks():
    """A model in the kernels passes the first checks and the comparison, and a wrong kernel fails one of the two."""
    module = model_of("Llama")
    check_liger(module, FORM, next_token_cross_entropy, vocabulary=WORDS)
    assert not liger.has_liger(module)
    check_briefly(in_liger(module), FORM, next_token_cross_entropy, vocabulary=WORDS)


def wrong_kernels():
    from liger_kernel.ops import rms_norm, rope, swiglu

    forward, backward, rotated = swiglu.swiglu_forward, swiglu.swiglu_backward, rope.rope_forward
    wrong = [
        (swiglu, "swiglu_forward", lambda gate, up: forward(gate, up + 0.05), "another output"),
        (swiglu, "swiglu_backward", lambda gate, up, found: backward(gate, up, found * 1.05), "another gradient"),
        (rope, "rope_forward", lambda q, k, cos, sin: rotated(q, k, cos, -sin), "another output"),
        (rms_norm, "rms_norm_backward", lambda found, *_, **__: (found.clone(), None), "another gradient"),
    ]
    module = model_of("Llama")
    for room, name, change, message in wrong:
        with patch.object(room, name, change), pytest.raises(ModelError, match=message) as error:
            check_liger(module, FORM, next_token_cross_entropy, vocabulary=WORDS)
        assert error.value.code == "liger_kernels"


def habits_of_liger():
    """Two habits of Liger's own functions are refused: gradients over kept tensors, and outputs from a shape alone."""
    module = in_liger(model_of("Llama"))
    empty = torch.empty
    hidden = {
        "_own": lambda tensor: tensor.contiguous(),
        "torch.empty_like": lambda like: empty(like.shape, dtype=like.dtype),
    }
    for name, change in hidden.items():
        target, _, attribute = f"raycloak.workers.models.liger.{name}".rpartition(".")
        with patch(f"{target}.{attribute}", change), pytest.raises(ModelError):
            check_briefly(module, FORM, next_token_cross_entropy, vocabulary=WORDS)


def values():
    """A value that Python reads behind a kernel is found."""
    for own, _, inputs in cases()[:3]:
        found = ReadValues(inputs[0])
        with found.watching():
            bool(own(*inputs)[0].sum() > 0)
        assert found.found is not None


def workload():
    """A worker's workload of a model by configuration passes all checks, and its class names Liger."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_llama(folder / "llama")
        (folder / "plot.txt").write_text("the film is very fine a plot was not dull " * 8)
        settings = config(
            model={
                "hf": str(folder / "llama"), "task": "causal_lm", "use_liger_kernels": True,
                "lora": {"rank": 2, "target_modules": ["down_proj"]},
            },
            dataset={"kind": "text_blocks", "path": str(folder / "plot.txt"), "max_length": 2},
            use_gpu=True,
        )  # fmt: skip
        opened = open_workload(worker_setup(settings, folder))
        assert "liger-kernel 0.8.5, attention eager" in opened.facts.numerics.model_libraries
        assert any("Liger's kernels" in note for note in opened.facts.model_notes)
        sizes = {
            "dimension": sum(each.size for each in opened.facts.tensors),
            "num_examples": opened.facts.num_examples,
        }
        planned = PlannedWorkload(opened, mechanism(**sizes), ())
        assert all(map(liger.has_liger, (opened.module, opened.runtime.twin())))
        assert len(planned.known_answer) == 32


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    pin_numerics()
    prepare()
    for name in sys.argv[1:]:
        globals()[name]()
