"""The collateral service that a policy names: where its verifiers fetch what vendors publish, and about what.

The policy names the platform families too. So nothing that a worker presents decides what is fetched, or from where.
"""

import ipaddress
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from raycloak.attestation.core.messages import Message

INTEL_ROOT_CRL = "/sgx/certification/v4/rootcacrl"  # PCCS's path; Intel's own service has it elsewhere


def _safe(url: str) -> str:
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query or parts.fragment or not parts.hostname:
        raise ValueError("it must be a URL of host and path alone")
    if parts.scheme != "https" and not (parts.scheme == "http" and _is_loopback(parts.hostname)):
        raise ValueError("it must be an https URL; http is for loopback addresses alone")
    return url.rstrip("/")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


Url = Annotated[str, Field(max_length=2000), AfterValidator(_safe)]
Fmspc = Annotated[bytes, Field(min_length=6, max_length=6)]
SnpList = Annotated[str, Field(pattern=r"^(vcek|vlek)/(Milan|Genoa|Turin)$")]


class CollateralService(Message):
    """The addresses of services that speak the vendors' own interfaces.

    Attributes:
        intel: serves TDX collateral, such as a PCCS; version 4 of Intel's interface.
        tdx_families: FMSPC of each platform family that is accepted.
        pck_ca: the CA that issued the certificates of their attestation keys.
        intel_root_crl: serves the list of Intel's root. By default ``intel`` with PCCS's path; Intel's own service
            has it elsewhere.
        amd: serves AMD's revocation lists; AMD's key distribution service or one like it.
        snp_lists: kind of key and generation of each list, such as ``vcek/Genoa``.
    """

    DOMAIN: ClassVar[str] = "raycloak/collateral-service/v1"

    intel: Url | None = None
    tdx_families: Annotated[tuple[Fmspc, ...], Field(max_length=64)] = ()
    pck_ca: Literal["platform", "processor"] = "platform"
    intel_root_crl: Url | None = None
    amd: Url | None = None
    # Two kinds of key in three generations.
    snp_lists: Annotated[tuple[SnpList, ...], Field(max_length=6)] = ()

    @model_validator(mode="after")
    def _says_what(self) -> Self:
        if (self.intel is None) == bool(self.tdx_families) or (self.amd is None) == bool(self.snp_lists):
            raise ValueError("intel goes with tdx_families, and amd with snp_lists")
        if self.intel is None and (self.amd is None or self.intel_root_crl is not None):
            raise ValueError("it names neither intel nor amd, or intel_root_crl without intel")
        return self

    @property
    def root_crl(self) -> str:
        """The address of the revocation list of Intel's root."""
        return self.intel_root_crl or f"{self.intel}{INTEL_ROOT_CRL}"
