"""The facts of a run that are not in its verdict: data, sampling, environment, commands, and what limits all of it."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from raycloak.coordinator.record.run_reader import RunData
from raycloak.coordinator.record.verdict import Verdict
from raycloak.coordinator.report.members import Evidence
from raycloak.coordinator.report.planned import budget_of
from raycloak.coordinator.report.words import participation_rows
from raycloak.workers.terms.mechanism import Mechanism

Rows = list[tuple[str, str]]

_KEPT = {"sealed": "sealed", "sent": "encrypted for attested workers"}


def data_rows(run: RunData) -> Rows:
    """Return what the examples are, by configuration and manifest; never what they contain."""
    dataset, evaluation = run.config.dataset, run.config.evaluation
    if dataset is None:
        rows = [("examples", "given in memory: the driver has seen them")]
    else:
        place = " · ".join(part for part in (dataset.path, dataset.function) if part)
        built_in = "none: a client sends it" if dataset.kind == "sent" else f"built in, split {dataset.split}"
        rows = [("kind", dataset.kind), ("place", place or built_in)]
        rows.append(("declared", "public: needs no protection" if dataset.public else "private"))
        rows.append(("kept", _KEPT.get(dataset.kind, "in the clear, on the workers' machines")))
    if run.manifest is not None:
        mechanism = run.manifest.computation.mechanism
        most = "examples, N" if mechanism.max_participations is None else "examples of a step, at most"
        rows.append((most, f"{mechanism.num_examples:,}, a public number"))
        rows.append(("identity", run.manifest.computation.dataset.hex()))
        fingerprint = run.manifest.dataset_fingerprint.hex()
        rows.append(("fingerprint", fingerprint or "none: without a key, nothing ties the account to these very bytes"))
    if evaluation is not None:
        place = evaluation.dataset.path or f"built in, split {evaluation.dataset.split}"
        rows.append(("evaluated on", f"{evaluation.dataset.kind}, {place}; every {evaluation.every} steps, public"))
    return rows


def sampling_rows(run: RunData) -> Rows:
    """Return how examples are drawn, clipped and noised; empty without a manifest."""
    if run.manifest is None:
        return []
    mechanism = run.manifest.computation.mechanism
    rows = [
        ("unit of privacy", "one example, replaced by a contribution of zero"),
        *_use_rows(mechanism),
        (
            "computed rows",
            f"{mechanism.virtual_workers} virtual workers x {mechanism.micro_batches} x {mechanism.micro_batch_size}",
        ),
    ]
    if not mechanism.private:
        return [*rows, ("privacy", "NOT PRIVATE: nothing was clipped or noised")]
    cap, delta = budget_of(run)
    return [
        *rows,
        ("clipping norm", f"{mechanism.max_grad_norm:g}, of one example's gradient"),
        ("noise multiplier", f"{mechanism.noise_multiplier:.6g}"),
        ("noise counted on", f"{mechanism.honest_share:.0%} of the virtual workers"),
        ("δ", _delta_text(mechanism, delta)),
        ("cap of the account", "none given" if cap is None else f"ε {cap:g}"),
        ("accountant", mechanism.accountant),
        *(
            (f"measured: {each.query.replace('_', ' ')}", _releases(each.mechanism))
            for each in run.manifest.computation.measurements
        ),
    ]


def _use_rows(mechanism: Mechanism) -> Rows:
    """Return how examples come to take part in a step."""
    batch = f"{mechanism.expected_batch_size:g} examples expected"
    if mechanism.max_participations is not None:
        return [*participation_rows(mechanism.max_participations, mechanism.steps), ("batch", batch)]
    passes = mechanism.steps * mechanism.sample_rate
    return [
        ("sampling", f"each example by itself with probability {mechanism.sample_rate:.6g} in each step (Poisson)"),
        ("batch", f"{batch}; {passes:.3g} passes in {mechanism.steps} steps"),
    ]


def _delta_text(mechanism: Mechanism, delta: float) -> str:
    if mechanism.max_participations is not None:
        most = mechanism.steps * mechanism.num_examples
        return f"{delta:g}; one over the most examples that all steps could have is {1 / most:.2g}"
    return f"{delta:g}; one over the number of examples is {1 / mechanism.num_examples:.2g}"


def _releases(mechanism: Mechanism) -> str:
    times = "once" if mechanism.steps == 1 else f"{mechanism.steps} times"
    return f"{times} at noise multiplier {mechanism.noise_multiplier:.6g}"


def model_rows(run: RunData) -> Rows:
    """Return what was trained, with what, and where it was computed; empty without a manifest."""
    if run.manifest is None:
        return []
    computation = run.manifest.computation
    numerics, optimizer = computation.numerics, computation.optimizer
    rows = [
        ("model", f"{computation.model}, {computation.mechanism.dimension:,} trained parameters"),
        ("model code", computation.model_code.hex()),
        ("loss", computation.loss.text),
        ("update rule", f"{optimizer.name}, learning rate {optimizer.learning_rate:g}, schedule {optimizer.schedule}"),
        *(("parameter group", group.text) for group in optimizer.groups),
        ("ring", f"{computation.mechanism.ring_bits} bits, grid step 2^{computation.mechanism.gamma_log2}"),
        ("software", f"Python {numerics.python}, torch {numerics.torch}, NumPy {numerics.numpy}"),
        ("gradient engine", numerics.engine),
        ("device", f"{numerics.device}, {numerics.threads} threads, {numerics.precision}"),
        ("CPU kernels", numerics.cpu_capability),
        ("deterministic", "yes" if numerics.deterministic else "NOT EXACT: a repeat may differ in last bits"),
    ]
    if numerics.model_libraries:
        rows.append(("model libraries", numerics.model_libraries))
    rows.append(("manifest", run.manifest.digest().hex()))
    return rows


def commands_of(run: RunData, evidence: Evidence) -> list[tuple[str, str, str]]:
    """Return what a reader can do with the run directory: purpose, command, and on what it depends."""
    folder = shlex.quote(str(run.path))
    made = []
    if not evidence.problem and run.record.status != "running":
        proof = f"raycloak trust {folder} --output trust.json\nraycloak verify {folder} --trust trust.json"
        needs = "Needs the site's ledger and packages. An auditor gets one file instead: raycloak bundle."
        made.append(("Prove every claim again", proof, needs))
    steps = len(run.steps)
    if steps:
        made.append(_replay(run, evidence, f"raycloak replay {folder} --steps 0:{min(steps, 10)}"))
    base = Path(run.record.driver_base)
    copied = shlex.quote(str(base / f"{run.config.name}-again.yaml"))
    if run.config.model is None or run.config.dataset is None:
        made.append(("Train it again", "", "The run was given its model or data in Python: start that program again."))
        return [*made, *_export(run, folder)]
    made.append(
        (
            "Train it again",
            f"cp {folder}/config.yaml {copied}\nraycloak run {copied}",
            "This is a new run with a new secret: other noise, other bytes, and a charge of its own to the account.",
        )
    )
    if run.record.status in ("running", "stopped", "failed") and steps:
        command = f"cp {folder}/config.yaml {copied}\nraycloak run {copied} --resume"
        made.append(("Resume it", command, "From its newest sealed package, with the secret that the site still has."))
    return [*made, *_export(run, folder)]


def _export(run: RunData, folder: str) -> list[tuple[str, str, str]]:
    if not (run.path / "parameters.safetensors").exists():
        return []
    command = f"raycloak export {folder} --format safetensors --out model.safetensors"
    return [("Take its model", command, "Any use of it is covered by what the verdict claims.")]


def _replay(run: RunData, evidence: Evidence, command: str) -> tuple[str, str, str]:
    purpose = "Compute steps again"
    if run.record.secret_file is not None:
        return purpose, command, f"Needs the run secret in {run.record.secret_file} and the data. It charges nothing."
    if evidence.secret_destroyed:
        needed = "its secret was destroyed at its end. secret_retention: keep would have kept it."
        return purpose, "", f"raycloak replay cannot do this for the run: {needed}"
    return purpose, command, "Needs the run secret, which the site has until the run is complete, and the data."


def is_old(run: RunData, verdict: Verdict) -> bool:
    """Return whether the run has gone on since its verdict: it was resumed, and has not ended since."""
    return run.record.status == "running" or verdict.steps < len(run.steps)


def limits_of(run: RunData, verdict: Verdict | None) -> tuple[str, ...]:
    """Return what this run does not show, in plain words; the first weigh most."""
    return tuple(_limits(run, verdict))


def _limits(run: RunData, verdict: Verdict | None) -> Iterator[str]:
    if verdict is None:
        yield "There is no verdict, so nothing is claimed. What was charged to the account stays charged."
    elif not verdict.private:
        yield (
            "NOT PRIVATE. Differential privacy was off: the model may reveal any example it was trained on. The "
            "data was declared public, and only that makes this acceptable."
        )
    else:
        yield from _privacy_limits(verdict)
    if verdict is not None:
        yield from _site_limits(verdict)
    if run.config.dataset is None or run.config.dataset.kind not in _KEPT:
        yield "The data was not sealed: the administrator of a worker's machine could read the examples."
    yield (
        "Accuracy, times and byte counts are the site's own records. Nobody signs them. The evidence log and the "
        "ledger are signed."
    )
    yield (
        "This page repeats the run directory and is itself no evidence. Whoever can edit the directory can edit the "
        "page; raycloak verify derives every claim again from signed bytes."
    )


def _privacy_limits(verdict: Verdict) -> Iterator[str]:
    yield (
        "ε bounds what can be learnt about one example. A person with several examples in the data is protected "
        "less: with k of them, by k times ε at most, and a larger δ."
    )
    yield (
        "ε is no probability of harm. It bounds by which factor, e^ε, one example can change the odds of anything "
        "that is learnt from the model; what is true of the whole population can be learnt all the same."
    )
    if verdict.max_participations is not None:
        yield (
            f"ε counts on it that no example took part in more than {verdict.max_participations} steps. That is the "
            "word of the training service, which counted ids: the ledger sees none, and cannot confirm it."
        )
        yield (
            "A client chose the examples of each step. ε speaks of that choice only as far as it followed from "
            "what was released and from public facts, and from nothing that an example holds."
        )
    if verdict.privacy_epsilon_one_worker is None:
        yield (
            "There is no bound if a worker's machine helps the aggregator: one machine held the keys of "
            f"{verdict.keys_on_one_machine} of {verdict.virtual_workers} virtual workers."
        )
    yield (
        f"Other runs on the same data add to it. All runs of the account together claim its cap"
        f"{'' if verdict.epsilon_cap is None else f', ε {verdict.epsilon_cap:g}'}; accounts of the same data add up."
    )
    if not verdict.rollback_witness:
        yield "Nobody outside watched the ledger, so an older copy that was put back would not be noticed."


def _site_limits(verdict: Verdict) -> Iterator[str]:
    if verdict.simulated:
        yield (
            "SIMULATED evidence: no hardware vouches for any member. Masks, noise and keys are as good as the word of "
            "those who run the machines."
        )
    if verdict.masked_bytes == 0:
        yield "Nothing was masked: the aggregator saw the update of each worker."
    if not verdict.exact:
        yield "NOT EXACT: operations without a deterministic kernel ran, so a repeat may give other last bits."
    if verdict.colocated:
        yield "Orchestrator and aggregator shared a machine, so one broken machine would have had both roles."
    if verdict.data_check is None:
        yield "No check of this data is on record: nobody looked for missing values, wrong labels or duplicates."
    if verdict.evaluation_data is None:
        yield "The model was not measured on a public split."
