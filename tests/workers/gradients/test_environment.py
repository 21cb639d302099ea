"""Which instruction set a run keeps to: a function of its nodes' CPUs, and then of its manifest."""

import pytest

from raycloak.metrics.errors import ConfigError
from raycloak.workers.gradients.environment import (
    own_flags,
    require_instructions,
    stated_capability,
    widest_shared,
    worker_environment,
)
from raycloak.workers.gradients.numerics import current_numerics

HASWELL = {"sse4_2", "avx2", "fma"}
SKYLAKE = HASWELL | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
ZEN4 = SKYLAKE | {"avx512_vnni", "avx512_bf16", "avx512_vbmi2"}
SAPPHIRE = ZEN4 | {"avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"}
NAMED = {"avx2": HASWELL, "avx512": SKYLAKE, "avx512_bf16": ZEN4, "amx": SAPPHIRE}


@pytest.mark.parametrize(
    ("nodes", "widest"),
    [
        *(([flags], name) for name, flags in NAMED.items()),
        ([SAPPHIRE, SAPPHIRE], "amx"),
        ([SAPPHIRE, ZEN4, SAPPHIRE], "avx512_bf16"),
        ([ZEN4, SKYLAKE], "avx512"),
        ([SAPPHIRE, HASWELL], "avx2"),
        # What a hypervisor hides is not there, whatever comes after it.
        ([SAPPHIRE - {"avx512_bf16"}], "avx512"),
        ([SAPPHIRE - {"avx512vl"}], "avx2"),
        ([SAPPHIRE, {"asimd"}], "default"),
        ([set()], "default"),
    ],
)
def test_the_widest_set_that_all_nodes_share_is_chosen(nodes: list[set[str]], widest: str) -> None:
    assert widest_shared(nodes) == widest


@pytest.mark.parametrize("name", [*NAMED, "default"])
def test_a_class_states_the_set_that_it_was_held_to(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in worker_environment(name).items():
        monkeypatch.setenv(variable, value)
    assert stated_capability(current_numerics("cpu").cpu_capability) == name


def test_a_machine_without_the_instructions_of_the_run_is_refused_by_name() -> None:
    for name, flags in NAMED.items():
        require_instructions(worker_environment(name), flags)
        require_instructions(worker_environment("default"), ())
    for name, flags, missing in (
        ("amx", ZEN4, "amx_bf16"),
        ("avx512_bf16", SKYLAKE, "avx512_bf16"),
        ("avx512", HASWELL, "avx512bw"),
        ("avx2", set[str](), "avx2"),
    ):
        with pytest.raises(ConfigError, match=f"cpu_capability: .*set {name}, .* has no {missing}"):
            require_instructions(worker_environment(name), flags)


def test_this_machine_has_what_is_chosen_for_it() -> None:
    require_instructions(worker_environment(widest_shared([own_flags()])), own_flags())
