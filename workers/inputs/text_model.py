"""Text models: a `transformers` model behind the one tensor in and one tensor out that the rest of raycloak knows.

A batch of text is one int64 tensor [m, T]; a negative number is padding. :class:`TextModel` turns it into all inputs of
a model, in shapes that no example changes. So sampling, sealing and the checks of a model know nothing about text.
"""

import copy
import inspect
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from raycloak.metrics.errors import ConfigError, ModelError, is_out_of_memory
from raycloak.workers.inputs.datasets import Dataset, DatasetForm
from raycloak.workers.inputs.void import IGNORED

ATTENTION = "eager"
"""The one attention: a matmul and a softmax. `sdpa` picks its kernel by device, mask and precision."""

# Tokens of the batch on which an explicit mask is compared with the model's own.
_PROBED = 8
# The last positions of its second row are padding.
_PADDED = 3
# Layers that a sentence names.
_SHOWN = 3
# Public examples that are looked at together.
_CHECKED = 4096
_LOSSES_OF_TOKENS = ("token_cross_entropy", "next_token_cross_entropy")
LOSSES_OF_CLASSES = ("cross_entropy", *_LOSSES_OF_TOKENS)


class TextModel(nn.Module):
    """A `transformers` model, bare or inside a PEFT model, that maps token ids [m, T] to logits.

    Guarantee: an example's logits depend on its own ids alone, and never on those at its padding. The shapes and the
    operations of a forward pass depend on m and T alone: the attention mask is always explicit, [m, 1, T, T].

    An id beyond the vocabulary gives its example NaN logits, and so no gradient: an error would tell of the example.

    Args:
        model: belongs to this object from then on; its cache is off, and its attention the one of this module.

    Attributes:
        model: the same; parameters are named ``model.`` and the model's own name.
        vocabulary: number of token ids that it has an embedding for.

    Raises:
        ModelError: ``text_model`` if it is an encoder-decoder, has no embedding of tokens, or fails on token ids.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        inner = _transformer(model)
        self.model = model
        config: Any = inner.config
        embedding = inner.get_input_embeddings()
        if config.is_encoder_decoder or not isinstance(embedding, nn.Embedding):
            raise _unfit(inner, "is no encoder or decoder of tokens")
        self.vocabulary = embedding.num_embeddings
        self._dtype = embedding.weight.dtype
        self._accepted = frozenset(inspect.signature(inner.forward).parameters)
        config.use_cache = False
        inner.set_attn_implementation(ATTENTION)
        text = config.get_text_config()
        padding = getattr(text, "pad_token_id", None)
        if padding is None and getattr(text, "eos_token_id", None) is not None:
            # As everybody does with a decoder that has none. The mask hides it; a classifier looks before it.
            padding = text.eos_token_id if isinstance(text.eos_token_id, int) else text.eos_token_id[0]
            text.pad_token_id = padding
        self._padding = padding if padding is not None and 0 <= padding < self.vocabulary else 0
        self._first_position = _first_position(inner)
        self._positions = _positions(text, self._first_position)
        self._has_types = bool(getattr(text, "type_vocab_size", 0))
        self._causal = any(getattr(layer, "is_causal", False) is True for layer in inner.modules())
        self._window = getattr(text, "sliding_window", None)

    @property
    def libraries(self) -> str:
        """The libraries that compute a gradient besides torch, with versions, and the attention."""
        names = ["transformers"] + (["peft"] if is_peft(self.model) else [])
        return ", ".join([*(f"{name} {version(name)}" for name in names), f"attention {ATTENTION}"])

    @property
    def classes(self) -> int | None:
        """The number of classes of the head; None for a model that predicts tokens."""
        inner = _transformer(self.model)
        head = type(inner).__name__
        return inner.config.num_labels if head.endswith("Classification") else None

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
        """Return logits, float32 [m, classes] or [m, T, classes], of ids [m, T]."""
        logits: Tensor = self.model(**self._arguments(features)).logits
        return logits.float()

    def _arguments(self, features: Tensor) -> dict[str, Any]:
        """Return all that the model takes; every tensor has a row per example."""
        seen, known = features >= 0, (features < self.vocabulary).all(1)
        ids = torch.where(seen, features, self._padding).clamp(max=self.vocabulary - 1)
        length = features.shape[1]
        looks = seen[:, None, :].expand(-1, length, -1)
        if self._causal:
            looks = looks & torch.ones(length, length, dtype=torch.bool, device=features.device).tril()
        # Every position sees itself, so padding has a softmax over something.
        looks = looks | torch.eye(length, dtype=torch.bool, device=features.device)
        mask = torch.where(looks, 0.0, torch.finfo(self._dtype).min) + torch.where(known, 0.0, torch.nan)[:, None, None]
        positions = torch.arange(length, device=features.device) + self._first_position
        given = {
            "input_ids": ids,
            "attention_mask": mask[:, None].to(self._dtype),
            "position_ids": positions.expand_as(ids),
            # A table of types is looked up, but a decoder without one takes its tokens' table.
            "token_type_ids": torch.zeros_like(ids) if self._has_types else None,
            "use_cache": False,
            "return_dict": True,
        }
        return {name: value for name, value in given.items() if value is not None and self._takes(name)}

    def _takes(self, name: str) -> bool:
        return name in self._accepted or name in ("input_ids", "attention_mask", "return_dict")

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
        self._check_length(form.feature_shape[0])
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
            if loss in _LOSSES_OF_TOKENS:
                labels = labels[labels != IGNORED]
            if most is not None and ((labels < 0) | (labels >= most)).any():
                wrong = labels[(labels < 0) | (labels >= most)][0]
                raise _beyond_head(f"the evaluation split has the label {wrong}", most)

    def _check_length(self, length: int) -> None:
        if self._positions is not None and length > self._positions:
            raise ModelError(
                "sequence_too_long",
                f"examples have {length} tokens, and the model {self._positions} positions.",
                f"Set max_length to at most {self._positions}.",
            )
        if self._window is not None and length > self._window:
            raise ModelError(
                "sequence_too_long",
                f"examples have {length} tokens, and the model attends within windows of {self._window}, which an "
                "explicit mask would widen.",
                f"Set max_length to at most {self._window}.",
            )

    def _check_inputs(self) -> int:
        """Require that the model computes from these inputs what it does from its own; returns the logits' dimensions.

        Raises:
            ModelError: ``text_model``.
        """
        inner = _transformer(self.model)
        length = min(_PROBED, self._positions or _PROBED)
        # Any ids but the padding, which some models look for to find the end.
        usable = [token for token in range(min(self.vocabulary, 64)) if token != self._padding] or [0]
        rows = [[usable[(row + 7 * place) % len(usable)] for place in range(length)] for row in range(2)]
        ids = torch.tensor(rows, device=next(self.model.parameters()).device)
        seen = torch.ones_like(ids)
        seen[1, max(1, length - _PADDED) :] = 0
        training = self.training
        self.eval()
        try:
            with torch.no_grad():
                # Without the hooks that may run the forward pass in a narrower type.
                ours = self.forward(torch.where(seen.bool(), ids, -1))
                theirs = self.model(
                    input_ids=torch.where(seen.bool(), ids, self._padding), attention_mask=seen, return_dict=True
                ).logits.float()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise _unfit(inner, f"fails on token ids with {type(error).__name__}") from error
        finally:
            self.train(training)
        dimensions: int = ours.ndim
        if dimensions == 3:
            ours, theirs = ours[seen.bool()], theirs[seen.bool()]
        tolerance = 1e-3 if self._dtype == torch.float32 else 5e-2
        if not torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max())):
            raise _unfit(inner, "computes something else under an explicit mask than under its own")
        return dimensions

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

    Any other module comes back unchanged, except for its dropout: the dropout of every module is set to 0.

    Raises:
        ModelError: as :class:`TextModel`.
    """
    is_text = is_transformer(module) or is_peft(module)
    notes = silence_dropout(module, is_text)
    return (TextModel(module) if is_text else module), notes


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


def libraries(module: nn.Module) -> str:
    """Return the libraries of a text model; empty text for any other."""
    return module.libraries if isinstance(module, TextModel) else ""


def silence_dropout(module: nn.Module, by_name: bool) -> tuple[str, ...]:
    """Set every dropout in ``module`` to 0, and return a sentence that says so; none if all are 0 already.

    Args:
        by_name: whether a number that is named after dropout is one, as in `transformers` and PEFT.
    """
    found = []
    for prefix, layer in module.named_modules():
        for name, value in _dropouts(layer, by_name):
            setattr(layer, name, 0.0)
            found.append((prefix if name == "p" else f"{prefix}.{name}".lstrip("."), value))
    return _silenced(found)


def silence_config(config: Any) -> tuple[str, ...]:
    """Set every dropout that a `transformers` configuration names to 0; returns as :func:`silence_dropout`."""
    found = [(name, float(value)) for name, value in vars(config).items() if "drop" in name and _is_positive(value)]
    for name, _ in found:
        setattr(config, name, 0.0)
    return _silenced(found)


def _silenced(found: list[tuple[str, float]]) -> tuple[str, ...]:
    if not found:
        return ()
    shown = ", ".join(f"{name or 'model'} was {value:g}" for name, value in found[:_SHOWN])
    more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return (f"dropout is set to 0 ({shown}{more}).",)


def _is_positive(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and value > 0


def _dropouts(layer: nn.Module, by_name: bool) -> Iterator[tuple[str, float]]:
    if isinstance(layer, nn.modules.dropout._DropoutNd):
        named = ["p"]
    elif isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
        named = ["dropout"]
    else:
        named = [name for name in vars(layer) if by_name and "drop" in name]
    for name in named:
        if _is_positive(value := getattr(layer, name)):
            yield name, float(value)


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
    of_tokens = loss in _LOSSES_OF_TOKENS
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


def _transformer(model: nn.Module) -> Any:
    """Return the `transformers` model; ModelError ``text_model`` if a PEFT model adapts something else."""
    inner = model.get_base_model() if is_peft(model) else model  # type: ignore[operator]
    if not isinstance(inner, nn.Module) or not is_transformer(inner):
        raise _unfit(model, "adapts no transformers model")
    return inner


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
    return None if found is None else int(found) - first


def _unfit(inner: nn.Module, why: str) -> ModelError:
    return ModelError(
        "text_model",
        f"{type(inner).__name__} {why}.",
        "Return a model for sequence classification, token classification or causal language modelling, or wrap it in "
        "a module of your own that takes token ids [m, T] and returns logits.",
    )
