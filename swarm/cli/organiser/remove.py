"""Remove a member from your run: from then on the other members refuse what it sends, and its peer leaves.

    swarm remove ada --why "sends nonsense"
    swarm remove QmYyQSo1c1...                # where several members have one name; swarm members --json shows peer ids
    swarm remove ada --restore                # it may take part again

You sign a new list of removed members. The peers of the run pass it on among themselves.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import tyro

from recipe.command_line import arg, exit_status, read_options
from recipe.errors import InputError
from swarm.cli.organiser.calling import Deadline, Lookout, NotTold, WrongClock, calling, handed_to
from swarm.cli.organiser.organiser_options import OrganiserOptions, listed, short

if TYPE_CHECKING:
    from hivemind.p2p import PeerID

    from swarm.enrolment.organiser_folder import OrganiserFolder
    from swarm.enrolment.registry import Member, Registry
    from swarm.membership.run_manifest import RunManifest
    from swarm.network.dht_process import SwarmDHT
    from swarm.protocol.certificates import Authority, Signer

ANSWER_SECONDS = 15.0
"""Time for the peers that are there to say which list they know, and to take the new one."""
FIRST_SERIAL = 10**12
"""No serial number is smaller. It is the time of enrolment in milliseconds since 1970; this one is in 2001."""


@dataclass(frozen=True)
class RemoveOptions:
    """Remove a member from your run: from then on the other members refuse what it sends, and its peer leaves."""

    who: tyro.conf.Positional[Annotated[str, arg("MEMBER")]]
    """Name, peer id or serial number of a member; swarm members --json shows them. A member that a deputy has let in on
    another machine is not listed there: give its serial number, which swarm ledger verify shows."""
    why: Annotated[str, arg("TEXT", "no reason given")] = ""
    """The reason, for the member and for your books."""
    restore: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Take a removal back: the member may take part again."""
    close: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Also close the invitation with which the member came: no other person can join with that line, nor this one with
    another identity."""
    offline: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Only sign the new list and keep it, and call no peer. The list goes out with the next one, or when your peer
    starts."""
    initial_peers: Annotated[tuple[str, ...] | None, arg("ADDRESS ...", "where your peer was last")] = None
    """Addresses of peers of the run. One that answers is enough."""
    organiser: Annotated[OrganiserOptions, tyro.conf.arg(name="your run")] = field(default_factory=OrganiserOptions)

    def check(self) -> None:
        """Raises InputError: options that do not go together"""
        if self.restore and self.why:
            raise InputError("--why is the reason of a removal, and --restore takes one back: leave out one of them.")
        if self.restore and self.close:
            raise InputError("--close goes with a removal, and --restore takes one back: leave out one of them.")
        if self.offline and self.initial_peers is not None:
            raise InputError("With --offline no peer is called: leave it out, or --initial-peers.")


@dataclass
class Change:
    """The removal of one member, or the end of its removal.

    Args:
        registry: the organiser's books
        signer: the key of the organiser, or of a deputy
        authority: the run, with the organiser's public key
        serial: number of the member
        is_foreign: whether the member is not in these books
        who: the member as a person knows it: a part of a sentence
        why: the reason, which the member is told
        restores: whether the member may take part again
        closes: whether the member's invitation is closed as soon as the list is signed
        signed: the new list of removed members; empty before `sign`
    """

    registry: Registry
    signer: Signer
    authority: Authority
    serial: int
    is_foreign: bool
    who: str
    why: str
    restores: bool
    closes: bool
    signed: bytes = b""

    def sign(self, has_looked: bool) -> bytes:
        """Sign the new list and write it into the books, if that is not done yet; return it.

        Args:
            has_looked: whether the swarm's newest list is in the books

        Raises:
            InputError: it cannot be signed or kept
        """
        if not self.signed:
            keys = self.signer, self.authority, has_looked
            if self.restores:
                self.signed = self.registry.restore([self.serial], *keys)
            else:
                self.signed = self.registry.remove([self.serial], self.why, *keys)
            if self.closes:
                self.registry.close_invitation_of(self.serial)
        return self.signed

    def made(self) -> str:
        """Sign the list without a look at the swarm's, if it is not signed yet, and return a sentence about the change.

        Raises:
            InputError: as `sign`
        """
        self.sign(has_looked=False)
        run_id = self.authority.run_id
        if self.restores:
            return f"{self.who} may take part in run {run_id} again."
        return f"{self.who} is removed from run {run_id}: {self.why or 'no reason given'}."


def main(arguments: list[str], say: Callable[[str], None] = print) -> int:
    """Returns the exit status: 0; 1 if the list is kept but no peer has it; 2 for input that cannot work."""
    return exit_status(
        lambda: _remove(read_options(RemoveOptions, arguments, "swarm remove"), say),
        "Interrupted: swarm members shows whether the list is signed; the same command hands it out again.",
    )


def _remove(options: RemoveOptions, say: Callable[[str], None]) -> int:
    options.check()
    lookout = None if options.offline else Lookout.of(options.initial_peers, options.organiser)
    change = _change(options, options.organiser.opened())
    status = _make(change, lookout, say)
    if options.close and change.is_foreign:
        say("Another machine keeps the invitation of this member: close it there (swarm invite --close).")
    if not options.restore and (uses := change.registry.uses_left_of(change.serial)):
        people = "one more person" if uses == 1 else f"{uses:,} more people"
        say(
            f"{change.who} came with an invitation that {people} can use: to close that as well, "
            f"`swarm remove {change.serial} --close`."
        )
    return status


def _make(change: Change, lookout: Lookout | None, say: Callable[[str], None]) -> int:
    """Sign the list, hand it out unless there is no look-out, and return the exit status.

    Args:
        lookout: for peers of the run; None: with `--offline`

    Raises:
        InputError: the list cannot be signed or kept, or a clock is wrong
    """
    if lookout is None:
        say(change.made())
        say("The new list is kept here. Your peer hands it out when it starts, or swarm remove does the next time.")
        return 0
    try:
        num_peers = hand_out(change, lookout)
    except WrongClock as error:
        said = str(error)
        raise InputError(
            f"Nothing was signed, because peers refuse a list with a wrong date, and {said[:1].lower()}{said[1:]} If "
            "this machine's clock is right, the peer's clock is wrong: give another peer with --initial-peers."
        ) from None
    except NotTold as error:
        say(change.made())
        print(
            f"error: No peer has the new list yet. {error} The list is kept here: your peer hands it out when it "
            "starts, or give the same command again.",
            file=sys.stderr,
        )
        return 1
    say(change.made())
    say(
        f"The new list {handed_to(num_peers)}"
        if num_peers
        else "No peer trains there now: the DHT keeps the list for an hour, and your peer hands it out when it starts."
    )
    return 0


def _change(options: RemoveOptions, folder: OrganiserFolder) -> Change:
    """The change that a person asks for. All that they may have got wrong is refused here, before any peer is called.

    Raises:
        InputError: there is no such member, the reason is too long, or the key cannot be used
    """
    from swarm.enrolment.organiser_key import check_right
    from swarm.protocol.certificates import MAX_REASON_LENGTH, Right

    if len(options.why) > MAX_REASON_LENGTH or not options.why.isprintable():
        raise InputError(f"--why has to be one line of at most {MAX_REASON_LENGTH} letters: say it more briefly.")
    registry, authority = folder.registry, folder.authority
    serial = _foreign_serial(registry, options.who, options.restore)
    if is_foreign := serial is not None:
        who = f"Member {serial}, which is not in your books,"
    else:
        member = find_member(registry, options.who, folder.run_id)
        serial, who = member.serial, f"{member.name} ({short(member.peer_id)})"
    why = options.why or registry.why_removed(serial) or ""  # the same command again keeps the reason
    signer = folder.signer()
    check_right(signer, authority, Right.REMOVE)
    return Change(registry, signer, authority, serial, is_foreign, who, why, options.restore, options.close)


def _foreign_serial(registry: Registry, who: str, restores: bool) -> int | None:
    """The serial number in `who`, if it is that of a member that is not in these books; else None.

    Such a member was let in with other books, such as those on a deputy's machine.

    Args:
        who: what was given on the command line
        restores: whether the member is removed already

    Raises:
        InputError: a member in these books has this number as its name
    """
    from swarm.protocol.certificates import CLOCK_SECONDS

    if not (who.isascii() and who.isdecimal() and len(who) <= 16 and who[0] != "0"):
        return None
    serial = int(who)
    latest = 1000 * (time.time() + CLOCK_SECONDS)
    found = registry.find(who)
    is_one = registry.why_removed(serial) is not None if restores else FIRST_SERIAL <= serial <= latest
    if not is_one or any(member.serial == serial for member in found):
        return None
    if called_so := [str(member.peer_id) for member in found if (member.why_removed is not None) == restores]:
        done = "restored" if restores else "removed"
        raise InputError(
            f"{who} is the name of a member in your books, and may be the serial number of another one. For the named "
            f"member, give its peer id: {listed(called_so)}. For the number, give {who} again when that one is {done}."
        )
    return serial


def find_member(registry: Registry, who: str, run_id: str) -> Member:
    """The one member that a person means. A whole peer id means its owner, even if another member has it as a name.

    Args:
        who: name, peer id or serial number

    Raises:
        InputError: no member is meant, or several may be
    """
    found = registry.find(who)
    found = [member for member in found if str(member.peer_id) == who] or found
    if len(found) > 1:
        peers = [f"{member.peer_id}{' (removed)' * (member.why_removed is not None)}" for member in found]
        raise InputError(f"{len(found)} members of run {run_id} are called {who}: give a peer id, {listed(peers)}.")
    if found:
        return found[0]
    names = listed(sorted({member.name for member in registry.members()}))
    there = f"give one of {names}" if names else "it has no members yet"
    raise InputError(f"No member of run {run_id} is called {ascii(who)[:80]}: {there}.")


# ---- the swarm ------------------------------------------------------------------------------------------------------


def hand_out(change: Change, lookout: Lookout) -> int:
    """Take the peers' newest list into the books, sign the new list, and hand it to the peers of the run.

    Args:
        lookout: for peers of the run

    Returns:
        how many peers have taken the list

    Raises:
        NotTold: no peer has taken the list, which may or may not be signed by then
        InputError: the list cannot be signed or kept
    """
    from swarm.network.record_push import MORE_RECEIVERS, push_until_taken
    from swarm.protocol.signed_lists import REMOVED

    try:
        with calling(lookout, change.authority) as (dht, manifest):
            deadline = Deadline(ANSWER_SECONDS)
            if change.registry.why_peers_refuse_the_list:  # this clock is right: it agrees with the peers'
                change.registry.begin_list_anew()
            _keep_newest(dht, manifest, change, deadline)
            peers = _who_trains(dht, manifest, deadline)[:MORE_RECEIVERS]
            signed = change.sign(has_looked=bool(peers))  # peers that train have stored the newest list
            num_taken = push_until_taken(dht, manifest.key_prefix, REMOVED, signed, tuple(peers), deadline.left)
    except (TimeoutError, CancelledError, OSError, RuntimeError):
        raise NotTold("The peers there are too busy to answer, or none answers any more.") from None
    if peers and not num_taken:
        raise NotTold("None of the peers there has taken the list.")
    return num_taken


def _keep_newest(dht: SwarmDHT, manifest: RunManifest, change: Change, deadline: Deadline) -> None:
    """Take the peers' newest list into the books: removals that were signed on another machine must not be lost."""
    from swarm.protocol.certificates import NotSigned
    from swarm.protocol.signed_lists import REMOVED

    dht.get(f"{manifest.key_prefix}.{REMOVED}", latest=True, return_future=True).result(deadline.left)
    if signed := dht.newest_list(REMOVED, deadline.left):
        try:
            change.registry.keep_removals(signed, change.authority)
        except NotSigned:  # this machine's clock is behind
            pass


def _who_trains(dht: SwarmDHT, manifest: RunManifest, deadline: Deadline) -> list[PeerID]:
    """The training peers that can be called. Client-mode peers ask for the list every few seconds."""
    from swarm.membership.progress_store import progress_records

    records = progress_records(dht, manifest, timeout_seconds=deadline.left)
    return [peer_id for peer_id, record in records.items() if not record.client_mode]
