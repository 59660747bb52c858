"""Reads docstrings from the source of installed libraries, without importing them."""

import ast
import csv
import hashlib
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from recipe.errors import InputError

VERSIONS = {"matplotlib": "3.11.2", "networkx": "3.6.1", "scikit-learn": "1.9.1", "sympy": "1.14.0"}
"""Versions of the libraries, about drawing, graphs, learning and algebra. All come with torch or with this project."""
PACKAGES = {"matplotlib": "matplotlib", "networkx": "networkx", "scikit-learn": "sklearn", "sympy": "sympy"}
"""Names under which the libraries are imported."""

PARTS = ("train", "val", "test")
TEXTS_PER_LIBRARY = 1300
MIN_WORDS, MAX_CHARACTERS = 8, 400

_SECTION = re.compile(
    r"\n\s*(?:Parameters|Args|Arguments|Returns?|Examples?|Notes|See Also|Attributes|Raises|References)\b"
    r"|>>>|\n\s*\.\. "
)
"""Where the prose of a docstring ends: headings and their style would give a library away."""


@dataclass(frozen=True)
class Docstring:
    """One text of the data set."""

    part: str
    library: str
    text: str


def extract(libraries: Iterable[str] = tuple(VERSIONS)) -> list[Docstring]:
    """The docstrings of all parts: equally many texts of each library, chosen and ordered by their hash.

    Raises:
        InputError: a library is missing, or has another version.
    """
    found = []
    for library in libraries:
        _check_version(library, VERSIONS[library])
        package = Path(find_spec(PACKAGES[library]).submodule_search_locations[0])
        texts = {text.lower(): (module, text) for module, text in _prose(package)}
        chosen = sorted(texts.values(), key=lambda item: _hash(item[1]))[:TEXTS_PER_LIBRARY]
        found += [Docstring(_part(module), library, text) for module, text in chosen]
    return sorted(found, key=lambda one: (PARTS.index(one.part), _hash(one.text)))


def as_csv(docstrings: list[Docstring]) -> bytes:
    """The docstrings as CSV: one row of part, library and text for each."""
    writer = csv.writer(file := io.StringIO(), lineterminator="\n")
    writer.writerows((one.part, one.library, one.text) for one in docstrings)
    return file.getvalue().encode()


def _check_version(library: str, wanted: str) -> None:
    try:
        found = version(library)
    except PackageNotFoundError:
        found = "missing"
    if found != wanted:
        pins = " ".join(f"{name}=={number}" for name, number in VERSIONS.items())
        raise InputError(f"{library} is {found}, and the texts are of {wanted}: pip install {pins}.")


def _prose(package: Path) -> Iterator[tuple[str, str]]:
    """(module, text) of each documented class and function of a package, except its tests.

    Texts that name their own library are left out.
    """
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package.parent).as_posix()
        if "/test" in module or "/_test" in module:
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                text = " ".join(_SECTION.split(ast.get_docstring(node) or "", maxsplit=1)[0].split())
                is_named = package.name in text.lower() or "scikit" in text.lower()
                if len(text.split()) >= MIN_WORDS and text.isascii() and not is_named:
                    yield module, text[:MAX_CHARACTERS]


def _part(module: str) -> str:
    """The part of a module's texts. It is the same for all of them, so held-out texts are from files unseen in
    training."""
    twentieth = int(_hash(module), 16) % 20
    return "train" if twentieth < 14 else "val" if twentieth < 17 else "test"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
