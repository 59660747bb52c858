"""How a peer finds its swarm. Its options are parsed once, and peers are called once, before the peer is built."""

import socket
from dataclasses import replace

import pytest

from recipe.errors import InputError
from recipe.presets import preset
from swarm.enrolment.join_line import JoinLine
from swarm.network.addresses import NobodyAnswers
from swarm.peer.bootstrap import Bootstrap, resolve_bootstrap, unfolded
from swarm.peer.options import MachineOptions, PeerOptions
from tests.helpers.programs.ports import free_port

PEER_ID = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def at(port: int) -> str:
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{PEER_ID}"


@pytest.fixture
def options(tmp_path, monkeypatch) -> PeerOptions:
    monkeypatch.delenv("INITIAL_PEERS", raising=False)
    return PeerOptions(machine=MachineOptions(output_dir=tmp_path))


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield at(server.getsockname()[1])


def test_once_parsed_it_does_not_matter_where_addresses_came_from(options, monkeypatch):
    assert unfolded(options)[0].initial_peers == ()
    by_option = unfolded(replace(options, initial_peers=(f"{at(1)}, {at(2)}", at(1).replace("p2p", "ipfs"))))
    monkeypatch.setenv("INITIAL_PEERS", f"{at(1)} {at(2)}")
    assert unfolded(options) == by_option
    assert by_option[0].initial_peers == (at(1), at(2))
    monkeypatch.setenv("INITIAL_PEERS", "here")
    with pytest.raises(InputError, match="INITIAL_PEERS: `here` cannot be used"):
        unfolded(options)


def test_a_peer_without_addresses_begins_alone(options):
    assert resolve_bootstrap(replace(options, initial_peers=())) == Bootstrap((), False, preset("digits"))


def test_only_a_peer_that_names_a_run_and_was_not_invited_begins_it_where_other_peers_are(options, listening):
    silent = at(free_port())
    given = replace(options, initial_peers=(silent, listening))
    assert resolve_bootstrap(given) == Bootstrap((listening,), True, None)
    named = replace(given, recipe="digits", run_id="new")
    assert resolve_bootstrap(named) == Bootstrap((listening,), True, preset("digits"))
    assert resolve_bootstrap(named, JoinLine("new", bytes(32), (listening,))) == Bootstrap((listening,), True, None)


def test_only_a_peer_that_has_trained_before_begins_alone_where_no_peer_answers(options, capsys):
    given = replace(options, initial_peers=(at(free_port()),))
    with pytest.raises(NobodyAnswers):
        resolve_bootstrap(given)
    assert resolve_bootstrap(given, stored=preset("glyphs")) == Bootstrap((), False, preset("glyphs"))
    assert capsys.readouterr().out.startswith("No peer answers: this peer goes on alone")
