"""Triton kernels for ring words: masks, encoding and noise, as `workers/vectors` computes them on a CPU.

Every word is an integer function of its inputs, so it depends neither on the card nor on the order of programs. None of
the numbers that differ from launch to launch is specialised: that would compile a kernel again.
"""

import triton
import triton.language as tl

from raycloak.workers.device.chacha import in_order, joined, keystream

MASK_LANES = tl.constexpr(128)
ENCODE_WORDS = tl.constexpr(1024)
# One program draws one block of the stream layout: 256 lanes of 32 words of 16 bits for each base draw.
DRAW_LANES = tl.constexpr(256)
DRAW_WORDS = tl.constexpr(8192)
SETTLE_LANES = tl.constexpr(32)
ZERO_BYTES = tl.constexpr(1 << 13)
# The entry of the table's index for a word that decides no outcome.
OPEN = tl.constexpr(-32768)


@triton.jit(do_not_specialize=["masks", "length", "first_block"])
def mask_kernel(vector_ptr, out_ptr, keys_ptr, signs_ptr, masks, length, first_block, WIDE: tl.constexpr):
    """Write vector + sum of sign * keystream of each key, in one pass over the vector.

    A sign is 1, or 2^bits - 1 to subtract. Every keystream begins at block ``first_block``.
    """
    program = tl.program_id(0).to(tl.int64)
    counter = (first_block + program * MASK_LANES + tl.arange(0, MASK_LANES)).to(tl.uint32)
    FOLDS: tl.constexpr = 3 if WIDE else 4
    nothing = counter & 0
    if WIDE:
        nothing = nothing.to(tl.uint64)
    sums = ()
    for _ in tl.static_range(1 << FOLDS):
        sums = sums + (nothing,)
    for mask in range(masks):
        sign = tl.load(signs_ptr + mask)
        stream = keystream(keys_ptr + mask * 8, counter, tl.full((), 0, tl.uint64))
        more = ()
        for place in tl.static_range(1 << FOLDS):
            if WIDE:
                more = more + (sums[place] + joined(stream[2 * place], stream[2 * place + 1]) * sign,)
            else:
                more = more + (sums[place] + stream[place] * sign,)
        sums = more
    at = program * (MASK_LANES << FOLDS) + tl.arange(0, MASK_LANES << FOLDS)
    vector = tl.load(vector_ptr + at, mask=at < length, other=0)
    tl.store(out_ptr + at, vector + in_order(sums, FOLDS), mask=at < length)


@triton.jit
def _encoded(values, limits_ptr, WIDE: tl.constexpr):
    """Return the ring words of float64 values: clamped, scaled by a power of two, rounded half to even.

    The limits are the clamp and the scale. Floor and remainder are exact, except between -1/2 and 0, where the
    remainder may round to 1/2 or 1; either rounds to 0, as it must.
    """
    clamp, scale = tl.load(limits_ptr), tl.load(limits_ptr + 1)
    scaled = tl.minimum(tl.maximum(values, -clamp), clamp) * scale
    below = tl.floor(scaled)
    rest = scaled - below
    is_odd = below * 0.5 != tl.floor(below * 0.5)
    rounds_up = (rest > 0.5) | ((rest == 0.5) & is_odd)
    whole = below.to(tl.int64) + rounds_up.to(tl.int64)
    return whole.to(tl.uint64) if WIDE else whole.to(tl.uint32)


@triton.jit
def _count_unfinite(values, unfinite_ptr):
    # Infinity less itself is no number, and what is no number equals nothing.
    tl.atomic_add(unfinite_ptr, tl.sum((values - values != 0.0).to(tl.int32), 0))


@triton.jit(do_not_specialize=["length"])
def encode_kernel(values_ptr, out_ptr, unfinite_ptr, limits_ptr, length, WIDE: tl.constexpr):
    """Write the ring words of float32 or float64 values, and count those that are not finite."""
    at = tl.program_id(0).to(tl.int64) * ENCODE_WORDS + tl.arange(0, ENCODE_WORDS)
    values = tl.load(values_ptr + at, mask=at < length, other=0.0).to(tl.float64)
    _count_unfinite(values, unfinite_ptr)
    tl.store(out_ptr + at, _encoded(values, limits_ptr, WIDE), mask=at < length)


@triton.jit(do_not_specialize=["start", "length", "first", "room", "draws"])
def draw_kernel(
    out_ptr, values_ptr, unfinite_ptr, limits_ptr, index_ptr, open_ptr, count_ptr, key_ptr, powers_ptr,
    start, length, first, room, draws, WIDE: tl.constexpr, ENCODES: tl.constexpr,
):  # fmt: skip
    """Add the noise of one block to ``out``, or write it there plus the encoded values.

    A word that decides no outcome goes to the block's list, in the order of the stream, and adds nothing yet. The list
    has ``room``; the count tells how many there were.
    """
    program = tl.program_id(0).to(tl.int64)
    number = first + program
    lane = tl.arange(0, DRAW_LANES)
    nothing = lane.to(tl.uint64) & 0 if WIDE else lane.to(tl.uint32) & 0
    totals = ()
    for _ in tl.static_range(32):
        totals = totals + (nothing,)
    listed = tl.full((), 0, tl.int32)
    for part in range(draws):
        counter = ((number * draws + part) * DRAW_LANES + lane).to(tl.uint32)
        stream = keystream(key_ptr, counter, tl.full((), 0, tl.uint64))
        outcomes = ()
        own = lane & 0
        for word in tl.static_range(32):
            outcome = tl.load(index_ptr + ((stream[word // 2] >> (word % 2 * 16)) & 0xFFFF).to(tl.int32)).to(tl.int32)
            outcomes = outcomes + (outcome,)
            own += (outcome == OPEN).to(tl.int32)
        # All words of a lane come before those of the next one.
        place = listed + tl.cumsum(own, 0) - own
        power = tl.load(powers_ptr + part)
        more = ()
        for word in tl.static_range(32):
            is_open = outcomes[word] == OPEN
            entry = (stream[word // 2] >> (word % 2 * 16)) & 0xFFFF
            entry = entry | ((lane * 32 + word + part * DRAW_WORDS).to(tl.uint32) << 16)
            tl.store(open_ptr + program * room + place, entry, mask=is_open & (place < room))
            place += is_open.to(tl.int32)
            decided = tl.where(is_open, 0, outcomes[word])
            if WIDE:
                more = more + (totals[word] + decided.to(tl.int64).to(tl.uint64) * power,)
            else:
                more = more + (totals[word] + decided.to(tl.uint32) * power,)
        totals = more
        listed += tl.sum(own, 0)
    tl.store(count_ptr + program, listed)
    at = number * DRAW_WORDS + tl.arange(0, DRAW_WORDS) - start
    is_here = (at >= 0) & (at < length)
    if ENCODES:
        values = tl.load(values_ptr + at, mask=is_here, other=0.0).to(tl.float64)
        _count_unfinite(values, unfinite_ptr)
        before = _encoded(values, limits_ptr, WIDE)
    else:
        before = tl.load(out_ptr + at, mask=is_here, other=0)
    tl.store(out_ptr + at, before + in_order(totals, 5), mask=is_here)


@triton.jit(do_not_specialize=["bounds", "steps", "lowest", "start", "length", "first", "room"])
def settle_kernel(
    out_ptr, open_ptr, count_ptr, high_ptr, low_ptr, key_ptr, powers_ptr,
    bounds, steps, lowest, start, length, first, room, WIDE: tl.constexpr,
):  # fmt: skip
    """Add the outcomes of listed words: each takes 112 more bits, and its outcome is that of the 128 in the table.

    Two words may be of one draw, so they are added one at a time; in which order shows nowhere.
    """
    program = tl.program_id(0).to(tl.int64)
    number = first + program
    count = tl.load(count_ptr + program)
    # Four entries take one block of the residue stream.
    block = tl.program_id(1) * SETTLE_LANES + tl.arange(0, SETTLE_LANES)
    if tl.program_id(1) * SETTLE_LANES * 4 < count:
        stream = keystream(key_ptr, block.to(tl.uint32), number.to(tl.uint64))
        for quarter in tl.static_range(4):
            each = block * 4 + quarter
            is_here = (each < count) & (each < room)
            entry = tl.load(open_ptr + program * room + each, mask=is_here, other=0)
            upper = joined(stream[4 * quarter], stream[4 * quarter + 1]) >> 16
            high = ((entry & 0xFFFF).to(tl.uint64) << 48) | upper
            low = joined(stream[4 * quarter + 2], stream[4 * quarter + 3])
            # The outcome is the number of bounds up to these 128 bits.
            least, most = block & 0, (block & 0) + bounds
            for _ in range(steps):
                is_open = least < most
                middle = (least + most) // 2
                bound_high = tl.load(high_ptr + middle, mask=is_open, other=0)
                bound_low = tl.load(low_ptr + middle, mask=is_open, other=0)
                is_reached = (bound_high < high) | ((bound_high == high) & (bound_low <= low))
                least = tl.where(is_open & is_reached, middle + 1, least)
                most = tl.where(is_open & (is_reached == 0), middle, most)
            position = (entry >> 16).to(tl.int32)
            power = tl.load(powers_ptr + position // DRAW_WORDS, mask=is_here, other=0)
            outcome = least + lowest
            at = number * DRAW_WORDS + position % DRAW_WORDS - start
            is_here = is_here & (at >= 0) & (at < length)
            if WIDE:
                tl.atomic_add(out_ptr + at, outcome.to(tl.int64).to(tl.uint64) * power, mask=is_here)
            else:
                tl.atomic_add(out_ptr + at, outcome.to(tl.uint32) * power, mask=is_here)


@triton.jit(do_not_specialize=["words"])
def zero_kernel(place_ptr, words):
    """Zero ``words`` words of 32 bits from an address on, of which the allocator knows no tensor."""
    at = tl.program_id(0).to(tl.int64) * (ZERO_BYTES // 4) + tl.arange(0, ZERO_BYTES // 4)
    begin = tl.load(place_ptr).to(tl.pointer_type(tl.uint32))
    tl.store(begin + at, at.to(tl.uint32) & 0, mask=at < words)
