"""Adds ledgers up again: an update counts when at least two thirds of its members have signed the same of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from recipe.errors import InputError
from swarm.ledger.chain import Chain, Finding, Given, Kind, Place, Word, read_chains
from swarm.protocol.certificates import Authority, Certificate, NotSigned
from swarm.protocol.run_names import is_prefix_of

MAX_FINDINGS = 1000
"""Which are kept; further ones are counted."""
CONFIRMED, UNCONFIRMED, ALONE = "confirmed", "unconfirmed", "alone"


@dataclass
class Credit:
    """What one peer has given, as it said.

    Args:
        samples: in updates that two thirds of their members confirm
        updates: those that it took part in
        unconfirmed_samples: in other updates
        unconfirmed_updates: the same
        alone_samples: in updates that it has made alone, of which nobody else knows
        alone_updates: the same
        name: under which it is shown
        serial: of the member, where the run has an organiser
    """

    samples: int = 0
    updates: int = 0
    unconfirmed_samples: int = 0
    unconfirmed_updates: int = 0
    alone_samples: int = 0
    alone_updates: int = 0
    name: str = ""
    serial: int | None = None

    def add(self, samples: int, how: str) -> None:
        """One more update."""
        if how == CONFIRMED:
            self.samples, self.updates = self.samples + samples, self.updates + 1
        elif how == ALONE:
            self.alone_samples, self.alone_updates = self.alone_samples + samples, self.alone_updates + 1
        else:
            self.unconfirmed_samples += samples
            self.unconfirmed_updates += 1


@dataclass
class Round:
    """What is said of one group.

    Args:
        claims: each member, and the samples that it says it gave
        step: that it has ended
        said: as a member has written it
        words: what the members that have signed it say
    """

    claims: tuple[tuple[str, int], ...]
    step: int
    said: Word
    words: dict[str, Word] = field(default_factory=dict)

    @property
    def most(self) -> int:
        """Samples for which a member counts at most, as most of them say; the name binds everything else."""
        return self._agreed[0]

    @property
    def how(self) -> str:
        """Whether it is confirmed, not, or of a peer that was alone."""
        if len(self.claims) == 1:
            return ALONE
        return CONFIRMED if 3 * self._agreed[1] >= 2 * len(self.claims) else UNCONFIRMED

    @property
    def _agreed(self) -> tuple[int, int]:
        if not self.words:
            return self.said.most, 0
        ((most, agreeing),) = Counter(word.most for word in self.words.values()).most_common(1)
        return most, agreeing


@dataclass
class Audit:
    """What came out of it.

    Args:
        run: start of the run's keys in the DHT
        organiser: her public key; empty if the run is open to everybody
        rounds: by name of the group
        credits: by peer id
        findings: what was tampered with
        more_findings: how many there are beyond those
        unsigned: updates that their peers have not signed, or not yet
        equal_states: of how many states all who have taken a digest say the same
        different_states: of how many they do not
    """

    run: str = ""
    organiser: bytes = b""
    rounds: dict[bytes, Round] = field(default_factory=dict)
    credits: dict[str, Credit] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    more_findings: int = 0
    unsigned: int = 0
    equal_states: int = 0
    different_states: int = 0

    def find(self, kind: Kind, place: Place, peer: str) -> None:
        """Note what is wrong."""
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(Finding(place, peer, kind))
        else:
            self.more_findings += 1

    @property
    def updates(self) -> dict[str, int]:
        """How many are confirmed, not, and made alone."""
        counted = Counter(found.how for found in self.rounds.values())
        return {how: counted[how] for how in (CONFIRMED, UNCONFIRMED, ALONE)}

    @property
    def forked_steps(self) -> int:
        """Steps that more than one confirmed group has ended."""
        groups = Counter(found.step for found in self.rounds.values() if found.how == CONFIRMED)
        return sum(number > 1 for number in groups.values())

    @property
    def ranked(self) -> list[tuple[str, Credit]]:
        """The credits by peer id; who has given most comes first."""
        return sorted(self.credits.items(), key=lambda item: (-item[1].samples, -item[1].unconfirmed_samples, item[0]))

    @property
    def members(self) -> list[dict[str, Any]]:
        """The same for each member of a run with an organiser, over all its peer ids."""
        found: dict[int, dict[str, Any]] = {}
        for _, credit in self.ranked:
            if credit.serial is not None:
                empty = {"serial": credit.serial, "name": credit.name, "samples": 0, "updates": 0}
                member = found.setdefault(credit.serial, empty)
                member["samples"] += credit.samples
                member["updates"] += credit.updates
        return sorted(found.values(), key=lambda member: -member["samples"])

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        findings = [
            {**vars(finding.place), "peer": finding.peer, "kind": finding.kind.name, "text": str(finding)}
            for finding in self.findings
        ]
        return {
            "run": self.run,
            "organiser": self.organiser.hex(),
            "updates": self.updates,
            "samples": sum(credit.samples for credit in self.credits.values()),
            "unsigned_updates": self.unsigned,
            "forked_steps": self.forked_steps,
            "states": {"equal": self.equal_states, "different": self.different_states},
            "peers": [{"peer": peer, **vars(credit)} for peer, credit in self.ranked],
            "members": self.members,
            "findings": findings,
            "more_findings": self.more_findings,
        }


def audit(paths: Sequence[Path], run_id: str = "", organiser: bytes = b"") -> Audit:
    """Read these ledgers and add them up.

    Args:
        paths: files of ledgers, or folders in which they are
        run_id: if it is given, ledgers of other runs are refused
        organiser: of that run; empty if it is open to everybody

    Raises:
        InputError: there is no ledger, it cannot be read, or they are of several runs, or of another one
    """
    result, chains, given = Audit(), [], {}
    for path in ledgers_in(paths):
        chains += read_chains(path, given, result.find)
    if not chains and not result.findings:
        named = ", ".join(map(str, paths))
        raise InputError(f"There is no ledger in {named}: a peer keeps ledger.jsonl in its run folder.")
    _check_run(chains, run_id, organiser)
    if chains:
        result.run, result.organiser = chains[0].start.run, chains[0].start.organiser
    said = _once(chains, result)
    members = _members(said, result)
    _listen(said, given, members, result)
    _note_unsigned(chains, given, members, result)
    names = {chain.peer: chain.name for chain in chains}
    for found in result.rounds.values():
        how, most = found.how, found.most
        for peer, samples in found.claims:
            if peer not in result.credits:
                result.credits[peer] = credit = Credit(name=names.get(peer, ""))
                if (member := members.get(peer)) is not None:
                    credit.name, credit.serial = member.name, member.serial
            result.credits[peer].add(min(samples, most), how)
        for peer, word in found.words.items():
            if how == CONFIRMED and word.most != most:
                result.find(Kind.CONTRADICTS, word.place, peer)
    _compare_states(said, result)
    return result


def ledgers_in(paths: Iterable[Path]) -> list[Path]:
    """The files of ledgers that are meant, each once.

    Of a folder, a ledger that was set aside (`ledger-1.jsonl`) is not one of them: it is of an earlier run, or of
    another version of this program.

    Raises:
        InputError: there is no such file
    """
    found: list[Path] = []
    for path in paths:
        path = path.expanduser()
        if path.is_dir():
            found += sorted({*path.rglob("ledger.jsonl"), *path.rglob("Qm*.jsonl")})
        elif path.is_file():
            found.append(path)
        else:
            raise InputError(f"There is no file {path}: give a ledger.jsonl, or a folder in which there are some.")
    return list(dict.fromkeys(file.resolve() for file in found))


def _check_run(chains: Sequence[Chain], run_id: str, organiser: bytes) -> None:
    """Raises InputError: they are of several runs, or of another one"""
    runs = sorted({chain.start.run for chain in chains})
    if len(runs) > 1:
        raise InputError(f"These are ledgers of several runs ({', '.join(runs[:4])}): give those of one.")
    if run_id and runs and not is_prefix_of(runs[0], run_id, organiser):
        raise InputError(f"This is the ledger of another run ({runs[0]}): give that of run {run_id}.")


Said = list[tuple[Chain, list[Word]]]


def _once(chains: Sequence[Chain], result: Audit) -> Said:
    """What peers have signed, once: of a ledger there may be several copies, some shorter than others."""
    seen: dict[tuple[bytes, int], bytes] = {}
    said: Said = []
    for chain in chains:
        new = []
        for word in chain.said:
            name = (chain.id, word.n)
            if name not in seen:
                seen[name] = word.digest
                new.append(word)
            elif seen[name] != word.digest:
                result.find(Kind.TWO_HISTORIES, word.place, chain.peer)
                break
        said.append((chain, new))
    return said


def _members(said: Said, result: Audit) -> dict[str, Certificate]:
    """Those whom the organiser has let in, by peer id; also who was removed later, and whose time has ended since."""
    members: dict[str, Certificate] = {}
    for chain, words in said:
        for word in words:
            if not word.certificate or not chain.start.organiser:
                continue
            try:
                member = _certificate(word.certificate, chain)
            except NotSigned:
                result.find(Kind.FALSE_CERTIFICATE, word.place, chain.peer)
                continue
            known = members.get(member.peer_id.to_base58())
            if known is None or known.begin <= member.begin:
                members[member.peer_id.to_base58()] = member
    for chain, words in said:
        has_said = any(word.group for word in words)
        if chain.start.organiser and has_said and chain.peer not in members:
            result.find(Kind.UNKNOWN_PEER, chain.place, chain.peer)
    return members


def _certificate(data: bytes, chain: Chain) -> Certificate:
    """Raises NotSigned: it is none of this run"""
    try:
        run_id = msgspec.msgpack.decode(msgspec.msgpack.decode(data)[0])[0]
    except (msgspec.MsgspecError, TypeError, LookupError, ValueError, RecursionError):
        raise NotSigned("cannot be read") from None
    if not is_prefix_of(chain.start.run, run_id, chain.start.organiser):
        raise NotSigned("is for another run")
    return Certificate.read(data, Authority(run_id, chain.start.organiser))


def _listen(said: Said, given: dict[bytes, Given], members: dict[str, Certificate], result: Audit) -> None:
    """Who says what of each group."""
    for chain, words in said:
        if chain.start.organiser and chain.peer not in members:
            continue
        for word in words:
            if not word.group:
                continue
            found = _round(word, given, result)
            if found.words.setdefault(chain.peer, word).most != word.most:
                result.find(Kind.TWO_VERSIONS, word.place, chain.peer)


def _note_unsigned(
    chains: Sequence[Chain], given: dict[bytes, Given], members: dict[str, Certificate], result: Audit
) -> None:
    """What was written and not signed confirms nothing, but it was said."""
    for chain in chains:
        for word in chain.unsigned:
            if word.group and not (chain.start.organiser and chain.peer not in members):
                result.unsigned += 1
                _round(word, given, result)


def _round(word: Word, given: dict[bytes, Given], result: Audit) -> Round:
    if word.group not in result.rounds:
        found = given[word.group]
        result.rounds[word.group] = Round(found.claims, found.step, word)
    return result.rounds[word.group]


def _compare_states(said: Said, result: Audit) -> None:
    """Digests of a state that several peers have held; other hardware may round it otherwise."""
    digests: dict[tuple[int, bytes], dict[str, bytes]] = {}
    for chain, words in said:
        for step, lineage, digest in (word.state for word in words if word.state is not None):
            digests.setdefault((step, lineage), {})[chain.peer] = digest
    several = [set(found.values()) for found in digests.values() if len(found) > 1]
    result.equal_states = sum(len(found) == 1 for found in several)
    result.different_states = len(several) - result.equal_states
