"""The question whether a peer is alive, which this peer asks through its DHT process."""

import pickle

from swarm.membership.liveness_probe import Call
from swarm.network.signed_records import peer_of
from tests.helpers.owners import subkey_of


def test_a_call_crosses_a_pipe():
    call = Call("run", peer_of(subkey_of("ada")), 1.0, b"shown")
    assert vars(pickle.loads(pickle.dumps(call))) == vars(call)
