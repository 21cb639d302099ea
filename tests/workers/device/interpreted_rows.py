"""The functions that `test_rows.py` runs by name, in processes with ``TRITON_INTERPRET=1``."""

import math
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.gpu.interpreter import mend_interpreter
from raycloak.metrics.errors import ProtocolError
from raycloak.workers.device import rows as module
from raycloak.workers.device.rows import FusedRows
from raycloak.workers.gradients import parts
from raycloak.workers.gradients.clipping import GradientEngine
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.parts import Products, RowsPart, rows_part
from raycloak.workers.gradients.row_memory import mechanism_of_rows
from raycloak.workers.models.losses import BUILT_IN_LOSSES
from raycloak.workers.models.models import read_flat
from tests.protocol import RENYI, whole_run
from tests.workers.device.row_models import Tied
from tests.workers.gradients.test_sensitivity import KINDS, ROWS, sides, tied_lookups


@contextmanager
def fused(every=False):
    """Let the engine form rows as on a GPU; every product, where it would else hold small rows or measure by Gram."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(parts, "_has_kernels", lambda device: True))
        if every:
            stack.enter_context(patch.object(parts, "_SMALL", 0))
            stack.enter_context(patch.object(parts, "_gram_pays", lambda *given: False))
        yield


def forms(kind, seed):
    """Products of one and of two uses, with lookups, in groups, in bfloat16 and in another order of their elements."""
    left, right = sides(kind, seed)
    turned = left.transpose(2, 3).contiguous().transpose(2, 3)
    yield [Products(left, right)], []
    yield [Products(turned, right), Products(0.5 * left, right)], tied_lookups(right, seed)
    yield [Products(torch.cat([left, -left], 1), torch.cat([right, right], 1))], []
    yield [Products(left, right.bfloat16())], tied_lookups(right, seed)
    yield [Products(left, torch.cat([right, 0.5 * right], 3), (3, 2))], []


def bounds():
    """No row is added with more than was measured, whatever it holds; one of weight zero adds exactly zero."""
    with fused():
        for kind in KINDS:
            for products, lookups in forms(kind, 1):
                part = rows_part(products, lookups)
                assert isinstance(part, FusedRows)
                squares = part.squares()
                finite = squares.isfinite()
                assert finite.all() or kind in ("huge", "near overflow", "infinite", "not a number"), kind
                # The engine's weights bring a row within its target, which is far from overflow.
                weights = torch.where(finite, 2.0**-100, 0.0).double()
                for row in range(ROWS):
                    alone = torch.zeros_like(weights)
                    alone[row] = weights[row]
                    total = torch.zeros(part._groups * part._height * part._width, dtype=torch.float64)
                    part.add(alone, total)
                    added = sum((Fraction(float(each)) ** 2 for each in total), Fraction(0))
                    root = Fraction(math.nextafter(math.sqrt(squares[row]), math.inf)) if finite[row] else Fraction(0)
                    assert added <= (root * Fraction(2) ** -100 * (1 + Fraction(2) ** -19)) ** 2, (kind, row)


def numbers():
    """The rows are those of a CPU within the rounding of their type, and one alone has the bits that it has in all."""
    for number, (products, lookups) in enumerate(forms("ordinary", 2)):
        right = RowsPart(products, lookups)
        with fused():
            part = rows_part(products, lookups)
        error = 2.0**-6 if number == 3 else 2.0**-20
        torch.testing.assert_close(part.rows(), right.rows(), rtol=error, atol=8 * error)
        torch.testing.assert_close(part.squares(), right.squares(), rtol=4 * error, atol=0)
        for row, alone in enumerate(part.rows()):
            weights, total = torch.zeros(ROWS, dtype=torch.float64), torch.zeros(len(alone), dtype=torch.float64)
            weights[row] = 1.0
            part.add(weights, total)
            assert torch.equal(total.float(), alone)


def other_rows():
    """Numbers that changed after they were measured leave no sum, but in a row of weight zero."""
    left, right = sides("ordinary", 3)
    for side in ("_left", "_right"):
        part = FusedRows(left.clone(), right.clone())
        part.squares()
        getattr(part, side)[1, 0, 2, 0] += 2.0**-20
        for weight, is_left in ((1.0, False), (2.0**-60, False), (0.0, True)):
            weights, total = torch.ones(ROWS, dtype=torch.float64), torch.zeros(12, dtype=torch.float64)
            weights[1] = weight
            part.add(weights, total)
            assert bool(total.isfinite().all()) == is_left


RIGHT = module.row_kernel


class Wrong:
    """A kernel with other arguments than it is given.

    Args:
        change: of the arguments by name.
    """

    def __init__(self, change):
        self.change = change

    def __getitem__(self, grid):
        def launch(*args, **options):
            given = dict(zip(RIGHT.arg_names, args, strict=False)) | options
            return RIGHT[grid](**given | self.change(given))

        return launch


WRONG = {
    "a token is left out": lambda given: {"tokens": given["tokens"] - 1},
    "rows are added twice as large": lambda given: {"weights_ptr": 2 * given["weights_ptr"]} if given["adds"] else {},
    "measured in ten bits": lambda given: {
        name: (given[name].view(torch.int32) & -8192).view(torch.float32) for name in ("left_ptr", "right_ptr")
    },
    "measured and added differ": lambda given: {"left_ptr": 1.5 * given["left_ptr"]} if given["adds"] else {},
    "what was measured is forgotten": lambda given: {"squares_ptr": squares_now(given)} if given["adds"] else {},
}


def squares_now(given):
    """Return the squares of the rows as they are now, so that the comparison of a kernel finds nothing."""
    now = torch.empty_like(given["squares_ptr"])
    RIGHT[(now.shape[1],)](**given | {"adds": 0, "squares_ptr": now, "total_ptr": now})
    return now


def wrong_kernels():
    """Each is found by public rows, before the first row of anybody."""
    left, right = sides("ordinary", 3)
    lookups = tied_lookups(right, 3)[0]
    tied = lookups.ids, lookups.values
    found = {}
    for name, change in WRONG.items():
        module._prove.cache_clear()
        with patch.object(module, "row_kernel", Wrong(change)):
            try:
                FusedRows.proven(left, right, tied)
            except ProtocolError as error:
                found[name] = error.code
    assert found == dict.fromkeys(WRONG, "not_reproducible")
    FusedRows.proven(left, right, tied)


def text_engine(rows):
    """Return an engine of a language model with a tied table, and its parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = Tied()
    parameters = read_flat(model)
    loss = BUILT_IN_LOSSES["next_token_cross_entropy"]
    return GradientEngine(model, loss, mechanism_of_rows(parameters.size, rows)), parameters


def clipped_sums():
    """A whole clipped sum is a CPU's within rounding, and the same bytes again, also where no device is the default."""
    engine, parameters = text_engine(rows=4)
    ids = np.random.default_rng(1).integers(70, size=(4, 4))
    ids[0] = ids[0, 0]
    batch = ids, ids, np.arange(4) < 3
    made, proven = [], FusedRows.proven
    usual = torch.cat(engine.clipped_sum(parameters, [batch])).numpy()
    with fused(every=True), patch.object(FusedRows, "proven", lambda *given: made.append(proven(*given)) or made[-1]):
        found = torch.cat(engine.clipped_sum(parameters, [batch])).numpy()
        assert [part._tied for part in made] == [True, False]
        module._prove.cache_clear()
        with torch.device("meta"):
            assert np.array_equal(found, torch.cat(engine.clipped_sum(parameters, [batch])).numpy())
    assert np.linalg.norm(found - usual) <= 1e-5 * np.linalg.norm(usual)


def whole():
    """Runs with two workers and with three give the same digests."""
    fields = {"virtual_workers": 3, "steps": 1, "dp_config": RENYI, "model": "tests.workers.device.row_models:tokens"}
    digests, made, proven = [], [], FusedRows.proven
    counted = patch.object(FusedRows, "proven", lambda *given: made.append(None) or proven(*given))
    with tempfile.TemporaryDirectory() as folder, fused(every=True), counted:
        for workers in (2, 3):
            run = whole_run(Path(folder) / str(workers), num_workers=workers, **fields)
            run.train()
            digests.append(run.digests)
            assert made, "its rows were formed by the kernel"
            made.clear()
    assert digests[0] == digests[1]
    assert len(digests[0]) == 1


if __name__ == "__main__":
    pin_numerics()
    mend_interpreter()
    globals()[sys.argv[1]]()
