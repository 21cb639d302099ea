"""The loader of Opacus, which lets a process load only the parts that it uses.

Opacus' packages import all of it: its optimizers, and through them torch.distributed, sympy and more of scipy. That
takes the ledger four seconds, since RDP alone needs no torch. Nothing here trains with them.

So :func:`opacus_module` puts a deferred package in the place of each of `DEFERRED`. Its own ``__init__`` runs, once,
when it is asked for a name that no loaded module has given it. A user's ``opacus.PrivacyEngine`` works as ever.

The base of the accountants imports the optimizers too, for annotations alone. It is loaded without them.
"""

import builtins
import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from threading import RLock
from types import ModuleType, SimpleNamespace
from typing import Any

DEFERRED = ("opacus", "opacus.accountants", "opacus.accountants.analysis")
BASE = "opacus.accountants.accountant"

# Reentrant: the __init__ of one deferred package asks the others for names.
_LOADING = RLock()
_RUNNING: set[str] = set()


def opacus_module(name: str) -> Any:
    """Return the module of that name, such as ``opacus.grad_sample``; what is imported already stays as it is."""
    for each in DEFERRED:
        if each not in sys.modules:
            package = _unloaded(each)
            package.__class__ = _DeferredPackage
            _enter(package)
    if BASE not in sys.modules:
        _load_base()
    return import_module(name)


class _DeferredPackage(ModuleType):
    """A package that has not run its ``__init__`` yet; afterwards it is a module like any other."""

    def __getattr__(self, name: str) -> Any:
        # Python and its libraries look for many such names in every module, without a need for the package.
        if not name.startswith("__") or name in ("__all__", "__version__"):
            with _LOADING:
                if type(self) is _DeferredPackage and self.__name__ not in _RUNNING:
                    self._run()
            if name in self.__dict__:
                return self.__dict__[name]
        raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'", name=name, obj=self)

    def _run(self) -> None:
        assert self.__spec__ is not None, "it was made from one"
        assert self.__spec__.loader is not None, "a package with an __init__ has a loader"
        _RUNNING.add(self.__name__)
        try:
            self.__spec__.loader.exec_module(self)
            self.__class__ = ModuleType  # type: ignore[assignment]  # as importlib.util.LazyLoader does
        finally:
            _RUNNING.discard(self.__name__)


def _load_base() -> None:
    """Load `BASE` with no optimizer in its annotations; no other module sees the difference."""
    annotated = SimpleNamespace(DPOptimizer=Any)

    def imported(name: str, *details: Any) -> Any:
        return annotated if name == "opacus.optimizers" else __import__(name, *details)

    module = _unloaded(BASE)
    # Python takes the import of a module from its builtins.
    vars(module)["__builtins__"] = {**vars(builtins), "__import__": imported}
    assert module.__spec__ is not None, "it was made from one"
    assert module.__spec__.loader is not None, "a module with a source has a loader"
    module.__spec__.loader.exec_module(module)
    _enter(module)


def _unloaded(name: str) -> ModuleType:
    spec = find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)
    return module_from_spec(spec)


def _enter(module: ModuleType) -> None:
    """Let every import find ``module``."""
    sys.modules[module.__name__] = module
    parent, _, last = module.__name__.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
