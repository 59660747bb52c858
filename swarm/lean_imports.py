"""Loads only what a peer needs: a third of its import time went into modules of which it never uses anything.

torchvision, Lightning and torch's optimizers import the front end of ``torch.compile`` (``torch._dynamo``, with sympy
and parts of Inductor) only to see whether something is compiled; a peer compiles nothing. Torchmetrics and Hivemind
import parts of scipy for metrics and for load balancing that a peer does not use.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

_COMPILER = ("torch._dynamo", "torch._dynamo.utils")
_LATE = {"scipy.optimize": (), "scipy.signal": ("hamming",)}
"""Modules, with names that Torchmetrics puts there if they are missing, for the sake of an audio metric."""


def load_lean() -> None:
    """Put stand-ins in place of these modules; call it before torch is imported, later it does nothing.

    Nothing is lost: who asks a stand-in for more than the few answers it has gets the real module.
    """
    if any(name in sys.modules for name in ("torch", *_COMPILER)):
        return
    for name, attributes in _LATE.items():
        if name not in sys.modules:
            sys.modules[name] = _Late(name)
            vars(sys.modules[name]).update(dict.fromkeys(attributes))
    for name in _COMPILER:
        sys.modules[name] = _NothingIsCompiled(name)
    sys.meta_path.insert(0, _RealSubmodules())


class _Late(ModuleType):
    """Is imported as soon as somebody asks for something in it, a submodule too."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


class _NothingIsCompiled(ModuleType):
    """The answers of ``torch._dynamo`` in a process that compiles nothing; asked for more, it makes way."""

    __path__: tuple[str, ...] = ()  # a package, as far as importers are concerned
    config = SimpleNamespace()

    class OptimizedModule:
        """What ``torch.compile`` would have returned."""

    @staticmethod
    def disable(fn: Any = None, *_args, **_kwargs) -> Any:
        """As torch's own: nothing to switch off."""
        return fn if fn is not None else lambda function: function

    @staticmethod
    def graph_break(*_args, **_kwargs) -> None:
        """Of a graph that nobody makes."""

    @staticmethod
    def is_compiling() -> bool:
        return False

    @staticmethod
    def is_compile_supported(_device_type: str) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _bring_back_compiler()
        return getattr(importlib.import_module(self.__name__), name)


class _RealSubmodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Other versions of torch import further parts of the compiler: then it is needed, whole."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("torch._dynamo.") or not isinstance(sys.modules["torch._dynamo"], _NothingIsCompiled):
            return None
        _bring_back_compiler()
        importlib.import_module(name)
        return importlib.util.spec_from_loader(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It has been executed."""


def _bring_back_compiler() -> None:
    for name in _COMPILER:
        if isinstance(sys.modules.get(name), _NothingIsCompiled):
            del sys.modules[name]
    torch = sys.modules.get("torch")
    if isinstance(getattr(torch, "_dynamo", None), _NothingIsCompiled):
        del torch._dynamo


def silence_libraries() -> None:
    """Hide what libraries tell developers in every run; warnings that a person can act on stay."""
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "WARNING")
    if not sys.warnoptions:
        for category in (FutureWarning, DeprecationWarning, PendingDeprecationWarning):
            warnings.simplefilter("ignore", category)
