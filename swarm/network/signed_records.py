"""Records that only their owner can write: the subkey is the owner's public key, and the value is signed with its key.

A peer's id is the hash of that public key (libp2p's definition). So every record says which peer wrote it, and no peer
can write in the name of another. A record that is unsigned, too large, unreadable or meant to stay for ever is not
stored, not passed on and not read. If one value under a key could not be decoded, Hivemind's readers of that key would
wait for ever.
"""

from __future__ import annotations

import base64
import hashlib
import multiprocessing as mp
import re
from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from dataclasses import astuple
from functools import lru_cache
from pathlib import Path
from typing import Any

from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils import get_logger
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.serializer import MSGPackSerializer
from hivemind.utils.timed_storage import get_dht_time

from recipe.errors import InputError
from recipe.run_folder import write_private
from swarm.network.acquaintances import Acquaintances
from swarm.network.dht_bounds.decoding import plain
from swarm.network.hivemind_internals import private_key_in, validators_of
from swarm.protocol.admission import OPEN, SHOWN_BYTES, Admission, NotAMember
from swarm.protocol.certificates import IN_ROUNDS, Authority, NotSigned
from swarm.protocol.signed_lists import MOST_BYTES, ORDERS, REMOVED
from swarm.runtime.processes import claim
from swarm.runtime.token_bucket import TokenBucket

logger = get_logger(__name__)

_OWNER = re.compile(rb"\[owner:(ssh-rsa [A-Za-z0-9+/]{100,1400}={0,2})\]")
_SHA2_256 = b"\x12\x20"  # multihash: its code, and 32 bytes
_SSH_BEGIN = b"\x00\x00\x00\x07ssh-rsa\x00\x00\x00\x03\x01\x00\x01"
"""Start of a public key with exponent 65537. If others were allowed, one modulus would make many owners at no cost."""
_DER_ALGORITHM = bytes.fromhex("300d06092a864886f70d0101010500")
_DER_EXPONENT = b"\x02\x03\x01\x00\x01"
MIN_KEY_BITS, MAX_KEY_BITS = 2048, 4096
RUNS_KEY = "swarm.runs"
"""DHT key of the run manifests."""
MAX_SUBKEY_BYTES = 2000
MAX_MANIFEST_VALUE_BYTES = 2**16 + 2**11
"""Size of a run manifest with its signature."""
MAX_VALUE_BYTES = 2**11 + 2**9 + SHOWN_BYTES
"""Size of any other record, with its signature and its owner's certificate."""
LIST_OVERHEAD_BYTES = 2**11
"""Bytes that the record of a list needs beside the list: the signature of the peer that passes it on."""
LISTS = (REMOVED, ORDERS)
PROGRESS, ADDRESSES = "progress", "addresses"
KINDS = (PROGRESS, ADDRESSES, *LISTS)
"""Kinds of records that a run has beside its manifest: the last parts of its keys."""
MAX_LIFE_SECONDS = 3600.0
"""Longest life of a record that its owner does not renew."""
MAX_CHECKED, STRANGERS_PER_SECOND = 8192, 1000.0
"""Checked records that are remembered, and strangers' signatures that are checked: the first number at once, then the
second per second. One check takes about 0.1 ms."""
MAX_LISTS, LISTS_PER_SECOND = 2048, 1000.0
"""Signatures on the organiser's lists that are checked for strangers, at once and then per second. The organiser's own
machine is a stranger when it hands out a list."""
MAX_WRITTEN = 64
"""Keys whose hashes are remembered because this peer has written there."""
SIGNATURE_BEGIN = RSASignatureValidator.SIGNATURE_FORMAT.partition(b"_value_")[0]
RUNS_ID = DHTID.generate(source=RUNS_KEY)


def keys_of(prefix: str) -> dict[DHTID, str]:
    """The DHT keys of a run, and the kind of record that is stored under each."""
    return {DHTID.generate(source=f"{prefix}.{kind}"): kind for kind in KINDS}


class OwnedRecords(RSASignatureValidator):
    """Signs the records that this peer stores, and refuses records that their owners have not signed.

    Args:
        key: this peer's private key
    """

    def __init__(self, key: RSAPrivateKey):
        super().__init__(key)
        self.key, self.own = key, peer_with(key)
        self.met = Acquaintances()
        """Peers whose records are checked first, and kept before those of strangers."""
        self.written: set[bytes] = set()
        """Hashes of the keys under which this peer itself has written."""
        self.vain_checks = 0
        """Number of checks that found no valid signature. No honest node of this program passes on such a record."""
        self._checked: OrderedDict[bytes, bool] = OrderedDict()
        self.strangers = TokenBucket(MAX_CHECKED, STRANGERS_PER_SECOND)
        """How many of strangers' records may still be checked now."""
        self.lists = TokenBucket(MAX_LISTS, LISTS_PER_SECOND)
        """The same for lists that the organiser has signed."""
        self.own_run = OPEN
        """What this process knows of the members of the run in which this peer takes part."""
        self.list_numbers = {kind: mp.Value("q", 0, lock=False) for kind in LISTS}
        """Number of the newest list of each kind of that run, for the trainer, which is another process.

        Only the DHT process writes it. There is no lock: it would stay taken for good if that process were killed."""
        self._admissions: dict[bytes, Admission] = {}
        self._list_keys: dict[bytes, str] = {}
        self._has_complained = False

    def sign_value(self, record: DHTRecord) -> bytes:
        if len(self.written) < MAX_WRITTEN:
            self.written.add(record.key)
        return super().sign_value(record)

    def sign(self, text: bytes) -> bytes:
        """This peer's signature, in base 64.

        Args:
            text: has to begin with the kind of what is signed, so that the signature counts for nothing else
        """
        return self.key.sign(text)

    def validate(self, record: DHTRecord) -> bool:
        """Whether a record may be stored, passed on and read. The cheapest checks come first."""
        most = MAX_MANIFEST_VALUE_BYTES if record.key == RUNS_ID.to_bytes() else MAX_VALUE_BYTES
        if (kind := self.kind_of_list(record.key)) is not None:
            most = MOST_BYTES[kind] + LIST_OVERHEAD_BYTES
        if not isinstance(record.value, bytes) or not isinstance(record.expiration_time, float):
            return False
        if record.subkey is None or len(record.subkey) > MAX_SUBKEY_BYTES or len(record.value) > most:
            return False
        if record.value.count(SIGNATURE_BEGIN) != 1:  # Hivemind looks for the end of each: 4 s for 64 KiB of beginnings
            return False
        if not record.expiration_time <= get_dht_time() + MAX_LIFE_SECONDS:  # refuses NaN, too
            return False
        owner = _owner_in(record.subkey)
        admission = self._admissions.get(record.key, OPEN)
        if owner is None or admission.is_removed(owner):
            return False
        digest = hashlib.sha256(MSGPackSerializer.dumps(astuple(record))).digest()
        if kind is not None and self._checked.get(digest) and not self.has_newest_list(record):
            del self._checked[digest]  # when it was checked, another list was the newest one
        if digest not in self._checked:  # the same record comes from several nodes, and is read again and again
            if not self._may_be_checked(record, owner, admission):
                return False
            is_good = self._checked[digest] = self._is_good(record, owner, admission)
            is_own = is_good and admission is self.own_run
            if is_own and admission.member(owner) is not None and not admission.is_removed(owner):
                self.met.add([owner])
            if len(self._checked) > MAX_CHECKED:
                self._checked.popitem(last=False)
        return self._checked[digest]

    def _is_good(self, record: DHTRecord, owner: PeerID, admission: Admission) -> bool:
        """Whether the owner may write this and has signed it.

        For a list, the organiser's signature is checked first, so that a made-up list costs one check only.
        """
        if self.kind_of_list(record.key) is not None:
            return self._is_admitted(record, owner, admission) and self._is_sound(record)
        return self._is_sound(record) and self._is_admitted(record, owner, admission)

    def _may_be_checked(self, record: DHTRecord, owner: PeerID, admission: Admission) -> bool:
        """Whether there is time to check its signatures. Known peers are always checked, strangers share a budget."""
        if owner == self.own or owner in self.met:
            return True
        if self.kind_of_list(record.key) is not None:
            return self.lists.take()
        if admission.is_open:
            return self.strangers.take()
        try:
            shown = plain(self.strip_value(record))
        except Exception:  # a stranger's bytes
            return False
        return admission.has_seen(shown, owner) or self.strangers.take()

    def admit_by(self, admission: Admission, prefix: str) -> None:
        """Decide by `admission` which peers may write under the keys of this run, unless that is decided already.

        Args:
            admission: what is known of the run's members
            prefix: start of the run's keys
        """
        for key, kind in keys_of(prefix).items():
            self._admissions.setdefault(key.to_bytes(), admission)
            if kind in LISTS:
                self._list_keys[key.to_bytes()] = kind

    def kind_of_list(self, key: bytes) -> str | None:
        """The kind of list that is stored under this key; None if it is no key of a list."""
        return self._list_keys.get(key)

    def has_newest_list(self, record: DHTRecord) -> bool:
        """Whether a checked record under the key of a list has the newest list that this node has heard of."""
        newest = self._admissions.get(record.key, OPEN).lists.signed(self._list_keys[record.key])
        return plain(self.strip_value(record)) == newest

    def forget_admission(self, key: bytes) -> None:
        """Forget which peers may write under this key, unless it belongs to this peer's own run."""
        if self._admissions.get(key) is not self.own_run:
            self._admissions.pop(key, None)
            self._list_keys.pop(key, None)

    def take_part(self, admission: Admission, prefix: str) -> None:
        """Note that this peer is a member of this run.

        Args:
            admission: what is known of the run's members
            prefix: start of the run's keys
        """
        self.own_run = admission
        self._checked.clear()  # some records were checked before it was known which peers may write
        for key in keys_of(prefix):
            self._admissions.pop(key.to_bytes(), None)
            self.written.add(key.to_bytes())  # so the storage takes other peers' records under these keys, too
        self.admit_by(admission, prefix)

    def _is_admitted(self, record: DHTRecord, owner: PeerID, admission: Admission) -> bool:
        """Whether the owner may write in this run. Any peer may pass on a list that the organiser has signed."""
        if admission.is_open:
            return True
        try:
            said = plain(self.strip_value(record))
            if (kind := self.kind_of_list(record.key)) is not None:
                return self._is_newest(kind, said, admission)
            admission.admit(said, owner, IN_ROUNDS)  # a member that only watches has nothing to say
            return True
        except NotAMember:
            return False
        except Exception:  # a stranger's bytes
            return False

    def _is_newest(self, kind: str, signed: bytes, admission: Admission) -> bool:
        """Take what is new in a list; whether the list then equals the newest one that this node knows."""
        is_own = admission is self.own_run
        try:
            if admission.lists.take(kind, signed) and is_own:
                self.list_numbers[kind].value = admission.lists.number(kind)
                self.met.drop(admission.removed(self.met.peers))
        except NotSigned as error:
            self.vain_checks += 1
            if is_own and not self._has_complained:
                self._has_complained = True
                logger.warning(f"A list under the run's key {kind!r} is refused: it {error} (said once)")
        return signed == admission.lists.signed(kind)

    def _is_sound(self, record: DHTRecord) -> bool:
        try:
            plain(self.strip_value(record))
        except Exception:  # a stranger's bytes: no text
            return False
        try:
            is_signed = super().validate(record)
        except Exception:  # no key, no signature
            is_signed = False
        self.vain_checks += not is_signed
        return is_signed


class Meet:
    """Tells the DHT process that these peers are no strangers (`DHT.run_coroutine`).

    Args:
        peers: a few, since many processes write to its pipe, where only small messages stay whole
    """

    def __init__(self, peers: Sequence[PeerID]):
        self.peers = peers

    async def __call__(self, _dht: Any, node: Any) -> None:
        records = records_of(node.protocol)
        if records is not None:
            records.met.add(self.peers)


class TakePart:
    """Tells the DHT process in which run this peer is a member, and its certificate there (`DHT.run_coroutine`).

    Args:
        prefix: start of the run's keys
        authority: the organiser of the run
        certificate: this peer's certificate
    """

    def __init__(self, prefix: str, authority: Authority, certificate: bytes):
        self.prefix, self.authority, self.certificate = prefix, authority, certificate

    async def __call__(self, _dht: Any, node: Any) -> None:
        records = records_of(node.protocol)
        if records is None:
            return
        if records.own_run.authority == self.authority:
            records.own_run.certificate = self.certificate
        else:
            records.take_part(Admission(self.authority, self.certificate), self.prefix)


class NewestList:
    """Fetches the newest list of this kind that the DHT process has heard of, as it was signed."""

    def __init__(self, kind: str):
        self.kind = kind

    async def __call__(self, _dht: Any, node: Any) -> bytes:
        records = records_of(node.protocol)
        return b"" if records is None else records.own_run.lists.signed(self.kind)


def records_of(protocol: Any) -> OwnedRecords | None:
    """The validator that checks the records of a DHT node; None if the node has none of this kind."""
    validators = validators_of(protocol.record_validator)
    return next((validator for validator in validators if isinstance(validator, OwnedRecords)), None)


def _owner_in(encoded: bytes) -> PeerID | None:
    """The owner that an encoded subkey names; None if it names none, or is not in the one canonical encoding."""
    try:
        subkey = plain(encoded)
    except Exception:  # a stranger's bytes
        return None
    if not isinstance(subkey, bytes) or MSGPackSerializer.dumps(subkey) != encoded:
        return None
    return peer_of(subkey)


def read_key(path: Path) -> RSAPrivateKey:
    """The private key in an identity file of libp2p."""
    return _key_in(path.read_bytes())


@lru_cache(maxsize=8)
def _key_in(identity: bytes) -> RSAPrivateKey:
    """The private key in this identity. Checking it takes 40 ms, so each process does it once, not in five places."""
    return private_key_in(crypto_pb2.PrivateKey.FromString(identity).data)


def peer_with(key: RSAPrivateKey) -> PeerID | None:
    """The id of the peer that has this key; None if such a key may not own records."""
    return peer_of(RSASignatureValidator(key).local_public_key)


def owned_entries(found: Any, most: int, first: Container[PeerID] = ()) -> list[tuple[PeerID, Any]]:
    """The owners and values of the entries that were found under a key of the DHT.

    Args:
        found: the result of `DHT.get`, or None
        most: entries that are returned at most
        first: owners whose entries come first, wherever they were in the result
    """
    entries = getattr(found, "value", None)
    chosen, others = [], []
    for subkey, entry in entries.items() if isinstance(entries, Mapping) else ():
        owner = peer_of(subkey) if isinstance(subkey, bytes) else None
        if owner is not None and getattr(entry, "value", None) is not None:
            (chosen if owner in first else others).append((owner, entry.value))
    return [*chosen, *others][:most]


@lru_cache(maxsize=8192)
def peer_of(subkey: bytes) -> PeerID | None:
    """The peer that owns records with this subkey; None if it names no public key, or an unsound one."""
    match = _OWNER.fullmatch(subkey[:MAX_SUBKEY_BYTES])
    modulus = _modulus_in(match[1].removeprefix(b"ssh-rsa ")) if match is not None else None
    if modulus is None:
        return None
    key = _der(0x30, _der(0x02, modulus) + _DER_EXPONENT)
    der = _der(0x30, _DER_ALGORITHM + _der(0x03, b"\0" + key))
    public_key = crypto_pb2.PublicKey(key_type=crypto_pb2.RSA, data=der).SerializeToString()
    return PeerID(_SHA2_256 + hashlib.sha256(public_key).digest())


def _modulus_in(encoded: bytes) -> bytes | None:
    """The modulus of an OpenSSH public key, in as many bytes as it needs; None if the key is not sound.

    A key that could be written in several ways would be several owners. Libraries accept such variants, so this
    function reads the bytes itself.
    """
    try:
        content = base64.b64decode(encoded, validate=True)
    except ValueError:
        return None
    size, modulus = content[len(_SSH_BEGIN) : len(_SSH_BEGIN) + 4], content[len(_SSH_BEGIN) + 4 :]
    if base64.b64encode(content) != encoded or not content.startswith(_SSH_BEGIN):  # base64 with stray bits at its end
        return None
    if int.from_bytes(size, "big") != len(modulus) or not modulus:
        return None
    number = int.from_bytes(modulus, "big", signed=True)
    if not number % 2 or not MIN_KEY_BITS <= number.bit_length() <= MAX_KEY_BITS or number < 0:
        return None
    return modulus if len(modulus) == number.bit_length() // 8 + 1 else None  # no more leading zeros than needed


def _der(tag: int, content: bytes) -> bytes:
    """One element of a DER encoding."""
    size = len(content)
    if size < 0x80:
        return bytes([tag, size]) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(length)]) + length + content


def prepare_identity(path: Path) -> PeerID:
    """The peer id of a private key file, made (RSA, mode 0600) if there is none.

    Raises:
        InputError: it cannot be made, read or understood.
    """
    try:
        if not path.exists():
            key = crypto_pb2.PrivateKey(key_type=crypto_pb2.KeyType.RSA, data=RSAPrivateKey().to_bytes())
            write_private(path, key.SerializeToString())
        content = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"--identity-path {path} cannot be used ({error.strerror}): name a file in a folder you may write to."
        ) from None
    try:
        peer_id = peer_with(_key_in(content))
    except Exception:  # protobuf, cryptography and hivemind each have their own
        peer_id = None
    if peer_id is None:
        raise InputError(
            f"--identity-path {path} does not hold a peer's private key: restore it, or delete it for a new identity."
        )
    return peer_id


def claim_identity(path: Path) -> None:
    """Reserve this private key on this machine for this process, until the process ends, however it ends.

    Two peers with one identity would overwrite each other's records and ledger. A client-mode peer with the same
    identity cannot be found by calling it, hence the lock.

    Raises:
        InputError: another process uses it
    """
    if not claim(path.with_name(f"{path.name}.lock")):
        raise InputError(identity_in_use(path))


def identity_in_use(path: Path) -> str:
    """The sentence that tells a person that this identity is in use, and what to do."""
    return (
        f"A running peer uses the identity {path} already: stop that peer, or give this one another --public-name or "
        "--identity-path."
    )
