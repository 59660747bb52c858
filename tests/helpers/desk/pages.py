"""What a page of the desk shows."""

import re

from tests.helpers.desk.seen_run import SeenRun

MARKUP = "</b><img src=x onerror=alert(1)>&\"'"
"""A name that does harm if a page includes it unescaped."""


def text_of(html: str) -> str:
    """The text that a person reads on the page."""
    return " ".join(re.sub("<[^>]*>", " ", html).split())


def names_on(seen: SeenRun, address: str) -> list[str]:
    """The names of peers on this page, from the top."""
    return re.findall("<bdi>([^<]*)</bdi>", seen.web.get(address).text)
