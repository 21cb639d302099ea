"""The first members' processes are started before anything else, and once."""

from raycloak.coordinator.membership.crew import start_crew
from tests.protocol import on, whole_run


def test_a_crew_that_was_started_ahead_is_the_runs_and_a_replacement_has_a_name_of_its_own(undisturbed, tmp_path):
    run = whole_run(tmp_path, disturb=on("step", "worker-1", "dies"), num_workers=3)
    backend, started = run.session.backend, []
    start = backend.start_worker
    backend.start_worker = lambda name: started.append(name) or start(name)
    crew = start_crew(backend, run.config)
    assert started == list(crew.workers) == ["worker-0", "worker-1", "worker-2"]
    run.change(crew=crew)
    run.train()
    assert started == ["worker-0", "worker-1", "worker-2", "worker-3"]
    assert run.digests == undisturbed
