"""Takes the picture of a desk's page: docs/pictures/desk-light.png.

    swarm desk ADDRESS                                       # of a run that has gone on for some minutes
    python docs/make_desk_picture.py http://127.0.0.1:8080

It needs Chromium (apt-get install chromium) and what `make setup` installs.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

PICTURE = Path(__file__).resolve().parent / "pictures" / "desk-light.png"
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
COLOURS = 128
"""More make the files larger, and nobody sees it."""


def take(browser: Browser, url: str) -> None:
    """What is seen of the page without scrolling."""
    page = browser.new_page(viewport={"width": 1120, "height": 1520}, color_scheme="light")
    page.goto(url)
    page.wait_for_selector("#charts path")
    picture = Image.open(io.BytesIO(page.screenshot()))
    picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(PICTURE, optimize=True)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of the page")
    options = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        print("error: There is no chromium: apt-get install chromium", file=sys.stderr)
        return 2
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        take(browser, options.url)
        browser.close()
    print(f"{PICTURE.name}: {PICTURE.stat().st_size // 1000} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
