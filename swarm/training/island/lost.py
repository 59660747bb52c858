"""The error that ends an island."""

LOST = (
    "A process of this island has ended or does not answer, so all of them end: torchrun starts them again if it has "
    "--max-restarts."
)


class IslandLost(RuntimeError):  # noqa: N818
    """A process of this island has ended, or does not answer; the others cannot go on without it."""

    def __init__(self, said: str = LOST):
        super().__init__(said)
