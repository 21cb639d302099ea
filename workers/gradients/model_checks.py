"""Checks of a model on synthetic data before anything is spent: is each example's gradient its own?

The assumption of the clipping bound is that every tensor keeps the examples in their rows. The checks try it forward
(another example in the batch moves no output), backward (a row's loss reaches its own place of every tensor alone), and
by what Python reads of the examples. They run on a copy of the model on the CPU, with slightly moved parameters so that
a layer initialised to zero hides nothing, and once more with parameters of eight times the size. The start of a run is
mostly these passes, so each serves several checks. They are evidence, not proof: they miss a layer that misbehaves only
on certain inputs. No check is needed to keep examples apart in the loss:
:class:`raycloak.workers.gradients.row_loss.RowLoss` shows it one example at a time.
"""

import copy
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import Tensor, nn

from raycloak.metrics.errors import ConfigError, ModelError, RaycloakError, is_out_of_memory
from raycloak.workers.gradients.gradient_parts import GradientParts, named_operations
from raycloak.workers.gradients.kept_state import KeptState
from raycloak.workers.gradients.parts import Part
from raycloak.workers.gradients.probes import Examples, Pair, Probes, odd_ids
from raycloak.workers.gradients.read_values import ReadValues
from raycloak.workers.gradients.row_loss import RowLoss
from raycloak.workers.gradients.row_places import moved_rows
from raycloak.workers.inputs.datasets import DatasetForm
from raycloak.workers.models.compute_mode import has_autocast, in_full_precision, remove_autocast
from raycloak.workers.models.models import LossFn, check_layers, compiled_model, content_hash
from raycloak.workers.terms.mechanism import Mechanism

_BATCH_SIZES = (5, 7)
"""Two sizes, so that another extent of the model's tensors cannot pass for the batch at both."""

_COMPARED = 2**20
"""Elements that are compared at once."""

_GROWN = 8.0
"""Factor of the trained parameters when the checks are made again: a run may grow them, and with them what is rare."""

_FIX = (
    "Treat each example alone: GroupNorm or LayerNorm, padding to one fixed length in place of the longest example, "
    "and an explicit mask."
)


@dataclass(frozen=True, slots=True)
class _Pass:
    """A forward pass.

    Attributes:
        layers: name of every layer and shape of its output, in the order in which layers finish: inner ones before
            the outer ones, the model itself last.
        output: of the model, a row per example.
    """

    features: Tensor
    layers: list[tuple[str, torch.Size]]
    output: Tensor

    def of_row(self, row: int) -> "_Pass":
        """Return the same with the output of one row in the place of every row; outputs of a large model are large."""
        return replace(self, output=self.output[row : row + 1].clone().expand_as(self.output))


@dataclass(frozen=True, slots=True)
class _Tolerance:
    """The distance by which two results of the same computation may differ.

    Attributes:
        relative: of each number.
        least: of the largest number, or of ``size`` if that is larger.
    """

    relative: float
    least: float
    size: float = 1.0


_FLOAT32, _FLOAT32_SUMS = _Tolerance(1e-3, 1e-4), _Tolerance(1e-3, 1e-5)
# Eight bits of a number are kept, so one rounding is off by up to 0.4 %.
_NARROW = _Tolerance(5e-2, 5e-2)


def check_trainable(
    module: nn.Module,
    form: DatasetForm,
    loss_fn: LossFn,
    deterministic: bool = True,
    vocabulary: int | None = None,
) -> None:
    """Refuse a model or loss that cannot be trained under per-example clipping on data of this form.

    Guarantee: on the synthetic examples tried, the forward pass and the loss draw no random number and change nothing
    that `workers/models/held_values.py` finds, in training and in evaluation mode; an example's output, loss and
    gradient keep their bits, and every layer its shape, when another example or its label changes; no loss of an
    example gives a gradient to another row of a tensor that a trained parameter enters; Python reads no value of a
    tensor that depends on examples; an example's output alone is its output in the batch up to rounding; the losses of
    a batch are those of its examples alone; and the per-example gradients add up to the gradient of the summed loss.
    ``module`` itself is not changed.

    Batches are small here; :func:`check_rows` tries the size that a run computes. A model that computes in bfloat16 is
    checked twice: in float32, where numbers that differ by more than rounding are told apart, and as it is.

    Args:
        deterministic: whether an operation without a deterministic kernel is refused.
        vocabulary: public number of ids, where features are integers; synthetic ones are drawn over all of them.

    Raises:
        ConfigError: ``vocabulary`` if features are integers and nobody says how many ids there are.
        ModelError: what `raycloak.workers.models.models.check_layers` refuses, ``model_input`` if the model or loss
            fails on such data, ``buffer_update``, ``random_layer``, ``mixing_layer``, ``moved_rows``, ``read_values``,
            ``mixing_loss``, ``loss_shape``, ``unsupported_layer``, ``nondeterministic_op``, ``compiled_model``, or
            ``bf16_unsupported`` if the model fails in bfloat16 alone; the layer is named.
    """
    check_layers(module)
    if has_autocast(module):
        with _copy_of(module, form, deterministic) as probe:
            remove_autocast(probe)
            _Checks(probe, form, loss_fn, deterministic, vocabulary).all()
    try:
        with _copy_of(module, form, deterministic) as probe:
            _Checks(probe, form, loss_fn, deterministic, vocabulary).all()
    except ModelError as error:
        # The model passed every check in float32.
        if error.code != "model_input" or not has_autocast(module):
            raise
        raise ModelError(
            "bf16_unsupported",
            f"in bfloat16 {error.message}",
            "Set precision: float32, or cast to float32 before the operation that is named.",
        ) from error


def check_rows(
    module: nn.Module,
    form: DatasetForm,
    loss_fn: LossFn,
    mechanisms: Iterable[Mechanism],
    deterministic: bool = True,
    vocabulary: int | None = None,
) -> None:
    """Refuse a model that mixes the examples of a physical micro-batch of one of ``mechanisms``.

    Guarantee: what :func:`check_trainable` says of the forward pass and of gradients, at the number of rows that each
    mechanism computes at once, in the mode in which private examples then meet the model. An extent of the model that
    equals this number by chance could pass for the batch at no other size.

    Raises:
        ModelError: ``mixing_layer``, ``buffer_update``, ``random_layer``, ``model_input``, ``unsupported_layer`` or
            ``nondeterministic_op``.
    """
    with _copy_of(module, form, deterministic) as probe:
        _Checks(probe, form, loss_fn, deterministic, vocabulary).of_sizes(mechanisms)


def check_released(
    module: nn.Module,
    form: DatasetForm,
    loss_fn: LossFn,
    mechanisms: Iterable[Mechanism],
    deterministic: bool = True,
    vocabulary: int | None = None,
) -> None:
    """Refuse a model that mixes synthetic examples at the parameters that it has now, where it is now.

    Guarantee: that of :func:`check_rows`. Parameters and examples are public, so a refusal says nothing of the data.
    """
    with _undisturbed(form, deterministic):
        _Checks(module, form, loss_fn, deterministic, vocabulary).of_sizes(mechanisms)
    module.train()


@contextmanager
def _copy_of(module: nn.Module, form: DatasetForm, deterministic: bool) -> Iterator[nn.Module]:
    """Lend a copy of ``module`` with moved parameters; the process's random state stays as it is."""
    probe = copy.deepcopy(module).cpu()
    with _undisturbed(form, deterministic):
        with torch.no_grad():
            for tensor in probe.parameters():
                if tensor.requires_grad:
                    tensor.add_(torch.randn_like(tensor), alpha=0.05)
        yield probe


@contextmanager
def _undisturbed(form: DatasetForm, deterministic: bool) -> Iterator[None]:
    """Let a model meet synthetic examples: the same ones each time, and the process's random state stays as it is."""
    with (
        torch.random.fork_rng(devices=[]),
        _no_compiler(),
        input_errors(form),
        named_operations(deterministic),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        warnings.filterwarnings("ignore", ".* does not have a deterministic implementation")
        torch.default_generator.manual_seed(1)
        yield


@dataclass(frozen=True, slots=True)
class _Mixed:
    """A batch of ordinary rows, and others like it.

    Attributes:
        mixes: features [n, ...], and how many of the first rows are others than in the ordinary batch.
    """

    ordinary: _Pass
    mixes: tuple[tuple[Tensor, int], ...]


@dataclass(frozen=True, slots=True)
class _Met:
    """The batches of fills that a model took.

    Attributes:
        batches: one for each group of values that were tried together; at least one.
        fills: the values that a whole batch of them may have.
    """

    batches: tuple[_Mixed, ...]
    fills: tuple[float, ...]


class _Checks:
    """The checks of one model and loss on synthetic examples.

    Args:
        module: lent for the checks.
        form, loss_fn, deterministic, vocabulary: as of :func:`check_trainable`.
    """

    def __init__(
        self, module: nn.Module, form: DatasetForm, loss_fn: LossFn, deterministic: bool, vocabulary: int | None
    ) -> None:
        self._module, self._loss_fn, self._deterministic = module, loss_fn, deterministic
        if not form.inputs and form.feature_dtype == "int64" and vocabulary is None:
            raise ConfigError(
                "vocabulary",
                "features are integers, and nothing public says how many ids there are.",
                "Set dataset.vocabulary to N if they are ids 0 .. N-1, or let the dataset give floating-point "
                "features.",
            )
        device = next((tensor.device for tensor in module.parameters()), torch.device("cpu"))
        self._probes = Probes(form, vocabulary or 2, odd_ids(module), device)
        self._loss = RowLoss.of(loss_fn)
        # On the module itself: taps keep nothing of a pass in it, and another copy would be all of the model again.
        self._gradients = GradientParts(module, self._loss, deterministic)

    def all(self) -> None:
        """Check what :func:`check_trainable` promises."""
        self._apart_in_both_modes(grown=False)
        # Another distribution at each size. A fault that hides from one shows in the forward pass, which met all of
        # both.
        for count, index in zip(_BATCH_SIZES, (0, -1), strict=True):
            pair = list(self._probes.draws(count))[index]
            self._check_places(pair.before)
            self._check_gradients(pair, slice(1, None))
            self._check_sum(pair.before)
        with torch.no_grad():
            for tensor in self._module.parameters():
                if tensor.requires_grad:
                    tensor.mul_(_GROWN)
        self._apart_in_both_modes(grown=True)

    def of_sizes(self, mechanisms: Iterable[Mechanism]) -> None:
        """Check what :func:`check_rows` promises."""
        for mechanism in mechanisms:
            if mechanism.query == "class_counts":
                continue
            count = mechanism.micro_batch_size
            self._enter_mode(mechanism.query == "gradient")
            met = self._check_fills(count)
            ordinary = met.batches[-1].ordinary
            self._check_alone(ordinary.features, ordinary.output)
            if mechanism.query == "evaluation":
                self._check_draws(count)
            if mechanism.query == "gradient":
                # Other rows' gradients show what other rows' outputs would; so these are not compared once more.
                *_, pair = self._probes.draws(count)
                self._check_met(met)
                self._check_gradients(pair, slice(1, None))
                self._check_sum(pair.before)

    def _enter_mode(self, training: bool) -> None:
        self._state = KeptState(self._module.train(training), self._loss.loss_fn, copies=True)

    def _apart_in_both_modes(self, *, grown: bool) -> None:
        """Check all that holds to the bit; with parameters that did not grow, also what holds up to rounding."""
        # Private examples are evaluated in evaluation mode, where a module may mix rows that it keeps apart in
        # training; see `raycloak.workers.gradients.sum_engines.PrivateEvaluationEngine`.
        for training in (False, True):
            self._enter_mode(training)
            for count in _BATCH_SIZES:
                drawn = self._check_draws(count)
                if count == _BATCH_SIZES[0]:
                    features = drawn[0][0].features
                    if not grown:
                        self._check_repeats(features)
                    # Before rows alone: of a batch that is trimmed to its longest text, it names the layer.
                    met = self._check_fills(count)
                    for batch, output in () if grown else drawn:
                        self._check_alone(batch.features, output)
                    # After what names a layer that mixes rows by such a value.
                    _check_reads(self._module, features)
                if training and not grown:
                    for batch, output in drawn:
                        self._check_loss(output, batch.labels)
        self._check_met(met)

    def _check_draws(self, count: int) -> list[tuple[Examples, Tensor]]:
        """Require that ordinary rows keep their bits when the first one changes; return batches with their output."""
        drawn = []
        for pair in self._probes.draws(count):
            before, after = (self._watched(each.features) for each in (pair.before, pair.after))
            _check_apart(self._module, before, after, slice(1, None))
            drawn.append((pair.before, before.output))
        return drawn

    def _check_repeats(self, features: Tensor) -> None:
        """Require that the same batch gives the same output of every layer twice."""
        first, again = list[Tensor](), list[Tensor]()
        found = _forward(self._module, features, first)
        self._state.check()
        _forward(self._module, features, again)
        for (name, _), *outputs in zip(found.layers, first, again, strict=True):
            if not _same(*outputs):
                raise _random_layer(name)

    def _check_fills(self, count: int) -> _Met:
        """Require that examples that are almost all one value, and ordinary ones, do not move each other.

        For each value all rows are filled, then rows of several values stand in one batch with ordinary rows, each
        where it stood before. An output must have the bits that the same row had among its equals.

        One mixed batch serves for several values. Suppose that what a row gets depends on some statistic of the batch,
        such as its longest text. If that differs between the ordinary batch and a filled one, the mixed batch differs
        from at least one of them, whatever else is in it. Then the ordinary rows or the filled row meet another value.
        """
        # At least one row stays ordinary.
        most = max(1, count - 1)
        batches, fills = list[_Mixed](), list[float]()
        for filling in self._probes.fillings(count):
            ordinary, mixes = self._watched(filling.ordinary), list[tuple[Tensor, int]]()
            groups: list[list[tuple[Tensor, _Pass]]] = [[]]
            for fill, example in filling.filled.items():
                found = self._if_accepted(example.expand_as(filling.ordinary).contiguous())
                if found is not None:
                    if len(groups[-1]) == most or not math.isfinite(fill):
                        groups.append([])
                    groups[-1].append((example, found.of_row(len(groups[-1]))))
                    fills.append(fill)
                    continue
                # Not in a batch of its own, but perhaps in one with others.
                alone = self._if_accepted(_with_rows(filling.ordinary, [example]))
                if alone is not None:
                    _check_apart(self._module, ordinary, alone, slice(1, None))
            for group in filter(None, groups):
                features = _with_rows(filling.ordinary, [example for example, _ in group])
                mixed = self._watched(features)
                _check_apart(self._module, ordinary, mixed, slice(len(group), None))
                for row, (_, found) in enumerate(group):
                    _check_apart(self._module, found, mixed, slice(row, row + 1))
                mixes.append((features, len(group)))
            batches.append(_Mixed(ordinary, tuple(mixes)))
        return _Met(tuple(batches), tuple(fills))

    def _check_met(self, met: _Met) -> None:
        """Require that gradients stay apart, and in their places, where ordinary rows meet filled and shorter ones."""
        # Finite ones alone, and first: what is not finite may hide what it meets.
        fills = [fill for fill in met.fills if math.isfinite(fill)]
        varied = self._probes.varied(len(met.batches[0].ordinary.features), fills)
        self._check_places(varied)
        self._check_shared(met.batches[0].ordinary.features, varied.features)
        for mixed in met.batches:
            ordinary = self._probes.labelled(mixed.ordinary.features)
            for features, others in mixed.mixes:
                among = Examples(features, ordinary.labels)
                # First, because it names what moves rows; gradients that mix in any other way are told apart below.
                self._check_places(among)
                if others < len(features):
                    self._check_gradients(Pair(ordinary, among), slice(others, None))

    def _if_accepted(self, features: Tensor) -> _Pass | None:
        """Return the pass; None if the model fails on these values, which are then in no batch that it computes."""
        try:
            with named_operations(self._deterministic):
                return _forward(self._module, features)
        except RaycloakError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # User code may raise anything; an odd value may be none for it.
            return None
        finally:
            self._state.check()

    def _watched(self, features: Tensor) -> _Pass:
        """Return the pass, and require that nothing of it was kept; the next one might undo it."""
        found = _forward(self._module, features)
        self._state.check()
        return found

    def _check_alone(self, features: Tensor, output: Tensor) -> None:
        """Require that an example's output in a batch of one is, up to rounding, what it is in the whole batch.

        Args:
            output: of the whole batch.
        """
        tolerance = _FLOAT32 if in_full_precision(self._module) else _NARROW
        for row in {0, len(features) - 1}:
            alone = self._watched(features[row : row + 1])
            if not _close(alone.output, output[row : row + 1], tolerance):
                raise ModelError(
                    "mixing_layer",
                    f"layer '{alone.layers[-1][0]}' gives an example another output alone than in a batch of "
                    f"{len(features)}.",
                    _FIX,
                )

    def _check_loss(self, output: Tensor, labels: Tensor) -> None:
        """Require that the loss of a batch is that of each example alone, for odd labels too, and keeps no state."""
        whole = self._loss_fn(output, labels)
        if not _close(whole, self._loss(output, labels), _FLOAT32):
            raise _mixing_loss()
        self._state.check()
        for pair in self._probes.odd_labels(labels):
            try:
                before, after = (self._loss(output, each) for each in pair)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                # A label of no class may be an error for the user's code.
                self._state.check()
                continue
            if not _same(before[1:], after[1:]):
                raise _mixing_loss()
            self._state.check()

    def _check_gradients(self, pair: Pair, rows: slice) -> None:
        """Require that the gradients of ``rows``, which are equal in both batches, have the same bits in both."""
        named = self._module.named_parameters()
        trained = {name: tensor.numel() for name, tensor in named if tensor.requires_grad}
        found = [
            # One batch's at a time: the gradients of a large model may all be alive at once.
            [_digest_of(part, rows, size) for part, size in zip(self._gradients(*batch), trained.values(), strict=True)]
            for batch in ((each.features, each.labels) for each in (pair.before, pair.after))
        ]
        for name, before, after in zip(trained, *found, strict=True):
            if before != after:
                raise ModelError("mixing_layer", f"one example changes another's gradient of parameter '{name}'.", _FIX)

    def _check_sum(self, examples: Examples) -> None:
        """Require that the rows' gradients add up to autograd's gradient of the summed loss."""
        module, parts = self._module, self._gradients(examples.features, examples.labels)
        self._loss(module(examples.features), examples.labels).sum().backward()  # type: ignore[no-untyped-call]
        wholes = {name: tensor.grad for name, tensor in module.named_parameters() if tensor.requires_grad}
        module.zero_grad(set_to_none=True)
        tolerance = _tolerance_of_gradients(module, wholes.values())
        for (name, whole), part in zip(wholes.items(), parts, strict=True):
            # Loose: the two sums round in different orders. A wrong rule is off by far more.
            if whole is None or not _close(_sum(part, len(examples.labels), whole), whole, tolerance):
                raise ModelError(
                    "unsupported_layer",
                    f"the per-example gradients of parameter '{name}' do not add up to its gradient.",
                    "Use the parameter in torch's own operations, in every forward pass.",
                )

    def _check_places(self, examples: Examples) -> None:
        """Require that a row's loss gives a gradient to its own place alone of every tensor that a parameter enters."""
        moved = self._gradients.moved_rows(examples.features, examples.labels)
        if moved is not None:
            raise moved_rows(f"the loss of one example reaches another's row where parameter '{moved}' is used")

    def _check_shared(self, left: Tensor, right: Tensor) -> None:
        """Require that what taps take as the same for all rows has the same bits in two batches of other rows."""
        found = self._gradients.shared(left)
        for one, other in zip_longest(found, self._gradients.shared(right) if found else []):
            if one != other:
                raise ModelError(
                    "unsupported_layer",
                    f"parameter '{(one or other)[0]}' meets a tensor that depends on examples and has no row for each.",
                    "Keep each example in its row of every tensor: pad and mask in place of packing.",
                )


def _with_rows(features: Tensor, examples: Sequence[Tensor]) -> Tensor:
    return torch.cat([*examples, features[len(examples) :]])


def _check_apart(module: nn.Module, left: _Pass, right: _Pass, rows: slice) -> None:
    """Require the same layers in the same shapes, and the same output for ``rows``, which are equal in both batches."""
    for index, pair in enumerate(zip_longest(left.layers, right.layers)):
        if pair[0] != pair[1]:
            # Of two passes, the longer one has the layer that the other skips.
            raise ModelError(
                "mixing_layer",
                f"layer '{max(left.layers, right.layers, key=len)[index][0]}' has another shape, or is skipped, when "
                "one example of the batch changes, as if the batch were trimmed to its longest text.",
                _FIX,
            )
    if not _same(left.output[rows], right.output[rows]):
        raise _moved(module, left.features, right.features, rows)


def _moved(module: nn.Module, left: Tensor, right: Tensor, rows: slice) -> ModelError:
    """Return the error for equal rows with other outputs: the first layer that shows it, by computing once more."""
    outputs: tuple[list[Tensor], ...] = ([], [], [])
    passes = [_forward(module, *each) for each in zip((left, left, right), outputs, strict=True)]
    name = passes[0].layers[-1][0]
    for (layer, _), first, again, other in zip(passes[0].layers, *outputs, strict=False):
        if not _same(first, again):
            return _random_layer(layer)
        # An inner tensor may have another first extent than the batch.
        if first.shape[:1] == left.shape[:1] == other.shape[:1] and not _same(first[rows], other[rows]):
            name = layer
            break
    return ModelError(
        "mixing_layer",
        f"layer '{name}' mixes the examples of a batch, so one example changes another's gradient.",
        _FIX,
    )


def _random_layer(name: str) -> ModelError:
    return ModelError(
        "random_layer",
        f"layer '{name}' draws random numbers outside the run's keyed streams, so a step could not be repeated.",
        "Take the randomness out of the forward pass.",
    )


def _backward_of_rows(module: nn.Module, output: Tensor) -> None:
    """Run a backward pass whose gradients depend on the rows from its start, as those of a loss do."""
    trained = tuple(tensor for tensor in module.parameters() if tensor.requires_grad)
    # Torch's own function for it would leave the mode that sees what Python gets.
    engine = torch.autograd.Variable._execution_engine
    try:
        engine.run_backward((output,), (output.detach().clone(),), False, False, trained, True, False)
    except RuntimeError as error:
        # The comparison of gradients, which comes later, names the parameter whose input was overwritten.
        if "modified by an inplace operation" not in str(error):
            raise


def _check_reads(module: nn.Module, features: Tensor) -> None:
    """Require that neither pass gives Python a value of a tensor that depends on examples."""
    values, where = ReadValues(features), list[str]()

    def leave(name: str, _output: object) -> None:
        # Inner layers finish first.
        if values.found is not None and not where:
            where.append(name)

    with _layers_watched(module, leave), values.watching():
        output = module(features)
        if module.training and values.found is None:
            _backward_of_rows(module, output)
    if values.found is not None:
        reader = f"layer '{where[0]}'" if where else "the backward pass"
        raise ModelError(
            "read_values",
            f"{reader} reads a value of its examples into Python ({values.found}), so one example could "
            "decide what is computed for all.",
            "Keep it a tensor: torch.where in place of if, fixed lengths, and a mask in place of a loop that ends.",
        )


def _mixing_loss() -> ModelError:
    return ModelError(
        "mixing_loss",
        "the loss of a batch is not the loss of each example alone, which is what raycloak trains on.",
        "Compute one number per example from its own output and label, and divide it by nothing of the batch.",
    )


def _digest_of(part: Part, rows: slice, size: int) -> bytes:
    """Return digests of ``rows``: of their squares, and of their sum with a weight of its own for each.

    Whole gradients of every row of a large model would not fit in memory.
    """
    squares = part.squares()
    weights, total = torch.zeros_like(squares), torch.zeros(size, dtype=torch.float64, device=squares.device)
    weights[rows] = (torch.arange(1, len(squares) + 1, dtype=torch.float64, device=squares.device) / len(squares))[rows]
    part.add(weights, total)
    return content_hash(total) + content_hash(squares[rows].nan_to_num())


def _sum(part: Part, count: int, like: Tensor) -> Tensor:
    total = torch.zeros(like.numel(), dtype=torch.float64, device=like.device)
    part.add(torch.ones(count, dtype=torch.float64, device=like.device), total)
    return total.view(like.shape)


@contextmanager
def _layers_watched(
    module: nn.Module, leave: Callable[[str, object], None], enter: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Call ``enter`` before each layer of ``module``, and ``leave`` with name and output after it, inner ones first."""
    names = {layer: name or "model" for name, layer in module.named_modules()}
    with ExitStack() as hooks:
        for each in names:
            hooks.enter_context(each.register_forward_pre_hook(lambda *_: enter()))
            hooks.enter_context(each.register_forward_hook(lambda layer, _, output: leave(names[layer], output)))
        yield


def _forward(module: nn.Module, features: Tensor, outputs: list[Tensor] | None = None) -> _Pass:
    """Run the model.

    Args:
        outputs: gets a copy of every layer's output. Only an error needs them, and to copy them takes as long as to
            compute them.

    Raises:
        ModelError: ``random_layer`` if torch's generator is drawn from; ``model_input``.
    """
    layers: list[tuple[str, torch.Size]] = []
    entered, drew = list[Tensor](), list[str]()

    def leave(name: str, output: object) -> None:
        if not torch.equal(entered.pop(), torch.get_rng_state()):
            drew.append(name)
        if isinstance(output, Tensor):
            layers.append((name, output.shape))
            if outputs is not None:
                outputs.append(output.detach().clone())

    with _layers_watched(module, leave, lambda: entered.append(torch.get_rng_state())):
        output = module(features)
    if drew:
        raise _random_layer(drew[0])
    if not isinstance(output, Tensor) or output.shape[:1] != features.shape[:1]:
        raise ModelError(
            "model_input",
            "the model's output is not one tensor with a row per example.",
            "Let its forward return one. Several heads are its columns, torch.cat([one, two], 1), with a list as loss.",
        )
    return _Pass(features, layers, output.detach())


def _tolerance_of_gradients(module: nn.Module, wholes: Iterable[Tensor | None]) -> _Tolerance:
    """Return how far a sum of rows may be from autograd's gradient, given those of all parameters.

    Under autocast one that is zero but for rounding, as that of a key's bias, is as uncertain as the largest.
    """
    if not has_autocast(module):
        return _FLOAT32_SUMS
    return replace(_NARROW, size=max((float(each.abs().max()) for each in wholes if each is not None), default=1.0))


def _close(left: Tensor, right: Tensor, tolerance: _Tolerance) -> bool:
    """Return whether two results of the same computation in other orders of rounding are equal."""
    if left.shape != right.shape:
        return False
    # Where large terms cancel, what is left is as exact as the largest value beside it.
    largest = max((float(piece.abs().max()) for piece in _pieces(right)), default=0.0)
    least = tolerance.least * max(tolerance.size, largest)
    pairs = zip(_pieces(left), _pieces(right), strict=True)
    return all(torch.allclose(a, b, rtol=tolerance.relative, atol=least) for a, b in pairs)


def _pieces(values: Tensor) -> Iterator[Tensor]:
    """Yield the values as finite float64, in pieces: whole copies of an embedding would be larger than its model."""
    if values.numel():
        yield from (piece.double().nan_to_num() for piece in torch.split(values.reshape(-1), _COMPARED))


def _same(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape:
        return False
    return torch.equal(left, right) or torch.equal(left.nan_to_num(), right.nan_to_num())


@contextmanager
def input_errors(form: DatasetForm) -> Iterator[None]:
    """Turn all that the user's model or loss raises on synthetic data into one ModelError, ``model_input``."""
    try:
        yield
    except RaycloakError:
        raise
    except Exception as error:
        # It says something of the machine, and nothing of the model.
        if is_out_of_memory(error):
            raise
        said = str(error).splitlines()[0] if str(error) else "it gives no reason"
        if form.inputs:
            named = (f"{each.name} [{', '.join(map(str, ('n', *each.shape)))}] ({each.dtype})" for each in form.inputs)
            features = f"the inputs {', '.join(named)}"
        else:
            shape = ", ".join(map(str, ("n", *form.feature_shape)))
            features = f"features of shape [{shape}] ({form.feature_dtype})"
        # A name is asked for that one tensor does not give.
        by_name = " For a forward with several arguments, name them in dataset.inputs." if "argument" in said else ""
        raise ModelError(
            "model_input",
            f"the model fails on {features}: {type(error).__name__}: {said}.",
            "Let model and loss take the dataset's shapes."
            + ("" if form.inputs else by_name)
            + (" Its labels have a point; classes are whole numbers." if form.label_dtype == "float32" else ""),
        ) from error


@contextmanager
def _no_compiler() -> Iterator[None]:
    """Refuse a model or loss that compiles anything as it runs; ModelError ``compiled_model``."""
    before = _compilations()
    try:
        yield
    finally:
        if _compilations() != before:
            raise compiled_model("a function that the model or the loss calls")


def _compilations() -> int:
    """Return how many frames torch's compiler has met in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["frames"]["total"])
