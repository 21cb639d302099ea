"""The generation of text from a released model: prompts in, completions out, pieces of text on the way.

It is `generate` of `transformers`, over all rows of a request at once. A row is one completion of one prompt.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.client.results import Completion
from raycloak.coordinator.runs.released_model import ReleasedModel
from raycloak.coordinator.service.sampling.requests import MOST_RESULT_BYTES
from raycloak.metrics.errors import ConfigError
from raycloak.metrics.service_errors import FutureFailedError, ServiceValidationError
from raycloak.workers.inputs.hub_files import library, quiet
from raycloak.workers.inputs.text_data import Tokenizer
from raycloak.workers.models.text_model import is_peft, is_transformer

_RATE_EVERY_S: Final = 0.25
"""Between two rates: often enough for a person who watches, and few beside the pieces of text."""
# Tokens of the prompt that are decoded with the first generated one: they decide whether a space comes between.
_BEFORE = 5
_UNFINISHED = "�"  # what a tokenizer writes for bytes that are not a whole character yet


class Generator:
    """A generator of text from one module, whose weights may be replaced between two requests.

    Args:
        model: a causal model of `transformers`, bare or with an adapter of PEFT, that a run released.
        clock: seconds that never go back.

    Raises:
        FutureFailedError: ``cannot_generate`` if it is no such model or has no tokenizer.
        ConfigError: as `raycloak.workers.inputs.text_data.Tokenizer.load`.
    """

    def __init__(self, model: ReleasedModel, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._module: Any = model.module
        inner = _causal(model.module)
        self._tokenizer = _tokenizer(model).inner
        config = inner.config.get_text_config()
        self._context: int | None = getattr(config, "max_position_embeddings", None)
        self._vocabulary = inner.get_input_embeddings().num_embeddings
        own = inner.generation_config
        self._ends = _ids(own.eos_token_id) or _ids(config.eos_token_id)
        self._begin = next(iter(_ids(own.bos_token_id) or _ids(config.bos_token_id)), None)
        # Masked in every prompt and never read behind an end, so any id of the vocabulary serves.
        padding = next(iter((*_ids(own.pad_token_id), *_ids(config.pad_token_id), *self._ends)), 0)
        self._padding = padding if 0 <= padding < self._vocabulary else 0
        # Off while it trained; a model that writes text is slow without it.
        inner.config.use_cache = True
        # A checkpoint's own habits, such as a penalty of repetitions, would change what a request says.
        self._special = {
            "eos_token_id": list(self._ends) or None,
            "pad_token_id": self._padding,
            "bos_token_id": self._begin,
        }
        inner.generation_config = library("transformers").GenerationConfig(**self._special)

    def complete(
        self,
        request: wire.Sample,
        on_text: Callable[[int, str], None],
        on_rate: Callable[[float], None],
        cancelled: Callable[[], bool],
    ) -> tuple[Completion, ...] | None:
        """Return the completions of a request, a prompt's side by side; None if it was cancelled.

        Guarantee: the pieces that ``on_text`` gets for a completion are its text. The same request on the same weights
        gives the same text, on one machine.

        Args:
            on_text: gets the place of a completion in the result, and the next piece of its text.
            on_rate: gets the tokens per second by now, four times a second and at the end: the tokens of all
                completions over the time since the model began to read the prompts.
            cancelled: is asked before every token.

        Raises:
            ServiceValidationError: ``prompt_too_long`` or ``prompt`` if the model cannot read one.
            FutureFailedError: ``not_finite`` if the model's logits are not numbers; ``text_too_long`` if the texts have
                more than `MOST_RESULT_BYTES` together.
        """
        prompts = [self._ids_of(number, text, request.max_tokens) for number, text in enumerate(request.prompts)]
        rows = [
            _Row(self._tokenizer, ids, self._ends, request.stop, number, on_text, place)
            for place, (number, ids) in enumerate(
                (number, ids) for number, ids in enumerate(prompts) for _ in range(request.completions)
            )
        ]
        longest = max(map(len, prompts))
        padded = [[self._padding] * (longest - len(row.prompt)) + row.prompt for row in rows]
        seen = [[0] * (longest - len(row.prompt)) + [1] * len(row.prompt) for row in rows]
        watch = _Watch(rows, on_rate, self._clock, cancelled)
        names = ("temperature", "top_p", "top_k") if request.temperature else ()  # a top_k of 0 is no limit there too
        drawn = {name: getattr(request, name) for name in names}
        with quiet(), torch.no_grad():
            torch.manual_seed(request.seed)
            self._module.generate(
                input_ids=torch.tensor(padded),
                attention_mask=torch.tensor(seen),
                generation_config=library("transformers").GenerationConfig(
                    max_new_tokens=request.max_tokens, do_sample=request.temperature > 0, **drawn, **self._special
                ),
                logits_processor=library("transformers").LogitsProcessorList([_finite]),
                stopping_criteria=library("transformers").StoppingCriteriaList([watch]),
            )
        if watch.was_cancelled:
            return None
        watch.tell_rate()
        return tuple(row.completion() for row in rows)

    def _ids_of(self, number: int, prompt: str, max_tokens: int) -> list[int]:
        """Return the ids of a prompt; the tokenizer's special tokens stand before it, and none behind it."""
        found = self._tokenizer(prompt, truncation=False, return_special_tokens_mask=True)
        ids, special = list(found["input_ids"]), list(found["special_tokens_mask"])
        while ids and special[-1]:
            del ids[-1], special[-1]
        if not ids and self._begin is not None:
            ids = [self._begin]
        if not ids:
            raise _wrong_prompt(number, "prompt", "is empty, and the model knows no token that begins a text")
        if max(ids) >= self._vocabulary:
            raise _wrong_prompt(number, "prompt", "has a token that the model has no embedding for")
        if self._context is not None and len(ids) + max_tokens > self._context:
            raise _wrong_prompt(
                number,
                "prompt_too_long",
                f"has {len(ids)} tokens; with max_tokens {max_tokens} that is beyond the context of {self._context}",
            )
        return ids


class _Row:
    """One completion under way.

    Attributes:
        prompt: its token ids.
        tokens: how many were generated and count. size: bytes of the text by now.
        finished: whether no further token counts.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        ends: tuple[int, ...],
        stop: Sequence[str],
        number: int,
        on_text: Callable[[int, str], None],
        place: int,
    ) -> None:
        self.prompt = list(prompt)
        self.finished = False
        self._tokenizer, self._ends, self._stop = tokenizer, ends, stop
        self._number, self._on_text, self._place = number, on_text, place
        self.tokens = self.size = 0
        self._text, self._held = "", ""
        self._reason: Literal["stop", "length"] = "length"
        self._window, self._read = self.prompt[-_BEFORE:], len(self.prompt[-_BEFORE:])

    def take(self, token: int) -> None:
        """Take the next token, unless the row is finished."""
        if self.finished:
            return
        self.tokens += 1
        if token in self._ends:
            self._finish("stop")
            return
        self._window.append(token)
        known, now = self._decoded(self._window[: self._read]), self._decoded(self._window)
        if len(now) > len(known) and not now.endswith(_UNFINISHED):
            # Only the newest piece stays in the window, so that a long text is not decoded again for each token.
            self._window, self._read = self._window[self._read :], len(self._window) - self._read
            self._say(now[len(known) :])

    def completion(self) -> Completion:
        """Return the completion; a row that is not finished ends here."""
        if not self.finished:
            self._finish("length")
        return Completion(self._number, self._text, self._reason, self.tokens)

    def _finish(self, reason: Literal["stop", "length"]) -> None:
        self._reason = reason
        rest = self._decoded(self._window)[len(self._decoded(self._window[: self._read])) :]
        self._say(rest)
        if not self.finished:
            self.finished = True
            self._emit(self._held)

    def _say(self, text: str) -> None:
        """Take text; all of it goes out but what may be the start of a stop text."""
        self._held += text
        places = [place for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if places:
            self.finished, self._reason = True, "stop"
            self._emit(self._held[: min(places)])
            return
        kept = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        out, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        self._emit(out)

    def _emit(self, text: str) -> None:
        if text:
            self._text += text
            self.size += len(text.encode())
            self._on_text(self._place, text)

    def _decoded(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


class _Watch:
    """A criterion of `generate`: gives every row its token, and ends the rows that are finished, or all of them.

    Its time begins when it is made.
    """

    def __init__(
        self,
        rows: Sequence[_Row],
        on_rate: Callable[[float], None],
        clock: Callable[[], float],
        cancelled: Callable[[], bool],
    ) -> None:
        self._rows, self._on_rate, self._clock, self._cancelled = rows, on_rate, clock, cancelled
        self._begun = self._told = clock()
        self.was_cancelled = False

    def __call__(self, input_ids: Tensor, scores: object, **_: object) -> Tensor:
        for row, token in zip(self._rows, input_ids[:, -1].tolist(), strict=True):
            row.take(token)
        if sum(row.size for row in self._rows) > MOST_RESULT_BYTES:
            message = f"the texts have more than {MOST_RESULT_BYTES} bytes together."
            raise FutureFailedError("text_too_long", message, "Ask for fewer tokens or completions.")
        if self._clock() - self._told >= _RATE_EVERY_S:
            self.tell_rate()
        self.was_cancelled = self._cancelled()
        return torch.tensor([row.finished or self.was_cancelled for row in self._rows])

    def tell_rate(self) -> None:
        """Tell the tokens of all rows over the time that they took."""
        self._told = self._clock()
        self._on_rate(sum(row.tokens for row in self._rows) / (self._told - self._begun))


def _finite(_ids: Tensor, scores: Tensor) -> Tensor:
    """Return the logits as they are; a choice among values that are no numbers would be made up."""
    # The largest alone: a model may rule a token out with minus infinity.
    if not torch.isfinite(scores.max(dim=-1).values).all():
        message = "the model's logits are not finite numbers."
        remedy = "The weights have diverged: load an earlier artifact, or lower the learning rate."
        raise FutureFailedError("not_finite", message, remedy)
    return scores


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that begins ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def _causal(module: nn.Module) -> Any:
    """Return the model of `transformers` that writes text; FutureFailedError ``cannot_generate`` if there is none."""
    inner: Any = module.get_base_model() if is_peft(module) else module  # type: ignore[operator]
    if not is_transformer(inner):
        raise cannot_generate(f"{type(inner).__name__} is no model of transformers")
    if inner.config.is_encoder_decoder or not inner.can_generate():
        raise cannot_generate(f"{type(inner).__name__} does not write text")
    return inner


def _tokenizer(model: ReleasedModel) -> Tokenizer:
    """Return the tokenizer of the examples, or else the one that lies beside the model."""
    if model.tokenizer is not None:
        return Tokenizer.load(model.tokenizer, model.base)
    if (hub := model.source.hub) is None:
        raise cannot_generate("no tokenizer is named")
    try:
        return Tokenizer.load(hub.place(model.base), model.base)
    except ConfigError as error:
        if error.code != "tokenizer":
            raise
        raise cannot_generate("no tokenizer lies beside the model") from None


def cannot_generate(why: str) -> FutureFailedError:
    """Return the refusal of a model that writes no text."""
    return FutureFailedError(
        "cannot_generate",
        f"this model cannot generate text: {why}.",
        "Sample from a causal language model of Hugging Face, whose run names a tokenizer or has one beside the model.",
    )


def _wrong_prompt(number: int, code: str, why: str) -> ServiceValidationError:
    return ServiceValidationError(
        code, f"prompt {number} {why}.", "Shorten it or ask for fewer tokens.", field=f"prompts.{number}"
    )


def _ids(found: int | list[int] | None) -> tuple[int, ...]:
    if found is None:
        return ()
    return (found,) if isinstance(found, int) else tuple(found)
