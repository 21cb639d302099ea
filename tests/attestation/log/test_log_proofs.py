"""Proofs of the evidence log on demand, over the service (RFC 9162, sections 2.1.3 and 2.1.4)."""

import pytest

from raycloak.attestation.log.entries import LogHead
from raycloak.attestation.log.merkle import proves_consistency, proves_inclusion
from raycloak.attestation.log.watch import LogWatch
from raycloak.metrics.errors import EvidenceError, RefusedError
from tests.attestation.serving import Site


@pytest.fixture
def site(session, tmp_path):
    with Site(session, tmp_path / "orchestrator").served() as site:
        yield site


@pytest.fixture
def client(site):
    client, _ = site.admitted()
    with client:
        client.release_keys(0)
        yield client


def head(site, client):
    return client.prove_growth(0)[1].open(site.log_owner)


def test_an_entry_is_proven_under_the_newest_head_and_in_any_smaller_tree(site, client):
    whole = head(site, client)
    for sequence in range(whole.length):
        proof, size = client.prove_entry(sequence)
        entry, under = proof.check(site.log_owner, site.run_id)
        assert (entry.sequence, size, under) == (sequence, whole.length, whole)
    for length in range(1, whole.length + 1):
        root = site.run.books.log.root_at(length)
        for sequence in range(length):
            proof, size = client.prove_entry(sequence, length)
            assert size == length
            assert proves_inclusion(proof.entry.hash, sequence, length, proof.path, root)
            assert (
                not proves_inclusion(proof.entry.hash, sequence, length, proof.path, whole.root) or size == whole.length
            )


def test_growth_is_proven_between_any_two_sizes(site, client):
    whole = head(site, client)
    roots = {length: site.run.books.log.root_at(length) for length in range(1, whole.length + 1)}
    for old in roots:
        for new in range(old, whole.length + 1):
            path, _ = client.prove_growth(old, new)
            assert proves_consistency(old, new, roots[old], roots[new], path)
            if old < new:
                assert not proves_consistency(old, new, bytes(32), roots[new], path)


def test_a_reader_follows_the_log_as_it_grows_and_refuses_another_one(site, client):
    watch = LogWatch()
    for _ in range(3):
        path, signed = client.prove_growth(watch.length)
        watch.accept(signed.open(site.log_owner), path)
        client.release_keys(0, seen=watch.length)
    assert watch.length == head(site, client).length - 1
    fork = LogHead(run_id=site.run_id, length=watch.length, root=bytes(32))
    other = LogWatch()
    other.accept(fork, ())
    path, signed = client.prove_growth(other.length)
    with pytest.raises(EvidenceError, match="log_forked"):
        other.accept(signed.open(site.log_owner), path)


def test_a_release_says_how_the_log_grew_since_the_head_that_the_caller_has(site, client):
    watch = LogWatch()
    path, signed = client.prove_growth(0)
    watch.accept(signed.open(site.log_owner), path)
    release = client.release_keys(0, seen=watch.length)
    assert release.log_length == watch.length + 1
    watch.accept(head(site, client), release.extends)
    with pytest.raises(RefusedError, match="log_forked"):
        client.release_keys(0, seen=watch.length + 100)


@pytest.mark.parametrize(("entry", "growth"), [((10**6,), (10**6,)), ((5, 3), (3, 2)), ((0, 10**6), (0, 2**63))])
def test_what_the_log_does_not_have_cannot_be_proven(entry, growth, client):
    for prove, arguments in ((client.prove_entry, entry), (client.prove_growth, growth)):
        with pytest.raises(RefusedError) as error:
            prove(*arguments)
        assert error.value.code == "log_range"
