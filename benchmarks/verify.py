"""Measure `raycloak verify` on long runs: ``python benchmarks/verify.py [STEPS ...]``, from the repository's root.

A run of so many planned steps is stopped after its first one. Log and ledger then get what they would have of all
others, signed by their own keys: verification looks at nothing else. Prints a JSON line per run.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

from raycloak.coordinator.proof.verify import verify_parts
from tests.coordinator.proof.proof_cases import lengthened, parts_of
from tests.coordinator.proof.test_runs import long_run


def measured(steps: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as home:
        record = long_run(Path(home), steps)
        contents = lengthened(record, steps)
    begun, on_clock = time.process_time(), time.perf_counter()
    report = verify_parts(parts_of(contents), record.trust)
    return {
        "steps": steps,
        "processor_seconds": round(time.process_time() - begun, 2),
        "seconds": round(time.perf_counter() - on_clock, 2),
        "megabytes": round(sum(map(len, contents.values())) / 1e6, 1),
        "failed": [claim.name for claim in report.failed],
    }


if __name__ == "__main__":
    for each in map(int, sys.argv[1:] or ["1000", "10000"]):
        print(json.dumps(measured(each)), flush=True)
