"""Reads an index of evidence. Each case names the evidence, the collateral, the time and the policy.

`docs/attestation-index.md` describes the format. Paths are relative to the index. Anchors are raycloak's pinned ones,
and any that a case names as ``simulator_root``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from raycloak.attestation.collateral.encoding import bytes_of, certificate_text, decode, resolve
from raycloak.attestation.core.canonical import canonical_json, read_json
from raycloak.attestation.core.evidence import EvidenceClass, Refusal, refuse
from raycloak.attestation.core.messages import Message
from raycloak.attestation.trust.certificates import read_presented
from raycloak.attestation.trust.roots import PINNED, Anchor, Family, VerifierTerms
from raycloak.metrics.errors import ConfigError
from raycloak.metrics.file_errors import file_error

Rules = TypeVar("Rules", bound=Message)
_ABOUT_ROOTS = ("simulator_root", "allow_simulator")
_FORMAT = 1
_END_OF_TIME = 253_402_300_800  # unix seconds: the year 10000, which certificates cannot express either


class RimFiles(BaseModel):
    """The files with the reference values for a GPU; None where there are none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    driver: str | None = None
    vbios: str | None = None


def _seconds(at: Any) -> int:
    """Return the verifier's clock in unix seconds. A fraction of a second is cut off."""
    instant = datetime.fromisoformat(str(at).upper())
    if instant.tzinfo is None or not 0 <= instant.timestamp() < _END_OF_TIME:
        raise ValueError("not an RFC 3339 time of 1970 to 9999")
    return int(instant.timestamp())


def _hexadecimal(text: Any) -> bytes | None:
    if text is not None and not isinstance(text, str):
        raise ValueError("not a text of hexadecimal digits")
    return None if text is None else bytes_of(text) if text else b""


class CaseFields(BaseModel):
    """One entry of ``cases``. Fields that only describe a case are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    family: str
    evidence: str
    encoding: str
    at: Annotated[int, BeforeValidator(_seconds)]
    collateral: str | None = None
    chain: list[str] | None = None
    rim: RimFiles | None = None
    ocsp: list[str] | None = None
    crl: list[str] | None = None
    nonce: Annotated[bytes | None, BeforeValidator(_hexadecimal)] = None
    report_data: Annotated[bytes | None, BeforeValidator(_hexadecimal)] = None
    expect: Literal["accept", "refuse"] | None = None
    refusal: str | None = None
    policy: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class VectorCase:
    """A case with its policy and the folder its paths are relative to.

    Every method that reads a file or a field raises ConfigError ``index`` if that fails. Evidence whose content is not
    of the stated encoding is different: it is refused as ``evidence_malformed``.

    Attributes:
        flaw: why the entry of the index is not of the format; empty if it is. A flawed case has only its id.
    """

    fields: CaseFields
    policy: Mapping[str, Any]
    folder: Path
    flaw: str = ""

    def without(self, rule: str, value: Any) -> "VectorCase":
        """Return the case with ``value`` taken off its policy's list ``rule``, because no policy can accept it."""
        listed = self.policy.get(rule)
        if not isinstance(listed, list) or value not in listed:
            return self
        return replace(self, policy={**self.policy, rule: [each for each in listed if each != value]})

    def given(self, rule: str, value: Any) -> "VectorCase":
        """Return the case with ``value`` as its policy's ``rule``, unless the policy has that rule."""
        return replace(self, policy={rule: value, **self.policy})

    def evidence(self) -> bytes:
        """Read the presented evidence."""
        content = self.file(self.fields.evidence)
        try:
            return decode(content, self.fields.encoding)
        except LookupError as error:
            raise self._unusable(str(error.args[0])) from None
        except ValueError as error:
            refuse(Refusal.EVIDENCE_MALFORMED, f"the evidence is not {self.fields.encoding}: {error}")

    def chain(self) -> tuple[bytes, ...]:
        """Read the certificates, each entry PEM or DER, in the order of the case."""
        return tuple(self._certificates(entry) for entry in self.fields.chain or ())

    def file(self, name: str) -> bytes:
        """Read a file that the case names."""
        try:
            return (self.folder / name).read_bytes()
        except (OSError, ValueError) as error:
            cause = error.strerror if isinstance(error, OSError) else str(error)
            raise self._unusable(f"cannot read {name}: {cause}") from None

    def base64_file(self, name: str) -> bytes:
        """Decode a base64 file; return the content of any other file as it is."""
        content = self.file(name)
        try:
            return decode(content, "base64")
        except ValueError:
            return content

    def rules(self, kind: type[Rules]) -> Rules:
        """Return the family's acceptance rules: the index's default policy, overridden by the case's."""
        given = {name: value for name, value in self.policy.items() if name not in _ABOUT_ROOTS}
        try:
            return kind.model_validate_json(canonical_json(given))
        except (ValidationError, TypeError, ValueError) as error:
            raise self._unusable(f"its policy cannot be used: {_first_line(error)}") from None

    def terms(self, *families: Family) -> VerifierTerms:
        """Return the terms of the case's clock: the pinned roots of ``families``, and all hardware classes.

        A simulator's root that the policy names is known, and class ``simulated`` is admitted, if the policy says so.
        """
        known = [Anchor(**root._asdict()) for root in PINNED.values() if root.family in families]
        name = self.policy.get("simulator_root")
        if name is not None:
            try:
                roots = read_presented(self.file(str(name)))
                known += [Anchor.simulated(family, root) for family in families for root in roots]
            except ValueError:
                raise self._unusable(f"{name} is not a root that can be a simulator's") from None
        refused = set() if self.policy.get("allow_simulator") is True else {EvidenceClass.SIMULATED}
        return VerifierTerms(known, frozenset(EvidenceClass) - refused, self.fields.at)

    def _certificates(self, entry: str) -> bytes:
        name, found, pointer = entry.partition("#")
        content = self.file(name)
        if not found:
            return content
        try:
            return certificate_text(resolve(read_json(content), pointer))
        except ValueError as error:
            refuse(Refusal.EVIDENCE_MALFORMED, f"the certificates cannot be read: {error}")

    def _unusable(self, message: str) -> ConfigError:
        return ConfigError("index", f"case '{self.fields.id}': {message}.", "See docs/attestation-index.md.")


def read_index(path: Path) -> tuple[VectorCase, ...]:
    """Read the cases of the index at ``path``, in its order.

    An entry that is not of the format becomes a case with a flaw, so the other cases can still be judged.

    Raises:
        ConfigError: ``index`` if it cannot be read, is not of the format, has no case, or names an id twice.
    """
    try:
        document = read_json(path.read_bytes())
    except OSError as error:
        raise file_error("index", "read", path, error) from None
    except ValueError as error:
        raise _no_index(path, _first_line(error)) from None
    fields: dict[str, Any] = document if isinstance(document, dict) else {}
    if (stated := fields.get("format", _FORMAT)) != _FORMAT:
        raise ConfigError(
            "index",
            f"{path} is of format {stated}; this version reads format {_FORMAT}.",
            "Use the version of raycloak that reads it.",
        )
    entries, given = fields.get("cases"), fields.get("default_policy")
    defaults = {} if given is None else given
    if not isinstance(entries, list) or not entries:
        raise _no_index(path, "it has no list 'cases' with a case in it")
    if any(not isinstance(entry, dict) or "id" not in entry for entry in entries):
        raise _no_index(path, "each of its 'cases' must be an object with an 'id'")
    if not isinstance(defaults, dict) or any(not isinstance(rules, dict) for rules in defaults.values()):
        raise _no_index(path, "its 'default_policy' must be an object of rules per family")
    named = [(str(entry["id"]), entry) for entry in entries]
    if len(dict(named)) != len(named):
        raise ConfigError("index", f"{path} names a case twice.", "Give each an id of its own.")
    return tuple(_case(name, entry, defaults, path.parent) for name, entry in named)


def _no_index(path: Path, why: str) -> ConfigError:
    return ConfigError("index", f"{path} is not an index of evidence: {why}.", "See docs/attestation-index.md.")


def _case(name: str, entry: Any, defaults: Mapping[str, Mapping[str, Any]], folder: Path) -> VectorCase:
    try:
        fields = CaseFields.model_validate(entry)
    except ValidationError as error:
        return VectorCase(CaseFields.model_construct(id=name, family=""), {}, folder, flaw=_first_line(error))
    return VectorCase(fields, {**defaults.get(fields.family, {}), **(fields.policy or {})}, folder)


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
