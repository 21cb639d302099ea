"""A reader of a log takes only heads that extend the ones it saw, however validly others are signed."""

import pytest

from raycloak.attestation.log.entries import LogHead
from raycloak.attestation.log.merkle import MerkleTree, consistency_proof, leaf_hash
from raycloak.attestation.log.watch import LogWatch
from raycloak.metrics.errors import EvidenceError


def tree(text):
    built = MerkleTree()
    for letter in text:
        built.append(leaf_hash(letter.encode()))
    return built


def head(text, run_id="run-1"):
    return LogHead(run_id=run_id, length=len(text), root=tree(text).root())


def proof(old, text):
    return consistency_proof(old, len(text), tree(text).subtree)


def test_every_newer_head_of_one_log_is_taken():
    watch = LogWatch()
    assert watch.length == 0
    for text in ("abc", "abc", "abcd", "abcdefghi"):
        watch.accept(head(text), proof(watch.length, text))
        assert watch.length == len(text)


@pytest.mark.parametrize(
    ("shown", "extends"),
    [
        (head("abX"), ()),
        (head("abXdef"), proof(3, "abXdef")),
        (head("abcdef"), proof(3, "abXdef")),
        (head("abcdef"), ()),
        (head("abcdef"), proof(4, "abcdef")),
        (head("ab"), ()),
        (head(""), ()),
        (head("abcdef", "run-2"), proof(3, "abcdef")),
    ],
    ids=["rewritten", "forked", "proof of a fork", "no proof", "other proof", "put back", "emptied", "other run"],
)
def test_a_log_that_is_not_the_one_seen_before_is_refused_by_name_and_not_remembered(shown, extends):
    watch = LogWatch()
    watch.accept(head("abc"), ())
    with pytest.raises(EvidenceError) as error:
        watch.accept(shown, extends)
    assert error.value.code == "log_forked"
    watch.accept(head("abcd"), proof(3, "abcd"))
