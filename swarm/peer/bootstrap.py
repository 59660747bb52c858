"""How a peer finds its swarm: everything about `--initial-peers` that is decided before something is built."""

from __future__ import annotations

from dataclasses import dataclass, replace

from recipe.config import Recipe
from recipe.errors import InputError
from swarm.enrolment.join_line import JoinLine, whom_to_join
from swarm.network.addresses import NobodyAnswers, check_reachable
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
    """The options with what was given to join parsed, once for all: addresses, and the run if a join line names it.

    Returns:
        the options, whose `initial_peers` are sound addresses, wherever they came from; and the join line, if one was
        given in place of addresses

    Raises:
        InputError: the line, or an address, is malformed; or the line is of another run
    """
    addresses, line = whom_to_join(options.initial_peers)
    options = replace(options, initial_peers=tuple(addresses))
    if line is None:
        return options, None
    if options.run_id not in (None, line.run_id):
        raise InputError(
            f"The join line is of run {line.run_id}, and --run-id says {options.run_id}: leave --run-id out, or ask "
            "for the other run's join line."
        )
    return replace(options, run_id=line.run_id), line


def resolve_bootstrap(options: PeerOptions, line: JoinLine | None = None, stored: Recipe | None = None) -> Bootstrap:
    """Ask once who answers, and say so where it is nobody who was given.

    Args:
        options: as of `unfolded`
        line: join line, if this peer was invited
        stored: recipe of the run that it goes on with if nobody answers; None: then it does not

    Raises:
        NobodyAnswers: nobody answers, and there is nothing to go on with
    """
    if options.initial_peers:
        try:
            answering = tuple(_who_answers(options))
        except NobodyAnswers:
            if stored is None:
                raise
            print(
                "No peer answers: this peer goes on alone with its last checkpoint, and others can join it.", flush=True
            )
        else:
            # Nobody may have begun there yet; only who names recipe and run wants to. Who was invited to a run never
            # begins another one of that name, whatever is found where it was invited to.
            may_begin = bool(options.recipe and options.run_id) and line is None
            return Bootstrap(answering, True, own_recipe(options) if may_begin else None)
    recipe = stored or own_recipe(options)
    options.check_micro_batch(recipe.target_batch_size)
    # A run of this name may go on without this peer, which has started it.
    met = met_before(options.machine.output_dir, options.run_id) if options.run_id is not None else []
    return Bootstrap(tuple(met), False, recipe)


def _who_answers(options: PeerOptions) -> list[str]:
    """The given addresses where something listens, or else those of peers that were met before."""
    try:
        return check_reachable(options.initial_peers)
    except InputError:
        met = met_before(options.machine.output_dir, options.run_id, options.initial_peers)
        if not met:
            raise
        print("None of the given peers answers; asking peers that were met before.", flush=True)
        return met
