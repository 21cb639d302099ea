"""Frames of HTTP/2 (RFC 9113) and gRPC by hand, for peers that do what no client of ours would do."""

import socket
import ssl
import struct

DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW = 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
LONGEST = 2**14
"""Of a frame's content, where the other end has said nothing else."""


def frame(kind, flags, stream, content=b""):
    """Return a frame."""
    return len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content


def headers(path, stream, scheme="http"):
    """Return the HEADERS of a call, as HPACK writes them without its tables (RFC 7541, 6.2.2)."""
    fields = {":method": "POST", ":scheme": scheme, ":path": path, ":authority": "x"}
    fields |= {"te": "trailers", "content-type": "application/grpc"}
    content = b"".join(
        b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in field) for field in fields.items()
    )
    return frame(HEADERS, END_HEADERS, stream, content)


def message(content, size=None):
    """Return a gRPC message; with ``size``, the beginning of one that is so long."""
    return struct.pack(">BI", 0, len(content) if size is None else size) + content


def data(stream, content):
    """Return the DATA frames of a stream that does not end with them."""
    return b"".join(
        frame(DATA, 0, stream, content[start : start + LONGEST]) for start in range(0, len(content), LONGEST)
    )


def opened(connection, settings=b""):
    """Begin HTTP/2 on a socket, without waiting for the other end."""
    connection.sendall(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(SETTINGS, ACK, 0))
    return connection


def unfinished_calls(connection, path, streams, sent=60_000, size=1_000_000):
    """Open calls whose request never becomes whole; return once all is sent, or the other end has had enough."""
    try:
        opened(connection)
        for number in range(streams):
            connection.sendall(headers(path, 2 * number + 1) + data(2 * number + 1, message(bytes(sent - 5), size)))
    except OSError:
        pass
    return connection


def is_closed(connection):
    """Return whether the other end has closed a socket; what it had said before is read."""
    connection.settimeout(0)
    try:
        while connection.recv(2**16):
            pass
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        return True
    return True


def connect(port, source="127.0.0.1"):
    """Return a connection to a port of this machine."""
    return socket.create_connection(("127.0.0.1", port), timeout=60, source_address=(source, 0))
