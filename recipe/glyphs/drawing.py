"""Draws the characters of a typeface: white on black, on one baseline and in one scale, so that c is smaller than C."""

import hashlib
import string
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from recipe.errors import InputError

CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
"""The classes, in the order of their labels."""

SIDE = 32
"""Width and height of an image, in pixels."""

_OVERSAMPLING = 4  # each pixel is the mean of 4 x 4: in whole numbers, so that every machine rounds alike
_WINDOW = SIDE * _OVERSAMPLING
_CANVAS = 4 * _WINDOW
_ORIGIN = (_CANVAS // 2, _CANVAS // 2)
_TALLEST, _WIDEST = 24 * _OVERSAMPLING, 28 * _OVERSAMPLING
_MEASURED_SIZE = 96.0
_ABSENT = "\uffff"  # not a character: fonts draw their box for missing characters here
_LEAST_INK_LEFT = 0.5

_SIZES = (0.85, 0.95, 1.0, 1.05)
_WEIGHTS = (-1, 0, 0, 1)
_LARGEST_SHIFT = _OVERSAMPLING  # one pixel of the image


class UnusableTypeface(InputError):  # noqa: N818 (reads as what happened)
    """A font file that has no outlines of the characters, or cannot be read."""


@dataclass(frozen=True)
class Variation:
    """How an image differs from the typeface's own drawing of the character."""

    size: float = 1.0
    """Factor of the size."""
    weight: int = 0
    """-1 is thinner, 1 is bolder, by a quarter of a pixel on each side of a stroke."""
    right: int = 0
    """Shift to the right, in quarters of a pixel."""
    down: int = 0
    """Shift downwards, in quarters of a pixel."""

    @classmethod
    def of(cls, name: str, number: int) -> "Variation":
        """The n-th variation of an image with this name, the same on every machine; number 0 changes nothing."""
        if number == 0:
            return cls()
        words = hashlib.sha256(f"{name}/{number}".encode()).digest()
        span = 2 * _LARGEST_SHIFT + 1
        right, down = (word % span - _LARGEST_SHIFT for word in words[2:4])
        return cls(_SIZES[words[0] % len(_SIZES)], _WEIGHTS[words[1] % len(_WEIGHTS)], right, down)


class Typeface:
    """A font file whose characters can be drawn.

    Args:
        path: the font file.

    Raises:
        UnusableTypeface: the file cannot be read, or draws nothing for a character.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fonts: dict[float, ImageFont.FreeTypeFont] = {}
        boxes = [self._ink(character, _MEASURED_SIZE).getbbox() for character in CHARACTERS]
        if None in boxes:
            raise UnusableTypeface(f"{path} draws nothing for some characters: install its package again.")
        self._top, self._bottom = min(box[1] for box in boxes) - _ORIGIN[1], max(box[3] for box in boxes) - _ORIGIN[1]
        widest = max(right - left for left, _, right, _ in boxes)
        self._scale = min(_TALLEST / (self._bottom - self._top), _WIDEST / widest)

    def draw(self, character: str, variation: Variation = Variation()) -> np.ndarray:
        """Draw a character: a uint8 array (SIDE, SIDE) in which 255 is white.

        The ink of the character is centred horizontally, and the whole typeface vertically.
        """
        scale = self._scale * variation.size
        ink = self._ink(character, _MEASURED_SIZE * scale)
        left, _, right, _ = ink.getbbox() or (*_ORIGIN, *_ORIGIN)
        x = (left + right - _WINDOW) // 2 - variation.right
        y = _ORIGIN[1] + round((self._top + self._bottom) * scale / 2) - _WINDOW // 2 - variation.down
        window = ink.crop((x, y, x + _WINDOW, y + _WINDOW))
        return np.asarray(_weighted(window, variation.weight).reduce(_OVERSAMPLING))

    @cached_property
    def images(self) -> np.ndarray:
        """All characters without variation: a uint8 array (len(CHARACTERS), SIDE, SIDE)."""
        return np.stack([self.draw(character) for character in CHARACTERS])

    @property
    def is_complete(self) -> bool:
        """Whether the typeface has every character and no two equal ones; its box for missing ones would repeat."""
        absent = self.draw(_ABSENT).tobytes()
        return len({absent, *(image.tobytes() for image in self.images)}) == len(CHARACTERS) + 1

    def _ink(self, character: str, size: float) -> Image.Image:
        """The character on a canvas; its baseline begins at `_ORIGIN`."""
        canvas = Image.new("L", (_CANVAS, _CANVAS))
        try:
            if size not in self._fonts:
                self._fonts[size] = ImageFont.truetype(self.path, size, layout_engine=ImageFont.Layout.BASIC)
            ImageDraw.Draw(canvas).text(_ORIGIN, character, fill=255, font=self._fonts[size], anchor="ls")
        except (OSError, ValueError) as error:  # Pillow raises these for what FreeType refuses
            raise UnusableTypeface(f"{self.path} cannot be drawn ({error}): install its package again.") from error
        return canvas


def _weighted(window: Image.Image, weight: int) -> Image.Image:
    """The drawing, made bolder or thinner; a hairline that would vanish stays as it is."""
    if weight == 0:
        return window
    changed = window.filter(ImageFilter.MaxFilter(3) if weight > 0 else ImageFilter.MinFilter(3))
    thin = np.asarray(changed).sum(dtype=np.int64) < _LEAST_INK_LEFT * np.asarray(window).sum(dtype=np.int64)
    return window if thin else changed
