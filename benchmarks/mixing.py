"""The time of a vector with correlated noise over one without: ``python -m benchmarks.mixing``.

Both are of ``examples/mnist/cnn-correlated.yaml``, on images of noise, in one thread and in turn. Times are medians;
the floor is 1. Each has the capacity of its own plan, so the rows that it computes are shown. A vector with correlated
noise encodes and hashes its own sum, mixes it with those of earlier steps, and hashes the mix. The aggregator's part,
one multiplication and subtraction a parameter and band, is measured beside it.
"""

import json
import time
from pathlib import Path
from statistics import median

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results" / "mixing.json"
EXAMPLES, ROUNDS, WARMED = 60_000, 15, 2


def main() -> None:
    """Measure, write the result and print it."""
    from raycloak.attestation.core.keys import Secret
    from raycloak.attestation.keys.release import VirtualWorkerKeys
    from raycloak.coordinator.aggregation.aggregator import decoded_average
    from raycloak.coordinator.config.run import load_config
    from raycloak.coordinator.planning.model_source import model_source
    from raycloak.coordinator.planning.plan import plan_mechanism
    from raycloak.workers.gradients.clipping import GradientEngine
    from raycloak.workers.gradients.numerics import pin_numerics
    from raycloak.workers.inputs import rows
    from raycloak.workers.models.models import build_model, loss_function, parameter_count, read_flat
    from raycloak.workers.terms.loss import LossSpec
    from raycloak.workers.virtual_worker import OwnSum, VirtualWorkerComputer

    pin_numerics(True, 1)
    folder = ROOT / "examples" / "mnist"
    overrides = {"mixed": [], "independent": ["dp_config.noise.correlated=off"]}
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (EXAMPLES, 28, 28)).astype(np.uint8)
    dataset = rows.gathered([(images, rng.integers(0, 10, EXAMPLES))], "noise", 255.0)
    keys = VirtualWorkerKeys(stream=Secret(bytes(32)), data=Secret(bytes(32)))
    computers, mechanisms = {}, {}
    for name, changes in overrides.items():
        # Versions of rows cost both the same.
        config = load_config(folder / "cnn-correlated.yaml", [*changes, "dataset.augment=null"])
        module = build_model(model_source(config.model), folder, 0)
        mechanisms[name] = mechanism = plan_mechanism(config, EXAMPLES, parameter_count(module))
        engine = GradientEngine(module, loss_function(LossSpec.of("cross_entropy"), folder)[0], mechanism)
        computers[name] = VirtualWorkerComputer(mechanism, engine, dataset, dataset.batch(np.zeros(1, np.int64)))
        computers[name].slice(0)
    bands, parameters = mechanisms["mixed"].bands, read_flat(module)
    past: list[OwnSum] = []
    seconds: dict[str, list[float]] = {"mixed": [], "independent": [], "solved": [], "decoded": []}
    for step in range(bands + ROUNDS):
        vectors = {}
        # In turn, so that what else runs on the machine slows both.
        for name in ("mixed", "independent") if step >= bands - 1 else ("mixed",):
            began = time.perf_counter()
            given = past if name == "mixed" else ()
            vectors[name] = computers[name].vector(0, keys, step, bytes(32), bytes(32), parameters, past=given)
            if step >= bands + WARMED:
                seconds[name].append(time.perf_counter() - began)
        own = vectors["mixed"].own
        assert own is not None, "a vector with correlated noise has a sum of its own"
        past = [own, *past][: bands - 1]
    words, terms = vectors["mixed"].values, mechanisms["mixed"]
    earlier = [(each / 2**16, np.ones(terms.dimension, np.float32)) for each in terms.coefficients[1:]]
    decoding = terms.ring_bits, terms.gamma_log2, terms.expected_batch_size, np.float32
    for _ in range(ROUNDS):
        for name, parts in (("solved", earlier), ("decoded", [])):
            began = time.perf_counter()
            decoded_average([words], *decoding, earlier=parts)
            seconds[name].append(time.perf_counter() - began)
    found = {name: median(each) for name, each in seconds.items()}
    result = {
        "command": "python -m benchmarks.mixing",
        "bands": bands,
        "dimension": terms.dimension,
        "rows": {name: each.micro_batch_rows * each.micro_batches for name, each in mechanisms.items()},
        "median_seconds": found,
        "vector_over_independent": found["mixed"] / found["independent"],
        "step_over_independent": (found["mixed"] + found["solved"]) / (found["independent"] + found["decoded"]),
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
