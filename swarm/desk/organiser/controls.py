"""What the organiser can order from the page, and what of it counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Command:
    """An order that the page offers.

    Args:
        what: its word, as on the command line
        title: what it does, as a button says it
        meaning: one sentence
        label: of the field for its value; empty if it has none
        least, most: bounds of that value
        step: of that value: 1 for whole numbers, "any" otherwise
    """

    what: str
    title: str
    meaning: str
    label: str = ""
    least: float = 0
    most: float = 0
    step: str = "1"


COMMANDS = {
    command.what: command
    for command in (
        Command("pause", "Pause", "Nobody computes from that update on, until you resume."),
        Command("resume", "Resume", "All compute again, as if nothing had happened."),
        Command("end", "End", "The run is over at that update, and peers leave it."),
        Command("extend", "Extend", "The run gets another length.", "Updates in all", 1, 10**7),
        Command(
            "learning-rate",
            "Change the learning rate",
            "It is so many times what the recipe says.",
            "Times the recipe's",
            0.01,
            100,
            "any",
        ),
        Command("target-batch-size", "Change the batch", "An update takes so many samples.", "Samples", 1, 2**20),
    )
}
"""By their words."""


@dataclass(frozen=True)
class OrderShown:
    """An order that was given.

    Args:
        at_step: from which it counts
        text: what was ordered
        counts: already
    """

    at_step: int
    text: str
    counts: bool


class Controls(Protocol):
    """Gives orders to a run, and knows those that were given. A method may take seconds; they are called in turn."""

    can_order: bool
    """The desk has a key with which it may sign."""

    def orders(self) -> list[OrderShown]:
        """All that were given, the newest last."""
        ...

    def in_force(self) -> dict[str, str]:
        """What counts now, in words."""
        ...

    def earliest_step(self) -> int:
        """From which an order of this moment can count on all peers."""
        ...

    def give(self, what: str, value: float, at_step: int) -> str:
        """Order it. Returns what was ordered, in words.

        Raises:
            InputError: it cannot be ordered
        """
        ...
