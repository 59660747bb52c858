"""Loads only what a peer needs: more than half of its import time went into modules of which it never uses anything.

torchvision, Lightning and torch's optimizers import the front end of ``torch.compile`` (``torch._dynamo``, with sympy
and parts of Inductor) only to see whether something is compiled; a peer compiles nothing. Torchmetrics and Hivemind
import parts of scipy for metrics and for load balancing that a peer does not use, Torchmetrics imports matplotlib for
plots that nobody asks a peer for and torchvision's models for a metric of images, torch's counter of operations imports
triton to know its kernels, and timm imports a hundred families of models of which a peer trains one. A fifth of what
remained went into Python's garbage collector, which looks through everything again and again while modules, which
nobody ever throws away, come in.
"""

import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from types import ModuleType, SimpleNamespace
from typing import Any

from swarm.runtime.log_filters import REPEATS

_COMPILER = ("torch._dynamo", "torch._dynamo.utils")
_LATE: dict[str, dict[str, Any]] = {
    "timm": {"__version__": version("timm")},
    "timm.models": {},
    "torchvision.models": {"resnet50": None, "vgg16": None, "VGG16_Weights": None},
    "scipy.optimize": {},
    "scipy.signal": {"hamming": None},  # Torchmetrics puts it there if it is missing, for an audio metric
    "matplotlib": {"colors": SimpleNamespace(Colormap=object)},
    "matplotlib.axes": {"Axes": object},
    "matplotlib.pyplot": {"Figure": object, "style": SimpleNamespace(context=lambda _style: lambda plot: plot)},
    "triton": {},
    "triton.runtime": {},
    "triton.runtime.jit": {"JITFunction": type("JITFunction", (), {}), "__path__": ()},  # its path is asked for, too
}
"""Modules, with what is asked of them while others are imported: types for annotations, decorators of plots."""
_ONLY_SUBMODULES = ("timm", "timm.models", "torchvision.models")
"""Packages whose modules can be imported one by one, without what the package itself imports."""


@contextlib.contextmanager
def lean_imports() -> Iterator[None]:
    """Within this, imports load only what a peer needs. Stand-ins are put in place only before torch is imported.

    Nothing is lost: who asks a stand-in for more than the few answers it has gets the real module.
    """
    _put_stand_ins()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # no later collection looks through it, so forked processes go on sharing its memory
        if collects:
            gc.enable()


def _put_stand_ins() -> None:
    if any(name in sys.modules for name in ("torch", *_COMPILER)):
        return
    specs = {package: importlib.util.find_spec(package) for package in map(_package, _LATE)}
    for name, attributes in _LATE.items():
        spec = specs[_package(name)]
        if spec is not None and name not in sys.modules:
            late = sys.modules[name] = _Late(name)
            vars(late).update(attributes)
            if name in _ONLY_SUBMODULES:
                late.__path__ = [os.path.join(os.path.dirname(spec.origin), *name.split(".")[1:])]
            parent, _, child = name.rpartition(".")
            if parent in sys.modules:
                setattr(sys.modules[parent], child, late)
    for name in _COMPILER:
        sys.modules[name] = _NothingIsCompiled(name)
    sys.meta_path.insert(0, _RealSubmodules())


def _package(name: str) -> str:
    return name.partition(".")[0]


class _Late(ModuleType):
    """Is imported as soon as somebody asks for something in it, a submodule too; its whole package with it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        for late in [late for late in _LATE if _package(late) == _package(self.__name__)]:
            if isinstance(sys.modules.get(late), _Late):
                del sys.modules[late]
        whole = importlib.import_module(self.__name__)
        for loaded, module in list(sys.modules.items()):  # submodules that were there before their package
            parent, _, child = loaded.rpartition(".")
            if parent == self.__name__:
                setattr(whole, child, module)
        return getattr(whole, name)


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
    """Hide what libraries tell developers in every run; warnings that a person can act on stay, each once a minute."""
    if "HIVEMIND_LOGLEVEL" not in os.environ:
        os.environ["HIVEMIND_LOGLEVEL"] = "WARNING"
        for name in ("hivemind.averaging.partition", "hivemind.p2p.p2p_daemon"):  # what became of a round is said by us
            logging.getLogger(name).setLevel(logging.ERROR)
        # p2pd could not start, as its exception tells; asyncio complains that the loop did not wait for its end
        logging.getLogger("asyncio").addFilter(lambda record: "that handles pid" not in str(record.msg))
    logging.lastResort.addFilter(REPEATS)  # where our own messages go
    if not sys.warnoptions:
        for category in (FutureWarning, DeprecationWarning, PendingDeprecationWarning):
            warnings.simplefilter("ignore", category)
