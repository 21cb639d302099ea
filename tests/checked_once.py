"""A memory of the checks that a worker and a plan make of a model, and of its code: most of the cost of a small run.

Hundreds of runs in one process train the same few models, each with three workers that would check it anew. All that is
remembered is pure. A model that is refused is refused by the check itself each time: only what passed is remembered.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from torch import nn

from raycloak.coordinator.audit.canaries import CanaryTask
from raycloak.coordinator.planning import dry_run
from raycloak.workers import workload
from raycloak.workers.gradients.model_checks import check_released, check_rows, check_trainable
from raycloak.workers.gradients.row_loss import RowLoss
from raycloak.workers.gradients.row_memory import largest_rows
from raycloak.workers.gradients.spare_rows import spare_rows
from raycloak.workers.inputs import user_code
from raycloak.workers.models.models import content_hash

TENSORS = {"_parameters", "_buffers", "_modules"}
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def _settings(layer: nn.Module, written: dict[int, str]) -> tuple[tuple[str, str], ...]:
    """Return what else than its tensors decides how a layer computes, of the object and of its class.

    Args:
        written: the texts of what was met before, by its address: layers share large configurations.
    """

    def text(name: str, value: object) -> str:
        if "_hooks" in name and isinstance(value, dict):
            # Hooks are kept under numbers that grow with each.
            return ADDRESS.sub("", repr(list(value.values())))
        if id(value) not in written:
            written[id(value)] = ADDRESS.sub("", repr(value))
        return written[id(value)]

    own = {name: value for name, value in vars(layer).items() if name not in TENSORS}
    shared = {name: value for name, value in vars(type(layer)).items() if isinstance(value, int | float | str)}
    return tuple((name, text(name, value)) for name, value in (*own.items(), *shared.items()))


def _kind(module: nn.Module) -> tuple[Any, ...]:
    """Return the layers of a model and the shapes of its tensors; tensors that are one and the same have one number."""
    written: dict[int, str] = {}
    layers = tuple((name, type(layer), _settings(layer, written)) for name, layer in module.named_modules())
    numbers: dict[int, int] = {}
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return layers, tuple(
        (name, numbers.setdefault(id(each), len(numbers)), each.shape, each.dtype, each.requires_grad)
        for name, each in tensors
    )


def _loss(loss_fn: Any) -> tuple[Any, ...]:
    inner = loss_fn.loss_fn if isinstance(loss_fn, RowLoss) else loss_fn
    task = getattr(inner, "__self__", None)
    if isinstance(task, CanaryTask) and ":" not in str(task.loss_function):
        # An audit's, with one of our own losses: neither its coins nor its folder decide what it computes.
        return inner.__code__, str(task.loss_function), task.output_shape, task.raw_norm
    return getattr(inner, "__code__", None) or type(inner), ADDRESS.sub("", repr(inner))


def _key(check: Callable[..., Any], given: inspect.BoundArguments) -> tuple[Any, ...]:
    given.apply_defaults()
    rest = {**given.arguments}
    module = rest.pop("module")
    loss = _loss(rest.pop("loss_fn")) if "loss_fn" in rest else ()
    if "mechanisms" in rest:
        rest["mechanisms"] = [(each.query, each.micro_batch_size) for each in rest["mechanisms"]]
    return check.__name__, _kind(module), loss, repr(rest)


def _values(module: nn.Module) -> tuple[bytes, ...]:
    """Return what the tensors of a model hold."""
    return tuple(content_hash(each) for each in module.state_dict().values())


def once(check: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``check`` with a memory of what passed; of those that run the model as it is, with which values."""
    passed: dict[tuple[Any, ...], Any] = {}
    signature = inspect.signature(check)

    def checking(*arguments: Any, **named: Any) -> Any:
        given = signature.bind(*arguments, **named)
        if "mechanisms" in given.arguments:
            given.arguments["mechanisms"] = tuple(given.arguments["mechanisms"])
        key = _key(check, given)
        if check in (check_released, spare_rows):
            key = (*key, *_values(given.arguments["module"]))
            given.arguments["module"].train()  # as the check leaves it, and rows are asked for
        if key not in passed:
            passed[key] = check(*given.args, **given.kwargs)
        return passed[key]

    return checking


def own_code_once(digest_of: Callable[[str], bytes | None]) -> Callable[[str], bytes | None]:
    """Return ``digest_of`` with a memory of our own packages, whose files no test changes."""
    remembered = cache(digest_of)
    return lambda module: (remembered if module.partition(".")[0] in ("raycloak", "tests") else digest_of)(module)


@contextmanager
def checks_remembered() -> Iterator[None]:
    """Let workers and plans of this process check each kind of model once."""
    with pytest.MonkeyPatch.context() as patch:
        for check in (check_trainable, check_rows, largest_rows):
            remembered = once(check)
            for caller in (workload, dry_run):
                patch.setattr(caller, check.__name__, remembered)
        for check in (check_released, spare_rows):
            patch.setattr(workload, check.__name__, once(check))
        patch.setattr(user_code, "_installed_digest", own_code_once(user_code._installed_digest))
        yield


@pytest.fixture(scope="session", autouse=True)
def checked_once() -> Iterator[None]:
    """Check a model of one kind in one worker alone, for all tests below the folder whose conftest names this."""
    with checks_remembered():
        yield
