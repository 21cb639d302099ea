"""Text models: a `transformers` model behind the one tensor in and one tensor out that the rest of raycloak knows.

A batch of text is one int64 tensor [m, T]; a negative number is padding. :class:`TextModel` turns it into all inputs of
a model, in shapes that no example changes. So sampling, sealing and the checks of a model know nothing about text.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from importlib.metadata import version
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from raycloak.metrics.errors import ConfigError, ModelError, is_out_of_memory
from raycloak.metrics.listing import listed
from raycloak.workers.inputs.datasets import Dataset, DatasetForm, dataset_form
from raycloak.workers.inputs.void import IGNORED
from raycloak.workers.models.dropout import silence_dropout
from raycloak.workers.models.experts import evaluate_every_expert
from raycloak.workers.models.liger import PACKAGE, has_liger
from raycloak.workers.terms.loss import LOSSES_OF_CLASSES, LOSSES_OF_TOKENS

ATTENTION = "eager"
"""The one attention: a matmul and a softmax. `sdpa` picks its kernel by device, mask and precision."""

# Tokens of the batch on which the logits are compared with those of the model's own call.
_PROBED = 8
# The last positions of its second row are padding.
_PADDED = 3
# Layers that a sentence names.
_SHOWN = 3
# Public examples that are looked at together.
_CHECKED = 4096


class TextModel(nn.Module):
    """A `transformers` model, bare or inside a PEFT model, that maps token ids [m, T] to logits.

    Guarantee: an example's logits depend on its own ids alone, and never on those at its padding. The shapes and the
    operations of a forward pass depend on m and T alone: the model builds its masks from [m, T] as it always does, but
    without a look at what they hide (:func:`_unseen_masks`), and every expert computes on every token.

    An id beyond the vocabulary gives its example NaN logits, and so no gradient: an error would tell of the example.

    Args:
        model: belongs to this object from then on; its cache is off, its attention the one of this module, and its
            experts those of `raycloak.workers.models.experts`.

    Attributes:
        model: the same; parameters are named ``model.`` and the model's own name.
        vocabulary: number of token ids that it has an embedding for.

    Raises:
        ModelError: ``text_model`` if it writes text to an input text, or has no embedding of tokens.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        inner = _transformer(model)
        self.model = model
        config: Any = inner.config
        embedding = _embedding(inner)
        # An encoder-decoder with a head of classes reads one text with both its parts.
        self._reads_twice = bool(config.is_encoder_decoder) and hasattr(inner, "classification_head")
        if config.is_encoder_decoder and not self._reads_twice:
            raise _unfit(inner, "is an encoder-decoder without a head of classes")
        self.vocabulary = embedding.num_embeddings
        self._dtype = embedding.weight.dtype
        self._accepted = frozenset(inspect.signature(inner.forward).parameters)
        if "global_attention_mask" in self._accepted:
            raise ModelError(
                "text_model",
                f"{type(inner).__name__} gathers the tokens of a batch that attend globally, so one example decides "
                "what is computed for all.",
                "Take a model that attends by masks alone, such as ModernBERT for long texts.",
            )
        config.use_cache = False
        inner.set_attn_implementation(ATTENTION)
        evaluate_every_expert(inner)
        text = config.get_text_config()
        padding = getattr(text, "pad_token_id", None)
        if padding is None and getattr(text, "eos_token_id", None) is not None:
            # As everybody does with a decoder that has none. The mask hides it; a classifier looks before it.
            padding = text.eos_token_id if isinstance(text.eos_token_id, int) else text.eos_token_id[0]
            text.pad_token_id = padding
        self._padding = padding if padding is not None and 0 <= padding < self.vocabulary else 0
        if self._reads_twice and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = self._padding
        self._first_position = _first_position(inner)
        self._positions = _positions(text, self._first_position)
        self._has_types = bool(getattr(text, "type_vocab_size", 0))
        self._ends_in_head = False

    @property
    def head(self) -> nn.Linear | None:
        """The linear layer whose output is the logits of tokens; None if something else is done to them.

        It is known after :meth:`try_out`.
        """
        return _transformer(self.model).get_output_embeddings() if self._ends_in_head else None

    @property
    def libraries(self) -> str:
        """The libraries that compute a gradient besides torch, with versions, and the attention."""
        names = ["transformers"] + ["peft"] * is_peft(self.model) + [PACKAGE] * has_liger(self.model)
        return ", ".join([*(f"{name} {version(name)}" for name in names), f"attention {ATTENTION}"])

    @property
    def classes(self) -> int | None:
        """The number of classes of the head; None for a model that predicts tokens."""
        inner = _transformer(self.model)
        head = type(inner).__name__
        return inner.config.num_labels if head.endswith("Classification") else None

    @property
    def odd_ids(self) -> tuple[int, ...]:
        """The ids that it may treat otherwise than others: padding, one beyond the vocabulary, and special tokens.

        Every negative id is one and the same to it, and so is every id beyond the vocabulary.
        """
        config = _transformer(self.model).config.get_text_config()
        special = {value for name, value in config.to_dict().items() if name.endswith("_token_id") and value}
        named = {each for each in special if isinstance(each, int) and each < self.vocabulary}
        return (-1, *sorted(named | {self._padding}), self.vocabulary)

    def checkpoint_blocks(self) -> None:
        """Keep only the inputs of the model's blocks for the backward pass, which computes the blocks again.

        Raises:
            ModelError: ``gradient_checkpointing`` if the model has no such blocks.
        """
        inner = _transformer(self.model)
        try:
            inner.activation_checkpointing_enable({"use_reentrant": False})
        except ValueError:
            raise ModelError(
                "gradient_checkpointing",
                f"{type(inner).__name__} has no blocks that it can compute again in the backward pass.",
                "Leave gradient_checkpointing out.",
            ) from None
        # It is for the other kind of checkpoints, and would take the backward pass through frozen embeddings.
        inner.disable_input_require_grads()

    def forward(self, features: Tensor) -> Tensor:
        """Return logits, float32 [m, classes] or [m, T, classes], of ids [m, T]; see also :func:`heads_apart`."""
        head = self.head if _HEADS_APART.get() else None
        with nullcontext() if head is None else _passing_on(head):
            output = self._logits(features)
        # Over several devices, the output is on another one than the ids.
        known = (features < self.vocabulary).all(1).to(output.device)
        return torch.where(known.view(-1, *[1] * (output.ndim - 1)), output.float(), torch.nan)

    def _logits(self, features: Tensor) -> Tensor:
        given, seen = self._arguments(features), features >= 0
        with _unseen_masks():
            logits: Tensor = self._read_twice(given, seen) if self._reads_twice else self.model(**given).logits
        return logits

    def _read_twice(self, given: dict[str, Any], seen: Tensor) -> Tensor:
        """Return the logits of an encoder-decoder, whose head of classes reads the end of a text.

        Its own forward pass looks for the token that ends a text, in a way that moves the rows of a batch.
        """
        inner = _transformer(self.model)
        if hasattr(inner, "_shift_right"):
            given = {**given, "decoder_input_ids": inner._shift_right(given["input_ids"])}
        hidden = getattr(inner, inner.base_model_prefix)(**given)[0]
        places = torch.arange(hidden.shape[1], device=hidden.device)
        last = torch.where(seen, places, 0).amax(1)
        logits: Tensor = inner.classification_head(hidden[torch.arange(len(hidden), device=hidden.device), last])
        return logits

    def _arguments(self, features: Tensor) -> dict[str, Any]:
        """Return all that the model takes; every tensor has a row per example."""
        seen = features >= 0
        ids = torch.where(seen, features, self._padding).clamp(max=self.vocabulary - 1)
        positions = torch.arange(features.shape[1], device=features.device) + self._first_position
        given = {
            "input_ids": ids,
            "attention_mask": seen.long(),
            "position_ids": positions.expand_as(ids),
            # A table of types is looked up, but a decoder without one takes its tokens' table.
            "token_type_ids": torch.zeros_like(ids) if self._has_types else None,
            "use_cache": False,
            "return_dict": True,
        }
        taken = self._accepted | {"input_ids", "attention_mask", "return_dict"}
        return {name: value for name, value in given.items() if value is not None and name in taken}

    def check_fits(
        self, form: DatasetForm, loss: str, vocabulary: int | None = None, classes: int | None = None
    ) -> None:
        """Refuse data or a loss that the model has no place for; a function of public facts only.

        Args:
            loss: name of the run's loss.
            vocabulary: number of ids that the data is declared to have, or its tokenizer has.
            classes: number of classes that the data is declared to have.

        Raises:
            ModelError: ``text_form``, ``sequence_too_long`` or ``text_model``.
            ConfigError: ``tokens_beyond_vocabulary``, ``labels_beyond_head`` or ``loss_of_task``.
        """
        if form.feature_dtype != "int64" or len(form.feature_shape) != 1:
            raise ModelError(
                "text_form",
                f"a text model takes token ids [T], and the features are {form.feature_dtype} "
                f"{list(form.feature_shape)}.",
                "Give integers, with -1 for padding; kind text makes them of text.",
            )
        length = form.feature_shape[0]
        if self._positions is not None and length > self._positions:
            raise ModelError(
                "sequence_too_long",
                f"examples have {length} tokens, and the model {self._positions} positions.",
                f"Set max_length to at most {self._positions}.",
            )
        if vocabulary is not None and vocabulary > self.vocabulary:
            raise _beyond_vocabulary(f"the data has {vocabulary} token ids", self.vocabulary)
        if classes is not None and self.classes is not None and classes > self.classes:
            raise _beyond_head(f"the data has {classes} classes", self.classes)
        _check_loss(loss, self._check_inputs(), form.label_shape)

    def check_public(self, examples: Dataset, loss: str) -> None:
        """Refuse an example with an id or a label that the model has no place for.

        For public examples alone: an error tells of them. Under a private run such an example has no gradient.

        Args:
            loss: name of the run's loss; what a label of a user's own means is not known here.

        Raises:
            ConfigError: ``tokens_beyond_vocabulary`` or ``labels_beyond_head``.
        """
        most = None if loss not in LOSSES_OF_CLASSES else self.classes or self.vocabulary
        for start in range(0, len(examples), _CHECKED):
            ids, labels = examples.batch(np.arange(start, min(start + _CHECKED, len(examples)), dtype=np.int64))
            if ids.max() >= self.vocabulary:
                raise _beyond_vocabulary(f"the evaluation split has the token id {ids.max()}", self.vocabulary)
            if loss in LOSSES_OF_TOKENS:
                labels = labels[labels != IGNORED]
            if most is not None and ((labels < 0) | (labels >= most)).any():
                wrong = labels[(labels < 0) | (labels >= most)][0]
                raise _beyond_head(f"the evaluation split has the label {wrong}", most)

    def _check_inputs(self) -> int:
        """Require that these inputs give what the model's own call does; return the number of the logits' dimensions.

        Raises:
            ModelError: ``text_model``.
        """
        inner = _transformer(self.model)
        ids, seen = self._probe()
        try:
            with torch.no_grad(), self._evaluating():
                # Without the hooks that may run the forward pass in a narrower type.
                ours = self.forward(torch.where(seen.bool(), ids, -1))
                theirs = self.model(
                    input_ids=torch.where(seen.bool(), ids, self._padding), attention_mask=seen, return_dict=True
                ).logits.float()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # The ids are synthetic, so its text tells of no example.
            said = next(iter(str(error).strip().splitlines()), "it gives no reason").rstrip(".")
            raise _unfit(inner, f"fails on token ids with {type(error).__name__}: {said}") from error
        dimensions: int = ours.ndim
        if dimensions == 3:
            ours, theirs = ours[seen.bool()], theirs[seen.bool()]
        tolerance = 1e-3 if self._dtype == torch.float32 else 5e-2
        if not torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max())):
            raise _unfit(inner, "computes something else from explicit inputs than in its own call")
        return dimensions

    def try_out(self) -> tuple[str, ...]:
        """Find the head, freeze all parameters that no logit depends on, and return a sentence that says so, if any.

        An example of those is a decoder's attention to an encoder that is not there. They would get noise alone.
        """
        trained = {name: tensor for name, tensor in self.model.named_parameters() if tensor.requires_grad}
        ids, _ = self._probe()
        head, given = _transformer(self.model).get_output_embeddings(), list[tuple[Tensor, int]]()
        # A layer of a class of its own, as that of an adapter, computes something else.
        is_plain = type(head) is nn.Linear
        hook = head.register_forward_hook(lambda *of: given.append((of[2], of[2]._version))) if is_plain else None
        try:
            with torch.enable_grad(), self._evaluating():
                logits = self._logits(ids)
            used = _reached(logits)
            # The very same tensor, which nothing wrote to: no scale or cap follows, as Gemma 2 and Cohere have them.
            self._ends_in_head = len(given) == 1 and given[0][0] is logits and given[0][1] == logits._version
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # :meth:`check_fits` says why.
            return ()
        finally:
            if hook is not None:
                hook.remove()
        unused = [name for name, tensor in trained.items() if used and id(tensor) not in used]
        for name in unused:
            trained[name].requires_grad_(False)
        return (f"frozen, since no logit depends on it: {listed(unused, _SHOWN)}.",) if unused else ()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        training = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(training)

    def _probe(self) -> tuple[Tensor, Tensor]:
        """Return the ids of two texts, and a mask of them [2, n] that hides the end of the second one."""
        length = min(_PROBED, self._positions or _PROBED)
        end = _transformer(self.model).config.eos_token_id if self._reads_twice else None
        # Any ids but the padding, which some models look for to find the end.
        usable = [token for token in range(min(self.vocabulary, 64)) if token not in (self._padding, end)] or [0]
        rows = [[usable[(row + 7 * place) % len(usable)] for place in range(length)] for row in range(2)]
        lengths = (length, max(1, length - _PADDED))
        for row, own in zip(rows, lengths, strict=True):
            row[own - 1] = row[own - 1] if end is None else end
        ids = torch.tensor(rows, device=next(self.model.parameters()).device)
        seen = torch.ones_like(ids)
        seen[1, lengths[1] :] = 0
        return ids, seen

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy that shares the frozen parameters, which nobody changes: a base may be all of the memory."""
        for tensor in self.parameters():
            if not tensor.requires_grad:
                memo[id(tensor)] = tensor
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return copied


def as_text_model(module: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """Return ``module`` in a :class:`TextModel` if it is a `transformers` or PEFT model, and what was changed in it.

    Any other module comes back unchanged, except for its dropout: the dropout of every module is set to 0. Parameters
    of a text model that its logits do not depend on are frozen.

    Raises:
        ModelError: as :class:`TextModel`.
    """
    is_text = is_transformer(module) or is_peft(module)
    notes = silence_dropout(module, is_text)
    if not is_text:
        return module, notes
    model = TextModel(module)
    return model, (*notes, *model.try_out())


def check_text(
    module: nn.Module, form: DatasetForm, loss: str, vocabulary: int | None, classes: int | None
) -> int | None:
    """Return the number of ids of integer features; a text model knows its own where nobody says.

    Raises:
        ConfigError, ModelError: as :meth:`TextModel.check_fits`.
    """
    if not isinstance(module, TextModel):
        return vocabulary
    module.check_fits(form, loss, vocabulary, classes)
    return module.vocabulary if vocabulary is None else vocabulary


def check_public_text(
    module: nn.Module, examples: Dataset, loss: str, vocabulary: int | None, classes: int | None
) -> None:
    """Refuse public examples that a text model cannot be measured on.

    Guarantee: a token or a label without a place in the model is found here, and not when steps are charged.

    Raises:
        ConfigError, ModelError: as `TextModel.check_fits` and `TextModel.check_public`.
    """
    check_text(module, dataset_form(examples), loss, vocabulary, classes)
    if isinstance(module, TextModel):
        module.check_public(examples, loss)


def libraries(module: nn.Module) -> str:
    """Return the libraries of a text model; empty text for any other."""
    return module.libraries if isinstance(module, TextModel) else ""


def _beyond_vocabulary(what: str, vocabulary: int) -> ConfigError:
    return ConfigError(
        "tokens_beyond_vocabulary",
        f"{what}, and the model an embedding for {vocabulary}.",
        "Take the tokenizer that belongs to the model.",
    )


def _beyond_head(what: str, classes: int) -> ConfigError:
    return ConfigError(
        "labels_beyond_head",
        f"{what}, and the model's head {classes} classes.",
        "Set model.classes to the number of classes, and number them from 0.",
    )


def _check_loss(loss: str, dimensions: int, label_shape: tuple[int, ...]) -> None:
    """Require a built-in loss to fit logits [m, classes] or [m, T, classes]; a user's own may fit anything."""
    of_tokens = loss in LOSSES_OF_TOKENS
    if (loss == "cross_entropy" and dimensions == 3) or (of_tokens and (dimensions == 2 or len(label_shape) != 1)):
        raise ConfigError(
            "loss_of_task",
            f"{loss} does not fit logits with {dimensions} dimensions and labels of shape {list(label_shape)}.",
            "cross_entropy is for one class an example, token_cross_entropy for a class a token, "
            "next_token_cross_entropy for a causal model.",
        )


def is_transformer(module: nn.Module) -> bool:
    """Return whether ``module`` is a model of `transformers`."""
    # Nobody has a model of a library that was never loaded.
    loaded = sys.modules.get("transformers.modeling_utils")
    return loaded is not None and isinstance(module, loaded.PreTrainedModel)


def is_peft(module: nn.Module) -> bool:
    """Return whether ``module`` is a model with an adapter of PEFT."""
    loaded = sys.modules.get("peft.peft_model")
    return loaded is not None and isinstance(module, loaded.PeftModel)


def recomputed_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of ``module`` that a backward pass computes again; see :meth:`TextModel.checkpoint_blocks`."""
    loaded = sys.modules.get("transformers.modeling_layers")
    if loaded is None:
        return []
    if isinstance(module, loaded.GradientCheckpointingLayer) and module.gradient_checkpointing:
        return [module]
    return list(dict.fromkeys(block for child in module.children() for block in recomputed_blocks(child)))


def _transformer(model: nn.Module) -> Any:
    """Return the `transformers` model; ModelError ``text_model`` if a PEFT model adapts something else."""
    inner = model.get_base_model() if is_peft(model) else model  # type: ignore[operator]
    if not isinstance(inner, nn.Module) or not is_transformer(inner):
        raise _unfit(model, "adapts no transformers model")
    return inner


def _embedding(inner: Any) -> nn.Embedding:
    """Return the table of tokens; ModelError ``text_model`` if there is none that is looked up as torch does."""
    try:
        found = inner.get_input_embeddings()
    except NotImplementedError:
        found = None
    if not isinstance(found, nn.Embedding):
        what = "no table of tokens" if found is None else f"a {type(found).__name__} for a table of tokens"
        raise _unfit(inner, f"has {what}")
    return found


def _reached(output: Tensor) -> set[int]:
    """Return the identities of the parameters that ``output`` was computed from."""
    found, seen, nodes = set[int](), set[Any](), [output.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        nodes += [following for following, _ in node.next_functions]
    return found


_HEADS_APART: ContextVar[bool] = ContextVar("raycloak_heads_apart", default=False)


@contextmanager
def heads_apart(apart: bool = True) -> Iterator[None]:
    """Let a :class:`TextModel` with a head return that layer's input in place of logits: float32 [m, T, width].

    Args:
        apart: False lets it return logits, also within such a block.
    """
    entered = _HEADS_APART.set(apart)
    try:
        yield
    finally:
        _HEADS_APART.reset(entered)


@contextmanager
def _passing_on(layer: nn.Module) -> Iterator[None]:
    """Let a layer return its input."""
    layer.forward = lambda values: values
    try:
        yield
    finally:
        # The class's own is seen again.
        del layer.forward


# Whether a mask is built in this context for a TextModel.
_UNSEEN: ContextVar[bool] = ContextVar("raycloak_unseen_masks", default=False)


@contextmanager
def _unseen_masks() -> Iterator[None]:
    """Keep `transformers` from looking at what a mask hides, as where it traces a graph.

    It drops a mask that hides nothing. Time and kernels would then tell of the examples, and one row would decide how
    all of them are computed.
    """
    masks: Any = sys.modules["transformers.masking_utils"]
    if not isinstance(masks.is_tracing, _Tracing):
        masks.is_tracing = _Tracing(masks.is_tracing)
    entered = _UNSEEN.set(True)
    try:
        yield
    finally:
        _UNSEEN.reset(entered)


class _Tracing:
    """Tells the functions that build masks that a graph is traced, where a :class:`TextModel` calls them."""

    def __init__(self, own: Callable[..., bool]) -> None:
        self._own = own

    def __call__(self, tensor: Any = None) -> bool:
        return _UNSEEN.get() or self._own(tensor)


def _first_position(inner: nn.Module) -> int:
    """Return the number of the first position: behind the padding where the table of positions has one, as RoBERTa's.

    A table that adds its offset itself, like OPT's, is a separate class.
    """
    for name, layer in inner.named_modules():
        if name.endswith("position_embeddings") and type(layer) is nn.Embedding and layer.padding_idx is not None:
            return int(layer.padding_idx) + 1
    return 0


def _positions(config: Any, first: int) -> int | None:
    found = getattr(config, "max_position_embeddings", None)
    # XLNet says -1 where there is no limit.
    return int(found) - first if isinstance(found, int) and found > 0 else None


def _unfit(inner: nn.Module, why: str) -> ModelError:
    return ModelError(
        "text_model",
        f"{type(inner).__name__} {why}.",
        "Return a model for sequence classification, token classification or causal language modelling, or wrap it in "
        "a module of your own that takes token ids [m, T] and returns logits.",
    )
