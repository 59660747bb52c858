"""Takes pictures of a desk's page: docs/pictures/desk-light.png, desk-dark.png and desk-phone.png.

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

PICTURES = Path(__file__).resolve().parent / "pictures"
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
KINDS = {
    "light": {"viewport": {"width": 1120, "height": 1520}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1120, "height": 1520}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light", "device_scale_factor": 2},
}
COLOURS = 128
"""More make the files larger, and nobody sees it."""


def take(browser: Browser, url: str, kind: str) -> Path:
    """One picture of what is seen without scrolling."""
    context = browser.new_context(**KINDS[kind])
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("#charts path")
    picture = Image.open(io.BytesIO(page.screenshot()))
    context.close()
    path = PICTURES / f"desk-{kind}.png"
    picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    return path


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
        for kind in KINDS:
            path = take(browser, options.url, kind)
            print(f"{path.name}: {path.stat().st_size // 1000} kB")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
