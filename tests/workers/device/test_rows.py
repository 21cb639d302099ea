"""`workers/device/rows.py` in Triton's interpreter, and which binaries a GPU would take."""

from importlib.util import find_spec

import pytest
import torch

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton (the extra gpu)")
INTERPRETED = "tests.workers.device.interpreted_rows"


def test_no_row_is_added_with_more_than_was_measured(interpreted):
    interpreted("bounds")


def test_rows_are_those_of_a_cpu_within_the_rounding_of_their_type(interpreted):
    interpreted("numbers")


def test_guarantee_what_is_added_of_a_row_has_the_norm_that_was_measured_or_the_total_is_nan(interpreted):
    interpreted("other_rows")


def test_wrong_kernels_are_not_reproducible(interpreted):
    interpreted("wrong_kernels")


def test_a_clipped_sum_is_a_cpus_within_rounding_and_names_its_devices(interpreted):
    interpreted("clipped_sums")


def test_runs_on_two_and_on_three_workers_have_one_digest(interpreted):
    interpreted("whole")


# --- binaries


def binaries(monkeypatch, kernel, **sides):
    """Return the binaries with which a GPU would measure and add these rows, by what Triton specialises."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    from raycloak.workers.device import rows

    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))
    seen = []

    class Recorded:
        def __getitem__(self, grid):
            return lambda *given, **options: seen.append(repr(bind(*given, **options)[1]))

    monkeypatch.setattr(rows, "row_kernel", Recorded())
    part = rows.FusedRows(**sides)
    part.squares()
    # A tensor's part of a total is aligned to 8 bytes alone.
    for start in (0, 1):
        part.add(torch.zeros(part._count + 1, dtype=torch.float64)[1:], torch.zeros(9, dtype=torch.float64)[start:])
    assert len(seen) == 3
    return set(seen)


def sides_of(rows, tokens, height, width, tied):
    left, right = torch.zeros(rows, 1, tokens, height), torch.zeros(rows, 1, tokens, width)
    lookups = (torch.zeros(rows, tokens, dtype=torch.int64), right[:, 0]) if tied else None
    return {"left": left, "right": right, "lookups": lookups}


@pytest.mark.parametrize("tied", [False, True])
def test_one_binary_measures_and_adds_and_public_rows_are_formed_by_it(monkeypatch, tied):
    import triton

    from raycloak.workers.device.row_kernel import row_kernel
    from raycloak.workers.device.rows import _golden_extent

    for height, width in ((1, 48), (50, 1), (64, 768), (130, 67), (16, 50)):
        chosen = [
            binaries(monkeypatch, row_kernel, **sides_of(count, tokens, *extents, tied))
            for count, tokens, extents in (
                (1, 1, (height, width)),
                (16, 32, (height, width)),
                (3, 21, (_golden_extent(height), _golden_extent(width))),
            )
        ]
        assert len(set.union(*chosen)) == 1, (height, width)
    anyhow = triton.jit(row_kernel.fn)
    assert len(binaries(monkeypatch, anyhow, **sides_of(16, 32, 50, 67, tied))) > 1
