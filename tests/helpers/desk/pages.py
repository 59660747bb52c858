"""What stands on a page of the desk."""

import re

from tests.helpers.desk.seen_run import SeenRun

MARKUP = "</b><img src=x onerror=alert(1)>&\"'"
"""A name that does harm where it gets into a page as it is."""


def text_of(html: str) -> str:
    """What a person reads there."""
    return " ".join(re.sub("<[^>]*>", " ", html).split())


def names_on(seen: SeenRun, address: str) -> list[str]:
    """The names of peers on this page, from the top."""
    return re.findall("<bdi>([^<]*)</bdi>", seen.web.get(address).text)
