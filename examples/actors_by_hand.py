"""The step loop on raycloak's actors, written out: what `raycloak.Trainer` does, without recovery and reporting.

Evidence is SIMULATED. Run it with `python examples/actors_by_hand.py`.
"""

import os
import tempfile
import time

import ray

import raycloak as rc

if "RAY_ADDRESS" not in os.environ:  # a cluster of its own gets a token of its own
    os.environ.setdefault("RAY_AUTH_TOKEN", os.urandom(32).hex())
ray.init(address=os.environ.get("RAY_ADDRESS", "local"), include_dashboard=False, log_to_driver=False)
home = tempfile.mkdtemp()
config = rc.RunConfig(
    num_workers=2,
    expected_batch_size=360,
    virtual_workers=8,
    steps=5,
    dp_config=rc.DPConfig(target_epsilon=8.0),
    ring=rc.RingConfig(bits=32),
)


def get(*refs: ray.ObjectRef) -> list:
    return ray.get(list(refs), timeout=120)


# The actors. Workers and aggregator get their evidence from the simulated platform of their node.
vendor = rc.SimulatedVendor.create()
source = rc.NodeEvidenceSource(rc.start_platforms(vendor))
environment = rc.worker_environment(config.cpu_capability, config.threads_per_worker)
orchestrator = rc.actor(rc.EvidenceOrchestrator).remote(home, time.time)
ledger = rc.actor(rc.PrivacyLedger).remote(f"sqlite:///{home}/ledger.sqlite")
aggregator = rc.actor(rc.MaskedAggregator, environment=environment).remote("aggregator", source)
worker = rc.actor(rc.TrainWorker, environment=environment)
workers = {name: worker.remote(name, source, time.time) for name in ("worker-0", "worker-1")}

# Everybody opens the data and builds the model; the manifest fixes what they agree on.
data = rc.DatasetDescriptor(kind="digits", scale=16.0)
setup = rc.WorkerSetup(
    rc.ModelSource("raycloak.coordinator.runs.demo:digits_model"), "cross_entropy", data, home, seed=0, device="cpu"
)
facts = get(*(w.prepare.remote(setup) for w in workers.values()))[0]
plan = rc.make_plan(config, facts.num_examples, sum(tensor.size for tensor in facts.tensors))
answer = get(*(w.compute_known_answer.remote(plan.mechanism) for w in workers.values()))[0]
(run_id, orchestrator_key), ledger_view = get(orchestrator.open_run.remote(None), ledger.view.remote())
computation = rc.build_computation(config, setup.model.name, data, facts, plan.mechanism)
policy = rc.simulated_policy(vendor, rc.code_measurement())
unkeyed = rc.build_manifest(
    computation, run_id=run_id, account="by-hand", known_answer=answer, policy_digest=policy.digest(),
    ledger_key=ledger_view.public_key, orchestrator_key=orchestrator_key,
)  # fmt: skip
manifest = unkeyed.with_keys(get(orchestrator.key_commitments.remote(unkeyed.key_context, 8, 1))[0])
get(ledger.open_account.remote("by-hand", plan.epsilon_cap, plan.delta, accountant=plan.mechanism.accountant))
get(ledger.register_run.remote(run_id, "by-hand", (plan.mechanism,), manifest.digest()))

# Evidence before keys, keys before data.
collateral = vendor.collateral(int(time.time()))
get(orchestrator.begin.remote(rc.run_terms(manifest, policy, collateral), session="by-hand"))
ranges = rc.split_ranges(facts.tensors, 1)
own = get(orchestrator.present.remote(source))[0]
evidence = []
for name, actor, terms in [
    *((name, w, [rc.Admission(manifest, policy, collateral, True, own)]) for name, w in workers.items()),
    ("aggregator", aggregator, [manifest, ranges[0]]),
]:
    challenge = get(orchestrator.challenge.remote(name, "aggregator" if actor is aggregator else "worker"))[0]
    evidence += get(actor.present.remote(challenge, *terms))
    get(orchestrator.admit.remote(evidence[-1]))
hosting = {"worker-0": (0, 1, 2, 3), "worker-1": (4, 5, 6, 7)}
commitments = ()
for name, hosted in hosting.items():
    package = get(orchestrator.release.remote(name, 0, hosted))[0]
    opened = get(workers[name].accept_keys.remote(package))[0]
    get(orchestrator.record_data.remote(opened))
    commitments += rc.DataCommitments.model_validate_json(opened.body).commitments
get(ledger.bind_data.remote(run_id, manifest.digest(), rc.data_root(commitments)))

# The loop: charge and roster, compute and mask, bind, sum and update. Wherever it ends, the run claims
# plan.epsilon_outsiders: its author may have looked at what it released.
parameters, state = ray.put(facts.initial_parameters), aggregator.initial_state.remote()
digest, commits, whole = computation.initial_parameters, (), (rc.VectorRange(0, 0, plan.mechanism.dimension),)
for step in range(config.steps):
    receipt, roster = get(
        ledger.charge.remote(run_id, step, digest, manifest.digest()),
        orchestrator.open_step.remote(step, hosting, ("aggregator",), commits),
    )
    request = rc.StepRequest(roster, tuple(evidence), commitments, whole)
    answers = [w.step.options(num_returns=2).remote(receipt, request, parameters) for w in workers.values()]
    replies = get(*(reply for reply, _ in answers))
    reduce = rc.ReduceRequest(roster, tuple(reply.header for reply in replies), digest, whole)
    vectors = rc.vectors_digest([rc.Header.model_validate_json(reply.header.body) for reply in replies])
    binding = ledger.bind_vectors.remote(run_id, "gradient", step, manifest.digest(), vectors)
    report, parameters, state = aggregator.reduce.options(num_returns=3).remote(
        reduce, binding, parameters, state, *(vector for _, vector in answers)
    )
    digest = rc.parameter_digest(facts.tensors, get(report)[0].tensor_digests)
    entry = rc.Receipt.model_validate_json(receipt.body)
    commits = (rc.StepCommit(step, digest, 1, entry.sequence, entry.head),)
    print(f"SIMULATED step {step}: parameters {digest.hex()[:16]}", flush=True)
get(orchestrator.finish.remote(commits, f"{home}/evidence.jsonl", True))
ray.shutdown()
