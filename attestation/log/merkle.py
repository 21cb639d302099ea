"""The Merkle tree of RFC 9162 (the hashes of RFC 6962): roots, inclusion proofs and consistency proofs.

Guarantee: two lists of leaves with one root are the same list, unless SHA-256 has a collision. A verified proof shows
what the tree of that root holds. Nobody has to trust its maker.

A tree is read through a function from (level, index) to the hash of a complete subtree. Level 0 has the leaves' hashes.
Node ``index`` of ``level`` covers the leaves from ``index * 2**level`` on. Complete subtrees never change. A store of
them appends with one new hash on average, and computes roots and proofs from a logarithm of them.
"""

from collections.abc import Callable, Sequence

from raycloak.attestation.core.canonical import digest

Subtree = Callable[[int, int], bytes]
"""Returns the hash of the complete subtree at (level, index), 32 bytes."""

EMPTY_ROOT = digest(b"")


def leaf_hash(data: bytes) -> bytes:
    """Hash a leaf, RFC 9162 section 2.1.1."""
    # The first byte keeps a node from passing for a leaf.
    return digest(b"\x00" + data)


def node_hash(left: bytes, right: bytes) -> bytes:
    """Hash a node over its two children, RFC 9162 section 2.1.1."""
    return digest(b"\x01" + left + right)


def completed(size: int, leaf: bytes, subtree: Subtree) -> list[bytes]:
    """Return the complete subtrees that end in a leaf appended to ``size`` others, level 0 (the leaf's hash) first."""
    new = [leaf]
    while size & 1:
        size >>= 1
        new.append(node_hash(subtree(len(new) - 1, 2 * size), new[-1]))
    return new


def root(size: int, subtree: Subtree) -> bytes:
    """Return the root of the first ``size`` leaves."""
    return _range_root(0, size, subtree) if size else EMPTY_ROOT


def inclusion_proof(index: int, size: int, subtree: Subtree) -> tuple[bytes, ...]:
    """Prove that leaf ``index`` is one of the first ``size``, RFC 9162 section 2.1.3.1; ValueError if it is not."""
    if not 0 <= index < size:
        raise ValueError(f"a tree of {size} leaves has no leaf {index}")
    path, begin, end = list[bytes](), 0, size
    while end - begin > 1:
        middle = begin + _left_size(end - begin)
        if index < middle:
            path.append(_range_root(middle, end, subtree))
            end = middle
        else:
            path.append(_range_root(begin, middle, subtree))
            begin = middle
    return tuple(reversed(path))


def consistency_proof(old_size: int, size: int, subtree: Subtree) -> tuple[bytes, ...]:
    """Prove that the first ``size`` leaves begin with the first ``old_size``, RFC 9162 section 2.1.4.1.

    Empty where nothing needs to be shown: for ``old_size`` 0, and for equal sizes. ValueError if it is greater.
    """
    if not 0 <= old_size <= size:
        raise ValueError(f"a tree of {size} leaves does not extend one of {old_size}")
    if old_size == 0:
        return ()
    path, begin, end, is_known = list[bytes](), 0, size, True
    while old_size < end:
        middle = begin + _left_size(end - begin)
        if old_size <= middle:
            path.append(_range_root(middle, end, subtree))
            end = middle
        else:
            path.append(_range_root(begin, middle, subtree))
            begin, is_known = middle, False
    return tuple(reversed(path if is_known else [*path, _range_root(begin, end, subtree)]))


def proves_inclusion(leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes) -> bool:
    """Return whether ``proof`` puts ``leaf`` (its hash) at ``index`` of the tree of ``size`` leaves and ``root``.

    RFC 9162 section 2.1.3.2.
    """
    if not 0 <= index < size:
        return False
    node, last, found = index, size - 1, leaf
    for sibling in proof:
        if last == 0:
            return False
        if node & 1 or node == last:
            found = node_hash(sibling, found)
            node, last = _to_left_border(node, last)
        else:
            found = node_hash(found, sibling)
        node, last = node >> 1, last >> 1
    return last == 0 and found == root


def proves_consistency(old_size: int, size: int, old_root: bytes, new_root: bytes, proof: Sequence[bytes]) -> bool:
    """Return whether ``proof`` shows that the new tree begins with the old one, each given by size and root.

    RFC 9162 section 2.1.4.2. An empty old tree and equal sizes take an empty proof.
    """
    if not 0 <= old_size <= size:
        return False
    if old_size in (0, size):
        expected = EMPTY_ROOT if old_size == 0 else new_root
        return not proof and old_root == expected
    path = [old_root, *proof] if old_size & (old_size - 1) == 0 else list(proof)
    if not path:
        return False
    node, last = old_size - 1, size - 1
    while node & 1:
        node, last = node >> 1, last >> 1
    old = new = path[0]
    for sibling in path[1:]:
        if last == 0:
            return False
        if node & 1 or node == last:
            old, new = node_hash(sibling, old), node_hash(sibling, new)
            node, last = _to_left_border(node, last)
        else:
            new = node_hash(new, sibling)
        node, last = node >> 1, last >> 1
    return last == 0 and (old, new) == (old_root, new_root)


class MerkleTree:
    """A tree in memory, for code that has all leaves."""

    __slots__ = ("levels",)

    def __init__(self) -> None:
        self.levels: list[list[bytes]] = [[]]

    def __len__(self) -> int:
        return len(self.levels[0])

    def append(self, leaf: bytes) -> None:
        """Add a leaf, given by its hash."""
        for level, subtree in enumerate(completed(len(self), leaf, self.subtree)):
            if level == len(self.levels):
                self.levels.append([])
            self.levels[level].append(subtree)

    def subtree(self, level: int, index: int) -> bytes:
        """Return the hash of a complete subtree."""
        return self.levels[level][index]

    def root(self, size: int | None = None) -> bytes:
        """Return the root of the first ``size`` leaves, of all if ``size`` is None."""
        return root(len(self) if size is None else size, self.subtree)


def _range_root(begin: int, end: int, subtree: Subtree) -> bytes:
    """Return the root of leaves ``begin`` to ``end - 1``; ``begin`` is a multiple of the left part's size."""
    size = end - begin
    if size & (size - 1) == 0:
        level = size.bit_length() - 1
        return subtree(level, begin >> level)
    middle = begin + _left_size(size)
    return node_hash(_range_root(begin, middle, subtree), _range_root(middle, end, subtree))


def _left_size(size: int) -> int:
    """Return the largest power of two below ``size``."""
    return 1 << ((size - 1).bit_length() - 1)


def _to_left_border(node: int, last: int) -> tuple[int, int]:
    """Move both positions up to the level where ``node`` has a sibling on its left, or is the first."""
    while node and not node & 1:
        node, last = node >> 1, last >> 1
    return node, last
