"""Says in words what a policy accepts, and where it is laxer than a hardware run's defaults or admits nothing.

Guarantee: every field that is laxer than its default is named.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Final

from raycloak.attestation.core.evidence import EvidenceClass
from raycloak.attestation.policy.policy import Policy
from raycloak.attestation.snp.rules import Generation, SnpRules
from raycloak.attestation.tdx.rules import RTMRS, TdxRules

_CLASS_WORDS: Final = {
    EvidenceClass.SIMULATED: "simulated",
    EvidenceClass.INTEL_TDX: "Intel TDX",
    EvidenceClass.AMD_SEV_SNP: "AMD SEV-SNP",
    EvidenceClass.NVIDIA_GPU: "NVIDIA GPU",
}
# A rule that is laxer than these defaults gets a warning.
_DEFAULTS: Final = Policy.model_construct()


def _low_floors(rules: SnpRules) -> set[Generation]:
    """Return the generations whose floor is below the default; where there is no default, a floor of 0 is none."""
    default = _DEFAULTS.sev_snp.min_snp_svn
    return {name for name, floor in rules.min_snp_svn.items() if floor < default.get(name, 1)}


def _exceeds(name: str, policy: Policy) -> bool:
    """Return whether a field is laxer than its default: a switch is turned, a set has more, or a number is larger."""
    found, default = attrgetter(name)(policy), attrgetter(name)(_DEFAULTS)
    if isinstance(default, tuple):
        return not set(found) <= set(default)
    return bool(found != default if isinstance(default, bool) else found > default)


_COMPARED: Final = (
    *("evidence_lifetime_s", "key_quotas.per_member", "key_quotas.per_run"),
    *("tdx.tcb_statuses", "tdx.allow_debug", "tdx.require_sept_ve_disable"),
    *("sev_snp.allowed_generations", "sev_snp.allowed_vmpl", "sev_snp.key_kinds", "sev_snp.require_crl"),
    *("sev_snp.require_alias_check", "sev_snp.allow_debug", "sev_snp.allow_migrate_ma"),
    *("nvidia_gpu.allow_ppcie", "nvidia_gpu.allow_unstated_mode", "nvidia_gpu.require_rim", "nvidia_gpu.require_ocsp"),
)
LAXER: Final[Mapping[str, Callable[[Policy], bool]]] = {
    "accepted_classes": lambda p: p.accepts_simulated,
    "workers_per_platform": lambda p: p.workers_per_platform is None or p.workers_per_platform > 1,
    "sev_snp.min_snp_svn": lambda p: bool(_low_floors(p.sev_snp)),
    **{name: partial(_exceeds, name) for name in _COMPARED},
}
"""Tells of each field of a policy that can be laxer than its default whether it is."""


def laxer_than_default(policy: Policy) -> tuple[str, ...]:
    """Return the names of the fields that are laxer than their defaults, whatever evidence the policy accepts."""
    return tuple(name for name, is_laxer in LAXER.items() if is_laxer(policy))


@dataclass(frozen=True, slots=True)
class Sentence:
    """A statement about one rule of a policy.

    Attributes:
        topic: the rule's subject. warning: whether its author should check that it is meant.
    """

    topic: str
    text: str
    warning: bool = False


def explain(policy: Policy) -> tuple[Sentence, ...]:
    """Explain every rule of ``policy`` that can make a difference, in the order in which evidence is judged."""
    families = {anchor.family for anchor in policy.anchors if anchor.evidence_class in policy.accepted_classes}
    sentences = [*_classes(policy)]
    if "tdx" in families:
        sentences += _tdx(policy.tdx)
    if "sev_snp" in families:
        sentences += _sev_snp(policy)
    sentences += _gpus(policy, "nvidia_gpu" in families)
    sentences += _machines(policy)
    sentences += _code(policy)
    sentences += _boundary(policy)
    sentences += _collateral(policy)
    hours = policy.evidence_lifetime_s / 3600
    quotas = policy.key_quotas
    drawn = f"A key is released at most {quotas.per_member} times to a member in a session, {quotas.per_run} in a run."
    names = laxer_than_default(policy)
    longer, more = "evidence_lifetime_s" in names, any(name.startswith("key_quotas.") for name in names)
    sentences += [
        Sentence("lifetime", f"Evidence must be renewed after {hours:g} hours, or when it expires.", longer),
        Sentence("keys", drawn, more),
    ]
    if names:
        sentences.append(Sentence("defaults", f"Laxer than the defaults: {', '.join(names)}.", warning=True))
    return tuple(sentences)


def _classes(policy: Policy) -> Iterator[Sentence]:
    names = ", ".join(_CLASS_WORDS[each] for each in policy.accepted_classes)
    yield Sentence("classes", f"Evidence of these classes is accepted: {names}. All other is refused.")
    if policy.accepts_simulated:
        text = "SIMULATED evidence is accepted: it proves nothing about the machine, and outputs say SIMULATED."
        yield Sentence("classes", text, warning=True)
    for each in policy.accepted_classes:
        count = sum(anchor.evidence_class is each for anchor in policy.anchors)
        if count:
            yield Sentence("roots", f"{count} root(s) vouch for {_CLASS_WORDS[each]} evidence.")
        else:
            text = f"No root vouches for {_CLASS_WORDS[each]} evidence, so none of it can be accepted."
            yield Sentence("roots", text, warning=True)


def _tdx(rules: TdxRules) -> Iterator[Sentence]:
    yield _measurements("TDX", rules.measurements)
    yield from _registers(rules)
    statuses = ", ".join(rules.tcb_statuses) or "none"
    lax = not set(rules.tcb_statuses) <= set(_DEFAULTS.tdx.tcb_statuses)
    text = f"Platform, TDX module and quoting enclave must each have one of these statuses: {statuses}."
    yield Sentence("TDX", text, warning=lax)
    if rules.rejected_advisories:
        yield Sentence("TDX", f"None of these advisories may apply: {', '.join(rules.rejected_advisories)}.")
    number = rules.min_tcb_evaluation_data_number
    floor = f"{number}" if number else "any that was not undercut before"
    yield Sentence("TDX", f"Lowest evaluation number of collateral: {floor}.")
    yield _debug("TDX", rules.allow_debug)
    if not rules.require_sept_ve_disable:
        text = "Guests are accepted whose host can inject exceptions on page faults (SEPT_VE_DISABLE off)."
        yield Sentence("TDX", text, warning=True)
    properties = (
        (rules.allow_dynamic_platform, "to which packages may be added"),
        (rules.allow_cached_keys, "that cache their root keys"),
        (rules.allow_smt, "whose threads share cores"),
    )
    for allowed, what in properties:
        yield Sentence("TDX", f"Platforms {what} are {'accepted' if allowed else 'refused'}.")


_REGISTER_WORDS: Final = {
    "rtmr0": "how the firmware was set up",
    "rtmr1": "kernel and boot loader",
    "rtmr2": "command line and initial RAM disk",
    "rtmr3": "what the guest adds later, such as containers",
}


def _registers(rules: TdxRules) -> Iterator[Sentence]:
    for name, accepted in rules.registers.items():
        if accepted is not None:
            text = f"{name} must be one of {len(accepted)} known value(s)."
            none = f"No value of {name} is known, so no guest is accepted."
            yield Sentence("TDX", text if accepted else none, warning=not accepted)
            if name in RTMRS and not all(map(any, accepted)):
                yield Sentence("TDX", f"{name} may be zero: nothing was measured into it.", warning=True)
    left_open = [f"{name} ({what})" for name, what in _REGISTER_WORDS.items() if rules.registers[name] is None]
    if left_open:
        text = (
            f"The measurement is of the firmware alone. Not compared, so anything may be in it: {', '.join(left_open)}."
        )
        yield Sentence("TDX", text, warning=True)


def _sev_snp(policy: Policy) -> Iterator[Sentence]:
    rules = policy.sev_snp
    yield _measurements("SEV-SNP", rules.measurements)
    admitted = [name for name in rules.allowed_generations if name in rules.min_snp_svn]
    floors = ", ".join(f"{name} from SNP firmware {rules.min_snp_svn[name]}" for name in admitted)
    low = not _low_floors(rules).isdisjoint(admitted)
    yield Sentence("SEV-SNP", f"Processors: {floors or 'none'}.", warning=low or not admitted)
    # Of what is beside the SNP firmware.
    for name in admitted:
        others = {part: floor for part, floor in rules.floors(name).items() if part != "SNP firmware"}
        if others:
            words = ", ".join(f"{part} from {floor}" for part, floor in others.items())
            yield Sentence("SEV-SNP", f"{name}: {words}.")
        missing = [part for part in ("boot loader", "TEE", "microcode") if part not in others]
        if missing:
            yield Sentence("SEV-SNP", f"{name}: any version of {', '.join(missing)} that AMD certified.")
    if "Milan" in admitted:
        text = "Milan is admitted, although software can read the seed of its endorsement keys (arXiv 2605.12990)."
        yield Sentence("SEV-SNP", text, warning=True)
    yield _debug("SEV-SNP", rules.allow_debug)
    levels = ", ".join(map(str, rules.allowed_vmpl)) or "none"
    lax = not set(rules.allowed_vmpl) <= set(_DEFAULTS.sev_snp.allowed_vmpl)
    yield Sentence("SEV-SNP", f"Privilege levels (VMPL): {levels}.", warning=lax or not rules.allowed_vmpl)
    kinds = rules.key_kinds
    yield Sentence("SEV-SNP", f"Reports are signed by: {', '.join(kinds) or 'nothing'}.", warning=not kinds)
    if "VLEK" in kinds:
        text = "A VLEK is shared by a provider's machines: it proves the provider, and no particular machine."
        yield Sentence("SEV-SNP", text, warning=True)
        masked = "A report with a masked chip id is refused, because workers_per_platform counts by machine."
        if unlimited := policy.workers_per_platform is None:
            masked = (
                "Where the provider masks the chip's id, any number of workers may be on one machine, and revoking a "
                "platform reaches one guest alone."
            )
        yield Sentence("SEV-SNP", masked, warning=unlimited)
    if rules.host_data is None:
        yield Sentence("SEV-SNP", "What the host sets at launch (HOST_DATA) is not compared.")
    else:
        text = f"What the host sets at launch (HOST_DATA) must be one of {len(rules.host_data)} known value(s)."
        yield Sentence("SEV-SNP", text, warning=not rules.host_data)
    if rules.allow_migrate_ma:
        yield Sentence("SEV-SNP", "Guests are accepted whose memory a migration agent can move.", warning=True)
    yield Sentence("SEV-SNP", f"Guests on shared cores are {'accepted' if rules.allow_smt else 'refused'}.")
    yield _required("SEV-SNP", "The firmware's check for memory aliases (BadRAM)", rules.require_alias_check)
    yield _required("SEV-SNP", "A current revocation list of AMD's root", rules.require_crl)


def _gpus(policy: Policy, known: bool) -> Iterator[Sentence]:
    count, rules = policy.gpus_per_worker, policy.nvidia_gpu
    if not count:
        yield Sentence("GPU", "Workers present no GPU; one that does is refused.")
        return
    text = f"Each worker presents exactly {count} GPU(s), each bound to it and enrolled once."
    yield Sentence("GPU", text if known else f"{text} No root vouches for GPUs, so every worker is refused.", not known)
    if known:
        yield _required("GPU", "Signed reference values of driver and VBIOS", rules.require_rim)
        yield _required("GPU", "An OCSP answer for every device certificate", rules.require_ocsp)
        models = "any model" if rules.models is None else ", ".join(rules.models) or "no model"
        yield Sentence("GPU", f"Accepted GPUs: {models}.", warning=rules.models == ())
        if rules.allow_unstated_mode:
            text = "A GPU is accepted whose report does not state that it is in confidential-computing mode."
            yield Sentence("GPU", text, warning=True)
        if rules.allow_ppcie:
            text = "Protected-PCIe mode is accepted: traffic between GPUs is in clear, over switches that are attested."
            yield Sentence("GPU", text, warning=True)


def _machines(policy: Policy) -> Iterator[Sentence]:
    if policy.platforms is None:
        text = "Any machine of the vendor is accepted, also one whose owner can probe its memory bus; list platforms."
        yield Sentence("machines", text, warning=True)
    else:
        yield Sentence("machines", f"{len(policy.platforms)} listed machine(s) are accepted.", not policy.platforms)
    most = policy.workers_per_platform
    limit = "any number of workers" if most is None else f"at most {most} worker(s)"
    yield Sentence("machines", f"One machine may run {limit}.", warning=most is None or most > 1)


def _boundary(policy: Policy) -> Iterator[Sentence]:
    if policy.require_boundary is None:
        yield Sentence("boundary", "A run may have its secrets in processes of Ray's user.")
    else:
        shown = f" Evidence shows them in {', '.join(policy.require_boundary)}." if policy.require_boundary else ""
        yield Sentence("boundary", f"A run has its secrets in vaults of the machines, under users of their own.{shown}")


def _code(policy: Policy) -> Iterator[Sentence]:
    if policy.code is None:
        yield Sentence("code", "A run may have any code of its own: model, data, loss, update rule, schedule, metrics.")
    elif policy.code:
        text = f"Code of a run's own must come from one of {len(policy.code)} known bundle(s) of files."
        yield Sentence("code", f"{text} Pickles and a model's remote code are refused.")
    else:
        yield Sentence("code", "A run may have no code of its own: built-in parts and Hugging Face models alone.")


def _collateral(policy: Policy) -> Iterator[Sentence]:
    service = policy.collateral_service
    if service is None:
        yield Sentence("collateral", "Verifiers fetch nothing from a network; they use the files they are given.")
        return
    if service.intel is not None:
        families = ", ".join(fmspc.hex() for fmspc in service.tdx_families)
        text = f"Verifiers fetch TDX collateral of the families {families} from {service.intel}, before it ends."
        yield Sentence("collateral", text)
        where = f"That of Intel's root comes from {service.root_crl}."
        yield Sentence("collateral", f"PCK revocation lists come from the {service.pck_ca} CA. {where}")
    if service.amd is not None:
        yield Sentence("collateral", f"They fetch AMD's lists {', '.join(service.snp_lists)} from {service.amd}.")
        rules = policy.sev_snp
        wanted = [f"{kind.lower()}/{name}" for kind in rules.key_kinds for name in rules.allowed_generations]
        missing = [each for each in wanted if each not in service.snp_lists]
        if rules.require_crl and missing:
            text = f"Of {', '.join(missing)} no list is fetched: without a file of it, such reports are refused."
            yield Sentence("collateral", text, warning=True)
    if "http://" in f"{service.intel} {service.amd} {service.intel_root_crl}":
        yield Sentence("collateral", "A service is asked without TLS, on a loopback address.", warning=True)


def _measurements(topic: str, measurements: tuple[bytes, ...] | None) -> Sentence:
    known = [value for value in measurements or () if any(value)]
    if not known:
        return Sentence(topic, "No measurement is known, so no guest is accepted.", warning=True)
    return Sentence(topic, f"The guest's measurement must be one of {len(known)} known value(s).")


def _debug(topic: str, allowed: bool) -> Sentence:
    if allowed:
        return Sentence(topic, "Debug guests are accepted, whose memory the host can read.", warning=True)
    return Sentence(topic, "Debug guests are refused.")


def _required(topic: str, what: str, required: bool) -> Sentence:
    if required:
        return Sentence(topic, f"{what} is required.")
    return Sentence(topic, f"{what} may be missing.", warning=True)
