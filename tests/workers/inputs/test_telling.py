"""An exception of user code is seen only by who plans; a process of a run tells its type alone."""

import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from raycloak.metrics.errors import RaycloakError
from raycloak.workers.inputs.descriptor import DatasetDescriptor
from raycloak.workers.inputs.user_code import resolve, telling
from raycloak.workers.models.models import ModelSource, build_model

SECRET = "row 17 is 0.5"
SOURCE = f"def rows(): raise ValueError({SECRET!r})\ndef model(): raise ValueError({SECRET!r})\n"
FAILING: list[Callable[[Path], object]] = [
    lambda base: resolve("broken:f", base),
    lambda base: build_model(ModelSource.of("mine:model"), base, 0),
    lambda base: DatasetDescriptor(kind="module", function="mine:rows").open(base),
]


@pytest.mark.parametrize("fails", FAILING)
@pytest.mark.parametrize("planning", [False, True])
def test_guarantee_only_a_plan_keeps_the_exception(fails: Callable[[Path], object], planning: bool, tmp_path: Path):
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text(f"raise ValueError({SECRET!r})")
    with telling() if planning else nullcontext(), pytest.raises(RaycloakError) as refused:
        fails(tmp_path)
    assert "ValueError" in refused.value.message
    assert SECRET not in str(refused.value)
    shown = "".join(traceback.format_exception(refused.value))
    assert (SECRET in shown) == planning
