"""The placement of virtual workers on workers: spread evenly, moved as little as possible. Pure functions."""

from collections.abc import Mapping, Sequence

Hosting = Mapping[str, tuple[int, ...]]


def rehost(current: Hosting, workers: Sequence[str], virtual_workers: int) -> dict[str, tuple[int, ...]]:
    """Spread ``virtual_workers`` over ``workers``, starting from ``current``.

    Guarantee: every virtual worker has exactly one host, loads differ by at most one, and no placement with these
    loads keeps more virtual workers where they are. The result depends on nothing but the arguments.

    Args:
        current: hosting so far; hosts that are not in ``workers`` lose theirs. May be empty.
        workers: member ids, at least one.
    """
    assert workers, "a run has at least one worker"
    small, larger = divmod(virtual_workers, len(workers))
    # The workers that already host most keep the larger shares, so the fewest virtual workers move.
    by_load = sorted(workers, key=lambda worker: (-len(current.get(worker, ())), worker))
    share = {worker: small + (index < larger) for index, worker in enumerate(by_load)}
    kept = {worker: sorted(current.get(worker, ()))[: share[worker]] for worker in workers}
    placed = {v for held in kept.values() for v in held}
    homeless = iter(v for v in range(virtual_workers) if v not in placed)
    return {
        worker: tuple(sorted(held + [next(homeless) for _ in range(share[worker] - len(held))]))
        for worker, held in sorted(kept.items())
    }


def moved(before: Hosting, after: Hosting) -> dict[str, tuple[int, ...]]:
    """Return the virtual workers that each worker of ``after`` hosts and did not host in ``before``."""
    return {
        worker: tuple(v for v in hosted if v not in before.get(worker, ()))
        for worker, hosted in after.items()
        if set(hosted) - set(before.get(worker, ()))
    }
