"""Rates a TDX platform against Intel's TCB info and QE identity, by Intel's "TCB status" rules.

A level applies if every version of the platform is at least the level's. The first that applies, in Intel's order,
gives the status. Platform, TDX module and quoting enclave are rated separately. The documents read here are already
known to be signed, and to be of the platform's family.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from raycloak.attestation.core.evidence import Refusal, refuse
from raycloak.attestation.tdx.platform import TdxPlatform
from raycloak.attestation.tdx.quote import TdReport, TdxQuote
from raycloak.attestation.tdx.rules import TdxRules

# Intel publishes a version for each; with fewer, a comparison would pass by itself.
_COMPONENTS: Final = 16
_REVOKED: Final = "Revoked"
_PATCHED: Final = ("UpToDate", "SWHardeningNeeded", "ConfigurationNeeded", "ConfigurationAndSWHardeningNeeded")


@dataclass(frozen=True, slots=True)
class TdxRating:
    """The statuses of one quote, in Intel's words.

    Attributes:
        platform, module: the statuses at the guest's launch. ``module`` is empty for one of major version 0, which has
            no status of its own. One status that advises a relaunch stands for both.
        advisory_ids: advisories that apply to any part, in order.
        current: statuses of platform and module now, if a quote tells them apart (TD 1.5).
    """

    platform: str
    module: str
    quoting_enclave: str
    advisory_ids: tuple[str, ...]
    current: tuple[str, ...] = ()

    @property
    def statuses(self) -> tuple[str, ...]:
        every = (self.platform, self.module, *self.current, self.quoting_enclave)
        return tuple(dict.fromkeys(status for status in every if status))

    @property
    def worst(self) -> str:
        """The first status that is not ``UpToDate``, if any."""
        return next((status for status in self.statuses if status != "UpToDate"), "UpToDate")


def rate(
    quote: TdxQuote, platform: TdxPlatform, tcb_info: dict[str, Any], qe_identity: dict[str, Any], rules: TdxRules
) -> TdxRating:
    """Rate platform, module and quoting enclave, and require that ``rules`` accept each status.

    Raises:
        EvidenceError: ``tcb_unacceptable`` if no level applies, one is revoked, the module is unknown, or an advisory
            applies that the rules reject. ``tcb_status`` for a status that the rules do not list.
    """
    try:
        launch, *later = (
            (_platform_level(svn, platform, tcb_info), _module_level(svn, quote.report, tcb_info))
            for svn in (quote.report.tee_tcb_svn, quote.report.tee_tcb_svn2)
            if svn
        )
        current = later[0] if later else ()
        enclave = _first_reached(qe_identity["tcbLevels"], quote.qe_svn, "quoting enclave")
        levels = (*launch, *current, enclave)
        advisories = sorted({str(name) for level in levels for name in level.get("advisoryIDs") or ()})
    except (LookupError, TypeError, ValueError, AttributeError):
        refuse(Refusal.TCB_UNACCEPTABLE, "the TCB info or the QE identity has no readable levels")
    now = tuple(str(level.get("tcbStatus", "")) for level in current)
    at_launch = [str(level.get("tcbStatus", "")) for level in launch]
    if advised := _relaunch(_converged(at_launch), _converged(now)):
        # Software that has to be hardened is a fault of the current state, which the relaunch advice does not name.
        at_launch, now = [advised, ""], tuple(status for status in now if "SWHardening" in status)
    rating = TdxRating(at_launch[0], at_launch[1], str(enclave["tcbStatus"]), tuple(advisories), now)
    if _REVOKED in rating.statuses:
        refuse(Refusal.TCB_UNACCEPTABLE, "the platform's TCB level is revoked")
    rejected = sorted(set(advisories) & set(rules.rejected_advisories))
    if rejected:
        refuse(Refusal.TCB_UNACCEPTABLE, f"the advisory {rejected[0]} applies to the platform")
    for status in rating.statuses:
        if status not in rules.tcb_statuses:
            refuse(Refusal.TCB_STATUS, f"the platform's TCB status is {status}")
    return rating


def _platform_level(svn: bytes, platform: TdxPlatform, tcb_info: dict[str, Any]) -> dict[str, Any]:
    """Return the platform's level with the 16 versions ``svn``, of which the module's minor and major come first."""
    # The module's own versions are rated with its identity, from major version 1 on.
    first = 2 if svn[1] else 0
    for level in tcb_info["tcbLevels"]:
        tcb = level["tcb"]
        needed = (*_svns(tcb["sgxtcbcomponents"]), *_svns(tcb["tdxtcbcomponents"])[first:])
        found = (*platform.component_svns, *svn[first:])
        if platform.pce_svn >= tcb["pcesvn"] and all(map(int.__ge__, found, needed)):
            return _level(level)
    refuse(Refusal.TCB_UNACCEPTABLE, "the platform is below every TCB level")


def _module_level(svn: bytes, report: TdReport, tcb_info: dict[str, Any]) -> dict[str, Any]:
    if not svn[1]:
        _check_module(report, tcb_info["tdxModule"])
        return {}
    name = f"TDX_{svn[1]:02X}"
    identity = next((each for each in tcb_info["tdxModuleIdentities"] if str(each["id"]).upper() == name), None)
    if identity is None:
        refuse(Refusal.TCB_UNACCEPTABLE, f"the TDX module {name} is not known")
    _check_module(report, identity)
    return _first_reached(identity["tcbLevels"], svn[0], "TDX module")


def _converged(statuses: Sequence[str]) -> str:
    """Merge the statuses of platform and module as Intel's library does; empty for none."""
    platform, module = (*statuses, "", "")[:2]
    if module == "OutOfDate" and platform in ("UpToDate", "SWHardeningNeeded"):
        return "OutOfDate"
    if module == "OutOfDate" and platform in ("ConfigurationNeeded", "ConfigurationAndSWHardeningNeeded"):
        return "OutOfDateConfigurationNeeded"
    return _REVOKED if module == _REVOKED else platform


def _relaunch(launch: str, current: str) -> str:
    """Return the status of a guest that is out of date only since its launch; empty for any other guest."""
    if not launch.startswith("OutOfDate") or current not in _PATCHED:
        return ""
    configuration = "Configuration" in launch + current
    return "TDRelaunchAdvisedConfigurationNeeded" if configuration else "TDRelaunchAdvised"


def _check_module(report: TdReport, identity: dict[str, Any]) -> None:
    mask = bytes.fromhex(identity["attributesMask"])
    attributes = bytes(a & b for a, b in zip(report.module_attributes, mask, strict=True))
    expected = bytes.fromhex(identity["mrsigner"]), bytes.fromhex(identity["attributes"])
    if (report.module_signer, attributes) != expected:
        refuse(Refusal.TCB_UNACCEPTABLE, "the TDX module is not the one that its identity describes")


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
