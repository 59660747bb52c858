"""How a peer finds its swarm: everything about `--initial-peers` that is decided before something is built."""

from __future__ import annotations

from dataclasses import dataclass, replace

from recipe.config import Recipe
from recipe.errors import InputError
from swarm.enrolment.join_line import JoinLine, whom_to_join
from swarm.network.addresses import NobodyAnswers, check_reachable, parse_initial_peers
from swarm.network.known_peers import met_before
from swarm.peer.options import PeerOptions, own_recipe


@dataclass(frozen=True)
class Bootstrap:
    """Where a peer begins.

    Args:
        addresses: of peers that answer now; none if it begins alone
        joins: it has been told whom to join
        new_recipe: what it trains if it has to start a run; None if it may only join one
    """

    addresses: tuple[str, ...]
    joins: bool
    new_recipe: Recipe | None


def unfolded(options: PeerOptions) -> tuple[PeerOptions, JoinLine | None]:
    """The options with what a join line says, if one was given in place of addresses: addresses, and the run.

    Raises:
        InputError: the line, or an address, is malformed; or the line is of another run
    """
    addresses, line = whom_to_join(options.initial_peers)
    if line is None:
        return options, None
    if options.run_id not in (None, line.run_id):
        raise InputError(
            f"The join line is of run {line.run_id}, and --run-id says {options.run_id}: leave --run-id out, or ask "
            "for the other run's join line."
        )
    return replace(options, initial_peers=tuple(addresses), run_id=line.run_id), line


def resolve_bootstrap(options: PeerOptions, stored: Recipe | None = None) -> Bootstrap:
    """Parse the addresses, and ask once who answers.

    Args:
        stored: recipe of the run that this peer goes on with if nobody answers; None: then it does not

    Raises:
        NobodyAnswers: nobody answers, and there is nothing to go on with
        InputError: an address is malformed
    """
    given = parse_initial_peers(options.initial_peers)
    if given:
        try:
            answering = tuple(_who_answers(options, given))
        except NobodyAnswers:
            if stored is None:
                raise
            print(
                "No peer answers: this peer goes on alone with its last checkpoint, and others can join it.", flush=True
            )
        else:
            # nobody may have begun there yet; only who names recipe and run wants to
            may_begin = bool(options.recipe and options.run_id)
            return Bootstrap(answering, True, own_recipe(options) if may_begin else None)
    recipe = stored or own_recipe(options)
    options.check_micro_batch(recipe.target_batch_size)
    # A run of this name may go on without this peer, which has started it.
    met = met_before(options.machine.output_dir, options.run_id) if options.run_id is not None else []
    return Bootstrap(tuple(met), False, recipe)


def _who_answers(options: PeerOptions, given: list[str]) -> list[str]:
    """The given addresses where something listens, or else those of peers that were met before."""
    try:
        return check_reachable(given)
    except InputError:
        met = met_before(options.machine.output_dir, options.run_id, given)
        if not met:
            raise
        print("None of the given peers answers; asking peers that were met before.", flush=True)
        return met
