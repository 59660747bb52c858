"""Classes that inherit from Hivemind's classes give none of their attributes a name that Hivemind uses."""

import ast
import inspect
import textwrap

import pytest
from hivemind.dht import DHT
from hivemind.p2p.servicer import ServicerBase

from swarm.network.dht_process import SwarmDHT
from swarm.network.peer_service import PeerService


def attributes_set_in(kind: type) -> set[str]:
    """Names that methods of this class, not of its bases, give to attributes of `self`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


@pytest.mark.parametrize(("ours", "theirs"), [(SwarmDHT, DHT), (PeerService, ServicerBase)])
def test_no_attribute_is_hiveminds(ours, theirs):
    bases = ours.__mro__[: ours.__mro__.index(theirs)]
    own = set().union(*map(attributes_set_in, bases))
    assert own, "else this test sees nothing"
    assert own & (attributes_set_in(theirs) | set(dir(theirs))) == set()
