"""Writes just enough DER for the extension of PCK certificates."""

SGX_EXTENSION_OID = "1.2.840.113741.1.13.1"

_BOOLEAN, _INTEGER, _OCTETS, _OID, _ENUMERATED, _SEQUENCE = 0x01, 0x02, 0x04, 0x06, 0x0A, 0x30


def sgx_extension(*, ppid: bytes, fmspc: bytes, instance_id: bytes, component_svns: bytes, pce_svn: int) -> bytes:
    """Encode the extension: platform ids and TCB of one multi-package, hyper-threaded platform with cached keys.

    Args:
        ppid, instance_id, component_svns: 16 bytes each. ``fmspc``: 6 bytes.
    """
    components = [_entry(f"2.{i}", integer(svn)) for i, svn in enumerate(component_svns, 1)]
    tcb = _sequence(*components, _entry("2.17", integer(pce_svn)), _entry("2.18", octets(component_svns)))
    configuration = _sequence(*(_entry(f"7.{i}", tlv(_BOOLEAN, b"\xff")) for i in (1, 2, 3)))
    return _sequence(
        _entry("1", octets(ppid)),
        _entry("2", tcb),
        _entry("3", octets(bytes(2))),
        _entry("4", octets(fmspc)),
        _entry("5", tlv(_ENUMERATED, b"\x01")),
        _entry("6", octets(instance_id)),
        _entry("7", configuration),
    )


def _entry(suffix: str, value: bytes) -> bytes:
    return _sequence(_oid(f"{SGX_EXTENSION_OID}.{suffix}"), value)


def _sequence(*parts: bytes) -> bytes:
    return tlv(_SEQUENCE, b"".join(parts))


def octets(value: bytes) -> bytes:
    """Encode an OCTET STRING."""
    return tlv(_OCTETS, value)


def integer(value: int) -> bytes:
    """Encode an INTEGER, not negative."""
    return tlv(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "big"))


def _oid(dotted: str) -> bytes:
    first, second, *rest = map(int, dotted.split("."))
    return tlv(_OID, b"".join(map(_base128, (40 * first + second, *rest))))


def _base128(value: int) -> bytes:
    digits = [value & 0x7F]
    while value := value >> 7:
        digits.append(0x80 | value & 0x7F)
    return bytes(reversed(digits))


def tlv(tag: int, content: bytes) -> bytes:
    """Encode any element."""
    size = len(content)
    if size < 0x80:
        return bytes((tag, size)) + content
    octets = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes((tag, 0x80 | len(octets))) + octets + content
