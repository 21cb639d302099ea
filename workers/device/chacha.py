"""ChaCha20 (RFC 8439) in Triton: each lane computes one block of 64 bytes, as 16 tensors of one word a lane.

Words leave this form once, at the end of a kernel (`in_order`): to bring them in order moves data between lanes.
"""

import triton
import triton.language as tl


@triton.jit
def _quarter_round(a, b, c, d):
    # Each turn of a word is written out: a call takes the interpreter ten times as long as the turn.
    a += b
    d ^= a
    d = (d << 16) | (d >> 16)
    c += d
    b ^= c
    b = (b << 12) | (b >> 20)
    a += b
    d ^= a
    d = (d << 8) | (d >> 24)
    c += d
    b ^= c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def _four_rounds(first, second, third, fourth):
    """Do a quarter round on each column of the four rows, which are four words each."""
    upper, above, below, lower = (), (), (), ()
    for column in tl.static_range(4):
        a, b, c, d = _quarter_round(first[column], second[column], third[column], fourth[column])
        upper, above, below, lower = upper + (a,), above + (b,), below + (c,), lower + (d,)
    return upper, above, below, lower


@triton.jit
def keystream(key_ptr, counter, nonce):
    """Return the 16 words of the blocks ``counter``, each uint32 [lanes].

    Args:
        key_ptr: eight words. counter: uint32 [lanes]. nonce: uint64 scalar; the first eight of its twelve bytes.
    """
    zero = counter & 0
    constants = (zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574)
    upper_key, lower_key = (), ()
    for word in tl.static_range(4):
        upper_key = upper_key + (zero + tl.load(key_ptr + word),)
        lower_key = lower_key + (zero + tl.load(key_ptr + word + 4),)
    position = (counter, zero + nonce.to(tl.uint32), zero + (nonce >> 32).to(tl.uint32), zero)
    a, b, c, d = constants, upper_key, lower_key, position
    for _ in range(10):
        a, b, c, d = _four_rounds(a, b, c, d)
        # The diagonals are the columns of rows that are turned by their number.
        b, c, d = (b[1], b[2], b[3], b[0]), (c[2], c[3], c[0], c[1]), (d[3], d[0], d[1], d[2])
        a, b, c, d = _four_rounds(a, b, c, d)
        b, c, d = (b[3], b[0], b[1], b[2]), (c[2], c[3], c[0], c[1]), (d[1], d[2], d[3], d[0])
    before, after = constants + upper_key + lower_key + position, a + b + c + d
    words = ()
    for place in tl.static_range(16):
        words = words + (before[place] + after[place],)
    return words


@triton.jit
def joined(low, high):
    """Return the 64-bit words of these halves."""
    return low.to(tl.uint64) | (high.to(tl.uint64) << 32)


@triton.jit
def in_order(words, FOLDS: tl.constexpr):
    """Return 2^FOLDS tensors [lanes] as one [lanes * 2^FOLDS], all of a lane before all of the next."""
    for fold in tl.static_range(FOLDS):
        folded = ()
        # What is interleaved last changes fastest, so the halves of the list come first.
        for place in tl.static_range(1 << (FOLDS - 1 - fold)):
            folded = folded + (tl.interleave(words[place], words[place + (1 << (FOLDS - 1 - fold))]),)
        words = folded
    return words[0]
