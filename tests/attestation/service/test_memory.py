"""The memory of calls: what the process may have, and limits that allow more."""

import pytest

from raycloak.attestation.service.limits import ServiceLimits
from raycloak.attestation.service.memory import process_memory, require_memory
from raycloak.metrics.errors import ConfigError

GIB = 2**30


def machine(root, groups, **files):
    """Write the files in which Linux says how much memory there is: 8 GiB, and control groups."""
    for name, text in {
        "proc/meminfo": f"MemTotal: {8 * 2**20} kB\nMemFree: 1 kB\n",
        "proc/self/cgroup": groups,
        **files,
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("groups", "files", "gib"),
    [
        ("0::/\n", {}, 8),
        ("0::/\n", {f"{V2}/memory.max": "max\n"}, 8),
        ("0::/\n", {f"{V2}/memory.max": f"{2 * GIB}\n"}, 2),
        ("0::/a/b\n", {f"{V2}/a/memory.max": f"{3 * GIB}\n", f"{V2}/a/b/memory.max": "max\n"}, 3),
        ("4:memory:/a\n0::/\n", {f"{V1}/a/memory.limit_in_bytes": f"{GIB}\n"}, 1),
        ("4:memory:/a\n", {f"{V1}/memory.limit_in_bytes": "9223372036854771712\n"}, 8),
        # In a container the path may be one that only the machine sees.
        ("4:memory:/of/the/machine\n", {f"{V1}/memory.limit_in_bytes": f"{4 * GIB}\n"}, 4),
    ],
)
def test_a_process_may_have_what_the_narrowest_of_its_groups_has(tmp_path, groups, files, gib):
    assert process_memory(machine(tmp_path, groups, **files)) == gib * GIB


def test_guarantee_limits_that_allow_more_than_there_is_are_refused(tmp_path):
    root = machine(tmp_path, "0::/\n")
    assert require_memory(4 * GIB, None, root=root) == "calls take at most 4,096 MiB of 4,096 MiB"
    with pytest.raises(ConfigError, match=r"may take 4,097 MiB of memory, and have 4,096 MiB") as refusal:
        require_memory(4 * GIB + 2**20, None, root=root)
    assert refusal.value.code == "memory"
    assert require_memory(5 * GIB, 6 * GIB, root=root) == "calls take at most 5,120 MiB of 6,144 MiB"
    with pytest.raises(ConfigError, match="have 1 MiB"):
        require_memory(2**21, 2**20, root=root)


def test_an_evidence_service_whose_limits_allow_more_than_its_memory_does_not_start(session, tmp_path):
    from tests.attestation.serving import Site

    site = Site(session, tmp_path / "orchestrator", ServiceLimits(memory_bytes=2**20))
    with pytest.raises(ConfigError, match="1 MiB") as refusal, site.served():
        pass
    assert refusal.value.code == "memory"
    site.run.close()


@pytest.mark.parametrize(
    ("limit", "each"), [("connections", 65_536), ("pending_calls", 16_384), ("request_bytes", 1), ("unread_bytes", 2)]
)
def test_every_limit_that_lets_calls_take_memory_counts(limit, each):
    limits = ServiceLimits()
    more = limits.model_copy(update={limit: getattr(limits, limit) + 100})
    assert more.most_bytes - limits.most_bytes == 100 * each
