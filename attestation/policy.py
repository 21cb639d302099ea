"""What evidence a run accepts, fixed before the run and named by its digest in the manifest.

Guarantee: the class of evidence follows from the root that verified it. A root counts as Intel's only if its public
key is the pinned one, so no policy file can declare a simulator's root to be hardware.
"""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from attestation.canonical import canonical_json
from attestation.certificates import key_id, read_root
from attestation.evidence import MEASUREMENT_BYTES, EvidenceClass
from attestation.messages import Message
from attestation.roots import INTEL_SGX_ROOT_DER, INTEL_SGX_ROOT_KEY_ID
from metrics.errors import ConfigError

TcbStatus = Literal[
    "UpToDate", "SWHardeningNeeded", "ConfigurationNeeded", "ConfigurationAndSWHardeningNeeded", "OutOfDate",
    "OutOfDateConfigurationNeeded",
]  # fmt: skip
Measurement = Annotated[bytes, Field(min_length=MEASUREMENT_BYTES, max_length=MEASUREMENT_BYTES)]
PlatformId = Annotated[bytes, Field(min_length=16, max_length=16)]

DEFAULT_LIFETIME_S = 24 * 3600


class Anchor(Message):
    """A root that the verifier trusts to vouch for one class of evidence.

    Attributes:
        root_der: the self-signed root certificate.
    """

    DOMAIN: ClassVar[str] = "raycloak/anchor/v1"

    evidence_class: EvidenceClass
    root_der: bytes

    @property
    def root_key_id(self) -> bytes:
        """SHA-384 of the root's uncompressed public point, 48 bytes."""
        return key_id(read_root(self.root_der))

    @model_validator(mode="after")
    def _class_follows_root(self) -> Self:
        is_intel = self.root_key_id == INTEL_SGX_ROOT_KEY_ID
        if is_intel != (self.evidence_class is EvidenceClass.INTEL_TDX):
            raise ValueError(f"this root does not vouch for {self.evidence_class} evidence")
        return self


INTEL_TDX_ANCHOR = Anchor(evidence_class=EvidenceClass.INTEL_TDX, root_der=INTEL_SGX_ROOT_DER)


class Policy(Message):
    """Acceptance rules for evidence.

    Attributes:
        accepted_classes: classes that are admitted.
        anchors: known roots. One of a class that is not accepted is recognised and refused by its name.
        measurements: accepted ``mr_td`` values, 48 bytes each. An empty set admits nothing.
        tcb_statuses: accepted status of platform, TDX module and quoting enclave.
        rejected_advisories: vendor advisories that must not apply to the platform.
        minimum_evaluation_number: lowest accepted ``tcbEvaluationDataNumber`` of collateral.
        evidence_lifetime_s: seconds after which appraised evidence must be renewed.
        allow_dynamic_platform, allow_cached_keys, allow_smt: platform properties that are tolerated; real
            multi-socket hosts have all three.
        platforms: admitted platform instance ids, 16 bytes each; None admits any platform.
    """

    DOMAIN: ClassVar[str] = "raycloak/policy/v1"

    accepted_classes: Annotated[tuple[EvidenceClass, ...], Field(min_length=1)]
    anchors: Annotated[tuple[Anchor, ...], Field(min_length=1)]
    measurements: tuple[Measurement, ...]
    tcb_statuses: tuple[TcbStatus, ...] = ("UpToDate",)
    rejected_advisories: tuple[str, ...] = ()
    minimum_evaluation_number: Annotated[int, Field(ge=0, lt=2**32)] = 0
    evidence_lifetime_s: Annotated[int, Field(gt=0, le=366 * 24 * 3600)] = DEFAULT_LIFETIME_S
    allow_dynamic_platform: bool = True
    allow_cached_keys: bool = True
    allow_smt: bool = True
    platforms: tuple[PlatformId, ...] | None = None

    @field_validator("anchors")
    @classmethod
    def _no_root_twice(cls, anchors: tuple[Anchor, ...]) -> tuple[Anchor, ...]:
        if len({anchor.root_key_id for anchor in anchors}) != len(anchors):
            raise ValueError("a root is listed twice")
        return anchors

    @property
    def accepts_simulated(self) -> bool:
        """Whether a run under this policy may rest on simulated evidence; its outputs then say SIMULATED."""
        return EvidenceClass.SIMULATED in self.accepted_classes

    def anchor_for(self, root_key_id: bytes) -> Anchor | None:
        """The anchor with that root key, if it is known."""
        return next((anchor for anchor in self.anchors if anchor.root_key_id == root_key_id), None)


class HasRoot(Protocol):
    """Whoever owns a root, such as `attestation.simulator.SimulatedVendor`."""

    @property
    def root_der(self) -> bytes: ...


def simulated_policy(vendor: HasRoot, measurement: bytes) -> Policy:
    """The policy of a run on this machine: ``vendor``'s simulated platforms running the code ``measurement``."""
    anchor = Anchor(evidence_class=EvidenceClass.SIMULATED, root_der=vendor.root_der)
    return Policy(accepted_classes=(EvidenceClass.SIMULATED,), anchors=(anchor,), measurements=(measurement,))


def load_policy(path: Path) -> Policy:
    """Read a policy from YAML. Byte strings are hexadecimal; the anchor ``intel_tdx`` may be given by name alone.

    Raises:
        ConfigError: ``policy`` if the file cannot be read, has unknown, missing or wrong fields, or a key twice.
    """
    try:
        raw = yaml.load(path.read_text(), Loader=_UniqueKeyLoader)  # noqa: S506 - a SafeLoader
        return _policy_from(raw)
    except OSError as error:
        raise ConfigError("policy", f"cannot read {path}: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError("policy", f"{path} is not YAML: {str(error).splitlines()[0]}.") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the document"
        raise ConfigError("policy", f"{path}: {field}: {first['msg']}.") from None
    except (TypeError, ValueError) as error:
        raise ConfigError("policy", f"{path} holds a value that no policy field takes: {error}.") from None


def _policy_from(raw: Any) -> Policy:
    if isinstance(raw, dict) and isinstance(raw.get("anchors"), list):
        raw["anchors"] = [_named_anchor(anchor) for anchor in raw["anchors"]]
    return Policy.model_validate_json(canonical_json(raw))


def _named_anchor(anchor: Any) -> Any:
    if anchor == EvidenceClass.INTEL_TDX.value:
        return INTEL_TDX_ANCHOR.model_dump(mode="json")
    return anchor


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a mapping that names a key twice, where YAML would let the last one win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if len(set(map(repr, keys))) != len(keys):
            raise yaml.constructor.ConstructorError(None, None, "a key is given twice", node.start_mark)
        return super().construct_mapping(node, deep)
