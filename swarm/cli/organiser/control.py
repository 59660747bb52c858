"""Steer your run while it is under way: each order counts from a step on, on all peers alike.

    swarm control show                             # what is ordered, and what counts now
    swarm control pause                            # in about 30 s no peer computes any more
    swarm control resume
    swarm control learning-rate 0.5                # half of what the recipe says
    swarm control target-batch-size 512 --at-step 2000
    swarm control extend 20000                     # the run has 20,000 updates
    swarm control evaluate 500                     # every 500 updates one peer tests the weights; 0: no more
    swarm control end

You sign a new list of orders. The peers of the run pass it on among themselves, so you may switch off your machine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from recipe.command_line import arg, exit_status, read_options
from recipe.errors import InputError
from swarm.cli.organiser.calling import Lookout, handed_to, reaching
from swarm.cli.organiser.organiser_options import OrganiserOptions

if TYPE_CHECKING:
    from swarm.membership.control.giving import Given, Situation

SHOW = "show"
WITH_VALUE = {"extend": "UPDATES", "learning-rate": "FACTOR", "target-batch-size": "SAMPLES", "evaluate": "UPDATES"}
"""Orders that take a value, and the name of that value on the command line."""
Word = Literal["show", "pause", "resume", "end", "extend", "learning-rate", "target-batch-size", "evaluate"]


@dataclass(frozen=True)
class ControlOptions:
    """Steer your run while it is under way: each order counts from a step on, on all peers alike."""

    what: tyro.conf.Positional[Annotated[Word, arg("WHAT")]] = SHOW
    """show: list what is ordered; pause, resume or end the run; extend: to VALUE updates in all; learning-rate: VALUE
    times that of the recipe; target-batch-size: VALUE samples per update; evaluate: one peer tests the weights every
    VALUE updates, 0: no peer does."""
    value: tyro.conf.Positional[Annotated[float | None, arg("VALUE", "none")]] = None
    """Value of the order: a number of updates or of samples, or a factor. The other orders take none."""
    at_step: Annotated[int | None, arg("STEP", "in about 30 s")] = None
    """Step from which the order counts. It has to be at least two updates ahead, unless the run is paused."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """With show: print one line of JSON."""
    initial_peers: Annotated[tuple[str, ...] | None, arg("ADDRESS ...", "where your peer was last")] = None
    """Addresses of peers of the run. One that answers is enough."""
    organiser: Annotated[OrganiserOptions, tyro.conf.arg(name="your run")] = field(default_factory=OrganiserOptions)

    def check(self) -> None:
        """Raises InputError: options that do not go together"""
        wanted = WITH_VALUE.get(self.what)
        if wanted and self.value is None:
            raise InputError(f"swarm control {self.what} needs a value: swarm control {self.what} {wanted}.")
        if not wanted and self.value is not None:
            raise InputError(f"swarm control {self.what} takes no value: leave out {self.value:g}.")
        if self.at_step is not None and self.what in (SHOW, "resume"):
            raise InputError(f"swarm control {self.what} is about the present step: leave out --at-step.")
        if self.json and self.what != SHOW:
            raise InputError("--json goes with swarm control show: leave it out.")


def main(arguments: list[str], say: Callable[[str], None] = print) -> int:
    """Returns the exit status: 0; 2 for input that cannot work, or if the run cannot be reached."""
    return exit_status(
        lambda: _control(read_options(ControlOptions, arguments, "swarm control"), say),
        "Interrupted: swarm control show says whether the order was given.",
    )


def _control(options: ControlOptions, say: Callable[[str], None]) -> None:
    options.check()
    lookout = Lookout.of(options.initial_peers, options.organiser)
    folder = options.organiser.opened()
    from swarm.protocol.orders import Order, What

    what, signer = None if options.what == SHOW else What(options.what), None
    if what is not None:
        from swarm.enrolment.organiser_key import check_right
        from swarm.protocol.certificates import Right

        try:  # as far as that can be seen without the swarm
            Order(1 if options.at_step is None else options.at_step, what, options.value or 0.0)
        except ValueError as error:
            raise InputError(str(error)) from None
        signer = folder.signer()
        check_right(signer, folder.authority, Right.CONTROL)
    with reaching(lookout, folder.authority) as (dht, manifest):
        from swarm.membership.control.giving import give_order, situation

        if what is None:
            _show(situation(dht, manifest), options.json, say)
        else:
            say(_sentence(give_order(dht, manifest, signer, what, options.value or 0.0, options.at_step)))
            recipe = manifest.recipe
            if what is What.EXTEND and recipe.averaging == "auto" and options.value < recipe.total_steps:
                say(
                    f"The run may be shorter now: its recipe has {recipe.total_steps:,} updates, or fewer where "
                    "--averaging auto has made several local steps in one."
                )


def _sentence(given: Given) -> str:
    when = "" if math.isnan(given.seconds) else f", in about {given.seconds:.0f} s" if given.seconds else ", at once"
    return f"Ordered: {given.order}{when}. The list {handed_to(given.num_peers)}"


def _show(now: Situation, as_json: bool, say: Callable[[str], None]) -> None:
    recipe, orders, step = now.manifest.recipe, now.orders, now.step
    counts = {
        "step": step,
        "total_steps": orders.total_steps(step, recipe.total_steps),
        "is_paused": now.is_paused,
        "learning_rate_factor": orders.learning_rate_factor(step),
        "target_batch_size": orders.target_batch_size(step, recipe.target_batch_size),
        "evaluate_every": orders.evaluate_every(step),
    }
    if as_json:
        listed = [{"at_step": order.at_step, "what": order.what, "value": order.value} for order in orders.given]
        say(json.dumps({"run_id": now.manifest.run_id, **counts, "orders": listed}))
        return
    say(
        f"Run {now.manifest.run_id} is {'paused ' * now.is_paused}at step {step} of {counts['total_steps']:,}: "
        f"{counts['target_batch_size']:,} samples per update, learning rate {counts['learning_rate_factor']:g} × the "
        "recipe's."
    )
    for order in orders.given:
        say(f"- {order}{' (coming)' if order.at_step > step else ''}")
    if not orders.given:
        say("Nothing was ordered.")
