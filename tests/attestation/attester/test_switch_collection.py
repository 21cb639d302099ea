"""Collecting switch evidence through NSCQ, from a library compiled here that has the functions of the genuine one."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pynvml
import pytest

from raycloak.attestation.attester.gpu_collection import GpuCollector
from raycloak.attestation.attester.switch_collection import SwitchCollector
from raycloak.attestation.core.evidence import SwitchEvidence
from raycloak.attestation.core.messages import parse
from raycloak.metrics.errors import EvidenceError
from tests.attestation.attester.test_gpu_collection import FakeNvml
from tests.simulators.gpu import SimulatedGpuVendor
from tests.simulators.switch import SimulatedSwitch, SwitchedMachine, switched_machine

NONCE = bytes(range(32))

# Each switch is two files, NUMBER.report and NUMBER.chain, in the folder of the library. A switch answers with its own
# report only where the nonce is the one that NONCE has.
SOURCE = r"""
#include <stdint.h>
#include <stdio.h>
#include <string.h>
typedef struct { int8_t rc; void *session; } session_result_t;
typedef struct { uint8_t bytes[16]; } uuid_t;
typedef struct { uint32_t report_size; uint8_t report[0x2000]; } report_t;
typedef struct { uint8_t cert_chain[0x1400]; uint32_t cert_chain_size; } chain_t;
typedef void (*report_fn)(const uuid_t *, int8_t, report_t, void *);
typedef void (*chain_fn)(const uuid_t *, int8_t, chain_t, void *);
static uint8_t nonce[32];
static int open_sessions;
session_result_t nscq_session_create(uint32_t flags) {
  session_result_t made = { flags == 1 ? CREATE_CODE : -128, &open_sessions };
  open_sessions++;
  return made;
}
void nscq_session_destroy(void *session) { open_sessions--; }
int opened(void) { return open_sessions; }
int8_t nscq_session_set_input(void *session, uint32_t flags, void *input, uint32_t size) {
  if (size != 32) return -5;
  memcpy(nonce, input, 32);
  return 0;
}
static uint32_t load(int number, const char *kind, uint8_t *to, uint32_t room) {
  char name[4096];
  snprintf(name, sizeof name, FOLDER "/%d.%s", number, kind);
  FILE *file = fopen(name, "rb");
  if (!file) return 0;
  uint32_t size = fread(to, 1, room, file);
  fclose(file);
  return size;
}
int8_t nscq_session_path_observe(void *session, const char *path, void *callback, void *data, uint32_t flags) {
  for (int number = COUNT - 1; number >= 0; number--) {
    uuid_t uuid = {{ (uint8_t)number }};
    if (!strcmp(path, "/{nvswitch}/config/attestation_report")) {
      static report_t found;
      found.report_size = load(number, "report", found.report, sizeof found.report);
      int known = !memcmp(found.report + 4, nonce, 32);
      ((report_fn)callback)(&uuid, known ? ANSWER_CODE : -5, found, data);
    } else if (!strcmp(path, "/{nvswitch}/config/certificate")) {
      static chain_t found;
      found.cert_chain_size = load(number, "chain", found.cert_chain, sizeof found.cert_chain);
      ((chain_fn)callback)(&uuid, 0, found, data);
    } else return -1;
  }
  return 0;
}
"""


@pytest.fixture(scope="module")
def machine() -> SwitchedMachine:
    return switched_machine(SimulatedGpuVendor.create())


def library(
    folder: Path,
    switches: tuple[SimulatedSwitch, ...],
    create_code: int = 0,
    answer_code: int = 0,
    backwards: bool = False,
) -> str:
    """Compile a library with these switches, and return its path."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    for number, switch in enumerate(switches):
        (folder / f"{number}.report").write_bytes(switch.report(NONCE))
        chain = switch.credentials[::-1] if backwards else switch.credentials
        (folder / f"{number}.chain").write_text("".join(each.pem for each in chain))
    (folder / "nscq.c").write_text(SOURCE)
    terms = {
        "COUNT": str(len(switches)),
        "FOLDER": f'"{folder}"',
        "CREATE_CODE": str(create_code),
        "ANSWER_CODE": str(answer_code),
    }
    defined = [f"-D{name}={value}" for name, value in terms.items()]
    built = folder / "libnscq.so"
    command = [compiler, "-shared", "-fPIC", *defined, "-o", str(built), str(folder / "nscq.c")]
    subprocess.run(command, check=True, timeout=120)
    return str(built)


@pytest.mark.parametrize("backwards", [False, True])
def test_each_switch_gives_its_report_and_chain(machine: SwitchedMachine, tmp_path: Path, backwards: bool) -> None:
    found = SwitchCollector(library(tmp_path, machine.switches, backwards=backwards)).collect(NONCE)
    presented = [parse(SwitchEvidence, each) for each in found]
    assert [each.chain for each in presented] == [switch.chain for switch in machine.switches]
    assert [each.report for each in presented] == [(tmp_path / f"{i}.report").read_bytes() for i in (0, 1)]


def test_what_gives_no_evidence_is_named(machine: SwitchedMachine, tmp_path: Path) -> None:
    def message(collector: SwitchCollector, nonce: bytes = NONCE) -> str:
        with pytest.raises(EvidenceError) as refused:
            collector.collect(nonce)
        assert refused.value.code == "switch_missing"
        assert "libnvidia-nscq" in refused.value.remedy
        return refused.value.message

    assert "cannot be loaded" in message(SwitchCollector(str(tmp_path / "none.so")))
    for i, (switches, codes, expected) in enumerate(
        (
            ((), {}, "0 switches"),
            (machine.switches, {"create_code": -6}, "no session: code -6"),
            (machine.switches, {"answer_code": -8}, "attestation_report: code -8"),
        )
    ):
        folder = tmp_path / str(i)
        folder.mkdir()
        assert expected in message(SwitchCollector(library(folder, switches, **codes)))
    whole = tmp_path / "whole"
    whole.mkdir()
    built = library(whole, machine.switches)
    assert "attestation_report: code -5" in message(SwitchCollector(built), bytes(32))
    (whole / "1.chain").write_text("")
    assert "no chain of 5 certificates" in message(SwitchCollector(built))
    with pytest.raises(ValueError, match="32 bytes"):
        SwitchCollector(built).collect(b"short")


class Protected(FakeNvml):
    """A machine in protected-PCIe mode."""

    def nvmlSystemGetConfComputeSettings(self, settings: Any) -> int:  # noqa: N802 - the binding's name
        found = settings._obj
        found.environment, found.multiGpuMode = 2, pynvml.NVML_CC_SYSTEM_MULTIGPU_PROTECTED_PCIE
        return pynvml.NVML_SUCCESS


def test_switches_are_asked_in_protected_pcie_mode_alone(machine: SwitchedMachine, tmp_path: Path) -> None:
    switches = SwitchCollector(library(tmp_path, machine.switches))
    assert len(GpuCollector(nvml=Protected(machine.gpus), switches=switches).collect_switches(NONCE)) == 2
    absent = SwitchCollector(str(tmp_path / "none.so"))
    assert GpuCollector(nvml=FakeNvml(machine.gpus), switches=absent).collect_switches(NONCE) == ()
    with pytest.raises(EvidenceError, match="switch_missing"):
        GpuCollector(nvml=Protected(machine.gpus), switches=absent).collect_switches(NONCE)
