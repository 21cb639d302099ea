"""Frames between two ends of a channel, and what a receiver refuses of them."""

import fcntl
import gc
import mmap
import os
import resource
import socket
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from raycloak.attestation.core.canonical import length_prefixed
from raycloak.attestation.processes import arrays
from raycloak.attestation.processes.channel import Channel
from raycloak.attestation.processes.deadline import Deadline
from raycloak.metrics.errors import ProtocolError
from tests.attestation.processes.targets import Note, Other

NOTE = Note(text="a")
SEALED = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@pytest.fixture
def ends():
    """Return the raw end of a hostile sender, and a channel."""
    raw, end = socket.socketpair()
    channel = Channel(end, most_bytes=2**16, most_array_bytes=2**16)
    yield raw, channel
    raw.close()
    channel.close()


def frame(*fields):
    """Return the bytes of a frame."""
    content = length_prefixed(*fields)
    return len(content).to_bytes(4, "big") + content


def send_with(raw, content, descriptors):
    """Send bytes with descriptors."""
    passed = struct.pack(f"{len(descriptors)}i", *descriptors)
    raw.sendmsg([content], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])


def refused(channel, *kinds):
    """Return the code with which a frame is refused."""
    with pytest.raises(ProtocolError) as refusal:
        channel.receive_frame(*(kinds or (Note,)), by=Deadline(60))
    return refusal.value.code


def memory(content, seals=SEALED, flags=0):
    """Return a descriptor of such memory."""
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING | flags)
    if content:
        os.write(descriptor, content)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def open_descriptors():
    """Return how many descriptors this process has."""
    gc.collect()  # what other tests left open is closed now, and not between two counts
    return len(list(Path("/proc/self/fd").iterdir()))


def test_messages_arrive_in_their_order_and_by_their_kind(ends):
    raw, channel = ends
    sender = Channel(raw)
    sender.send(NOTE)
    sender.send(Other(text="ü"))
    assert channel.receive(Other, Note) == NOTE
    assert channel.receive(Other, Note) == Other(text="ü")
    sender.finish()
    assert channel.receive(Note) is None


def test_a_frame_longer_than_the_socket_takes_arrives_whole_while_several_send():
    first, second = map(Channel, socket.socketpair())
    texts = [letter * 2**22 for letter in "abc"]
    senders = [threading.Thread(target=first.send, args=(Note(text=text),)) for text in texts]
    for each in senders:
        each.start()
    found = sorted(second.receive(Note, by=Deadline(60)).text for _ in texts)
    for each in senders:
        each.join()
    assert found == texts
    first.close()
    assert second.receive(Note) is None
    with pytest.raises(ConnectionError):
        second.send(NOTE)
    second.close()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.uint32).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(12, dtype=np.int64)[::2],
        np.zeros((0, 5), np.float32),
        np.array(True),
        np.array([1, 2], np.float16),
    ],
    ids=lambda array: f"{array.dtype}-{array.shape}",
)
def test_an_array_arrives_as_it_was(ends, array):
    raw, channel = ends
    before = open_descriptors()
    Channel(raw).send(NOTE, [array, array + array])
    found = channel.receive_frame(Note)
    assert found.message == NOTE
    for own, expected in zip(found.arrays, (array, array + array), strict=True):
        assert (own.dtype, own.shape) == (expected.dtype, expected.shape)
        assert np.array_equal(own, expected)
    del found, own
    assert open_descriptors() == before
    Channel(raw).send(NOTE, [array])
    with pytest.raises(ProtocolError, match="arrays"):
        channel.receive(Note)


def test_guarantee_an_array_cannot_change_while_it_is_read():
    """Neither by who sent it, nor by another that it was sent to."""
    specs, descriptor = arrays.shared([np.arange(4)])
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
    for size in (0, 64):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, 32, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    (first,), (second,) = (arrays.mapped(arrays.places_of(specs), descriptor) for _ in range(2))
    first[0] = 9
    assert second.tolist() == [0, 1, 2, 3]
    os.close(descriptor)


@pytest.mark.parametrize(
    ("made", "code"),
    [
        (lambda: memory(bytes(8), fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW), "array_unsealed"),
        (lambda: memory(bytes(8), SEALED & ~fcntl.F_SEAL_WRITE | 0x10), "array_unsealed"),  # F_SEAL_FUTURE_WRITE
        (lambda: memory(bytes(8), SEALED & ~fcntl.F_SEAL_SHRINK), "array_unsealed"),
        (lambda: os.open("/dev/zero", os.O_RDONLY), "array_unsealed"),
        (lambda: os.pipe()[0], "array_unsealed"),
        (lambda: memory(bytes(7)), "array_size"),
        (lambda: memory(bytes(9)), "array_size"),
        (lambda: memory(b"", flags=os.MFD_HUGETLB), "array_pages"),
    ],
    ids=["writable", "writable where it is mapped", "may shrink", "device", "pipe", "short", "long", "huge pages"],
)
def test_guarantee_memory_that_could_change_or_does_not_fit_is_refused_and_the_next_frame_is_read(ends, made, code):
    raw, channel = ends
    before = open_descriptors()
    descriptor = made()
    send_with(raw, frame(Note.DOMAIN, NOTE.encode(), "<f8:1"), [descriptor])
    os.close(descriptor)
    assert refused(channel) == code
    Channel(raw).send(NOTE)
    assert channel.receive(Note) == NOTE
    assert open_descriptors() - before <= 1, "the other end of the pipe"


def test_thousands_of_arrays_come_in_one_memory():
    first, second = map(Channel, socket.socketpair())
    before = open_descriptors()
    given = [np.full(index % 7, index, np.uint16) for index in range(3000)]
    first.send(NOTE, given)
    found = second.receive_frame(Note)
    assert open_descriptors() == before + 1
    assert all(own.tolist() == expected.tolist() for own, expected in zip(found.arrays, given, strict=True))
    assert all(own.ctypes.data % arrays.ALIGNMENT == 0 for own in found.arrays)
    first.close()
    second.close()


def test_each_array_is_copied_once_on_its_way(ends, monkeypatch):
    """By the sender, from its own memory into the one that the receiver maps."""
    raw, channel = ends
    written, real = [], os.pwrite

    def pwrite(descriptor, content, offset):
        written.append(len(content))
        return real(descriptor, content, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    sent = np.arange(4096, dtype=np.float32)
    Channel(raw).send(NOTE, [sent])
    (found,) = channel.receive_frame(Note, by=Deadline(60)).arrays
    assert written == [sent.nbytes]
    assert isinstance(found.base, mmap.mmap)
    assert np.array_equal(found, sent)


def test_a_sparse_file_counts_at_its_full_size(ends):
    raw, channel = ends
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 2**40)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALED)
    for spec in (f"|u1:{2**40}", f"<f8:{2**20},{2**17}", f"<f8:{2**62},{2**62},0"):
        send_with(raw, frame(Note.DOMAIN, NOTE.encode(), spec), [descriptor])
    os.close(descriptor)
    assert [refused(channel) for _ in range(3)] == ["arrays_too_large", "arrays_too_large", "array_size"]


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "<f8",
        "|O:1",
        "<f8:-1",
        "<f8:1,",
        "f8:1",
        "<f8: 1",
        "<f8:01",
        "<M8[s]:1",
        "<U3:1",
        "(2,)f8:1",
        "<f8:1" + 32 * ",1",
    ],
)
def test_an_array_of_no_plain_type_and_shape_is_refused(ends, spec):
    raw, channel = ends
    descriptor = memory(bytes(8))
    send_with(raw, frame(Note.DOMAIN, NOTE.encode(), spec), [descriptor])
    os.close(descriptor)
    assert refused(channel) == "malformed"


@pytest.mark.parametrize(
    "content",
    [
        frame(Note.DOMAIN, b'{"text": "a"}'),
        frame(Note.DOMAIN, b'{"text":7}'),
        frame(Note.DOMAIN, b'{"more":1,"text":"a"}'),
        frame(Other.DOMAIN, NOTE.encode()),
        frame("", NOTE.encode()),
        frame(Note.DOMAIN),
        frame(Note.DOMAIN, NOTE.encode(), "<f8:1"),
        bytes(4),
        bytes([0, 0, 0, 3, 0, 0, 0]),
        bytes([0, 0, 0, 5, 0, 0, 0, 9, 1]),
    ],
)
def test_a_frame_that_is_no_message_is_refused_and_the_next_one_is_read(ends, content):
    raw, channel = ends
    raw.sendall(content)
    assert refused(channel) == "malformed"
    raw.sendall(frame(Note.DOMAIN, NOTE.encode()))
    assert channel.receive(Note) == NOTE


def test_descriptors_that_no_array_needs_are_closed(ends):
    raw, channel = ends
    before = open_descriptors()
    descriptor = memory(bytes(8))
    # More than stated, at the beginning; others in the middle of a frame, where nobody takes any.
    send_with(raw, frame(Note.DOMAIN, NOTE.encode()), [descriptor] * 253)
    content = frame(Note.DOMAIN, NOTE.encode())
    raw.sendall(content[:9])
    send_with(raw, content[9:], [descriptor] * 3)
    os.close(descriptor)
    assert refused(channel) == "malformed"
    assert channel.receive(Note, by=Deadline(60)) == NOTE
    assert open_descriptors() == before


def test_guarantee_a_frame_that_is_too_large_is_never_held_and_the_next_one_is_read(ends):
    raw, channel = ends
    size = 64 * 2**20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sender = threading.Thread(target=raw.sendall, args=(size.to_bytes(4, "big") + bytes(size),))
    sender.start()
    assert refused(channel) == "frame_too_large"
    sender.join()
    Channel(raw).send(NOTE)
    assert channel.receive(Note, by=Deadline(60)) == NOTE
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2 * size // 1024 + 16 * 1024, "the sender has it twice; in KiB"


def test_an_end_in_the_middle_of_a_frame_that_is_too_large_is_an_end(ends):
    raw, channel = ends
    raw.sendall((2**16 + 1).to_bytes(4, "big") + b"x")
    raw.close()
    assert channel.receive(Note, by=Deadline(60)) is None


def test_an_end_in_the_middle_of_a_frame_is_an_end(ends):
    raw, channel = ends
    raw.sendall(frame(Note.DOMAIN, NOTE.encode())[:-1])
    raw.close()
    assert channel.receive(Note) is None


def test_silence_ends_at_the_deadline_and_may_be_made_shorter(ends):
    raw, channel = ends
    raw.sendall(bytes(2))
    with pytest.raises(TimeoutError):
        channel.receive(Note, by=Deadline(0.05))
    far = Deadline(3600)
    threading.Timer(0.05, far.shorten, (0.05,)).start()
    far.shorten(7200)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        channel.receive(Note, by=far)
    assert time.monotonic() - began < 60


def test_a_send_that_nobody_reads_ends_at_the_deadline(ends):
    _, channel = ends
    with pytest.raises(TimeoutError):
        channel.send(Note(text="x" * 2**24), by=Deadline(0.05))
