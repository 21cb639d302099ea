"""Checks of a model on synthetic data before anything is spent: is each example's gradient its own?

The checks run on a copy of the model on the CPU, with slightly moved parameters so that a layer initialised to zero
hides nothing. They are evidence, not proof: a layer that misbehaves only on certain inputs is not found.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raycloak.metrics.errors import ConfigError, ModelError, RaycloakError
from raycloak.workers.gradients.clipping import PerExampleGradients, named_operations
from raycloak.workers.inputs.datasets import DatasetForm
from raycloak.workers.inputs.models import LossFn, check_layers

_BATCH_SIZES = (5, 7)
"""Two sizes, so that another extent of the model's tensors cannot pass for the batch at both."""

_DTYPES = {"float32": torch.float32, "int64": torch.int64}


@dataclass(frozen=True, slots=True)
class _Examples:
    features: Tensor
    labels: Tensor


@dataclass(frozen=True, slots=True)
class _LayerTrace:
    name: str
    output: Tensor
    drew_randomness: bool


def check_trainable(
    module: nn.Module,
    form: DatasetForm,
    loss_fn: LossFn,
    deterministic: bool = True,
    vocabulary: int | None = None,
) -> None:
    """Refuse a model or loss that cannot be trained under per-example clipping on data of this form.

    Guarantee: on the synthetic examples tried, the forward pass changes neither a buffer nor a parameter. It draws no
    random number, in training and in evaluation mode. An example's output, loss and gradient keep their bits when
    another example or its label changes. The per-example gradients add up to the gradient of the summed loss.
    ``module`` itself is not changed.

    Args:
        deterministic: whether an operation without a deterministic kernel is refused.
        vocabulary: public number of ids, where features are integers; synthetic ones are drawn over all of them.

    Raises:
        ConfigError: ``vocabulary`` if features are integers and nobody says how many ids there are.
        ModelError: what `raycloak.workers.inputs.models.check_layers` refuses, ``model_input`` if the model or loss
            fails on such data, ``buffer_update``, ``random_layer``, ``mixing_layer``, ``loss_shape``,
            ``unsupported_layer`` or ``nondeterministic_op``; the layer is named.
    """
    check_layers(module)
    if form.feature_dtype == "int64" and vocabulary is None:
        raise ConfigError(
            "vocabulary",
            "features are integers, and nothing public says how many ids there are.",
            "Set dataset.vocabulary to N if they are ids 0 .. N-1, or let the dataset give floating-point features.",
        )
    probe = copy.deepcopy(module).cpu()
    with (
        torch.random.fork_rng(devices=[]),
        _input_errors(form),
        named_operations(deterministic),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        warnings.filterwarnings("ignore", ".* does not have a deterministic implementation")
        torch.default_generator.manual_seed(1)
        _perturb(probe)
        for count in _BATCH_SIZES:
            examples = _synthetic(form, count, vocabulary or 1)
            changed = _change_first(examples, vocabulary or 1)
            # Private examples are evaluated in evaluation mode, where a module may mix rows that it keeps apart in
            # training; see `raycloak.workers.gradients.sum_engines.PrivateEvaluationEngine`.
            _check_forward(probe.eval(), examples, changed)
            _check_forward(probe.train(), examples, changed)
            _check_gradients(probe, loss_fn, examples, changed, deterministic)


def _perturb(module: nn.Module) -> None:
    with torch.no_grad():
        for tensor in module.parameters():
            if tensor.requires_grad:
                tensor.add_(torch.randn_like(tensor), alpha=0.05)


def _synthetic(form: DatasetForm, count: int, vocabulary: int) -> _Examples:
    """Return examples with features in [0, 1) or any id, and labels of class 0 or in [0, 1)."""
    return _Examples(
        _draw((count, *form.feature_shape), _DTYPES[form.feature_dtype], vocabulary),
        _draw((count, *form.label_shape), _DTYPES[form.label_dtype], 1),
    )


def _draw(shape: tuple[int, ...], dtype: torch.dtype, integers_below: int) -> Tensor:
    return torch.randint(integers_below, shape) if dtype == torch.int64 else torch.rand(shape)


def _change_first(examples: _Examples, vocabulary: int) -> _Examples:
    features, labels = examples.features.clone(), examples.labels.clone()
    features[0] = 1 - features[0] if features.is_floating_point() else (features[0] + 1) % vocabulary
    labels[0] = 1 - labels[0]
    return _Examples(features, labels)


def _check_forward(module: nn.Module, examples: _Examples, changed: _Examples) -> None:
    state = {name: tensor.clone() for name, tensor in _all_tensors(module)}
    first = _trace(module, examples.features)
    for name, tensor in _all_tensors(module):
        if not torch.equal(tensor, state[name]):
            raise ModelError(
                "buffer_update",
                f"a forward pass changes '{name}', which no noise covers.",
                "Use a layer without running statistics.",
            )
    for before, repeated in zip(first, _trace(module, examples.features), strict=True):
        if before.drew_randomness or not _same(before.output, repeated.output):
            raise ModelError(
                "random_layer",
                f"layer '{before.name}' draws random numbers outside the run's keyed streams, so a step could not be "
                "repeated.",
                "Take the randomness out of the forward pass.",
            )
    other = _trace(module, changed.features)
    moved = [_mixes(*pair, len(examples.features)) for pair in zip(first, other, strict=True)]
    # The last layer to finish is the model itself. An inner tensor may have another first extent than the batch.
    if moved[-1]:
        raise ModelError(
            "mixing_layer",
            f"layer '{first[moved.index(True)].name}' mixes the examples of a batch, so one example changes another's "
            "gradient.",
            "Use one that treats each alone, such as GroupNorm or LayerNorm.",
        )


def _check_gradients(
    module: nn.Module, loss_fn: LossFn, examples: _Examples, changed: _Examples, deterministic: bool
) -> None:
    gradients = PerExampleGradients(copy.deepcopy(module), loss_fn, deterministic)
    before = gradients(examples.features, examples.labels)
    after = gradients(changed.features, changed.labels)
    names = [name for name, tensor in module.named_parameters() if tensor.requires_grad]
    loss_fn(module(examples.features), examples.labels).sum().backward()  # type: ignore[no-untyped-call]
    for name, rows, moved in zip(names, before, after, strict=True):
        if not _same(rows[1:], moved[1:]):
            raise ModelError(
                "mixing_layer",
                f"one example changes another's gradient of parameter '{name}'.",
                "Let model and loss treat each example alone.",
            )
        whole = module.get_parameter(name).grad
        module.get_parameter(name).grad = None
        # Loose: the two sums round in different orders. A wrong rule of Opacus is off by far more.
        if whole is None or not torch.allclose(rows.sum(0), whole, rtol=1e-3, atol=1e-5):
            raise ModelError(
                "unsupported_layer",
                f"Opacus' per-example gradients of parameter '{name}' do not add up to its gradient.",
                "Use the parameter only through its own layer's forward.",
            )


def _all_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _trace(module: nn.Module, features: Tensor) -> list[_LayerTrace]:
    """Return every layer's output in the order in which layers finish, inner layers before the outer ones."""
    traces: list[_LayerTrace] = []
    entered: list[Tensor] = []

    def enter(_layer: nn.Module, _inputs: object) -> None:
        entered.append(torch.get_rng_state())

    def leave(layer: nn.Module, _inputs: object, output: object) -> None:
        drew = not torch.equal(entered.pop(), torch.get_rng_state())
        if isinstance(output, Tensor):
            traces.append(_LayerTrace(names[layer], output.detach().clone(), drew))

    names = {layer: name or "model" for name, layer in module.named_modules()}
    hooks = [layer.register_forward_pre_hook(enter) for layer in names]
    hooks += [layer.register_forward_hook(leave) for layer in names]
    try:
        output = module(features)
    finally:
        for hook in hooks:
            hook.remove()
    if not isinstance(output, Tensor) or output.shape[:1] != features.shape[:1]:
        raise ModelError(
            "model_input", "the model's output is not one tensor with a row per example.", "Let its forward return one."
        )
    return traces


def _mixes(before: _LayerTrace, after: _LayerTrace, count: int) -> bool:
    """Return whether rows of ``count`` examples differ beyond the first."""
    return before.output.shape[:1] == (count,) and not _same(before.output[1:], after.output[1:])


def _same(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left.nan_to_num(), right.nan_to_num())


@contextmanager
def _input_errors(form: DatasetForm) -> Iterator[None]:
    """Turn all that the user's model or loss raises on synthetic data into one ModelError."""
    try:
        yield
    except RaycloakError:
        raise
    except Exception as error:
        said = str(error).splitlines()[0] if str(error) else "it gives no reason"
        raise ModelError(
            "model_input",
            f"the model fails on features of shape [n, {', '.join(map(str, form.feature_shape))}] "
            f"({form.feature_dtype}): {type(error).__name__}: {said}.",
            "Let model and loss take the dataset's shapes.",
        ) from error
