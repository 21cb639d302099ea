"""Sends one GET at a time to a service that a policy names: bounded in time and size, over verified TLS.

Guarantee: returns only an answer of the named host itself, of bounded size. No redirect is followed, and the system's
authorities must vouch for the certificate. No wait is longer than the deadline, and the body is complete within it.
"""

import ssl
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPMessage
from typing import Any, Final
from urllib.error import HTTPError, URLError

DEADLINE_S: Final = 20.0
# Bounds the memory that a service can take from its caller.
MAX_BYTES: Final = 4 * 2**20
_CHUNK: Final = 65_536


@dataclass(frozen=True, slots=True)
class HttpsResponse:
    """A service's answer. Header names are in lower case."""

    body: bytes
    headers: Mapping[str, str]


class FetchError(Exception):
    """The reason why there is no answer, in one clause."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def https_get(url: str, deadline_s: float = DEADLINE_S, max_bytes: int = MAX_BYTES) -> HttpsResponse:
    """Fetch ``url``; :class:`FetchError` without an answer in time and within ``max_bytes``."""
    ends = time.monotonic() + deadline_s
    context = ssl.create_default_context()
    # No redirects: only the named host itself may answer.
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), _NoRedirects())
    try:
        with opener.open(url, timeout=deadline_s) as response:
            body = b""
            while chunk := response.read1(_CHUNK):
                body += chunk
                if len(body) > max_bytes:
                    raise FetchError(f"it answers with more than {max_bytes} bytes")
                # The timeout bounds each read alone. A body that trickles is bounded here.
                if time.monotonic() > ends:
                    raise FetchError(f"it did not answer within {deadline_s:g} s")
            headers: HTTPMessage = response.headers
            return HttpsResponse(body, {name.lower(): value for name, value in headers.items()})
    except HTTPError as error:
        with error:
            raise FetchError(f"it answers with status {error.code}") from None
    except URLError as error:
        raise FetchError(f"{error.reason}") from None
    except TimeoutError:
        raise FetchError(f"it did not answer within {deadline_s:g} s") from None
    except (OSError, HTTPException, ValueError) as error:
        raise FetchError(f"the connection failed ({type(error).__name__})") from None
