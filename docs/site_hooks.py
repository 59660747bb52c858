"""What mkdocs does beyond its settings: pages of the repository's root, and links to files that are no pages."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
ROOT_PAGES = {"developer/contributing.md": "CONTRIBUTING.md", "developer/changelog.md": "CHANGELOG.md"}
"""Pages of the site that are kept where people look for them in a repository."""
REPOSITORY = os.environ.get("SWARM_DOCS_REPOSITORY", "")
"""Address of the files of the repository, such as https://HOST/OWNER/NAME/blob/main; without it there are no links."""

MERMAID = ROOT / "build" / "mermaid.min.js"
"""What draws diagrams, if `make docs` could fetch it. Without it the browser gets it from the internet."""

_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of the root, and what draws diagrams."""
    if MERMAID.exists():
        files.append(File.generated(config, "assets/mermaid.min.js", abs_src_path=str(MERMAID)))
        config.extra_javascript.append("assets/mermaid.min.js")
    for page, source in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links to files of the repository into what works on the site.

    A link that leads to a page of the site becomes a link to that page. Any other file of the repository is no part of
    the site: its link leads to the repository, if its address is known, or else only its text is left. A link that
    leads nowhere stays as it is, and mkdocs warns.
    """
    source = page.file.src_uri
    folder = posixpath.dirname("docs/" + source)
    if source in ROOT_PAGES:
        folder = ""
    of_root = {source_name: name for name, source_name in ROOT_PAGES.items()}

    def replaced(match: re.Match) -> str:
        text, target = match[1], match[2]
        if re.match(r"[a-z]+:|#|/", target):
            return match[0]
        path, _, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(folder, path))
        name = of_root.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if name is not None and files.get_file_from_path(name) is not None:
            link = posixpath.relpath(name, posixpath.dirname(source) or ".")
            return f"[{text}]({link}{'#' + anchor if anchor else ''})"
        if name is None and (ROOT / path).exists():
            return f"[{text}]({REPOSITORY}/{path})" if REPOSITORY else text
        return match[0]

    # Code stays as it is. A link whose text is code is found all the same: only fences are cut out.
    parts = _FENCE.split(markdown)
    return "".join(part if index % 2 else _LINK.sub(replaced, part) for index, part in enumerate(parts))
