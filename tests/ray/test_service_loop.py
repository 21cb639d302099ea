"""The examples of loops over a service, as a user runs them: a service of their own on the session's cluster."""

import re
import tarfile

import pytest

from tests.layout import ROOT

DEADLINE_S = 900
STEP = re.compile(r"step (\d+): ε (\d+\.\d+)")


@pytest.mark.parametrize("example", ["service_loop.py", "service_loop_async.py"])
def test_an_example_trains_to_its_end_and_leaves_nothing_behind(example, run_python, ray_cluster):
    script = str(ROOT / "examples" / example)
    done = run_python(script, "2", environment=ray_cluster.environment, deadline_s=DEADLINE_S)
    assert done.code == 0, done.stderr
    steps = [int(number) for number, _ in STEP.findall(done.stdout)]
    digests = re.findall(r"\b[0-9a-f]{64}\b", done.stdout)
    if example == "service_loop.py":
        assert steps == [1, 2]
        assert len(digests) == 1
        with tarfile.open(run_python.folder / "model.tssp") as package:
            assert package.getnames()
    else:
        assert sorted(steps) == [1, 1, 2, 2]
        assert len(set(digests)) == 2
    spent = [float(epsilon) for _, epsilon in STEP.findall(done.stdout)]
    assert 0 < min(spent) <= max(spent) <= 8.0
