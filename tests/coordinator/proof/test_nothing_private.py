"""Nothing private is in a bundle: it is searched for what only workers and the run's secret know."""

import io

import numpy as np

from raycloak.attestation.core.keys import Secret
from raycloak.coordinator.planning.references import descriptor
from raycloak.coordinator.proof.bundle import put_bundle
from tests.coordinator.proof.proof_cases import proved, train
from tests.protocol import SECRET, examples
from tests.ray import leaks


def test_nothing_that_a_worker_or_the_runs_secret_knows_is_in_a_bundle(tmp_path):
    """Keys, sampled ids, batch sizes, losses, sums and examples; that the search finds them is seen by planting."""
    workers = []
    data = {
        "data": examples(400),
        "expected_batch_size": 200,
        "micro_batch_size": 16,
        "measurements": {},
        "steps": 2,
        "num_workers": 2,
    }
    run = train(tmp_path, tamper=lambda worker, member_id: workers.append(worker), **data)
    record = proved(tmp_path, run)
    digests = [bytes.fromhex(digest) for digest in run.digests]
    dataset = descriptor(run.config.dataset).open(tmp_path / "data")
    begins = [record.manifest.computation.initial_parameters, *digests[:-1]]
    needles = dict(leaks.run_needles(record.manifest, dataset, Secret(bytes.fromhex(SECRET)), begins))
    for worker in workers:
        needles |= leaks.worker_needles(worker)
    rows, _ = dataset.batch(np.arange(400))
    needles |= {f"example {i}": np.asarray(row).tobytes() for i, row in enumerate(rows)}
    sink = io.BytesIO()
    put_bundle(sink, record.manifest.run_id, record.parts, record.site.signer, 1)
    places = [*record.contents.items(), ("bundle", sink.getvalue())]
    assert len(needles) > 500
    assert leaks.leaks(needles, places) == []
    planted = sink.getvalue()[:1000] + next(iter(needles.values())) + sink.getvalue()[1000:]
    assert leaks.leaks(needles, [("planted", planted)])
