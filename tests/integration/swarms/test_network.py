"""Real DHT processes on loopback: they start, explain themselves when they cannot, and never outlive the trainer."""

import asyncio
import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import socket
import stat
import sys
import threading
import time
from queue import Queue

import hivemind.dht.protocol
import psutil
import pytest
from hivemind.p2p import P2P
from hivemind.utils.mpfuture import MPFuture

from recipe.errors import InputError
from recipe.presets import preset
from swarm.membership.progress_store import progress_records
from swarm.membership.run_manifest import PROTOCOL, RunManifest, read_manifests
from swarm.network import dht_options as network
from swarm.network.addresses import check_reachable
from swarm.network.dht_options import NetworkOptions, SwarmDHT, start_dht, stop_dht, visible_addresses
from swarm.network.signed_records import RUNS_KEY, prepare_identity
from swarm.runtime.processes import descendants
from tests.helpers.cli import wait_until
from tests.helpers.programs.ports import free_port

pytestmark = pytest.mark.timeout(60)
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
STRANGER_ID = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def options(*initial_peers: str, **others) -> NetworkOptions:
    return NetworkOptions(**{"host_maddrs": LOOPBACK, "initial_peers": initial_peers, **others})


def swarm_processes() -> set[int]:
    """Return the pids of DHT processes and p2pd below this process."""
    below = descendants(os.getpid())
    return {p.pid for p in below if p.status() != psutil.STATUS_ZOMBIE}


def still_there(processes: list[psutil.Process], timeout_seconds: float = 5) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(processes, timeout=timeout_seconds)
    return [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def dhts():
    """A list of DHTs, which are stopped after the test."""
    started = []
    yield started
    for dht in reversed(started):
        stop_dht(dht)


@pytest.fixture(scope="module")
def first():
    dht = start_dht(options())
    yield visible_addresses(dht)[0]
    stop_dht(dht)


def refusal(asked: NetworkOptions, capfd, limit_seconds: float = 30) -> str:
    """Return the sentence of the refusal by `start_dht`, which comes in time, without a traceback or a process left."""
    before, start = swarm_processes(), time.monotonic()
    with pytest.raises(InputError) as caught:
        start_dht(asked)
    assert time.monotonic() - start < limit_seconds
    assert swarm_processes() == before
    assert "Traceback" not in capfd.readouterr().err
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_start_join_store_and_clean_shutdown(first, dhts):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    joined = start_dht(options(first))
    dhts.append(joined)
    (address,) = visible_addresses(joined)
    assert address.startswith("/ip4/127.0.0.1/tcp/")
    assert address.endswith(f"/p2p/{joined.peer_id}")
    assert joined.store(RUNS_KEY, subkey=joined.owner, value="value", expiration_time=time.time() + 60)
    assert joined.get(RUNS_KEY).value[joined.owner].value == "value"
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before

    processes = [psutil.Process(joined.pid), *joined.processes]
    assert [p.name() for p in processes[1:]] == ["p2pd"]
    assert "torch_shm_manager" not in {p.name() for p in descendants(os.getpid())}, "60 MB that no peer needs"
    assert processes[1].environ()["GOMAXPROCS"] == os.environ.get("GOMAXPROCS", "1"), "not that of all p2pd"
    connections = processes[1].net_connections("tcp4")
    listens = {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    called_from = {c.laddr.port for c in connections if c.raddr and c.raddr.port == int(first.split("/")[4])}
    assert listens
    assert called_from
    assert not listens & called_from, "two that call each other at the same moment would make one connection"
    assert any(path.name.startswith("p2pd-") for path in joined.sockets.iterdir())
    assert stat.S_IMODE(joined.sockets.stat().st_mode) == 0o700, "no other user can give it orders"
    start = time.monotonic()
    stop_dht(joined)
    assert time.monotonic() - start < 10
    assert not still_there(processes)
    stop_dht(joined)  # twice is once


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_stop_leaves_nothing_even_of_a_broken_dht(first, dhts, number):
    dht = start_dht(options(first))
    dhts.append(dht)
    processes = [psutil.Process(dht.pid), *dht.processes]
    # Awake, it may still hold MPFuture's lock, which the tests share.
    wait_until(lambda: processes[0].status() == psutil.STATUS_SLEEPING, 20, "the DHT has nothing to do")
    os.kill(dht.pid, number)
    stop_dht(dht, timeout_seconds=0.3)
    assert not still_there(processes)
    assert not dht.sockets.exists()


def _trainer(pipe):
    """Run a trainer process: send the pids below it, and its DHT's address at each SIGINT."""
    os.setsid()
    MPFuture.reset_backend()  # a lock shared with the tests might stay locked when this process is killed
    dht = start_dht(options())
    signal.signal(signal.SIGINT, lambda *_: pipe.send(visible_addresses(dht)))
    pipe.send([dht.pid, *(p.pid for p in dht.processes)])
    while True:
        signal.pause()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only the Linux kernel tells children of a death")
def test_ctrl_c_spares_the_dht_and_kill_9_of_the_trainer_takes_it_along():
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    trainer = fork.Process(target=_trainer, args=(theirs,))
    trainer.start()
    try:
        assert ours.poll(20)
        processes = [psutil.Process(pid) for pid in ours.recv()]
        assert [p.name() for p in processes[1:]] == ["p2pd"]
        os.killpg(trainer.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
        assert ours.poll(20), "the DHT no longer answers"
        assert ours.recv()[0].startswith("/ip4/127.0.0.1/tcp/")
        assert all(p.is_running() for p in processes)
    finally:
        trainer.kill()
        trainer.join(20)
    assert not still_there(processes, timeout_seconds=5)


def test_nothing_listens(capfd):
    port = free_port()
    sentence = refusal(options(f"/ip4/127.0.0.1/tcp/{port}/p2p/{STRANGER_ID}"), capfd)
    assert f"127.0.0.1:{port} (connection refused)" in sentence


def test_another_peer_behind_the_address(first, capfd):
    address = first.rsplit("/", 1)[0] + f"/{STRANGER_ID}"
    assert refusal(options(address), capfd).startswith(f"No peer with the expected id answers at {address}: ")


def test_no_peer_at_all_behind_the_address(capfd):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{STRANGER_ID}"
        assert "No peer with the expected id answers" in refusal(options(address), capfd)


@contextlib.contextmanager
def busy_peer():
    """Run a p2pd that answers as a DHT node only once it is allowed to. Yields its address and the permission."""
    address, let, answers = Queue(), threading.Event(), threading.Event()

    async def run():
        p2p = await P2P.create(host_maddrs=LOOPBACK, startup_timeout=60)
        address.put(str((await p2p.get_visible_maddrs())[0]))
        await asyncio.to_thread(let.wait)
        node = await hivemind.dht.DHTNode.create(p2p=p2p)
        answers.set()
        await asyncio.to_thread(ended.wait)
        await node.shutdown()
        await p2p.shutdown()

    def answer():
        let.set()
        assert answers.wait(20)

    ended = threading.Event()
    thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
    thread.start()
    try:
        yield address.get(timeout=60), answer
    finally:
        let.set()
        ended.set()
        thread.join(20)
        assert not thread.is_alive()


def test_a_peer_that_is_too_busy_is_asked_again(dhts, monkeypatch, capfd):
    asked = []

    def reachable_ones(addresses):
        asked.append(addresses)
        if len(asked) == 4:
            answer()
        return check_reachable(addresses)

    monkeypatch.setattr(network, "check_reachable", reachable_ones)
    with busy_peer() as (address, answer):
        assert "too busy to answer" in refusal(options(address, patience_seconds=0), capfd)
        assert len(asked) == 1, "no patience"
        asked.append("so that it answers at the third attempt")
        dhts.append(start_dht(options(address)))
        assert len(asked) == 4
        stop_dht(dhts.pop())


class FastClock(SwarmDHT):
    """A peer whose clock is a minute ahead."""

    def run(self):
        hivemind.dht.protocol.get_dht_time = lambda: time.time() + 60
        super().run()


def test_clocks_that_disagree(dhts, capfd):
    for _ in range(2):  # the second ping fails unseen, which asyncio would report
        known = [address for dht in dhts for address in visible_addresses(dht)]
        dhts.append(FastClock(initial_peers=known, start=True, host_maddrs=LOOPBACK))
    sentence = refusal(options(*(visible_addresses(dht)[0] for dht in dhts)), capfd)
    assert "clock is 60 s behind" in sentence
    assert "NTP" in sentence
    assert "timedatectl" in sentence


def test_one_of_the_first_peers_cannot_keep_others_from_starting(first, dhts):
    """The first peer claims that all clocks are off, as a liar could."""
    dhts.append(FastClock(start=True, host_maddrs=LOOPBACK))
    dhts.append(start_dht(options(visible_addresses(dhts[0])[0], first)))
    assert read_manifests(dhts[1], [first]) == {}, "nothing is trained there, and it is a node as any other"


def test_port_in_use(first, capfd):
    port = int(first.split("/")[4])
    assert f"Port {port} is in use" in refusal(NetworkOptions(port=port), capfd)
    assert f"Port {port} is in use" in refusal(options(host_maddrs=(f"/ip4/127.0.0.1/tcp/{port}",)), capfd)


def test_identity_is_made_once_private_and_one_peer_at_a_time(first, dhts, tmp_path, capfd):
    path = tmp_path / "new folder" / "peer.key"
    dhts.append(start_dht(options(first, identity_path=path)))
    assert path.stat().st_mode & 0o777 == 0o600
    peer_id = dhts[0].peer_id
    assert peer_id == prepare_identity(path)
    both = (first, visible_addresses(dhts[0])[0])  # the first alone may not know its newest neighbour yet
    assert "already: stop that peer" in refusal(options(*both, identity_path=path), capfd)
    stop_dht(dhts.pop())
    dhts.append(start_dht(options(first, identity_path=path)))
    assert dhts[0].peer_id == peer_id


def test_unusable_identities(tmp_path, capfd):
    for content in (b"", b"not a key", os.urandom(1200)):
        (tmp_path / "bad").write_bytes(content)
        assert "does not hold a peer's private key" in refusal(options(identity_path=tmp_path / "bad"), capfd)
    assert "cannot be used (Is a directory)" in refusal(options(identity_path=tmp_path), capfd)
    assert "cannot be used (" in refusal(options(identity_path=tmp_path / "bad" / "key"), capfd)


def test_public_ip_is_announced_next_to_the_local_ones(dhts):
    port = free_port()
    dhts.append(start_dht(NetworkOptions(port=port, public_ip="203.0.113.5")))
    hosts = [address.split("/")[2] for address in visible_addresses(dhts[0])]
    assert hosts[0] == "203.0.113.5"
    assert hosts[-1] == "127.0.0.1"
    assert NetworkOptions(port=port, public_ip="2001:db8::5").announced_addresses()[0] == f"/ip6/2001:db8::5/tcp/{port}"


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        ({"public_ip": "203.0.113.5"}, "--public-ip needs a fixed --port"),
        ({"public_ip": "example.org", "port": 31337}, "is not an IP address"),
        (
            {"public_ip": "203.0.113.5", "port": 31337, "host_maddrs": ("/ip4/127.0.0.1/tcp/0",)},
            "or one in --host-maddrs",
        ),
        ({"host_maddrs": ("/ip4/127.0.0.1",)}, "--host-maddrs: `/ip4/127.0.0.1` cannot be used"),
        ({"announce_maddrs": ("/ip4/127.0.0.1/tcp/0",)}, "needs the port itself"),
        ({"host_maddrs": ("/ip4/203.0.113.5/tcp/0",)}, "This machine cannot listen on 203.0.113.5"),
    ],
)
def test_contradictory_options_are_refused_before_anything_starts(others, sentence):
    with pytest.raises(InputError) as caught:
        start_dht(options(**others))
    assert sentence in str(caught.value)


def test_a_dht_belongs_to_the_main_thread():
    caught = []

    def start():
        try:
            start_dht(options())
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    thread.join(20)
    assert "main thread" in str(caught[0])


def test_a_dht_that_does_not_answer_is_said_in_one_sentence():
    class Busy:
        def run_coroutine(self, _coroutine, return_future: bool):
            assert return_future
            return concurrent.futures.Future()

    with pytest.raises(InputError, match=r"did not answer within 0\.01 s"):
        visible_addresses(Busy(), 0.01)


def test_where_no_node_answers_any_more_nothing_is_known_of_a_run(dhts):
    """The peers may have left, or this machine's network may be down: that is another answer than that none trains."""
    dhts.append(start_dht(options()))
    dhts.append(start_dht(options(*visible_addresses(dhts[0]), client_mode=True)))
    run = RunManifest(PROTOCOL, "letters", preset("digits"))
    assert progress_records(dhts[1], run) == {}
    stop_dht(dhts[0])
    with pytest.raises(TimeoutError, match="no node"):
        progress_records(dhts[1], run, timeout_seconds=20)
