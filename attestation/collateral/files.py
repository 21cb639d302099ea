"""Reads the collateral of a run on real hardware from files that its verifiers obtained from the vendors.

One YAML file names them, by paths relative to itself. Nothing is fetched from the network.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from raycloak.attestation.collateral.encoding import decode
from raycloak.attestation.core.evidence import Collateral, CollateralBundle
from raycloak.attestation.files.yaml_reader import read_yaml
from raycloak.attestation.trust.certificates import crl_der
from raycloak.metrics.errors import ConfigError, EvidenceError
from raycloak.metrics.file_errors import file_error

CODE: Final = "collateral"


_FILES: Final = TypeAdapter(
    dict[Literal["tdx", "snp_vcek_crls", "snp_vlek_crls", "gpu_rims", "gpu_ocsp"], list[str]],
    config=ConfigDict(strict=True),
)
"""The fields of `CollateralBundle`, each a list of files."""


def load_collateral(path: Path) -> CollateralBundle:
    """Load the files that ``path`` names.

    TDX collateral is JSON in dcap-qvl's form; revocation lists are PEM or DER; reference values are XML; OCSP answers
    are DER, bare or in base64.

    Raises:
        ConfigError: ``collateral`` if a file cannot be read or is not of its form.
    """
    try:
        files = _FILES.validate_python(read_yaml(path, CODE))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the document"
        raise ConfigError(CODE, f"{path}: {field}: {first['msg']}.", "See docs/attestation.md.") from None
    readers: dict[str, Callable[[Path], Collateral | bytes]] = {
        "tdx": _tdx,
        "snp_vcek_crls": lambda file: crl_der(_content(file)),
        "snp_vlek_crls": lambda file: crl_der(_content(file)),
        "gpu_rims": _content,
        "gpu_ocsp": _answer,
    }
    named: dict[str, Any] = {
        field: tuple(readers[field](path.parent / name) for name in names) for field, names in files.items()
    }
    return CollateralBundle(**named)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise file_error(CODE, "read", path, error) from None
    except ValueError as error:
        raise ConfigError(CODE, f"{path} is not a path: {error}.", "Check it.") from None


def _tdx(path: Path) -> Collateral:
    try:
        return Collateral.from_json(_content(path).decode())
    except (EvidenceError, UnicodeDecodeError):
        raise ConfigError(
            CODE, f"{path} is not TDX collateral in dcap-qvl's JSON form.", "Fetch it in that form."
        ) from None


def _answer(path: Path) -> bytes:
    content = _content(path)
    try:
        return decode(content, "base64")
    # An answer in DER cannot pass for base64: the bytes of its length are no text.
    except ValueError:
        return content
