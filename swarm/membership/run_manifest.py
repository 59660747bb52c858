"""The run manifest: a run's recipe, kept in the DHT by all its peers, so that a newcomer needs only an address."""

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import hivemind
from hivemind.dht.node import DHTNode
from hivemind.p2p import PeerID
from hivemind.utils.timed_storage import get_dht_time

from recipe.config import Recipe
from recipe.errors import InputError
from swarm.network.dht_storage import MAX_MANIFESTS
from swarm.network.known_peers import peer_of_address
from swarm.network.record_push import publish
from swarm.network.signed_records import RUNS_KEY, owned_entries
from swarm.protocol.certificates import CLOCK_SECONDS, Authority, NotSigned, Signer
from swarm.protocol.run_names import authority_in, is_run_id, key_prefix, signed_content

PROTOCOL = 25
"""Protocol version. It is raised when peers of two program versions could no longer train together.

11: a member may listen to a round before it has the weights of its step.
14: the size of a part follows its bytes on the wire.
15: members show a certificate, where the run has an organiser.
16: progress records say what state a peer holds; reducers clip what members send, unless the recipe says otherwise.
17: members follow the same orders of the organiser, sign what they send and average, and may be helpers.
18: tickets say to which state their members want to go back, and what they have measured; orders are signed one by one;
records say why a round failed, and what a test found.
19: shares follow the lines that tickets name; members compute each other's work again; records have a profile.
20: lists of work name the weights, and the micro-batches of all processes of a member; samples need a list.
21: a member that gives something else than its list of work says can be proven guilty.
22: buffers travel in parts of their own, and are averaged without regard to local steps.
23: rounds are named after their run as well, and tickets have bytes of their own, so that nothing signed counts twice;
a member without samples has no vote on going back; orders are signed for one recipe.
25: a manifest says when its organiser began the run, and orders are signed for that beginning.
"""

MAX_MANIFEST_BYTES = 64 * 1024
MAX_DIGEST_LENGTH = 64
MAX_LOOKED_AT = 8 * MAX_MANIFESTS
"""DHT entries that are searched for the organiser's key. Each node that answers can bring a thousand of its own."""
ANSWER_SECONDS = 5.0
"""Longest wait for a sign of life of the peers behind trusted addresses, if no manifest has come."""

logger = logging.getLogger(__name__)


class NoAnswerError(InputError):
    """None of the peers at the addresses that a person gave answers."""


class OtherProtocolError(InputError):
    """The run uses another protocol version, with which this program cannot train.

    Args:
        sentence: message for people
        content: content of the run's manifest, which anyone may have written
    """

    def __init__(self, sentence: str, content: Mapping[str, Any]):
        super().__init__(sentence)
        run_id = content.get("run_id")
        self.run_id = run_id if is_run_id(run_id) else ""
        try:
            authority = authority_in(content)
        except Exception:  # a stranger's bytes, as in `RunManifest.from_bytes`
            authority = None
        self.organiser = b"" if authority is None else authority.organiser
        """Public key of the organiser that signed the manifest; empty if it is not signed."""


@dataclass(frozen=True)
class RunManifest:
    """What every peer of a run has to agree on.

    Args:
        classes: digest of what all peers' data have in common: the class names of an image folder, whose order gives
            the labels, or the images of `glyphs`; empty where there is only one such data set
        organiser: public key of the organiser, who decides about members; empty in an open run
        signature: the organiser's signature over all the rest, as text; empty as long as it is not signed
        made: when it was signed, seconds since 1970; the latest manifest counts; 0 if it is not signed
        begun: when the organiser began the run at step 0, seconds since 1970; 0 if it has no organiser

    Raises:
        InputError: the run id is not a plain name (it becomes a folder on every volunteer's disk).
    """

    protocol: int
    run_id: str
    recipe: Recipe
    classes: str = ""
    organiser: bytes = b""
    signature: str = ""
    made: int = 0
    begun: int = 0

    def __post_init__(self):
        if not is_run_id(self.run_id):
            raise InputError(
                f"The run id {str(self.run_id)[:80]!r} has to be 1 to 64 letters, digits, dots, dashes or underscores, "
                "the first a letter or a digit: choose another --run-id."
            )

    @property
    def key_prefix(self) -> str:
        """Start of all DHT keys of this run."""
        return key_prefix(self.run_id, self.recipe.fingerprint, self.organiser, self.begun)

    @property
    def authority(self) -> Authority | None:
        """The organiser's key and the names that signatures of this run are checked against; None in an open run."""
        return Authority(self.run_id, self.organiser, self.key_prefix) if self.organiser else None

    def signed_by(self, signer: Signer) -> "RunManifest":
        """Return this manifest signed, for a run by invitation. The run begins now if it has not begun before."""
        now = int(time.time())
        dated = replace(self, made=now, begun=self.begun or now)
        content = signed_content(dated._content(), signer)
        return replace(dated, organiser=signer.public_key, signature=content["signature"])

    def to_bytes(self) -> bytes:
        """Encode as JSON of at most 64 KiB.

        Raises:
            InputError: it would be longer
        """
        content = self._content()
        if self.organiser:
            content |= {"organiser": self.organiser.hex(), "signature": self.signature}
        data = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
        if len(data) > MAX_MANIFEST_BYTES:
            raise InputError(
                f"The recipe takes {len(data)} bytes, a run manifest holds {MAX_MANIFEST_BYTES}: shorten its texts."
            )
        return data

    def _content(self) -> dict[str, Any]:
        return {
            "protocol": self.protocol,
            "run_id": self.run_id,
            "fingerprint": self.recipe.fingerprint,
            "recipe": json.loads(self.recipe.to_json()),
            "classes": self.classes,
            **({"made": self.made, "begun": self.begun} if self.made else {}),
        }

    @classmethod
    def from_bytes(cls, data: bytes) -> "RunManifest":
        """Read a manifest that anyone may have written.

        Raises:
            OtherProtocolError: it has another protocol version.
            InputError: anything else is wrong with it.
        """
        try:
            return cls._read(data)
        except InputError:
            raise
        except Exception as error:  # a stranger's bytes: nothing they hold may end this process
            raise InputError(f"The swarm holds a run manifest that cannot be read ({type(error).__name__}).") from None

    @classmethod
    def _read(cls, data: bytes) -> "RunManifest":
        if not isinstance(data, bytes) or len(data) > MAX_MANIFEST_BYTES:
            raise InputError(f"The swarm holds a run manifest that is not {MAX_MANIFEST_BYTES} bytes or less.")
        content = json.loads(data.decode(), parse_constant=_no_constant)
        protocol = content["protocol"]
        if type(protocol) is not int or protocol < 1:
            raise InputError("The swarm holds a run manifest without a protocol version.")
        if protocol > PROTOCOL:
            raise OtherProtocolError(
                f"The run speaks protocol {protocol}, this program {PROTOCOL}: update it (`git pull`) and join again.",
                content,
            )
        if protocol < PROTOCOL:
            raise OtherProtocolError(
                f"The run speaks protocol {protocol}, this program {PROTOCOL}: use the version that its peers use, "
                "or ask its organiser to start it again with this one.",
                content,
            )
        recipe = Recipe.from_json(json.dumps(content["recipe"]))
        if recipe.fingerprint != content["fingerprint"]:
            raise InputError(
                "This version reads the swarm's recipe differently: install the version of the run's first peer."
            )
        classes = content.get("classes", "")
        if not isinstance(classes, str) or len(classes) > MAX_DIGEST_LENGTH:
            raise InputError("The swarm holds a run manifest with an invalid digest of the class names.")
        try:
            authority = authority_in(content)
        except NotSigned as error:
            raise InputError(f"The swarm holds a run manifest that {error}.") from None
        if authority is None and content.keys() & {"signature", "made", "begun"}:
            raise InputError("The swarm holds a run manifest that is signed and names no organiser.")
        if authority is None:
            return cls(protocol, content["run_id"], recipe, classes)
        made, begun = content["made"], content["begun"]
        latest = time.time() + CLOCK_SECONDS
        if any(type(second) is not int or not 0 < second <= latest for second in (made, begun)):
            raise InputError("The swarm's run manifest has a time in the future: check this machine's clock.")
        signature = content["signature"]
        return cls(protocol, content["run_id"], recipe, classes, authority.organiser, signature, made, begun)

    def with_classes(self, classes: str, data_dir: Path) -> "RunManifest":
        """Return the manifest of a peer with these data. The peer that starts a run fixes them.

        Args:
            classes: their digest
            data_dir: where they are

        Raises:
            InputError: the run has other data, so that the same label would mean something else, or a sample held out
                here would be trained on there
        """
        if self.classes and self.classes != classes:
            raise InputError(
                f"The data in {data_dir} are not the data of run {self.run_id!r}: the class names, or glyphs.npz or "
                "vocab.txt, differ. Ask the organiser for the data, or for the class names."
            )
        return self if classes == self.classes else replace(self, classes=classes)


def publish_manifest(
    dht: hivemind.DHT, manifest: RunManifest, expiration_seconds: float = 600, timeout_seconds: float = 30
) -> bool:
    """Store the manifest under `swarm.runs` in this peer's name; True if any node took it.

    Raises:
        concurrent.futures.TimeoutError: the DHT process did not answer.
    """
    _, stored = publish(dht, RUNS_KEY, manifest.to_bytes(), get_dht_time() + expiration_seconds)
    return bool(stored.result(timeout_seconds))


def read_manifests(
    dht: hivemind.DHT,
    trusted: Sequence[str] = (),
    run_id: str | None = None,
    organiser: bytes = b"",
    timeout_seconds: float = 20,
    may_begin: bool = False,
) -> dict[str, RunManifest]:
    """Read the manifests of the runs in this DHT, by run id.

    Returns as soon as there is one, and an empty dictionary after the timeout. Malformed manifests are left out, with
    one line of log. Of more than 1,000, those of trusted peers and the first others are looked at.

    Args:
        trusted: addresses that a person gave. The manifests of the peers behind them count, if there are any; otherwise
            the manifest that most peers hold
        run_id: the run that is asked for; if there is a manifest of it, no others are returned
        organiser: public key of the organiser to search for; then only manifests with that signature count
        may_begin: whether the caller begins the run if there is no manifest; no stranger can keep it from that

    Raises:
        OtherProtocolError: the run that is asked for, or every run there is, has another protocol version. A trusted
            peer has to say so, if there are any, unless there is no manifest to use and `may_begin` is False. The
            organiser has to have signed it, if one is given
        NoAnswerError: there is no manifest, no trusted peer answers, and `may_begin` is False
    """
    deadline = time.monotonic() + timeout_seconds
    peers = {PeerID.from_base58(peer_of_address(address)) for address in trusted}
    while True:
        said, refused, others = _valid_manifests(_fetch(dht, deadline - time.monotonic()), peers, organiser)
        pause_seconds = min(0.5, deadline - time.monotonic())
        if said or pause_seconds <= 0:
            break
        time.sleep(pause_seconds)
    known = {manifest.run_id for manifest in said.values()}
    if peers and (known or may_begin):
        others = {peer: error for peer, error in others.items() if peer in peers}
    asked = [error for error in others.values() if error.run_id == run_id]
    if others and not known:
        raise next(iter(asked or others.values()))
    if asked and run_id not in known:
        raise asked[0]
    # A search gives up peers that do not answer, and then finds nothing, as where there is no run.
    if peers and not (said or may_begin or _one_answers(dht, peers)):
        raise NoAnswerError("The peers there do not answer: try again, or ask for another address.")
    if refused:
        count = "1 run manifest is" if len(refused) == 1 else f"{len(refused)} run manifests are"
        logger.warning("%s left out%s because: %s", count, "" if len(refused) == 1 else ", the first", refused[0])
    said = {peer: manifest for peer, manifest in said.items() if manifest.run_id == run_id} or said
    if organiser:
        return {manifest.run_id: manifest for manifest in sorted(said.values(), key=lambda manifest: manifest.made)}
    by_trusted = {peer: manifest for peer, manifest in said.items() if peer in peers}
    votes = Counter((by_trusted or said).values())
    chosen: dict[str, RunManifest] = {}
    for manifest, _ in votes.most_common():
        chosen.setdefault(manifest.run_id, manifest)  # most common first: of one run id, the first one counts
    return chosen


def choose_manifest(manifests: Mapping[str, RunManifest], run_id: str | None, organiser: bytes = b"") -> RunManifest:
    """Choose the run to join: the one with that id, or the only one.

    Args:
        manifests: manifests by run id, of `read_manifests`
        run_id: the run that is asked for, if any
        organiser: public key of the organiser that the manifests were searched for; empty if none was given

    Raises:
        InputError: there is no such run, or there are several and none is asked for.
    """
    names = ", ".join(sorted(manifests))
    if organiser and run_id not in manifests:
        raise InputError(
            f"The peers there know of no run {run_id} of this organiser: ask the organiser whether it is running, and "
            "for a new join line."
        )
    if not manifests:
        raise InputError(
            "The peers there know of no run: check that training has started there, or ask for another address "
            "(python -m swarm.peer --recipe NAME --run-id NAME --initial-peers ADDRESS starts a run there)."
        )
    if run_id is None and len(manifests) > 1:
        raise InputError(f"Several runs are in this swarm: choose one with --run-id ({names}).")
    if run_id is not None and run_id not in manifests:
        raise InputError(
            f"No run {run_id!r} is in this swarm: give --run-id one of {names}, or leave it out (python -m swarm.peer "
            "--recipe NAME with the same address and --run-id starts it there)."
        )
    return manifests[run_id] if run_id is not None else next(iter(manifests.values()))


def check_overrides(manifest: RunManifest, wanted: Mapping[str, object]) -> None:
    """Compare settings that were given next to `--initial-peers` with those of the run.

    Args:
        wanted: fields of the recipe and the values that were asked for

    Raises:
        InputError: they differ; the sentence shows each difference.
    """
    missing = object()
    differences = []
    for name, here in wanted.items():
        swarm = getattr(manifest.recipe, name, missing)
        if swarm is missing:
            raise InputError(f"The recipe has no setting {name!r}: drop that option.")
        if _plain(swarm) != _plain(here):
            differences.append(f"{name}: swarm {swarm}, here {here}")
    if differences:
        raise InputError(
            f"Run {manifest.run_id!r} is trained with other settings ({'; '.join(differences)}): drop the option to "
            "join it, or start another run without --initial-peers."
        )


def _fetch(dht: hivemind.DHT, timeout_seconds: float) -> Any:
    """What is under `swarm.runs`; None when there is no answer."""
    try:
        return dht.get(RUNS_KEY, latest=True, return_future=True).result(max(1, timeout_seconds))
    except Exception as error:
        logger.debug("Reading the run manifests failed: %r", error)
        return None


def _one_answers(dht: hivemind.DHT, peers: Set[PeerID]) -> bool:
    """Whether any of these peers answers a call."""
    try:
        return dht.run_coroutine(partial(_ping, peers), return_future=True).result(ANSWER_SECONDS)
    except Exception as error:
        logger.debug("Calling the trusted peers failed: %r", error)
        return False


async def _ping(peers: Set[PeerID], _dht: hivemind.DHT, node: DHTNode) -> bool:
    return any(await asyncio.gather(*map(node.protocol.call_ping, peers)))


def _valid_manifests(
    found: Any, trusted: Set[PeerID], organiser: bytes = b""
) -> tuple[dict[PeerID, RunManifest], list[InputError], dict[PeerID, OtherProtocolError]]:
    """Sort what was found.

    Args:
        trusted: peers whose entries are looked at however many there are
        organiser: only manifests of this organiser are looked at, and more entries are searched for them

    Returns:
        usable manifests by the peer that stored each; why others were refused; the refusals for another version, by
        peer
    """
    manifests, refused, others = {}, [], {}
    entries = owned_entries(found, MAX_LOOKED_AT if organiser else MAX_MANIFESTS, trusted)
    for peer, value in entries:
        # A cheap look for the key, before JSON is parsed and signatures are checked.
        if organiser and not (isinstance(value, bytes) and organiser.hex().encode() in value):
            continue
        try:
            manifest = RunManifest.from_bytes(value)
        except InputError as error:
            refused.append(error)
            if isinstance(error, OtherProtocolError) and (not organiser or error.organiser == organiser):
                others[peer] = error
            continue
        if not organiser or manifest.organiser == organiser:
            manifests[peer] = manifest
    return manifests, refused, others


def _no_constant(name: str) -> None:
    raise InputError(f"The swarm holds a run manifest with {name} in it.")


def _plain(value: object) -> object:
    """Turn tuples into lists: a setting is the same in both forms."""
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
