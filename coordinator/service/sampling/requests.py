"""Requests for text, and the one set of their bounds: the desk refuses what is beyond it, before anything is queued.

Beside the bounds is the ending by which the desk and the sampler know a copy of weights.
"""

from typing import Final

from raycloak.coordinator.client import service_pb2 as wire

COPY_SUFFIX: Final = ".safetensors"
"""Of a file with a copy of weights, whose name is their digest; no package ends so."""
MOST_ROWS: Final = 64
"""Prompts times completions: rows of one batch, whose memory grows with each."""
MOST_TOKENS: Final = 4096
"""Of a completion; 64 such rows keep a sampler for minutes on a small model."""
MOST_TEXT_BYTES: Final = 2**20
"""Of all prompts and stop texts, beyond any model's context; each text is tokenized as a whole."""
MOST_RESULT_BYTES: Final = 2**22
"""Of all completions together: 16 bytes for each token of the largest request, where texts have about four."""
COLDEST: Final = 0.01
"""The least temperature above 0: logits divided by less are beyond float32."""
HOTTEST: Final = 100.0
"""A higher temperature would draw from all tokens alike just as this one does."""
MOST_TOP_K: Final = 2**31 - 1
MOST_STOPS: Final = 16
LONGEST_STOP: Final = 256
"""Characters, since the text after each token is searched for every stop text."""


def wrong_field(request: wire.Sample) -> tuple[str, str] | None:
    """Return the first field that is out of bounds, and what it must be; None if all are within."""
    size = sum(len(each.encode()) for each in (*request.prompts, *request.stop))
    bounds = {
        "prompts": (
            bool(request.prompts) and all(request.prompts) and size <= MOST_TEXT_BYTES,
            f"give texts that are not empty, with the stop texts of at most {MOST_TEXT_BYTES} bytes",
        ),
        "completions": (
            request.completions >= 1 and len(request.prompts) * request.completions <= MOST_ROWS,
            f"prompts times completions must be from 1 to {MOST_ROWS}",
        ),
        "max_tokens": (1 <= request.max_tokens <= MOST_TOKENS, f"it must be from 1 to {MOST_TOKENS}"),
        "temperature": (
            request.temperature == 0 or COLDEST <= request.temperature <= HOTTEST,
            f"it must be 0, or from {COLDEST} to {HOTTEST:g}",
        ),
        "top_p": (0 < request.top_p <= 1, "it must be above 0 and at most 1"),
        "top_k": (request.top_k <= MOST_TOP_K, f"it must be from 0 to {MOST_TOP_K}"),
        "stop": (
            len(request.stop) <= MOST_STOPS and all(0 < len(each) <= LONGEST_STOP for each in request.stop),
            f"at most {MOST_STOPS} texts of 1 to {LONGEST_STOP} characters may end a completion",
        ),
    }
    return next(((field, rule) for field, (holds, rule) in bounds.items() if not holds), None)
