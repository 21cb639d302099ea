"""Checks of a model on synthetic data before anything is spent: is each example's gradient its own?

The assumption of the clipping bound is that every tensor keeps the examples in their rows. The checks try it forward
(another example in the batch moves no output), backward (a row's loss reaches its own place of every tensor alone), and
by what Python reads of the examples. They run on a copy of the model where the model is, with slightly moved parameters
so that a layer initialised to zero hides nothing, and once more with parameters of eight times the size. They are
evidence, not proof: they miss a layer that misbehaves only on certain inputs. No check is needed to keep examples apart
in the loss: :class:`raycloak.workers.gradients.row_loss.RowLoss` shows it one example at a time.

The start of a run is mostly these passes, so each serves several claims (f forward, b backward):

    evaluation   7 rows, one changed: 2 f. 5 rows: fills 1 f a value, mixed with ordinary rows 1 f a batch, the same
                 batch twice 2 f, rows alone 2 f, values read 1 f
    training     the same, and values read in the backward pass 1 b
                 5 and 7 rows, one changed: outputs, gradients and places 2 f 3 b; the sum, of 5 alone, 1 f 1 b
    grown        evaluation, 5 rows: fills 1 f a value, ordinary and mixed rows 1 f a batch
                 training: the same, and ordinary rows' gradients 1 f 1 b; outputs, gradients and places of mixed and
                 shortened rows 1 f 2 b a batch

:func:`check_rows` does what is said of grown parameters in training, and has ordinary rows changed, their sum, and rows
alone too.

A backward pass of weighed losses and a plain one show all places (:class:`WeighedRows`); the plain one also gives the
gradients.
"""

import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import torch
from torch import Tensor, nn

from raycloak.metrics.errors import ConfigError, ModelError, RaycloakError, is_out_of_memory
from raycloak.workers.gradients.gradient_parts import GradientParts, named_operations
from raycloak.workers.gradients.kept_state import KeptState
from raycloak.workers.gradients.parts import Part
from raycloak.workers.gradients.probes import Examples, Filling, Probes, odd_ids
from raycloak.workers.gradients.read_values import ReadValues
from raycloak.workers.gradients.row_loss import RowLoss
from raycloak.workers.gradients.row_places import moved_rows
from raycloak.workers.gradients.vocabulary_loss import ModelLosses
from raycloak.workers.gradients.watched_pass import (
    KEEP_APART,
    WatchedPass,
    layers_watched,
    random_layer,
    require_apart,
    same_values,
    watched_pass,
)
from raycloak.workers.inputs.datasets import DatasetForm
from raycloak.workers.models.compute_mode import has_autocast, in_full_precision, remove_autocast
from raycloak.workers.models.liger import use_liger
from raycloak.workers.models.losses import BuiltInLoss
from raycloak.workers.models.models import LossFn, check_layers, compiled_model, content_hash, device_of, twin_of
from raycloak.workers.models.text_model import TextModel, heads_apart
from raycloak.workers.terms.mechanism import Mechanism

_BATCH_SIZES = (5, 7)
"""Two sizes, so that another extent of the model's tensors cannot pass for the batch at both."""

_FEWEST = 2
"""Rows of the first look: one that changes, and one that must not."""

_COMPARED = 2**20
"""Elements that are compared at once."""

_TOKENS = 16
"""Length to which texts are cut for :func:`check_trainable`. What depends on the length shows at the rows of a run."""

_CLASSES = 256
"""Classes of a frozen head in looks at gradients. A head computes each row by itself, in memory of its own, and nothing
else follows it. So its other classes show nothing of how rows are kept apart, and would be most of the checks' work."""

_GROWN = 8.0
"""Factor of the trained parameters when the checks are made again: a run may grow them, and with them what is rare."""


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

    Batches are small here, and texts short; :func:`check_rows` tries the size that a run computes. A model in bfloat16
    is checked twice: in float32, where numbers that differ by more than rounding are told apart, and as it is.

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
    form = _shortened(module, form, loss_fn)
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


def check_briefly(
    module: nn.Module,
    form: DatasetForm,
    loss_fn: LossFn,
    deterministic: bool = True,
    vocabulary: int | None = None,
) -> None:
    """Refuse most of what :func:`check_trainable` does by a few passes of two rows, before a model goes to a GPU.

    Raises:
        ModelError, ConfigError: as :func:`check_trainable`.
    """
    check_layers(module)
    form = _shortened(module, form, loss_fn)
    with _copy_of(module, form, deterministic) as probe:
        _Checks(probe, form, loss_fn, deterministic, vocabulary).first()


def check_liger(
    module: nn.Module,
    form: DatasetForm,
    loss_fn: LossFn,
    deterministic: bool = True,
    vocabulary: int | None = None,
) -> None:
    """Refuse a model whose outputs or gradients by Liger's kernels differ beyond rounding from its own layers'.

    Guarantee: on synthetic examples, the outputs and the sums of the rows' gradients agree, also in float32 where the
    model computes in bfloat16. ``module`` itself is not changed.

    Args:
        module: on a GPU, in its own layers.
        deterministic, vocabulary: as of :func:`check_trainable`.

    Raises:
        ModelError: ``liger_kernels``, or as :func:`check_trainable` where the model fails.
    """
    form = _shortened(module, form, loss_fn)
    # In float32, where numbers that differ by more than rounding are told apart, and as it is.
    for narrow in (False, True) if has_autocast(module) else (False,):
        with _copy_of(module, form, deterministic) as probe:
            if not narrow:
                remove_autocast(probe)
            _Checks(probe, form, loss_fn, deterministic, vocabulary).in_liger()


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


def _shortened(module: nn.Module, form: DatasetForm, loss_fn: LossFn) -> DatasetForm:
    """Return the form of shorter texts, where nothing of the user's own may count on their length."""
    inner = loss_fn.loss_fn if isinstance(loss_fn, RowLoss) else loss_fn
    if not isinstance(module, TextModel) or not isinstance(inner, BuiltInLoss):
        return form
    shape, labels = form.feature_shape, form.label_shape
    short = (min(shape[0], _TOKENS),)
    return form.model_copy(update={"feature_shape": short, "label_shape": short if labels == shape else labels})


@contextmanager
def _copy_of(module: nn.Module, form: DatasetForm, deterministic: bool) -> Iterator[nn.Module]:
    """Lend a copy of ``module`` with moved parameters; the process's random state stays as it is."""
    probe = twin_of(module)
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
class _Look:
    """The findings of one look at the gradients of a batch.

    Attributes:
        gradients: by the first row that counts, a digest of those rows' gradients of each trained parameter.
        shared, moved: as of `GradientLook`.
    """

    examples: Examples
    gradients: Mapping[int, Sequence[bytes]]
    shared: tuple[tuple[str, bytes], ...]
    moved: str | None


@dataclass(slots=True)
class _Fills:
    """The fills of some ordinary rows that a model takes, by the batches in which they are to meet these.

    Attributes:
        groups: examples [1, ...] that fill a batch each, with what the row of that place gives among its equals.
        values: those of all groups.
        refused: examples that the model does not take in a batch of their own.
    """

    ordinary: Tensor
    groups: list[list[tuple[Tensor, WatchedPass]]] = field(default_factory=lambda: [[]])
    values: list[float] = field(default_factory=list)
    refused: list[Tensor] = field(default_factory=list)


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
        self._probes = Probes(form, vocabulary or 2, odd_ids(module, vocabulary or 2), device_of(module))
        self._loss = RowLoss.of(loss_fn)
        self._losses = ModelLosses(module, self._loss)
        # On the module itself: taps keep nothing of a pass in it, and another copy would be all of the model again.
        self._gradients = GradientParts(module, self._loss, deterministic, classes=_CLASSES)

    def all(self) -> None:
        """Check what :func:`check_trainable` promises."""
        with self._losses.module_form():
            # Private examples are evaluated in evaluation mode, where a module may mix rows that it keeps apart in
            # training; see `raycloak.workers.gradients.sum_engines.PrivateEvaluationEngine`.
            for training in (False, True):
                self._enter_mode(training)
                self._check_outputs()
            # Another distribution at each size. A fault that hides from one shows in the forward pass, which met all of
            # both.
            for count, index in zip(_BATCH_SIZES, (0, -1), strict=True):
                pair = list(self._probes.draws(count))[index]
                self._check_pair(pair.before, pair.after, summed=index == 0)
            with torch.no_grad():
                for tensor in self._module.parameters():
                    if tensor.requires_grad:
                        tensor.mul_(_GROWN)
            for training in (False, True):
                self._enter_mode(training)
                self._check_fills(_BATCH_SIZES[0], gradients=training)

    def first(self) -> None:
        """Check what :func:`check_briefly` promises."""
        with self._losses.module_form():
            for training in (False, True):
                self._enter_mode(training)
                self._check_draws(_FEWEST)
            *_, pair = self._probes.draws(_FEWEST)
            self._check_pair(pair.before, pair.after, summed=True)

    def in_liger(self) -> None:
        """Check what :func:`check_liger` promises."""
        examples = next(iter(self._probes.draws(_BATCH_SIZES[0]))).before
        own, sums = self._outcome(examples)
        use_liger(self._module)
        output, others = self._outcome(examples)
        # Of the largest gradient: one that is zero but for rounding is as uncertain.
        size = max(float(each.abs().max()) for each in sums.values())
        apart = [
            f"gradient of parameter '{name}'"
            for name, each in sums.items()
            if not _close(others[name], each, replace(self._tolerance, size=size))
        ]
        if not _close(output, own, self._tolerance):
            apart.insert(0, "output")
        if apart:
            raise ModelError(
                "liger_kernels",
                f"with Liger's kernels the model computes another {apart[0]} than with its own layers.",
                "Leave use_liger_kernels out.",
            )

    def _outcome(self, examples: Examples) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the output, and the sum of the rows' gradients of each trained parameter."""
        with torch.no_grad():
            output: Tensor = self._module(examples.features)
        trained = [(name, tensor) for name, tensor in self._module.named_parameters() if tensor.requires_grad]
        found = zip(trained, self._gradients(examples.features, examples.labels), strict=True)
        return output, {name: _sum(part, len(examples.labels), tensor) for (name, tensor), part in found}

    def of_sizes(self, mechanisms: Iterable[Mechanism]) -> None:
        """Check what :func:`check_rows` promises."""
        with self._losses.module_form():
            for mechanism in mechanisms:
                if mechanism.query == "class_counts":
                    continue
                count, gradients = mechanism.micro_batch_rows, mechanism.query == "gradient"
                self._enter_mode(training=gradients)
                ordinary, look = self._check_fills(count, gradients=gradients, summed=gradients)
                self._check_alone(ordinary.features, ordinary.output)
                if look is not None:
                    _, other = self._look(self._probes.pair(look.examples).after, [1], places=False)
                    self._check_gradients(look, other, 1)
                else:
                    self._check_draws(count)

    @property
    def _tolerance(self) -> _Tolerance:
        return _FLOAT32 if in_full_precision(self._module) else _NARROW

    def _enter_mode(self, training: bool) -> None:
        self._state = KeptState(self._module.train(training), self._loss.loss_fn, copies=True)

    def _check_outputs(self) -> None:
        """Check all that outputs and losses show in the mode that the model is in."""
        few, many = _BATCH_SIZES
        drawn = self._check_draws(many)
        features = drawn[0][0].features[:few]
        self._check_repeats(features)
        # Before rows alone: of a batch that is trimmed to its longest text, it names the layer.
        self._check_fills(few)
        for batch, output in drawn:
            self._check_alone(batch.features, output)
        # After what names a layer that mixes rows by such a value.
        _check_reads(self._module, features)
        for batch, output in drawn if self._module.training else ():
            self._check_loss(batch, output)

    def _check_draws(self, count: int) -> list[tuple[Examples, Tensor]]:
        """Require that ordinary rows keep their bits when the first one changes; return batches with their output."""
        drawn = []
        for pair in self._probes.draws(count):
            before, after = (self._watched(each.features) for each in (pair.before, pair.after))
            require_apart(self._module, before, after, slice(1, None))
            drawn.append((pair.before, before.output))
        return drawn

    def _check_repeats(self, features: Tensor) -> None:
        """Require that the same batch gives the same output of every layer twice."""
        first, again = list[Tensor](), list[Tensor]()
        found = watched_pass(self._module, features, first)
        self._state.check()
        watched_pass(self._module, features, again)
        for (name, _), *outputs in zip(found.layers, first, again, strict=True):
            if not same_values(*outputs):
                raise random_layer(name)

    def _check_fills(
        self, count: int, *, gradients: bool = False, summed: bool = False
    ) -> tuple[WatchedPass, _Look | None]:
        """Require that examples that are almost all one value, and ordinary ones, do not move each other.

        For each value all rows are filled, then rows of several values stand in one batch with ordinary rows, each
        where it stood before. An output must have the bits that the same row had among its equals.

        One mixed batch serves for several values. Suppose that what a row gets depends on some statistic of the batch,
        such as its longest text. If that differs between the ordinary batch and a filled one, the mixed batch differs
        from at least one of them, whatever else is in it. Then the ordinary rows or the filled row meet another value.

        Args:
            gradients: whether the same is required of gradients and of their places, also of shortened rows.
            summed: whether the rows' gradients must add up to the gradient of the sum.

        Returns:
            The plain pass of an ordinary batch, and what its gradients showed.
        """
        met = [self._filled(filling) for filling in self._probes.fillings(count)]
        looks: list[tuple[_Look, _Look, int]] = []
        for fills in met:
            features, groups = fills.ordinary, list(filter(None, fills.groups))
            # Where parameters are tapped, a layer may have other shapes: plain passes are compared with plain ones.
            plain = ordinary = self._watched(features)
            for example in fills.refused:
                # Not in a batch of its own, but perhaps in one with others.
                alone = self._if_accepted(_with_rows(features, [example]))
                if alone is not None:
                    require_apart(self._module, plain, alone, slice(1, None))
            if gradients:
                examples = self._probes.labelled(features)
                # Its places are those of rows that mixed batches have too.
                ordinary, look = self._look(examples, {1, *map(len, groups)}, places=False, summed=summed)
            for group in groups:
                among, others = _with_rows(features, [example for example, _ in group]), len(group)
                if gradients:
                    labels = torch.cat([1 - examples.labels[:others], examples.labels[others:]])
                    mixed, look_among = self._look(Examples(among, labels), [others])
                    looks.append((look, look_among, others))
                else:
                    mixed = self._watched(among)
                require_apart(self._module, ordinary, mixed, slice(others, None))
                # Plain, as the rows among their equals are: on some processors a tap takes kernels of other bits.
                among_others = self._watched(among) if gradients else mixed
                for row, (_, found) in enumerate(group):
                    require_apart(self._module, found, replace(among_others, layers=plain.layers), slice(row, row + 1))
        if gradients:
            # Finite ones alone, and first: what is not finite may hide what it meets.
            finite = [fill for each in met for fill in each.values if math.isfinite(fill)]
            _, varied = self._look(self._probes.varied(count, finite))
            _require_places(varied)
            _check_shared(look, varied)
        for look, look_among, others in looks:
            # First, because it names what moves rows; gradients that mix in any other way are told apart below.
            _require_places(look_among)
            self._check_gradients(look, look_among, others)
        return plain, look if gradients else None

    def _filled(self, filling: Filling) -> _Fills:
        """Return the examples of ``filling`` that the model takes, at least one row of each batch kept ordinary."""
        fills, most = _Fills(filling.ordinary), max(1, len(filling.ordinary) - 1)
        for fill, example in filling.filled.items():
            found = self._if_accepted(example.expand_as(filling.ordinary).contiguous())
            if found is None:
                fills.refused.append(example)
                continue
            if len(fills.groups[-1]) == most or not math.isfinite(fill):
                fills.groups.append([])
            fills.groups[-1].append((example, found.of_row(len(fills.groups[-1]))))
            fills.values.append(fill)
        return fills

    def _if_accepted(self, features: Tensor) -> WatchedPass | None:
        """Return the pass; None if the model fails on these values, which are then in no batch that it computes."""
        try:
            with named_operations(self._deterministic):
                return watched_pass(self._module, features)
        except RaycloakError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # User code may raise anything; an odd value may be none for it.
            return None
        finally:
            self._state.check()

    def _watched(self, features: Tensor) -> WatchedPass:
        """Return the pass, and require that nothing of it was kept; the next one might undo it."""
        found = watched_pass(self._module, features)
        self._state.check()
        return found

    def _check_alone(self, features: Tensor, output: Tensor) -> None:
        """Require that an example's output in a batch of one is, up to rounding, what it is in the whole batch.

        Args:
            output: of the whole batch.
        """
        for row in {0, len(features) - 1}:
            alone = self._watched(features[row : row + 1])
            if not _close(alone.output, output[row : row + 1], self._tolerance):
                raise ModelError(
                    "mixing_layer",
                    f"layer '{alone.layers[-1][0]}' gives an example another output alone than in a batch of "
                    f"{len(features)}.",
                    KEEP_APART,
                )

    def _check_loss(self, batch: Examples, output: Tensor) -> None:
        """Require that the loss of a batch is that of each example alone, for odd labels too, and keeps no state."""
        losses, labels, whole, tolerance = self._losses.of, batch.labels, output, _FLOAT32
        if not self._losses.reads_logits:
            # The model's own, which shows that nothing but the head follows in training either.
            with heads_apart(False):
                whole = self._module(batch.features)
            tolerance = self._tolerance
        if not _close(self._loss_fn(whole, labels.to(whole.device)), losses(output, labels), tolerance):
            raise _mixing_loss()
        self._state.check()
        losses = self._gradients.losses.of
        for pair in self._probes.odd_labels(labels):
            try:
                before, after = (losses(output, each) for each in pair)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                # A label of no class may be an error for the user's code.
                self._state.check()
                continue
            if not same_values(before[1:], after[1:]):
                raise _mixing_loss()
            self._state.check()

    def _look(
        self, examples: Examples, firsts: Iterable[int] = (), *, places: bool = True, summed: bool = False
    ) -> tuple[WatchedPass, _Look]:
        """Run both passes, and require that nothing was kept.

        Args:
            firsts: the first rows that gradients are compared from.
            places: whether to find out which places a row's loss reaches.
            summed: whether the rows' gradients must add up to autograd's gradient of the summed loss.
        """
        passes: list[WatchedPass] = []

        def forward(features: Tensor) -> Tensor:
            passes.append(watched_pass(self._module, features, graph=True))
            return passes[0].output

        found = self._gradients.looked_at(examples.features, examples.labels, forward, places=places)
        self._state.check()
        if summed:
            self._check_sum(examples, found.parts)
        sizes = [tensor.numel() for tensor in self._module.parameters() if tensor.requires_grad]
        # Digests: the gradients of a large model may all be alive at once.
        digests = {
            first: [_digest_of(*each, first) for each in zip(found.parts, sizes, strict=True)] for first in firsts
        }
        passed = replace(passes[0], output=passes[0].output.detach())
        return passed, _Look(examples, digests, found.shared, found.moved)

    def _check_pair(self, before: Examples, after: Examples, *, summed: bool) -> None:
        """Require that outputs and gradients keep apart in two batches of which the first row alone differs."""
        (left, look), (right, other) = self._look(before, [1], summed=summed), self._look(after, [1], places=False)
        require_apart(self._module, left, right, slice(1, None))
        _require_places(look)
        # Before gradients: it names what may mix them.
        _check_shared(look, other)
        self._check_gradients(look, other, 1)

    def _check_gradients(self, left: _Look, right: _Look, first: int) -> None:
        """Require that the gradients of the rows from ``first`` on, equal in both batches, have the same bits."""
        names = [name for name, tensor in self._module.named_parameters() if tensor.requires_grad]
        for name, before, after in zip(names, left.gradients[first], right.gradients[first], strict=True):
            if before != after:
                raise ModelError(
                    "mixing_layer", f"one example changes another's gradient of parameter '{name}'.", KEEP_APART
                )

    def _check_sum(self, examples: Examples, parts: Sequence[Part]) -> None:
        """Require that the rows' gradients add up to autograd's gradient of the summed loss."""
        module = self._module
        self._gradients.losses.backward_by_logits(examples.features, examples.labels)
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


def _require_places(look: _Look) -> None:
    """Require that a row's loss reached its own place alone of every tensor that a trained parameter enters."""
    if look.moved is not None:
        raise moved_rows(f"the loss of one example reaches another's row where parameter '{look.moved}' is used")


def _check_shared(left: _Look, right: _Look) -> None:
    """Require that what taps take as the same for all rows has the same bits in two batches of other rows."""
    for one, other in zip_longest(left.shared, right.shared):
        if one != other:
            raise ModelError(
                "unsupported_layer",
                f"parameter '{(one or other)[0]}' meets a tensor that depends on examples and has no row for each.",
                "Keep each example in its row of every tensor: pad and mask in place of packing.",
            )


def _with_rows(features: Tensor, examples: Sequence[Tensor]) -> Tensor:
    return torch.cat([*examples, features[len(examples) :]])


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

    with layers_watched(module, leave), values.watching():
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


def _digest_of(part: Part, size: int, first: int) -> bytes:
    """Return digests of the rows from ``first`` on: of their squares, and of their sum with a weight for each.

    Whole gradients of every row of a large model would not fit in memory.
    """
    squares = part.squares()
    weights, total = torch.zeros_like(squares), torch.zeros(size, dtype=torch.float64, device=squares.device)
    numbers = torch.arange(1, len(squares) + 1, dtype=torch.float64, device=squares.device)
    weights[first:] = (numbers / len(squares))[first:]
    part.add(weights, total)
    return content_hash(total) + content_hash(squares[first:].nan_to_num())


def _sum(part: Part, count: int, like: Tensor) -> Tensor:
    total = torch.zeros(like.numel(), dtype=torch.float64, device=like.device)
    part.add(torch.ones(count, dtype=torch.float64, device=like.device), total)
    return total.view(like.shape)


def _tolerance_of_gradients(module: nn.Module, wholes: Iterable[Tensor | None]) -> _Tolerance:
    """Return how far a sum of rows may be from autograd's gradient, given those of all parameters.

    Under autocast one that is zero but for rounding, as that of a key's bias, is as uncertain as the largest.
    """
    if in_full_precision(module):
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
