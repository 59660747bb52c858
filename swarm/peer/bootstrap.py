"""How a peer finds its swarm: everything about `--initial-peers` that is decided before the DHT is started."""

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
        addresses: of peers that answer now; empty if it begins alone
        joins: a person has named peers to join
        new_recipe: what it trains if it has to start a run; None if it may only join one
    """

    addresses: tuple[str, ...]
    joins: bool
    new_recipe: Recipe | None


def unfolded(options: PeerOptions) -> tuple[PeerOptions, JoinLine | None]:
    """Parse what was given to join: return the options with plain addresses and, from a join line, with its run.

    Returns:
        the options, with well-formed addresses as `initial_peers`, wherever they came from; and the join line, if one
        was given in place of addresses

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
    """Find out once which peers answer, and print it if none of the given ones does.

    Args:
        options: as `unfolded` returns them
        line: the join line, if this peer was invited
        stored: recipe of the run that it goes on with if no peer answers; None if it may not go on alone

    Raises:
        NobodyAnswers: no peer answers, and there is no recipe to go on with
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
            # Perhaps no peer has begun the run there yet. A peer begins it only if both recipe and run were given. A
            # peer with a join line never begins another run of that name, whatever it finds at the line's addresses.
            may_begin = bool(options.recipe and options.run_id) and line is None
            return Bootstrap(answering, True, own_recipe(options) if may_begin else None)
    recipe = stored or own_recipe(options)
    options.check_micro_batch(recipe.target_batch_size)
    # Other peers may still train a run of this name that this peer has started.
    met = met_before(options.machine.output_dir, options.run_id) if options.run_id is not None else []
    return Bootstrap(tuple(met), False, recipe)


def _who_answers(options: PeerOptions) -> list[str]:
    """Return the given addresses where something listens, or else those of peers that were met before."""
    try:
        return check_reachable(options.initial_peers)
    except InputError:
        met = met_before(options.machine.output_dir, options.run_id, options.initial_peers)
        if not met:
            raise
        print("None of the given peers answers; asking peers that were met before.", flush=True)
        return met
