"""Whether a peer goes back with its group to an earlier state: never on the word of others alone."""

from __future__ import annotations

from swarm.averaging.audit.audits import Audits
from swarm.protocol.messages import NOWHERE, Group, RoundFailed, Ticket, WentBack


async def going_back(group: Group, own: Ticket, audits: Audits | None) -> WentBack:
    """How this peer's round ends in a group that has decided to go back.

    Args:
        own: what this peer has said itself
        audits: who can be shown a proof; None where nothing is checked

    Raises:
        RoundFailed: it stays where it is; if the others go back, it finds that they have gone on
    """
    step, liars = group.back_to, frozenset()
    if audits is not None:
        liars = await audits.liars_since(step, group)
    if own.back_to == NOWHERE and not liars:
        raise RoundFailed(f"most of the group go back to step {step}, and show this peer no reason")
    return WentBack(group, step, liars)
