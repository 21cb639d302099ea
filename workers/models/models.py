"""Models and losses: built from the names that the user gave, with their parameters as one flat vector.

Only tensors with ``requires_grad`` are trained and sent, in the order of ``named_parameters``. All are hashed.
"""

import copy
import hashlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import model_validator
from torch import Tensor, nn

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.messages import Message
from raycloak.metrics.errors import ModelError, is_out_of_memory
from raycloak.workers.inputs.user_code import (
    SEE_WHY,
    absent_import,
    find_in,
    not_importable,
    own_folders,
    resolve,
    source_digest,
    told,
)
from raycloak.workers.models.compute_mode import PLAIN, ComputeMode
from raycloak.workers.models.dropout import dropouts
from raycloak.workers.models.held_values import HeldValue, held_values
from raycloak.workers.models.hub_model import HubSpec
from raycloak.workers.models.losses import BuiltInLoss
from raycloak.workers.models.model_fixes import is_frozen, keep_still, name_once
from raycloak.workers.models.text_model import as_text_model
from raycloak.workers.terms.loss import LossSpec
from raycloak.workers.terms.manifest import TensorSpec
from raycloak.workers.terms.model_digest import ATTRIBUTES, TensorContent, dimension, split_flat

LARGEST_IN_DRIVER = 2 * 10**9
"""Bytes of the largest model that a driver runs, to plan with it or to measure it: a larger one takes minutes of a
machine's time."""

# Elements that are hashed at once: bounds the memory beside the model, and changes no digest.
_PIECE = 2**20
A = TypeVar("A", Tensor, NDArray[Any])
LossFn = Callable[[Tensor, Tensor], Tensor]
"""(output [n, ...], labels [n, ...]) to one loss per example, shape [n]."""


class FunctionSource(Message):
    """A callable of the user's own, which only Python can read.

    Attributes:
        pickled: the callable, one opaque field.
        pickled_digest: SHA-256 of it, by which it is named.
        code: its source digest.
        folders: where its process found modules; a worker looks there too, after all other places.
    """

    DOMAIN: ClassVar[str] = "raycloak/function-source/v1"

    pickled: bytes
    pickled_digest: bytes
    code: bytes
    folders: tuple[str, ...]

    @model_validator(mode="after")
    def _is_named_by_its_digest(self) -> Self:
        if digest(self.pickled) != self.pickled_digest:
            raise ValueError("the function is not the one that its digest names")
        return self


class ModelSource(Message):
    """The source of a model, in a form that travels to workers.

    A model travels by its name, and every worker computes the digest of the code or files that it finds there. Only a
    callable travels itself, on any cluster.

    Attributes:
        name: ``module:function``, the qualified name of a callable, or the last part of a model's path or hub name.
        function: a callable; None for the others.
        hub: of a Hugging Face model by configuration; None for the others.
    """

    DOMAIN: ClassVar[str] = "raycloak/model-source/v1"

    name: str
    function: FunctionSource | None = None
    hub: HubSpec | None = None

    @classmethod
    def of(cls, model: str | HubSpec | Callable[[], nn.Module]) -> "ModelSource":
        """Return the source of a ``module:function``, a model by configuration or a callable without arguments."""
        if isinstance(model, str):
            return cls(name=model)
        if isinstance(model, HubSpec):
            # Not the whole path: the manifest has the name, and a model that was moved is the same.
            return cls(name=Path(model.hf).name, hub=model)
        name = getattr(model, "__qualname__", type(model).__qualname__)
        _require_function(model, name)
        pickled = cloudpickle.dumps(model)
        code, folders = source_digest(model, Path()), own_folders()
        function = FunctionSource(pickled=pickled, pickled_digest=digest(pickled), code=code, folders=folders)
        return cls(name=name, function=function)

    def code_digest(self, base: Path | str) -> bytes:
        """Return a SHA-256 of the source, see `workers/inputs/user_code.py` and `hub_model.py`; errors as there."""
        if self.hub is not None:
            return self.hub.code_digest(base)
        return self.function.code if self.function else source_digest(self.name, base)

    def drawing(self, base: Path | str) -> Callable[[], tuple[nn.Module, tuple[str, ...]]]:
        """Return what builds the model, drawing from torch's generator; see :func:`build_noted` for what that returns.

        Raises:
            ConfigError: ``module_function``.
        """
        if self.hub is not None:
            hub = self.hub
            return lambda: _as_trained(*hub.build(base))
        if self.function is None:
            named = resolve(self.name, base)
            return lambda: _as_trained(self._called(named, base), ())
        find_in(self.function.folders)
        try:
            # It runs code, but our own driver pickled it, and runs this user's code in any case.
            function = cloudpickle.loads(self.function.pickled)
        except ModuleNotFoundError as error:
            # A name that is in what the driver sent is none of an example.
            if error.name is None or error.name.encode() not in self.function.pickled:
                raise
            raise not_importable(self.name, error.name) from told(error)
        return lambda: _as_trained(self._called(function, base), ())

    def _called(self, function: Callable[[], Any], base: Path | str) -> nn.Module:
        _require_function(function, self.name)
        try:
            module = function()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            if self.function is None and (absent := absent_import(error, self.name, base)) is not None:
                raise absent from told(error)
            # Only its type is told: its text may hold private data.
            raise ModelError("model_function", f"{self.name} fails with {type(error).__name__}.", SEE_WHY) from told(
                error
            )
        if not isinstance(module, nn.Module):
            raise ModelError(
                "model_function",
                f"{self.name} returned a {type(module).__name__}, not a torch.nn.Module.",
                "Name a function that returns one.",
            )
        return module


@dataclass(frozen=True, slots=True)
class ModelRuntime:
    """A way to build and run the model of a run in one process.

    Attributes:
        twin: gives each caller a module of its own, which shares the frozen parameters.
        loss_fn: one loss per example.
        device: ``cpu`` or ``cuda``.
        deterministic: whether an operation without a deterministic kernel is refused.
    """

    twin: Callable[[], nn.Module]
    loss_fn: LossFn
    device: str
    deterministic: bool


def _require_function(function: object, name: str) -> None:
    """Refuse a module in the place of the function that builds it: each worker builds its own."""
    if isinstance(function, nn.Module) or not callable(function):
        raise ModelError(
            "model_function",
            f"{name} is a {type(function).__name__}, and no function that returns a module.",
            "Give a function without arguments that builds the module.",
        )


def build_model(source: ModelSource, base: Path | str, seed: int, mode: ComputeMode = PLAIN) -> nn.Module:
    """Return the module of :func:`build_noted` alone."""
    return build_noted(source, base, seed, mode)[0]


def build_noted(
    source: ModelSource, base: Path | str, seed: int, mode: ComputeMode = PLAIN
) -> tuple[nn.Module, tuple[str, ...]]:
    """Build the model with torch's generator at the public ``seed``; the global generator is left as it was.

    Guarantee: a function that draws from torch's CPU generator alone gives the same initial parameters every time,
    in one numerics class.

    Returns:
        The module, its dropout set to 0, as a `raycloak.workers.models.text_model.TextModel` if it is a model of
        Hugging Face; and sentences for the reader about what was changed or drawn.

    Raises:
        ModelError: ``model_function`` if the function fails or returns anything but a module, or what
            :func:`check_layers`, :class:`TextModel`, :meth:`HubSpec.build` or :meth:`ComputeMode.apply` refuses.
        ConfigError: ``module_function``, or as :meth:`HubSpec.build`.
    """
    module, notes = build_unchecked(source, base, seed)
    check_layers(module)
    mode.apply(module)
    return module, notes


def build_unchecked(source: ModelSource, base: Path | str, seed: int) -> tuple[nn.Module, tuple[str, ...]]:
    """Build the model as :func:`build_noted` does, whatever its layers are: for a report on them."""
    # Before the seed is set: a module draws only where it is imported for the first time.
    draw = source.drawing(base)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return draw()


def _as_trained(module: nn.Module, drawn: tuple[str, ...]) -> tuple[nn.Module, tuple[str, ...]]:
    name_once(module)
    keep_still(module)
    # Hugging Face gives what it loads in evaluation mode; a model that is trained is in training mode everywhere.
    trained, changed = as_text_model(module.train())
    return trained, (*drawn, *changed)


def check_layers(module: nn.Module) -> None:
    """Refuse layers that cannot be trained per example in the mode that each is in, by what it is known to do;
    `workers/gradients/model_checks.py` also runs the model.

    Raises:
        ModelError: ``mixing_layer`` (statistics of batches in training mode), ``random_layer`` (dropout with p > 0),
            ``unsupported_layer`` (recurrent layers, running statistics in training mode), ``compiled_model``,
            ``liger_kernels``, ``no_trainable_parameters`` or ``parameter_dtype``; the layer is named.
    """
    trainable = _trainable(module)
    if not trainable:
        raise ModelError(
            "no_trainable_parameters",
            "no parameter of the model has requires_grad.",
            "Set requires_grad on some of them.",
        )
    for name, tensor in trainable:
        if tensor.dtype != torch.float32:
            raise ModelError(
                "parameter_dtype",
                f"parameter '{name}' is {tensor.dtype}; trained parameters must be float32.",
                "Convert the module with .float(), or freeze the parameter.",
            )
    for name, layer in module.named_modules():
        problem = layer_problem(name, layer)
        if problem is not None:
            raise problem


def layer_problem(name: str, layer: nn.Module) -> ModelError | None:
    """Return what :func:`check_layers` has against one layer, apart from its dtypes."""
    shown = f"layer '{name or 'model'}' ({type(layer).__name__})"
    # Of a compiler that was never loaded, nobody has a layer.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    compiled = compiler is not None and isinstance(layer, compiler.OptimizedModule)
    if compiled or layer._compiled_call_impl is not None:
        return compiled_model(shown)
    # Liger puts its forward into classes and objects of others, too.
    if any(map(_is_of_liger, (*type(layer).__mro__, layer.forward))):
        return ModelError(
            "liger_kernels",
            f"{shown} computes in Liger's kernels, which show no operation that a parameter enters, and whose "
            "repeatability torch cannot promise.",
            "Leave Liger out of the model. model.use_liger_kernels has it in the frozen layers of one with an adapter.",
        )
    if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training:
        return ModelError(
            "mixing_layer",
            f"{shown} computes statistics over the batch, so one example changes another's gradient.",
            "Put it into evaluation mode, where it keeps its statistics, as raycloak.fix(model) does."
            if is_frozen(layer)
            else "Use GroupNorm or LayerNorm, as raycloak.fix(model) does.",
        )
    if any(dropouts(layer)):
        return ModelError(
            "random_layer",
            f"{shown} draws random numbers outside the run's keyed streams, so a step could not be repeated.",
            "Set its dropout to 0; the noise regularises already.",
        )
    return _unsupported(layer, shown)


def loss_function(loss: LossSpec, base: Path | str) -> tuple[LossFn, bytes]:
    """Return the loss and its source digest, which is empty for a built-in one.

    Raises:
        ConfigError: ``module_function``.
        ModelError: ``liger_kernels`` for a loss of Liger's.
    """
    if loss.terms:
        return BuiltInLoss(loss.terms), b""
    found = resolve(loss.name, base)
    if _is_of_liger(found):
        raise ModelError(
            "liger_kernels",
            f"the loss {loss.name} is Liger's, which averages over the tokens of a batch and reads their number.",
            "Take one of raycloak's own, such as next_token_cross_entropy.",
        )
    return found, source_digest(loss.name, base)


def trainable_tensors(module: nn.Module) -> tuple[TensorSpec, ...]:
    """Return names and shapes of the trained tensors, in canonical order."""
    return tuple(TensorSpec(name=name, shape=tuple(tensor.shape)) for name, tensor in _trainable(module))


def tensor_contents(module: nn.Module, loss_fn: LossFn | None = None) -> tuple[TensorContent, ...]:
    """Return the content of all that ``module`` and ``loss_fn`` hold (`workers/models/held_values.py`).

    Every parameter, buffer, other tensor and array is one entry. The plain values of a layer together are one more, of
    dtype ``attributes``.

    Guarantee: reads each tensor once, in pieces of 2^20 elements; no second copy of a tensor is made.

    Raises:
        ModelError: ``tensor_layout`` if a tensor has no plain bytes, such as a sparse one; it is named.
    """
    contents: list[TensorContent] = []
    plain: dict[str, list[str]] = {}
    for held in held_values(module, loss_fn):
        if isinstance(held.value, str):
            plain.setdefault(held.owner, []).extend((held.name, held.value))
        else:
            contents.append(_content(held))
    for owner, fields in plain.items():
        found = digest(length_prefixed("raycloak/attributes/v1", *fields))
        contents.append(TensorContent(owner, ATTRIBUTES, (), found, trained=False))
    return tuple(contents)


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the module's parameters; the CPU if it has none."""
    return next((tensor.device for tensor in module.parameters()), torch.device("cpu"))


def held_bytes(module: nn.Module) -> int:
    """Return the bytes of all parameters and buffers."""
    return sum(each.nbytes for each in (*module.parameters(), *module.buffers()))


def is_left_to_workers(module: nn.Module) -> bool:
    """Return whether no driver runs a model: machines of workers are made for it, and a driver's may not be."""
    return held_bytes(module) > LARGEST_IN_DRIVER


def twin_of(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` that shares its frozen parameters, which nobody changes: a base may be all memory."""
    return copy.deepcopy(module, {id(each): each for each in module.parameters() if not each.requires_grad})


def read_flat(module: nn.Module) -> NDArray[np.float32]:
    """Return a copy of all trained tensors as float32 [d], in canonical order, each in C order."""
    return np.concatenate([tensor.detach().cpu().numpy().reshape(-1) for _, tensor in _trainable(module)])


def load_flat(module: nn.Module, vector: NDArray[np.float32]) -> None:
    """Copy float32 [d] into the trained tensors; frozen tensors stay as they are."""
    with torch.no_grad():
        for (_, tensor), part in zip(_trainable(module), split_flat(vector, trainable_tensors(module)), strict=True):
            if (tensor.device.type, tensor.dtype) == ("cpu", torch.float32):
                np.copyto(tensor.detach().numpy(), part.reshape(tensor.shape))
            else:
                # A copy, because the vector may be a read-only view of shared memory.
                tensor.copy_(torch.tensor(part, device="cpu").reshape(tensor.shape))


def parameter_count(module: nn.Module) -> int:
    """Return d, the number of trained coordinates."""
    return dimension(trainable_tensors(module))


def _content(held: HeldValue) -> TensorContent:
    assert not isinstance(held.value, str), "plain values have one entry together"
    dtype = dtype_name(held.value)
    try:
        found, shape = content_hash(held.value), tuple(held.value.shape)
    except (RuntimeError, ValueError, TypeError) as error:
        if is_out_of_memory(error):
            raise
        # Sparse, quantized, on the meta device, or not initialised yet.
        raise ModelError(
            "tensor_layout",
            f"tensor '{held.name}' ({dtype}) has no plain bytes to identify it by.",
            "Hold it as a dense tensor that is initialised when the model's function returns.",
        ) from None
    return TensorContent(held.name, dtype, shape, found, held.trained)


def content_hash(value: Tensor | NDArray[Any]) -> bytes:
    """Return the SHA-256 of the bytes of all elements in C order."""
    found = hashlib.sha256()
    if isinstance(value, Tensor):
        for piece in _pieces(value.detach()):
            plain = piece.resolve_conj().resolve_neg().contiguous()
            found.update(plain.cpu().reshape(-1).view(torch.uint8).numpy().data)
    else:
        for part in _pieces(value):
            found.update(part.tobytes())
    return found.digest()


def dtype_name(value: Tensor | NDArray[Any]) -> str:
    """Return torch's name of a tensor's dtype, such as ``float32``, or NumPy's, such as ``numpy.<f4``."""
    return str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else f"numpy.{value.dtype.str}"


def _pieces(values: A) -> Iterator[A]:
    """Yield the elements of ``values`` in C order, in pieces of bounded size."""
    size = math.prod(values.shape)
    if size <= _PIECE:
        yield values
    elif len(values) == 1:
        yield from _pieces(values[0])
    else:
        rows = max(1, _PIECE * len(values) // size)
        for start in range(0, len(values), rows):
            yield from _pieces(values[start : start + rows])


def _trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, tensor) for name, tensor in module.named_parameters() if tensor.requires_grad]


def _is_of_liger(what: object) -> bool:
    return (getattr(what, "__module__", None) or "").partition(".")[0] == "liger_kernel"


def compiled_model(what: str) -> ModelError:
    """Return the refusal of a model or loss that a compiler has rewritten."""
    return ModelError(
        "compiled_model",
        f"{what} is compiled by torch.compile. What a compiler makes of a step depends on all that the process "
        "computed before, so a worker that joins later could compute other bytes.",
        "Return the model without torch.compile.",
    )


def _unsupported(layer: nn.Module, shown: str) -> ModelError | None:
    if not any(tensor.requires_grad for tensor in layer.parameters(recurse=False)):
        return None
    if isinstance(layer, nn.RNNBase):
        reason = "torch runs all its time steps in one operation, which shows no example's gradient"
        remedy = "Use opacus.layers.DPLSTM, DPGRU or DPRNN, as raycloak.fix(model) does, or freeze it."
    elif getattr(layer, "track_running_stats", False) and layer.training:
        reason = "it keeps statistics of the batches that it has seen"
        remedy = "Set track_running_stats=False, as raycloak.fix(model) does, or freeze it."
    else:
        return None
    return ModelError("unsupported_layer", f"{shown} cannot be trained per example: {reason}.", remedy)
