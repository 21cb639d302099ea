"""The Merkle tree: known roots, the definition of RFC 9162 by recursion, and proofs that hold for nothing else."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloak.attestation.log.merkle import (
    EMPTY_ROOT,
    MerkleTree,
    completed,
    consistency_proof,
    inclusion_proof,
    leaf_hash,
    node_hash,
    proves_consistency,
    proves_inclusion,
)

# The leaves of the reference tests of Certificate Transparency, with the roots of their prefixes.
CT_LEAVES = [
    bytes.fromhex(each)
    for each in ("", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f")
]
CT_ROOTS = {
    0: "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    1: "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    8: "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
}


def by_definition(leaves: list[bytes]) -> bytes:
    """Compute RFC 9162 section 2.1.1, word for word."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return hashlib.sha256(b"\x00" + leaves[0]).digest()
    k = 1
    while 2 * k < len(leaves):
        k *= 2
    return hashlib.sha256(b"\x01" + by_definition(leaves[:k]) + by_definition(leaves[k:])).digest()


def tree_of(leaves: list[bytes]) -> MerkleTree:
    tree = MerkleTree()
    for leaf in leaves:
        tree.append(leaf_hash(leaf))
    return tree


@st.composite
def sizes(draw: st.DrawFn, most: int = 70) -> tuple[int, int]:
    size = draw(st.integers(1, most))
    return draw(st.integers(0, size - 1)), size


LEAVES = [index.to_bytes(2, "big") for index in range(70)]
WHOLE = tree_of(LEAVES)


@pytest.mark.parametrize("size", CT_ROOTS)
def test_the_roots_are_those_of_certificate_transparency(size):
    assert tree_of(CT_LEAVES[:size]).root().hex() == CT_ROOTS[size]


@given(st.integers(0, 70))
def test_every_prefix_has_the_root_of_the_definition(size):
    assert WHOLE.root(size) == by_definition(LEAVES[:size])


@given(sizes())
def test_an_inclusion_proof_holds_for_its_leaf_place_size_and_root_alone(drawn):
    index, size = drawn
    root, leaf = WHOLE.root(size), leaf_hash(LEAVES[index])
    proof = inclusion_proof(index, size, WHOLE.subtree)
    assert len(proof) <= max(size - 1, 0).bit_length()
    assert proves_inclusion(leaf, index, size, proof, root)
    assert not proves_inclusion(leaf_hash(b"other"), index, size, proof, root)
    assert not proves_inclusion(leaf, index, size, proof, node_hash(root, root))
    for other in {index ^ 1, size - 1 - index} - {index}:
        assert not proves_inclusion(leaf, other, size, proof, root)
    assert not proves_inclusion(leaf, index, index, proof, root)
    assert not proves_inclusion(leaf, index, size, (*proof, root), root)
    for place in range(len(proof)):
        assert not proves_inclusion(leaf, index, size, proof[:place] + proof[place + 1 :], root)
        changed = (*proof[:place], bytes(32), *proof[place + 1 :])
        assert not proves_inclusion(leaf, index, size, changed, root)


@given(sizes())
def test_a_consistency_proof_holds_for_its_two_trees_alone(drawn):
    old, size = drawn
    roots = WHOLE.root(old), WHOLE.root(size)
    proof = consistency_proof(old, size, WHOLE.subtree)
    assert proves_consistency(old, size, *roots, proof)
    other = tree_of([b"another past", *LEAVES[1:size]])
    assert other.root() != roots[1]
    assert not proves_consistency(old, size, bytes(32), roots[1], proof)
    if old:
        assert not proves_consistency(old, size, other.root(old), roots[1], proof)
        assert not proves_consistency(old, size, roots[0], other.root(), proof)
        assert not proves_consistency(size, old, *reversed(roots), proof)
    assert not proves_consistency(old, size, *roots, (*proof, bytes(32)))
    for place in range(len(proof)):
        assert not proves_consistency(old, size, *roots, proof[:place] + proof[place + 1 :])
        assert not proves_consistency(old, size, *roots, (*proof[:place], bytes(32), *proof[place + 1 :]))


def test_a_tree_extends_itself_and_the_empty_one():
    assert consistency_proof(7, 7, WHOLE.subtree) == () == consistency_proof(0, 7, WHOLE.subtree)
    assert proves_consistency(7, 7, WHOLE.root(7), WHOLE.root(7), ())
    assert not proves_consistency(7, 7, WHOLE.root(6), WHOLE.root(7), ())
    assert proves_consistency(0, 7, EMPTY_ROOT, WHOLE.root(7), ())
    assert not proves_consistency(3, 7, WHOLE.root(3), WHOLE.root(7), ())


@pytest.mark.parametrize(("ask", "first", "size"), [
    (inclusion_proof, 3, 3), (inclusion_proof, 0, 0), (inclusion_proof, -1, 3), (consistency_proof, 4, 3),
])  # fmt: skip
def test_what_is_not_in_a_tree_has_no_proof(ask, first, size):
    with pytest.raises(ValueError, match=f"a tree of {size} leaves"):
        ask(first, size, WHOLE.subtree)


def test_appending_and_proving_read_a_logarithm_of_the_tree():
    """A long run does not slow down: 2^20 leaves are reached through a function, none of them stored."""
    reads = []

    def subtree(level: int, index: int) -> bytes:
        reads.append((level, index))
        return level.to_bytes(16, "big") + index.to_bytes(16, "big")

    size = 2**20 - 1
    assert len(completed(size, bytes(32), subtree)) == 21
    assert len(reads) == 20
    reads.clear()
    inclusion_proof(12345, size, subtree)
    consistency_proof(777_777, size, subtree)
    assert len(reads) <= 2 * 20 * 20
