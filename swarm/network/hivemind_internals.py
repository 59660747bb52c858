"""The private attributes and methods of Hivemind 1.1.12 (with an underscore) that this program uses.

Another version may change them without notice. Then only this file and `swarm.network.hivemind_patches` have to change:
`tests/unit/project/test_hivemind_internals.py` checks that no other file uses private names of Hivemind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from hivemind import DHT
from hivemind.dht.validation import RecordValidatorBase
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.servicer import RPCHandler, ServicerBase
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.mpfuture import MPFuture
from hivemind.utils.multiaddr import Multiaddr

from swarm.runtime.pipes import WholePipe

# ---- p2pd and its callers -------------------------------------------------------------------------------------------


async def connect(p2p: P2P, peer: PeerID, addresses: Iterable[Multiaddr] = ()) -> None:
    """Have p2pd connect to a peer.

    Args:
        p2p: the connection to p2pd
        peer: its peer id
        addresses: its addresses, beside those that p2pd knows

    Raises:
        P2PDaemonError: no address answers as this peer
    """
    await p2p._client.connect(peer, addresses)


async def disconnect(p2p: P2P, peer: PeerID) -> None:
    """Have p2pd end all its connections to a peer.

    Raises:
        P2PDaemonError: it could not
    """
    await p2p._client.disconnect(peer)


def use_socket_folder(folder: Path | str) -> None:
    """Have this process talk to p2pd through sockets in this folder."""
    P2P._UNIX_SOCKET_PREFIX = f"/unix{folder}/"


def handlers_of(service: type[ServicerBase]) -> Sequence[RPCHandler]:
    """The calls that a service answers: its methods `rpc_...`, and the types of their messages."""
    service._collect_rpc_handlers()
    return service._rpc_handlers


def handle_name(service: type[ServicerBase], namespace: str, method: str) -> str:
    """The name under which a service in this namespace answers calls of this method."""
    return service._get_handle_name(namespace, method)


# ---- the DHT process ------------------------------------------------------------------------------------------------


def use_whole_pipes(dht: DHT) -> None:
    """Let a DHT process that has not started yet use pipes that take messages of any size."""
    if not isinstance(dht._inner_pipe, WholePipe):
        dht._inner_pipe, dht._outer_pipe = WholePipe(dht._inner_pipe), WholePipe(dht._outer_pipe)


def has_answered(dht: DHT) -> bool:
    """Whether the DHT process has said that it is ready, or why it could not start."""
    return dht._ready.done()


def failed_to_start(dht: DHT) -> bool:
    """Whether the DHT process has said why it could not start."""
    return dht._ready.done() and dht._ready.exception() is not None


def release_future_lock() -> None:
    """Release the lock of all `MPFuture`s, if this process holds it.

    A process shares the lock with its parent and siblings. If it ended while it holds the lock, none of them could
    answer any more.
    """
    if MPFuture._update_lock._semlock._is_mine():
        MPFuture._update_lock.release()


# ---- records of the DHT ---------------------------------------------------------------------------------------------


def validators_of(validator: RecordValidatorBase | None) -> Sequence[RecordValidatorBase]:
    """The parts of a node's `record_validator`, if it is a `CompositeValidator`; else nothing."""
    return getattr(validator, "_validators", ())


def private_key_in(der: bytes) -> RSAPrivateKey:
    """A private key from its DER encoding. Hivemind's constructor can only make a new key.

    Raises:
        ValueError: it cannot be read
    """
    key = RSAPrivateKey.__new__(RSAPrivateKey)
    key.__setstate__({"_private_key": der})
    return key
