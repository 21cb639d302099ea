"""The bench of the training service, with few of everything: the real processes, and figures that fit together."""

import json

CODE = """
from raycloak_lab.bench import service
service._ROUNDS, service._ALONE, service._EACH, service._IDLE_CLIENTS = 2, 6, 4, 3
service._PENDING, service._STEPS = 40, 12
from raycloak_lab.cli.app import main
main(["bench", "service", "--clients", "2", "--json"])
"""


def test_operations_actors_and_the_floor_are_measured_in_one_run(run_python_in, tmp_path):
    """The code is a file with a guard: the bench's processes import it anew."""
    lines = "\n".join(f"    {line}" for line in CODE.strip().splitlines())
    (tmp_path / "few.py").write_text(f'if __name__ == "__main__":\n{lines}\n')
    done = run_python_in(tmp_path)("few.py", deadline_s=300)
    assert done.code == 0, done.stderr
    assert "Traceback" not in done.stderr
    figures = json.loads(done.stdout)
    assert figures["clients"] == 2
    assert figures["operations"] == 2 * (6 + 2 * 4)
    assert figures["pending"] == 40
    assert figures["overhead_ms"] == figures["operation_ms"] - figures["actor_ms"]
    assert figures["over_floor_ms"] == figures["operation_ms"] - figures["floor_ms"]
    assert 0 < figures["operation_p50_ms"] <= figures["operation_p99_ms"]
    assert figures["pipeline_speedup"] == figures["await_each_s"] / figures["pipeline_s"]
    # Two of its commits are what the floor measures, and its processes work for it.
    assert figures["service_cpu_ms"] > 0
    assert figures["client_cpu_ms"] > 0
    assert list((tmp_path).glob("raycloak-bench-*")) == []
