"""Rates a TDX platform against Intel's TCB info and QE identity, as Intel's "TCB status" rules say.

A level applies if every version of the platform is at least the level's; the first that applies, in the order in which
Intel lists them, gives the status. Platform, TDX module and quoting enclave are rated apart. What is read here was
found to be signed, and to be of the platform's family.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from attestation.evidence import Refusal, refuse
from attestation.quote_format import TdxQuote
from attestation.tdx_platform import TdxPlatform
from attestation.tdx_rules import TdxRules

_COMPONENTS: Final = 16
_REVOKED: Final = "Revoked"


@dataclass(frozen=True, slots=True)
class TdxRating:
    """Statuses in Intel's words.

    Attributes:
        module: empty for a module of major version 0, which has no status of its own.
        advisory_ids: advisories that apply to any of the three, in order.
    """

    platform: str
    module: str
    quoting_enclave: str
    advisory_ids: tuple[str, ...]

    @property
    def statuses(self) -> tuple[str, ...]:
        return tuple(status for status in (self.platform, self.module, self.quoting_enclave) if status)

    @property
    def worst(self) -> str:
        """The first status that is not ``UpToDate``, if there is one."""
        return next((status for status in self.statuses if status != "UpToDate"), "UpToDate")


def rate(
    quote: TdxQuote, platform: TdxPlatform, tcb_info: dict[str, Any], qe_identity: dict[str, Any], rules: TdxRules
) -> TdxRating:
    """The status of platform, module and quoting enclave, each of which ``rules`` accept.

    Raises:
        EvidenceError: ``tcb_unacceptable`` if no level applies, one is revoked, the module is unknown, or an advisory
            applies that the rules reject; ``tcb_status`` for a status that the rules do not list.
    """
    try:
        levels = (
            _platform_level(quote, platform, tcb_info),
            _module_level(quote, tcb_info),
            _enclave_level(quote, qe_identity),
        )
        advisories = sorted({str(name) for level in levels for name in level.get("advisoryIDs") or ()})
    except (LookupError, TypeError, ValueError, AttributeError):
        refuse(Refusal.TCB_UNACCEPTABLE, "the TCB info or the QE identity has no readable levels")
    platform_status, module, enclave = (str(level.get("tcbStatus", "")) for level in levels)
    rating = TdxRating(platform_status, module, enclave, tuple(advisories))
    if _REVOKED in rating.statuses:
        refuse(Refusal.TCB_UNACCEPTABLE, "the platform's TCB level is revoked")
    rejected = sorted(set(advisories) & set(rules.rejected_advisories))
    if rejected:
        refuse(Refusal.TCB_UNACCEPTABLE, f"the advisory {rejected[0]} applies to the platform")
    for status in rating.statuses:
        if status not in rules.tcb_statuses:
            refuse(Refusal.TCB_STATUS, f"the platform's TCB status is {status}")
    return rating


def _platform_level(quote: TdxQuote, platform: TdxPlatform, tcb_info: dict[str, Any]) -> dict[str, Any]:
    # The module's own versions are rated with its identity, from major version 1 on.
    first = 2 if quote.module_version else 0
    for level in tcb_info["tcbLevels"]:
        tcb = level["tcb"]
        needed = [_svns(tcb["sgxtcbcomponents"]), _svns(tcb["tdxtcbcomponents"])[first:]]
        found = [platform.component_svns, quote.tee_tcb_svn[first:]]
        if platform.pce_svn >= tcb["pcesvn"] and all(map(_reaches, found, needed)):
            return _level(level)
    refuse(Refusal.TCB_UNACCEPTABLE, "the platform is below every TCB level")


def _module_level(quote: TdxQuote, tcb_info: dict[str, Any]) -> dict[str, Any]:
    if not quote.module_version:
        _check_module(quote, tcb_info["tdxModule"])
        return {}
    name = f"TDX_{quote.module_version:02X}"
    identity = next((each for each in tcb_info["tdxModuleIdentities"] if str(each["id"]).upper() == name), None)
    if identity is None:
        refuse(Refusal.TCB_UNACCEPTABLE, f"the TDX module {name} is not known")
    _check_module(quote, identity)
    return _first_reached(identity["tcbLevels"], quote.tee_tcb_svn[0], "TDX module")


def _check_module(quote: TdxQuote, identity: dict[str, Any]) -> None:
    mask = bytes.fromhex(identity["attributesMask"])
    attributes = bytes(a & b for a, b in zip(quote.module_attributes, mask, strict=True))
    expected = bytes.fromhex(identity["mrsigner"]), bytes.fromhex(identity["attributes"])
    if (quote.module_signer, attributes) != expected:
        refuse(Refusal.TCB_UNACCEPTABLE, "the TDX module is not the one that its identity describes")


def _enclave_level(quote: TdxQuote, qe_identity: dict[str, Any]) -> dict[str, Any]:
    return _first_reached(qe_identity["tcbLevels"], quote.qe_svn, "quoting enclave")


def _first_reached(levels: Iterable[dict[str, Any]], version: int, what: str) -> dict[str, Any]:
    level = next((each for each in levels if version >= each["tcb"]["isvsvn"]), None)
    if level is None:
        refuse(Refusal.TCB_UNACCEPTABLE, f"the {what} is below every TCB level")
    return _level(level)


def _level(level: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(level["tcbStatus"], str) or not level["tcbStatus"]:
        raise ValueError("a TCB level without a status")
    return level


def _svns(components: list[dict[str, Any]]) -> list[int]:
    svns = [component["svn"] for component in components]
    if len(svns) != _COMPONENTS or not all(type(svn) is int for svn in svns):
        raise ValueError("a TCB level without 16 component versions")
    return svns


def _reaches(found: bytes, needed: list[int]) -> bool:
    return all(map(int.__ge__, found, needed))
