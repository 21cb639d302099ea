"""Computes the launch measurement of an SEV-SNP guest from the inputs of its launch."""

from dataclasses import dataclass
from pathlib import Path

from raycloak.metrics.errors import ConfigError
from raycloak.metrics.file_errors import file_error

GUEST_FEATURES = 0x1
"""The ``guest_features`` of a guest that has SEV-SNP and no other feature switched on."""


@dataclass(frozen=True, slots=True)
class SnpLaunch:
    """The inputs of a guest's launch.

    Attributes:
        ovmf: firmware image. kernel, initrd, append: the parts of a direct boot, which the firmware measures; None
            and empty if the guest boots from a disk.
        vcpus: number of virtual processors, each of which is measured. vcpu_type: QEMU's name of their model.
        guest_features: the VMSA's SEV_FEATURES word.
    """

    ovmf: Path
    vcpus: int
    vcpu_type: str
    kernel: Path | None = None
    initrd: Path | None = None
    append: str = ""
    guest_features: int = GUEST_FEATURES


def snp_measurement(launch: SnpLaunch) -> bytes:
    """Compute the launch digest, 48 bytes, for ``sev_snp.measurements`` of a policy.

    Raises:
        ConfigError: ``measure_tool`` if the library that computes it is not installed. ``measure`` if the launch
            cannot be measured, for example because a file is missing.
    """
    try:
        # Imported here, because only the extra 'measure' installs it.
        from sevsnpmeasure import guest
        from sevsnpmeasure.sev_mode import SevMode
        from sevsnpmeasure.vcpu_types import CPU_SIGS
    except ImportError:
        raise ConfigError(
            "measure_tool", "sev-snp-measure is not installed.", "Install raycloak with the extra 'measure'."
        ) from None
    if launch.vcpu_type not in CPU_SIGS:
        raise ConfigError(
            "measure", f"'{launch.vcpu_type}' is not a known processor model.", "Name one, such as EPYC-v4."
        )
    files = [str(path) if path else "" for path in (launch.kernel, launch.initrd)]
    try:
        digest = guest.calc_launch_digest(
            SevMode.SEV_SNP,
            launch.vcpus,
            CPU_SIGS[launch.vcpu_type],
            str(launch.ovmf),
            *files,
            launch.append,
            launch.guest_features,
        )
    except OSError as error:
        raise file_error("measure", "read", error.filename, error) from None
    # The library does not check its input; a bad image ends in any of these.
    except (RuntimeError, ValueError, LookupError, AssertionError) as error:
        raise ConfigError(
            "measure", f"{launch.ovmf} cannot be measured: {error}.", "Check that it is the guest's OVMF file."
        ) from None
    return bytes(digest)
