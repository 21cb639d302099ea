"""The policy's list of code, as a worker holds itself to it: before it opens data, and before it presents itself.

Guarantee: under a list, no code of the user's runs here that is not in a bundle on it. Pickles and a model's remote
code are in none.
Assumes: whoever prepares this process gives it the policy's list. A process that was given another refuses to present
itself, and so gets no keys; but what that list admitted has run by then.
"""

from pathlib import Path

from raycloak.metrics.errors import EvidenceError, ProtocolError
from raycloak.workers.inputs.augmentation import SHIFT
from raycloak.workers.inputs.code_bundle import CodeBundle
from raycloak.workers.inputs.user_code import only_from, require_module
from raycloak.workers.messages import Admission, WorkerFacts, WorkerSetup

_REMEDY = "Name it as module:function, in a file beside the config file that the policy lists."


def admit_code(setup: WorkerSetup) -> bytes:
    """Hold this process to the list of ``setup``, for good; return the digest of the bundle that its code comes from.

    Guarantee: opens no data and executes none of the code. What is imported later is what was digested here.

    Returns:
        32 bytes; empty without a list, and for a setup without code of its own.

    Raises:
        EvidenceError: ``code_unlisted``, with the code named.
        ConfigError: as `CodeBundle.read`, `CodeBundle.take` and `require_module`.
    """
    if setup.code is None:
        return b""
    model, data = setup.model, (setup.dataset, setup.evaluation)
    if model.function is not None:
        raise EvidenceError(
            "code_unlisted", f"the model {model.name} is a pickle, which no list of code covers", _REMEDY
        )
    if model.hub is not None:
        model.hub.require_data_alone(setup.base)
    named = [model.name] if model.hub is None else []
    named += [setup.loss.name] if not setup.loss.terms else []
    named += [each.function for each in data if each is not None and each.kind == "module" and each.function]
    augment = setup.dataset.augment
    named += [augment.kind] if augment is not None and augment.kind != SHIFT else []
    if not named:
        # An empty one: what a file of examples may name, such as an audit's, is refused as well.
        only_from(CodeBundle(Path(setup.base).resolve(), {}))
        return b""
    bundle = CodeBundle.read(setup.base)
    bundle.require_listed(setup.code, named)
    only_from(bundle)
    for target in named:
        # A later failure would come after data was opened.
        require_module(target, setup.base)
    return bundle.digest


def check_code(admission: Admission, setup: WorkerSetup, facts: WorkerFacts) -> None:
    """Require that the manifest states the bundle of all code of the user's that the run has, and the policy lists it.

    Args:
        setup, facts: of this worker's workload.

    Raises:
        ProtocolError: ``policy_mismatch`` if the list that this process was held to is not the policy's;
            ``manifest_mismatch`` if the manifest states another bundle than this worker's own code comes from.
        EvidenceError: ``code_unlisted``.
    """
    manifest, policy = admission.manifest, admission.policy
    if policy.code != setup.code:
        raise ProtocolError(
            "policy_mismatch", "the list of code that this worker was prepared under is not the policy's"
        )
    if manifest.code != facts.code and (facts.code or policy.code is None):
        raise ProtocolError("manifest_mismatch", "the manifest's code is not what this worker has")
    policy.require_code(manifest.code, "the run")
    # Run by the aggregators and the driver, which take it from the bundle that the manifest states.
    elsewhere = manifest.computation.code_elsewhere
    if policy.code is not None and elsewhere and not manifest.code:
        raise EvidenceError(
            "code_unlisted", f"the manifest does not state where {', '.join(elsewhere)} come from", _REMEDY
        )
