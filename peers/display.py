"""Shows in a notebook what its peer does: with widgets that are updated in place, or with a line now and then."""

from __future__ import annotations

import html
import math
import time
from collections.abc import Callable
from typing import Protocol

from swarm.cli.demo import Lines, wide_console
from swarm.peer.status import Status

LINE_SECONDS = 60.0


class Display(Protocol):
    """Shows a peer's status repeatedly."""

    def show(self, status: Status) -> None: ...

    def close(self, last_words: str) -> None: ...


def make_display() -> Display:
    """The display for this place: widgets in a notebook, lines elsewhere."""
    try:
        from IPython import get_ipython

        if get_ipython() is not None and "IPKernelApp" in get_ipython().config:
            return WidgetDisplay()
    except ImportError:
        pass
    return LineDisplay()


class WidgetDisplay:
    """Two progress bars and a line of text, and once a minute a plain line for places that show no widgets.

    Args:
        clock: returns seconds
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        import ipywidgets
        from IPython.display import display

        layout = ipywidgets.Layout(width="60%")
        self._run = ipywidgets.IntProgress(description="run", layout=layout)
        self._batch = ipywidgets.IntProgress(description="next update", layout=layout, bar_style="info")
        self._text = ipywidgets.HTML("Starting …")
        display(ipywidgets.VBox([self._run, self._batch, self._text]))
        self._clock, self._printed_at = clock, -math.inf

    def show(self, status: Status) -> None:
        self._run.max, self._run.value = max(1, status.total_steps), status.step
        self._batch.max, self._batch.value = status.target_batch_size, min(status.samples, status.target_batch_size)
        given = f"<br>You gave {status.contributed:,} samples so far." if status.contributed else ""
        self._text.value = f"{html.escape(status.line())}{given}"
        if self._clock() - self._printed_at >= LINE_SECONDS:
            self._printed_at = self._clock()
            print(status.line(), flush=True)

    def close(self, last_words: str) -> None:
        self._text.value = html.escape(last_words).replace("\n", "<br>")
        print(last_words)  # stays in the file if the notebook is saved without its widgets


class LineDisplay:
    """Prints lines, for a terminal or a log."""

    def __init__(self) -> None:
        self._lines = Lines(wide_console())

    def show(self, status: Status) -> None:
        self._lines.show([status])

    def close(self, last_words: str) -> None:
        print(last_words)
