"""SHA-256 (FIPS 180-4) of a vector's leaves in Triton: each lane hashes one leaf, from its first word to its last."""

import triton
import triton.language as tl

LEAF_LANES = tl.constexpr(32)


@triton.jit
def _rounds(state, words, constants_ptr):
    """Return the state, eight words a lane, after 16 rounds with these 16 words of the schedule."""
    a, b, c, d, e, f, g, h = state
    for place in tl.static_range(16):
        # Each turn of a word is written out, as in ChaCha20: a call takes the interpreter ten times as long.
        turned = ((e >> 6) | (e << 26)) ^ ((e >> 11) | (e << 21)) ^ ((e >> 25) | (e << 7))
        first = h + turned + (g ^ (e & (f ^ g))) + tl.load(constants_ptr + place) + words[place]
        turned = ((a >> 2) | (a << 30)) ^ ((a >> 13) | (a << 19)) ^ ((a >> 22) | (a << 10))
        second = turned + ((a & b) | (c & (a | b)))
        a, b, c, d, e, f, g, h = first + second, a, b, c, d + first, e, f, g
    return a, b, c, d, e, f, g, h


@triton.jit
def _next_words(words):
    """Return the 16 words of the schedule that follow these."""
    for place in tl.static_range(16):
        early, late = words[place + 1], words[place + 14]
        mixed = ((early >> 7) | (early << 25)) ^ ((early >> 18) | (early << 14)) ^ (early >> 3)
        stirred = ((late >> 17) | (late << 15)) ^ ((late >> 19) | (late << 13)) ^ (late >> 10)
        words = words + (words[place] + mixed + words[place + 9] + stirred,)
    following = ()
    for place in tl.static_range(16):
        following = following + (words[place + 16],)
    return following


@triton.jit(do_not_specialize=["leaves", "longest", "octet"])
def leaf_kernel(words_ptr, starts_ptr, lengths_ptr, constants_ptr, out_ptr, leaves, longest, octet):
    """Write the digest of each leaf, eight words.

    Args:
        words_ptr: uint32. starts_ptr, lengths_ptr: int64 and int32, where a leaf begins and how many words it has.
        constants_ptr: uint32 [72], the constants of the 64 rounds and the first state.
        longest: blocks that the longest leaf fills with its padding.
        octet: 8. Of a shift by a known number LLVM makes a swap of two words at once, and then fails for sm_100.
    """
    leaf = tl.program_id(0) * LEAF_LANES + tl.arange(0, LEAF_LANES)
    is_leaf = leaf < leaves
    start = tl.load(starts_ptr + leaf, mask=is_leaf, other=0)
    length = tl.load(lengths_ptr + leaf, mask=is_leaf, other=0)
    # A one after the last word, and 64 bits for the length.
    blocks = (length + 18) // 16
    nothing = length.to(tl.uint32) & 0
    state = ()
    for place in tl.static_range(8):
        state = state + (nothing + tl.load(constants_ptr + 64 + place),)
    for number in range(longest):
        block = ()
        for place in tl.static_range(16):
            at = number * 16 + place
            word = tl.load(words_ptr + start + at, mask=is_leaf & (at < length), other=0)
            # SHA-256 reads words with their first byte on top: both pairs of bytes change places, then those of a pair.
            word = (word << 16) | (word >> 16)
            word = ((word & 0x00FF00FF) << octet) | ((word >> octet) & 0x00FF00FF)
            word = tl.where(at == length, nothing + 0x80000000, word)
            # A leaf has far fewer than 2^32 bits.
            word = tl.where(at == blocks * 16 - 1, length.to(tl.uint32) * 32, word)
            block = block + (word,)
        after = state
        # A loop: 64 rounds in a row take a minute to compile.
        for part in range(3):
            after = _rounds(after, block, constants_ptr + part * 16)
            block = _next_words(block)
        after = _rounds(after, block, constants_ptr + 48)
        kept = ()
        for place in tl.static_range(8):
            kept = kept + (tl.where(number < blocks, state[place] + after[place], state[place]),)
        state = kept
    for place in tl.static_range(8):
        tl.store(out_ptr + leaf * 8 + place, state[place], mask=is_leaf)
