"""How a peer becomes a member of its run and, on the organiser's machine, how it lets other peers in."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from recipe.config import Recipe
from recipe.errors import InputError
from recipe.run_folder import RunFolder
from swarm.enrolment.join_line import JoinLine
from swarm.enrolment.removed import Removed
from swarm.network.addresses import check_port_free, closed_ports, is_loopback, join_commands
from swarm.peer.options import PeerOptions
from swarm.peer.status import program

SEARCH_SECONDS = 15.0
OPEN_USES = 100_000
"""Uses of an invitation without a limit: as many as there may be members."""


class Entry:
    """How one peer enters a run: as a member of it, if the run is by invitation.

    Args:
        options: the command line
        line: the join line, if the peer was invited
    """

    def __init__(self, options: PeerOptions, line: JoinLine | None):
        self.options, self.line = options, line
        self.membership = None
        """Membership of this peer; None as long as it has none, and in an open run."""
        self._identity, self._name = Path(), ""
        self._enrolment = None
        self._signer = None
        self._watch = None
        self._run_id = line.run_id if line is not None else options.run_id

    @property
    def enrolment_process(self):
        """Process of the server where newcomers enrol; None except at the organiser's peer."""
        return None if self._enrolment is None else self._enrolment.process

    @property
    def lets_others_in(self) -> bool:
        """Whether this is the organiser's peer in a run by invitation."""
        return self._enrolment is not None

    @property
    def organiser(self) -> bytes:
        """Public key of the organiser that this peer wants to train for; empty if any organiser will do."""
        if self.line is not None:
            return self.line.organiser
        if (kept := self._kept_credentials()) is not None:
            return kept.line.organiser
        if self._organisers_folder is not None:
            try:
                return self._organisers_folder.authority.organiser
            except InputError:  # the organiser has not started the run yet
                pass
        return b""

    @property
    def _organisers_folder(self):
        from swarm.enrolment.organiser_folder import OrganiserFolder

        if not self.options.membership.by_invitation or self._run_id is None:
            return None
        return OrganiserFolder(self.options.machine.output_dir, self._run_id, self.options.membership.organiser_key)

    @property
    def _folder(self) -> RunFolder:
        return RunFolder(self.options.machine.output_dir.expanduser() / self._run_id / self._name)

    def name_peer(self, identity: Path, name: str) -> None:
        """Set the identity and the name of this peer.

        Args:
            identity: file of its private key
            name: public name
        """
        self._identity, self._name = identity, name

    def ask_to_be_let_in(self, identity: Path, name: str) -> None:
        """Become a member, if this peer was invited. A refusal is raised before anything else is started.

        Args:
            identity: file of this peer's private key
            name: public name

        Raises:
            InputError: the organiser does not let it in, or cannot be asked
        """
        from swarm.peer.membership.credentials import become_member

        self.name_peer(identity, name)
        if self.line is not None:
            self.membership = become_member(self.line, identity, name, self._folder, self.options.certificate)
        elif self.options.certificate is not None:
            raise InputError("--certificate goes with a join line: give that as well (swarm join swarm://...).")

    @property
    def may_serve(self) -> bool:
        """Whether the organiser allows other peers to call this one; True without a membership."""
        from swarm.protocol.certificates import Role

        own = None if self.membership is None else self.membership.new_admission().own
        return own is None or Role.SERVE in own.roles

    def new_manifest(self, protocol: int, recipe: Recipe):
        """Return the manifest of a run that no peer trains yet, or that this peer goes on with alone.

        Raises:
            InputError: the organiser's key cannot be made or read, or is not that of the run; or this peer was invited
                and has no kept manifest
        """
        from swarm.membership.run_manifest import RunManifest

        self._run_id = self._run_id or f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        if (folder := self._organisers_folder) is not None:
            self._signer = folder.make_signer()
            if self.organiser not in (b"", self._signer.public_key):
                raise InputError(
                    f"Run {self._run_id} has another organiser's key than {folder.key}: give the --organiser-key FILE "
                    "with which it was started, or another --run-id."
                )
            begun = self._begun_before() or int(time.time())
            return RunManifest(protocol, self._run_id, recipe, organiser=self._signer.public_key, begun=begun)
        kept = self._kept_credentials()
        is_same = kept is not None and (self.line is None or self.line.organiser == kept.line.organiser)
        if is_same and kept.manifest:
            return RunManifest.from_bytes(kept.manifest)
        if self.line is not None:
            raise InputError(
                f"This peer cannot go on alone: {self._folder.membership} does not say what run {self._run_id} trains. "
                "Join again when one of its peers runs."
            )
        return RunManifest(protocol, self._run_id, recipe)

    def _begun_before(self) -> int:
        """Return when the run of this name began that this peer was in, in seconds since 1970; 0 if there is none.

        It counts even if that run has left no checkpoint here: other peers may have trained on since, and this peer has
        to meet them again.
        """
        from swarm.membership.run_manifest import RunManifest

        kept = self._kept_credentials()
        try:
            return 0 if kept is None else RunManifest.from_bytes(kept.manifest).begun
        except InputError:  # of another version
            return 0

    def take_part(self, dht, manifest, addresses: Sequence[str]) -> None:
        """Make this peer a member of the run of this manifest, and tell its DHT process. Does nothing in an open run.

        Args:
            dht: of this peer
            addresses: where this peer can be called

        Raises:
            Removed: the organiser has removed this peer
            InputError: this peer was not invited, or may not train; or, on the organiser's machine, no other peer could
                be let in
        """
        from swarm.network.record_push import push_list
        from swarm.protocol.certificates import Role

        if manifest.authority is None:
            return
        self._run_id = manifest.run_id
        if self.membership is None:
            self.membership = self._organisers_own(dht, manifest, addresses) or self._kept(manifest, dht.peer_id)
        self.membership = replace(self.membership, run=manifest.key_prefix)
        admission = self.membership.new_admission()
        dht.take_part(manifest.key_prefix, manifest.authority, admission.certificate)
        self._look_for_newer_lists(dht, manifest.key_prefix)  # orders count from the first update on
        admission = self.membership.new_admission()
        if (why := admission.why_this_peer_was_removed) is not None:
            raise Removed(f"The organiser has removed this peer from run {manifest.run_id}: {why}.")
        if admission.own is not None and Role.TRAIN not in admission.own.roles and not self.options.role.helps:
            hint = ": add --role helper, as which it may take part" if self.may_serve else ""
            raise InputError(f"The organiser has not given this peer the role to train in run {manifest.run_id}{hint}.")
        for kind, signed in admission.lists.all_signed.items():
            with contextlib.suppress(TimeoutError):  # the other peers have the list, or get it from another one
                push_list(dht, manifest.key_prefix, kind, signed)

    def _look_for_newer_lists(self, dht, prefix: str) -> None:
        """Search the swarm for newer lists that the organiser has signed, and keep them."""
        from swarm.network.signed_records import LISTS
        from swarm.protocol.certificates import NotSigned

        known = self.membership.new_admission().lists
        with contextlib.suppress(TimeoutError):
            searches = [dht.get(f"{prefix}.{kind}", latest=True, return_future=True) for kind in LISTS]
            for kind, search in zip(LISTS, searches, strict=True):
                search.result(SEARCH_SECONDS)
                if dht.list_number(kind) in (0, known.number(kind)):
                    continue
                with contextlib.suppress(NotSigned):  # this clock was set back; other peers have the list, too
                    known.take(kind, dht.newest_list(kind))
                credentials = self.membership.credentials.with_list(kind, known.signed(kind))
                self.membership = replace(self.membership, credentials=credentials)

    def _kept_credentials(self):
        """Return the credentials that this peer has kept from an earlier time in this run; None if there are none."""
        from swarm.peer.membership.credentials import Credentials

        return Credentials.read(self._folder.membership) if self._run_id and self._name else None

    def _organisers_own(self, dht, manifest, addresses: Sequence[str]):
        """If this is the organiser's own peer, let other peers in from now on, and return its membership; else None."""
        from swarm.peer.membership.credentials import organisers_own
        from swarm.peer.membership.enrolment_process import EnrolmentProcess

        folder = self._organisers_folder
        if folder is None:
            return None
        if not (self._signer or folder.key.exists()):
            if folder.is_started:  # else this is an ordinary member of another person's run
                folder.signer()  # raises InputError: the key is missing
            return None
        signer = self._signer or folder.signer()
        if signer.public_key != manifest.organiser:
            return None
        if not addresses:
            fix = "leave out --client-mode" if self.options.connection.client_mode else "give it a --port that is open"
            raise InputError(f"The organiser's peer has to be one that others can call: {fix}.")
        self._enrolment = EnrolmentProcess(folder, signer, manifest.authority, self._enrolment_port(folder))
        if dht.opened is not None and not dht.opened.open_same(self._enrolment.port):
            print(f"Your router did not open TCP port {self._enrolment.port}, where newcomers enrol: forward it.")
        public_ip = self.options.connection.public_ip
        return organisers_own(folder, signer, addresses, self._enrolment.port, dht.peer_id, self._name, public_ip)

    def _enrolment_port(self, folder) -> int:
        """Return the port where newcomers enrol; 0 for any.

        It is the given one, or the one after the peer's port, or that of before, which join lines name.

        Raises:
            InputError: another program uses the port of before
        """
        membership, port = self.options.membership, self.options.connection.port
        if membership.enrolment_port:
            return membership.enrolment_port
        if port:
            return port + 1
        try:
            noted = folder.enrolment_port
        except InputError:
            return 0  # there is no join line yet
        try:
            check_port_free(noted)
        except InputError:
            raise InputError(
                f"Another program uses port {noted}, which the join lines of run {self._run_id} name for enrolment: "
                "end that program (perhaps `swarm enrol`), or give another --enrolment-port and send new join lines."
            ) from None
        return noted

    def _kept(self, manifest, peer_id):
        """Return the membership of a member that comes back without its join line."""
        from swarm.peer.membership.credentials import become_member

        kept = self._kept_credentials()
        if kept is None or kept.line.organiser != manifest.organiser or kept.certificate_of(peer_id) is None:
            raise InputError(
                f"Run {manifest.run_id} is by invitation: ask its organiser for a join line, and give that in place of "
                "the address (swarm join swarm://...)."
            )
        return become_member(kept.line, self._identity, self._name, self._folder)

    def signed(self, manifest):
        """Return the manifest as it is published: with the organiser's signature, if this is the organiser's peer."""
        if self.membership is None or self.membership.sign is None:
            return manifest
        return self.membership.sign(manifest)

    def keep(self, admission, manifest, folder: RunFolder) -> None:
        """Write down what this peer needs to come back; a full disk does not keep it from training."""
        from swarm.peer.membership.credentials import keep

        if self.membership is not None:
            try:
                keep(self.membership, admission, manifest, folder)
            except OSError:
                pass  # the session says that the folder cannot be written

    def invitation(self) -> tuple[JoinLine, str] | None:
        """Return a join line for the screen, and a sentence about it; None except at the organiser's peer.

        A peer may start again many times. It prints the same line as long as people can join with it. It prints a new
        one if the line has expired or other numbers are asked for. It prints none if the organiser has closed the line
        or it is used up.

        Raises:
            InputError: the organiser's folder cannot be used
        """
        from swarm.protocol.certificates import EVERYTHING

        folder, membership = self._organisers_folder, self.options.membership
        if not self.lets_others_in or folder is None:
            return None
        uses, days = OPEN_USES if membership.open else membership.invite, membership.invite_days
        run = f"--run-id {folder.run_id} --output-dir {self.options.machine.output_dir}"
        command = f"{program('swarm')} invite --uses {uses or 1} --days {days:g} {run}"
        if not membership.invite:
            return folder.join_line(), f"No invitation was made (--invite 0). To make one:\n  {command}"
        registry, token = folder.registry, folder.first_token(uses, days)
        found = registry.invitation_of(token)
        if found is None or (found.uses_left and found.expires_at < time.time()):
            token = registry.invite("", days, uses, EVERYTHING)
            folder.keep_first_token(token, uses, days)
            found = registry.invitation_of(token)
        if not found.uses_left:
            closed = "The invitation of this run was closed or is used up."
            return folder.join_line(), f"{closed} To make a new one:\n  {command}"
        until = time.strftime("%Y-%m-%d", time.localtime(found.expires_at))
        who = "One person" if found.uses_left == 1 else f"{found.uses_left} people"
        who = "Anyone" if membership.open else who
        return folder.join_line(token), f"{who} can join with this line, until {until}."

    def watch(
        self,
        dht,
        admission,
        prefix: str,
        tell: Callable[[bytes, Mapping[str, bytes]], bool],
        on_end: Callable[[InputError], None],
    ):
        """Follow the organiser's lists and renew the certificate from now on; arguments as of `MemberWatch`."""
        from swarm.peer.membership.member_watch import MemberWatch

        if self.membership is not None:
            merge = self.membership.merge
            self._watch = MemberWatch(dht, admission, prefix, tell, self.membership.renew, on_end, merge)
            self._watch.start()

    def stop_watching(self) -> None:
        """Stop what `watch` has started: this peer trains no more."""
        if self._watch is not None:
            self._watch.stop()

    def stop(self) -> None:
        """Let no more peers in."""
        if self._enrolment is not None:
            self._enrolment.stop()


def open_door(manifest, addresses: Sequence[str], joins: bool) -> str:
    """Return a warning about an open run; empty for a run with members, and for one that stays on this machine.

    Args:
        addresses: of peers of the run, this one included
        joins: whether another peer has started it
    """
    if manifest.authority is not None or all(map(is_loopback, addresses)):
        return ""
    ask = "ask its organiser to start" if joins else "start"
    return (
        "warning: This run is open: anyone with an address can join it and corrupt its weights. For a run with members "
        f"only, {ask} a new one with {program('swarm')} start (--start-from CHECKPOINT keeps the weights)."
    )


def how_to_join(
    addresses: Sequence[str],
    public_ip: str | None,
    output_dir: Path,
    invitation: tuple[JoinLine, str] | None,
    company: str,
) -> str:
    """Return what the first peer of a run prints last. The line to send stands at the end, visible while it waits.

    Args:
        addresses: where the peer can be called
        public_ip: as `closed_ports` has it
        output_dir: where the organiser's folder is
        invitation: as `Entry.invitation` returns it; None in an open run, where an address is enough to join
        company: a sentence that says for how many peers this one waits; empty if it trains at once
    """
    swarm, said = program("swarm"), []
    line, what = invitation or (None, "")
    if line is not None:
        run = f"--run-id {line.run_id} --output-dir {output_dir}"
        commands = [f"  {swarm} {words} {run}" for words in ("members", "invite", "remove NAME")]
        said += ["To list, invite or remove members:", *commands]
    said += [closed_ports(addresses, public_ip, 0 if line is None else line.enrolment_port)]
    if line is not None and not line.token:
        said += [what, company]
    else:
        commands = join_commands(addresses, f"{swarm} join", public_ip)
        shown = commands if line is None else f"# {what}\n\n{swarm} join {line}"
        said += [company, f"\n{' Others join with this line ':=^80}\n\n{shown}\n"]
    return "\n".join(filter(None, said))
