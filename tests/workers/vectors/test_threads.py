"""Threads that share words, `workers/vectors/threads.py`, and that every function they help gives the same bytes."""

import gc
import os
import threading
import tracemalloc
import weakref

import numpy as np
import pytest
import torch

from raycloak.attestation.core.keys import Secret
from raycloak.metrics.errors import ProtocolError, RefusedError
from raycloak.workers.terms import model_digest
from raycloak.workers.terms.manifest import TensorSpec
from raycloak.workers.terms.model_digest import own_copy, tensor_digests
from raycloak.workers.vectors import masks, noise, ring, vector_tag
from raycloak.workers.vectors.masks import masked_sum
from raycloak.workers.vectors.noise import BLOCK, NoiseSampler
from raycloak.workers.vectors.ring import RingSpec, encode_into, ring_dtype
from raycloak.workers.vectors.threads import ONE_THREAD, WordThreads, blocks_of
from raycloak.workers.vectors.vector_tag import TensorLeaves, tensor_leaves

COUNTS = (2, 3, 7)
KEYS = [(Secret(bytes([index]) * 32), sign) for index, sign in ((1, 1), (2, -1), (3, 1))]
PIECE = 16
"""Words of a piece where a test makes pieces small: one block of keystream, in a ring of 32 bits."""


@pytest.fixture
def small_pieces(monkeypatch):
    """Cut short vectors into as many pieces as long ones."""
    for module in (ring, masks, model_digest):
        monkeypatch.setattr(module, "PIECE_WORDS", PIECE)
    monkeypatch.setattr(noise, "_TOGETHER", 1)
    monkeypatch.setattr(vector_tag, "_PIECE", 1)
    monkeypatch.setattr(model_digest, "_LARGE", 0)


def lengths(around: int) -> list[int]:
    """Return lengths at the ends of pieces of ``around``, and by chance."""
    ends = [max(0, times * around + more) for times in (0, 1, 2, 16, 57) for more in (-1, 0, 1)]
    return sorted({*ends, *np.random.default_rng(40).integers(0, 60 * around, 4).tolist()})


def words_of(length: int, bits: int = 32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**bits, length, ring_dtype(bits).type)


def masked(length, threads, bits=32, in_place=False):
    vectors = [words_of(length, bits, seed) for seed in range(2)]
    out = vectors[0] if in_place else np.zeros(length, ring_dtype(bits))
    masked_sum(vectors, KEYS, out, threads)
    return out.tobytes()


def encoded(length, threads, bits=32):
    values = 100 * np.random.default_rng(length).standard_normal(length, np.float32)
    out = np.zeros(length, ring_dtype(bits))
    encode_into(values, RingSpec(bits, -10, 64.0), out, threads)
    return out.tobytes()


def noised(length, threads, bits=32, start=0, sigma=3e6):
    out = words_of(length, bits)
    NoiseSampler(sigma, bits).add_to(out, KEYS[0][0], start=start, threads=threads)
    return out.tobytes()


def copied(length, threads):
    ranges = [words_of(each).astype(np.float32) for each in (length, 3, length + 1)]
    return own_copy(ranges, threads).tobytes()


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("made", [masked, encoded])
def test_guarantee_no_word_depends_on_the_number_of_threads(made, bits):
    for length in lengths(PIECE):
        alone = made(length, ONE_THREAD, bits)
        assert {made(length, WordThreads(count), bits) for count in COUNTS} == {alone}, length


@pytest.mark.usefixtures("small_pieces")
def test_guarantee_no_word_depends_on_threads_where_a_vector_is_masked_in_its_own_memory():
    for length in lengths(PIECE):
        alone = masked(length, ONE_THREAD)
        assert {masked(length, WordThreads(count), in_place=True) for count in (1, *COUNTS)} == {alone}, length


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("bits", "sigma"), [(32, 200.0), (32, 3e6), (64, 2.0**40)])
def test_guarantee_no_draw_depends_on_the_number_of_threads(bits, sigma):
    for length in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 9 * BLOCK + 1, 100_003):
        for start in (0, 1, BLOCK - 1, 5 * BLOCK):
            alone = noised(length, ONE_THREAD, bits, start, sigma)
            shared = {noised(length, WordThreads(count), bits, start, sigma) for count in COUNTS}
            assert shared == {alone}, (length, start)


def test_guarantee_no_draw_depends_on_how_many_blocks_are_drawn_at_once(monkeypatch):
    alone = noised(9 * BLOCK + 5, ONE_THREAD, start=7)
    for together in (1, 2, 6, 9, 64):
        monkeypatch.setattr(noise, "_TOGETHER", together)
        assert noised(9 * BLOCK + 5, WordThreads(2), start=7) == alone


def test_guarantee_pieces_of_their_real_size_give_the_same_words_too():
    for made in (masked, encoded, noised, copied):
        alone = made(900_001, ONE_THREAD)
        assert {made(900_001, WordThreads(count)) for count in COUNTS} == {alone}


@pytest.mark.usefixtures("small_pieces")
def test_guarantee_no_digest_depends_on_the_number_of_threads():
    sizes = (40_000, 1, 16_384, 7, 70_001)
    vector = words_of(sum(sizes))
    alone = [TensorLeaves.of(part) for part in np.split(vector, np.cumsum(sizes)[:-1])]
    tensors = tuple(TensorSpec(name=f"t{size}", shape=(size,)) for size in sizes)
    flat = vector.view(np.float32)
    for count in (1, *COUNTS):
        assert tensor_leaves(vector, sizes, WordThreads(count)) == alone
        assert tensor_digests(flat, tensors, WordThreads(count)) == tensor_digests(flat, tensors)
        assert copied(20 * PIECE + 1, WordThreads(count)) == copied(20 * PIECE + 1, ONE_THREAD)


def test_tensors_that_do_not_make_up_the_vector_are_refused():
    for sizes in ((5, 6), (5, 4), ()):
        with pytest.raises(RefusedError, match="proof_bound"):
            tensor_leaves(words_of(10), sizes, ONE_THREAD)


class Broken(WordThreads):
    """Threads that do a piece twice, leave one out, or begin one a word too late."""

    def __init__(self, fault):
        super().__init__(2)
        self._fault = fault

    def cut(self, length, least):
        pieces = super().cut(length, least)
        changed = {
            "twice": [*pieces, pieces[1]],
            "left out": pieces[1:],
            "late": [*pieces[1:], range(1, pieces[0].stop)],
        }
        return changed[self._fault]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("fault", ["twice", "left out", "late"])
def test_a_piece_twice_or_never_or_from_another_place_shows(fault):
    assert noised(10 * BLOCK, Broken(fault)) != noised(10 * BLOCK, ONE_THREAD)
    assert masked(10 * PIECE, Broken(fault), in_place=True) != masked(10 * PIECE, ONE_THREAD)
    # To encode a word twice is harmless.
    if fault != "twice":
        assert encoded(10 * PIECE, Broken(fault)) != encoded(10 * PIECE, ONE_THREAD)


@pytest.mark.parametrize("count", [1, *COUNTS])
def test_pieces_are_consecutive_whole_and_multiples_of_the_least(count):
    for length in (0, 1, 63, 64, 65, 1000, 64_001):
        pieces = WordThreads(count).cut(length, 64)
        assert [index for piece in pieces for index in piece] == list(range(length))
        assert all(piece.start % 64 == 0 for piece in pieces)
        assert len(pieces) <= max(1, 8 * count)
    assert len(WordThreads(count).cut(64_000, 64)) >= count


def test_blocks_begin_with_each_piece():
    places = list(blocks_of([range(10), range(20, 24)], 4))
    assert places == [slice(0, 4), slice(4, 8), slice(8, 10), slice(20, 24)]


def test_each_piece_is_done_once_by_the_caller_and_as_many_helpers_as_are_needed():
    barrier, done = threading.Barrier(3), list[tuple[int, str]]()

    def work(pieces):
        for piece in pieces:
            # Nobody goes on before all three threads have a piece.
            if piece < 3:
                barrier.wait(60)
            done.append((piece, threading.current_thread().name))

    WordThreads(3).share(range(50), work)
    assert sorted(piece for piece, _ in done) == list(range(50))
    assert {name for _, name in done} == {threading.current_thread().name, "words"}
    names = []
    WordThreads(9).share([1], lambda pieces: names.extend(threading.current_thread().name for _ in pieces))
    WordThreads(9).share([], lambda pieces: names.extend(pieces))
    assert names == [threading.current_thread().name]


@pytest.mark.parametrize("failing", ["caller", "helper"])
def test_guarantee_the_first_exception_ends_all_threads_and_nothing_is_written_afterwards(failing):
    caller, both, written = threading.current_thread(), threading.Barrier(2), list[int]()
    failed = threading.Event()

    def work(pieces):
        mine = "caller" if threading.current_thread() is caller else "helper"
        for piece in pieces:
            if piece < 2:
                both.wait(60)
                if mine == failing:
                    failed.set()
                    raise ProtocolError("encode_non_finite", "a virtual worker's sum is not finite")
                assert failed.wait(60)
            written.append(piece)

    before = threading.active_count()
    with pytest.raises(ProtocolError, match="encode_non_finite"):
        WordThreads(2).share(range(1000), work)
    assert threading.active_count() == before
    # The other thread ends the piece that it has, and at most begins one before it can know.
    assert len(written) <= 2


def test_guarantee_an_exception_keeps_no_vector_in_memory():
    def fail():
        values = np.full(400_000, np.nan, np.float32)
        dead = weakref.ref(values)
        with pytest.raises(ProtocolError, match="encode_non_finite"):
            encode_into(values, RingSpec(32, -10, 64.0), values.view(np.uint32), WordThreads(3))
        return dead

    gc.disable()
    try:
        dead = fail()
        assert dead() is None
    finally:
        gc.enable()


def test_a_thread_that_cannot_start_ends_those_that_did(monkeypatch):
    started, start = [], threading.Thread.start

    def begin(self):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", begin)
    with pytest.raises(RuntimeError, match="can't start"):
        WordThreads(3).share(range(100), lambda pieces: [None for _ in pieces])
    assert not started[0].is_alive()


def test_guarantee_threads_have_the_callers_denormal_mode():
    """Else a decoded value below 2^-126 would depend on which thread wrote it."""
    tiny, found = np.full(1, 2.0**-140, np.float64), {}

    def work(pieces):
        for piece in pieces:
            barrier.wait(60)
            found[piece] = bool(tiny.astype(np.float32).any())

    for flushed in (False, True):
        barrier = threading.Barrier(2)
        torch.set_flush_denormal(flushed)
        try:
            WordThreads(2).share([0, 1], work)
        finally:
            torch.set_flush_denormal(False)
        assert found == {0: not flushed, 1: not flushed}


def test_a_forked_process_has_threads_of_its_own():
    alone = masked(600_000, WordThreads(2))
    child = os.fork()
    if child == 0:
        os._exit(0 if masked(600_000, WordThreads(2)) == alone else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_guarantee_no_thread_holds_more_than_a_block_of_any_mask():
    vector, out = np.ones(1_000_000, np.uint32), np.empty(1_000_000, np.uint32)
    tracemalloc.start()
    masked_sum([vector], KEYS, out, WordThreads(3))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 << 19


def test_a_share_is_what_was_reserved_and_what_the_process_may_use():
    usable = os.sched_getaffinity(0)
    assert WordThreads.of_share().count == len(usable)
    assert WordThreads.of_share(1).count == 1
    assert WordThreads.of_share(0).count == 1
    assert WordThreads.of_share(10**6).count == len(usable)
    os.sched_setaffinity(0, {min(usable)})
    try:
        assert WordThreads.of_share(2).count == 1
    finally:
        os.sched_setaffinity(0, usable)
