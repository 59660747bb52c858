"""Writes docs/reference/*.md from the code, so that the pages say what the program does.

    python docs/make_reference.py            # write the pages
    python docs/make_reference.py --check    # exit with 1 if a page is stale

`make docs` runs it. It imports neither torch nor Hivemind, so it takes about a second.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from generate import commands, python_api, recipe_page, run_files, wire  # noqa: E402 (the path comes first)

PAGES = {
    "commands.md": commands.page,
    "recipe.md": recipe_page.page,
    "run-folder.md": run_files.folder_page,
    "metrics.md": run_files.metrics_page,
    "python-api.md": python_api.page,
    "wire-protocol.md": wire.page,
}
NOTE = "<!-- Written by docs/make_reference.py from the code: change that, then run `make docs`. -->\n\n"


def pages() -> dict[Path, str]:
    """The text that each page should have."""
    return {HERE / "reference" / name: NOTE + write().rstrip() + "\n" for name, write in PAGES.items()}


def stale() -> list[Path]:
    """Pages that do not have the text they should have."""
    return [path for path, text in pages().items() if not path.exists() or path.read_text(encoding="utf-8") != text]


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    if arguments == ["--check"]:
        for path in (out_of_date := stale()):
            print(f"{path.relative_to(HERE.parent)} is stale: run `make docs`.", file=sys.stderr)
        return int(bool(out_of_date))
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
