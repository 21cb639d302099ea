"""Decodes the bytes in the files of an index: raw, hexadecimal, base64, or inside a JSON document.

Text is read leniently where it does not matter: white space, case, the base64 alphabet, padding. The rest is read
strictly: a character that is not a digit, or a JSON object that names a key twice, is an error.
"""

import base64
import re
from typing import Any

from raycloak.attestation.core.canonical import read_json


def decode(content: bytes, encoding: str) -> bytes:
    """Decode ``content``; ``encoding`` is ``raw``, ``hex``, ``base64`` or ``json:<RFC 6901 pointer>``.

    Raises:
        LookupError: for any other encoding.
        ValueError: if the content is not of that form.
    """
    if encoding == "raw":
        return content
    if encoding == "hex":
        return _from_hex(_squeezed(content))
    if encoding == "base64":
        return _from_base64(_squeezed(content))
    if encoding.startswith("json:"):
        return bytes_of(resolve(read_json(content), encoding.removeprefix("json:")))
    raise LookupError(f"the encoding '{encoding}' is not known")


def resolve(document: Any, pointer: str) -> Any:
    """Return the value that an RFC 6901 pointer names; ValueError if there is none."""
    if pointer and not pointer.startswith("/"):
        raise ValueError(f"'{pointer}' is no JSON pointer")
    value = document
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        try:
            value = value[_position(name)] if isinstance(value, list) else value[name]
        except (LookupError, TypeError):
            raise ValueError(f"the JSON document has nothing at '{pointer}'") from None
    return value


def bytes_of(value: Any) -> bytes:
    """Decode an array of byte values, or a string: hexadecimal if it is all hex digits, else base64."""
    if isinstance(value, list):
        if not all(type(item) is int for item in value):
            raise ValueError("the JSON array holds other things than byte values")
        return bytes(value)
    if not isinstance(value, str):
        raise ValueError("the JSON value is neither an array nor a string")
    text = "".join(value.split())
    digits = text.removeprefix("0x")
    return _from_hex(digits) if re.fullmatch("[0-9a-fA-F]+", digits) else _from_base64(text)


def certificate_text(value: Any) -> bytes:
    """Decode certificates inside a JSON document: PEM text, or PEM or DER in the form of :func:`bytes_of`."""
    if isinstance(value, str) and "-----BEGIN" in value:
        return value.encode()
    return bytes_of(value)


def _squeezed(content: bytes) -> str:
    # Some editors put a byte-order mark in front.
    return "".join(content.decode("utf-8-sig").split())


def _from_hex(text: str) -> bytes:
    found = bytes.fromhex(text[2:] if text[:2] in ("0x", "0X") else text)
    if not found:
        raise ValueError("there are no hexadecimal digits")
    return found


def _from_base64(text: str) -> bytes:
    unpadded = text.replace("-", "+").replace("_", "/").removesuffix("=").removesuffix("=")
    return base64.b64decode(unpadded + "=" * (-len(unpadded) % 4), validate=True)


def _position(name: str) -> int:
    if not re.fullmatch("0|[1-9][0-9]*", name):
        raise LookupError(name)
    return int(name)
