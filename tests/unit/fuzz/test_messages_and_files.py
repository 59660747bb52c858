"""Anything that comes from the network or from a damaged disk is read or refused. No other error leaves a parser."""

import io
import json
from functools import partial

import msgpack
import numpy as np
import pytest
import torch
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils.multiaddr import Multiaddr
from hypothesis import example, given
from hypothesis import strategies as some

from recipe.data.vision_data import VisionData
from recipe.errors import InputError
from recipe.presets import digits
from recipe.run_folder import read_metrics
from swarm.averaging.meeting.matchmaking_messages import group_reply, parse_group, parse_step
from swarm.ledger.audit import audit
from swarm.ledger.lines import NotALine, Update, read_line, to_line
from swarm.ledger.messages import LedgerOffer, LedgerWish
from swarm.membership.announcer import addresses_in
from swarm.membership.progress_record import PeerProgress
from swarm.membership.run_manifest import PROTOCOL, RunManifest
from swarm.network.addresses import parse_initial_peers
from swarm.network.known_peers import MAX_REMEMBERED, peer_of_address, read_book, usable
from swarm.network.reachability import NONCE_BYTES, Called, CallMe
from swarm.network.signed_records import owned_entries
from swarm.peer.checkpoints import newest_checkpoint
from swarm.peer.status import Status
from swarm.protocol.admission import OPEN, Admission
from swarm.protocol.attestation import Attestation
from swarm.protocol.auto_mode import Pace, Plan
from swarm.protocol.certificates import ORDER, Removals
from swarm.protocol.messages import MAX_GROUP_SIZE, Group, RoundFailed, Ticket
from swarm.protocol.notes import Profile
from swarm.protocol.order_book import merged, revoke
from swarm.protocol.orders import Order, Orders, What
from swarm.protocol.signed_lists import ORDERS, REMOVED
from swarm.protocol.wire import LINEAGE_BYTES, MAX_STEP, to_wire
from swarm.protocol.work import NUM_PLACES, Line, WorkList, name_of
from swarm.state_sync.download_messages import SLICE_BYTES, Offer, Wish
from swarm.state_sync.serialization import pack, unpack
from swarm.state_sync.squeeze import CHUNK_BYTES, squeeze, unsqueeze
from tests.helpers.owners import Organiser, subkey_of
from tests.helpers.strangers.fuzzing import TIMES, damaged, json_junk, junk, messages, often, refused

pytestmark = pytest.mark.timeout(300 * TIMES)
NOW = 1_700_000_000.0
TICKET = Ticket(
    7, 96, False, 1.5, bytes(LINEAGE_BYTES), (0.5,), True, pace=Pace(Plan(1, 0, 5, 5), 900, 2000), line_kbps=9000
)
WORK = WorkList("", [Line(7, 4, (0.5,) * NUM_PLACES)])
PEERS = [PeerID(bytes([18, 32, *[number] * 32])) for number in range(3)]
BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
NONCE = bytes(range(LINEAGE_BYTES))
GROUP = Group.close(NONCE, tuple(PEERS), (TICKET,) * 3)

# ---- from the network ----------------------------------------------------------------------------------------------


ATTESTED = Attestation(5, bytes(16), bytes(16), (0.5, -0.5))
PROFILE = Profile("CPU, 8 threads", "0.1.0, protocol 19", "local network", 1e6, 5, 7)
RECORD = PeerProgress(
    *("anna", 5, 96, 31.4, NOW - 60, NOW - 1, False, "training"), attested=ATTESTED, profile=PROFILE
).to_bytes()
WISH = Wish(7, b"").to_bytes()
OFFER = Offer(0.0, bytes(16), 3 * SLICE_BYTES, (bytes(32),) * 3, b"description").to_bytes()
PARSERS = {
    "wish": (Wish.from_bytes, WISH),
    "offer": (lambda data: Offer.from_bytes(data, 10 * SLICE_BYTES), OFFER),
    "progress": (lambda data: PeerProgress.from_bytes(data, NOW), RECORD),
    "work": (lambda data: WorkList.from_bytes(data, name_of(data), 4), WORK.to_bytes()),
    "ticket": (Ticket.from_bytes, TICKET.to_bytes()),
    "ledger's wish": (LedgerWish.from_bytes, LedgerWish(PEERS[0].to_bytes(), bytes(32), 7).to_bytes()),
    "ledger's offer": (LedgerOffer.from_bytes, LedgerOffer(bytes(32), 7, 2**40).to_bytes()),
    "call": (CallMe.FromString, CallMe(31337, bytes(NONCE_BYTES)).SerializeToString()),
    "called": (Called.FromString, Called("203.0.113.5", True).SerializeToString()),
}


@pytest.mark.parametrize("name", PARSERS)
def test_messages(name):
    parse, true = PARSERS[name]
    outcomes = []

    @often(300)
    @given(messages(true))
    @example(true)
    def check(data):
        outcomes.append(refused(parse, data))

    check()
    assert len(outcomes) > 200
    assert {True, False} == set(outcomes), "some are read"


@often(300)
@given(
    some.lists(some.sampled_from([peer.to_bytes() for peer in PEERS]) | some.binary(max_size=40), max_size=5),
    some.lists(some.just(TICKET.to_bytes()) | messages(TICKET.to_bytes()), max_size=5),
    some.just(GROUP.group_id) | some.binary(max_size=20),
)
def test_groups(peers, tickets, group_id):
    reply = group_reply(GROUP, NONCE, [ticket.to_bytes() for ticket in GROUP.tickets])
    assert parse_group(reply, PEERS[0], PEERS[1], TICKET, OPEN, "") == GROUP
    for field, values in ((reply.ordered_peer_ids, peers), (reply.gathered, tickets)):
        del field[:]
        field.extend(values)
    reply.group_id = group_id
    if not refused(lambda reply: parse_group(reply, PEERS[0], PEERS[1], TICKET, OPEN, ""), reply):
        assert 2 <= len(peers) == len(set(peers)) == len(tickets) <= MAX_GROUP_SIZE


@often(200)
@given(messages(msgpack.packb([7])) | some.integers(-(2**63), 2**64 - 1).map(msgpack.packb))
def test_steps(data):
    step = parse_step(averaging_pb2.MessageFromLeader(code=averaging_pb2.CANCELLED, gathered=[data]))
    assert step is None or 0 <= step <= MAX_STEP


MANIFEST = json.loads(RunManifest(PROTOCOL, "run", digits()).to_bytes())


@often(200)
@given(some.sampled_from([*MANIFEST, *MANIFEST["recipe"]]), json_junk, damaged(json.dumps(MANIFEST).encode()))
def test_manifests(field, value, data):
    manifest = json.loads(json.dumps(MANIFEST))
    (manifest if field in manifest else manifest["recipe"])[field] = value
    for text in (json.dumps(manifest).encode(), data):
        if not refused(RunManifest.from_bytes, text, InputError):
            assert RunManifest.from_bytes(text).recipe == digits()


ORGANISER = Organiser("run")
MEMBER = ORGANISER.admission(PEERS[0])
SHOWN = MEMBER.show(TICKET.to_bytes())
LIST = ORGANISER.remove(ORGANISER.admission(PEERS[1]))
ORDERED = Orders("run").with_order(Order(7, What.LEARNING_RATE, 0.5)).with_order(Order(9, What.PAUSE))
SIGNED_ORDERS = ORDERED.signed_by(ORGANISER.signer)
REVOKED_ORDERS = merged(
    revoke(bytes(32), [], ORGANISER.signer, ORGANISER.authority), SIGNED_ORDERS, ORGANISER.authority
).to_bytes()
SIGNED_MANIFEST = RunManifest(PROTOCOL, "run", digits()).signed_by(ORGANISER.signer)


@often(300)
@given(damaged(SHOWN) | messages(SHOWN))
@example(SHOWN)
def test_what_members_show(data):
    here = Admission(ORGANISER.authority)
    if not refused(lambda data: here.admit(data, PEERS[0]), data):
        assert here.member(PEERS[0]) == MEMBER.own, "nothing that the organiser has not signed"
    assert refused(lambda data: here.admit(data, PEERS[1]), data), "nor by another peer"


@often(200)
@given(damaged(LIST) | messages(LIST))
def test_lists_of_removed_members(data):
    here = Admission(ORGANISER.authority)
    if not refused(partial(here.lists.take, REMOVED), data):
        assert here.lists.removals == Removals.read(LIST, ORGANISER.authority)


@often(200)
@given(damaged(REVOKED_ORDERS) | messages(REVOKED_ORDERS))
def test_lists_of_orders_with_a_revoked_deputy(data):
    here = Admission(ORGANISER.authority, lists={ORDERS: SIGNED_ORDERS})
    if not refused(partial(here.lists.take, ORDERS), data):
        assert here.lists.orders.given == ORDERED.given
        assert here.lists.orders.revoked <= {bytes(32)}


@often(200)
@given(damaged(SIGNED_ORDERS) | messages(SIGNED_ORDERS))
@example(SIGNED_ORDERS)
def test_lists_of_orders(data):
    here = Admission(ORGANISER.authority)
    if not refused(partial(here.lists.take, ORDERS), data):
        assert set(here.lists.orders.given) <= set(ORDERED.given)


@often(200)
@given(some.integers(0, 2**31), some.integers(0, 7), some.floats() | some.integers(-1, 2**40))
def test_what_an_order_says(at_step, kind, value):
    """The order is signed, but by a faulty program of the organiser."""
    content = to_wire(at_step, kind, value, 1)
    signed = to_wire([], [(b"", [(content, ORGANISER.signer.signature(ORDER.format("run"), content))])])
    here = Admission(ORGANISER.authority)
    if not refused(partial(here.lists.take, ORDERS), signed):
        (order,) = here.lists.orders.given
        for step in (0, at_step, MAX_STEP):
            here.lists.orders.digest(step)
            assert here.lists.orders.schedule_position(step, 100) >= 0
            assert 0.01 <= here.lists.orders.learning_rate_factor(step) <= 100
            assert here.lists.orders.total_steps(step, 100) >= 1
            assert here.lists.orders.target_batch_size(step, 64) >= 1
            assert here.lists.orders.evaluate_every(step) >= 0
        assert 1 <= order.at_step <= MAX_STEP


@often(200)
@given(some.sampled_from([*MANIFEST, "organiser", "signature"]), json_junk, damaged(SIGNED_MANIFEST.to_bytes()))
def test_signed_manifests(field, value, data):
    changed = json.dumps(json.loads(SIGNED_MANIFEST.to_bytes()) | {field: value}).encode()
    for text in (changed, data):
        if not refused(RunManifest.from_bytes, text, InputError):
            assert RunManifest.from_bytes(text) == SIGNED_MANIFEST


LEDGER_LINE = to_line(Update.of(1, bytes(32), NOW, GROUP, (7, bytes(16), bytes(16))))
LEDGER_FIELDS = json.loads(LEDGER_LINE)


@often(300)
@given(
    damaged(LEDGER_LINE) | some.binary(max_size=300) | json_junk.map(json.dumps).map(str.encode),
    some.sampled_from([*LEDGER_FIELDS]),
    json_junk,
)
@example(LEDGER_LINE, "state", None)
def test_lines_of_a_ledger(data, field, value):
    for text in (data, json.dumps(LEDGER_FIELDS | {field: value}).encode()):
        if not refused(read_line, text, NotALine) and isinstance(line := read_line(text), Update):
            assert read_line(to_line(line)) == line
            same = (line.nonce, line.lineage, line.step, line.members) == (
                NONCE,
                TICKET.lineage,
                7,
                read_line(LEDGER_LINE).members,
            )
            assert line.is_named_rightly("") == (same and line.group == GROUP.group_id)


NAMES = [*(peer.to_base58() for peer in PEERS), "12D3KooWJ4h25QzeTZ85zXdNp9a4QgFm7gQVk1KNdcfcHdQLKPmh"]
peer_names = some.sampled_from(NAMES) | some.builds(
    lambda zeros, rest: zeros * "1" + rest,
    some.sampled_from([0, 1, 2, 46]),
    some.sampled_from(["", *NAMES[-2:]]) | some.text(BASE58, max_size=50),
)
hosts = some.just(("ip4", "203.0.113.5")) | some.tuples(some.just("dns4"), some.text("aZ1-_.", min_size=1, max_size=9))


@some.composite
def addresses(draw) -> str:
    """Multiaddresses of which some part may be nonsense."""
    odd = some.text(max_size=8) | some.sampled_from(["", "/", "0", "-1", "65536", "ip4", "p2p", "10.0.0.1", "::1"])
    parts = [*draw(hosts), "tcp", "31337", "p2p", draw(peer_names)]
    parts += ["p2p-circuit", "p2p", draw(peer_names)] if draw(some.booleans()) else []
    if draw(some.integers(0, 3)) == 0:
        place = draw(some.integers(0, len(parts)))
        parts[place : place + draw(some.integers(0, 1))] = [draw(odd)]
    return "/" + "/".join(parts)


damaged_addresses = damaged(f"/ip4/203.0.113.5/tcp/31337/p2p/{NAMES[0]}".encode()).map(
    lambda address: address.decode(errors="replace")
)


@often(300)
@given(some.lists(addresses() | damaged_addresses | some.text(max_size=250), max_size=50))
@example([f"/ip4/203.0.113.5/tcp/{port}/p2p/{PEERS[0].to_base58()}" for port in range(1, 100)])
def test_addresses(texts):
    found = usable(texts)
    assert len(found) <= MAX_REMEMBERED
    assert usable(found) == found, "what is usable stays so"
    for address in found:  # as the peer that calls them does
        Multiaddr(address.rpartition("/p2p/")[0])
        PeerID.from_base58(peer_of_address(address))
    for text in texts[:3]:
        refused(parse_initial_peers, [text], InputError)


class Entry:
    def __init__(self, value: object):
        self.value = value


@often(200)
@given(some.dictionaries(some.binary(max_size=20) | some.just(subkey_of("anna")), junk, max_size=3) | junk, junk)
def test_entries_of_the_dht(entries, value):
    if isinstance(entries, dict):
        entries = {key: Entry(value) for key, value in entries.items()}
    for found in (Entry(entries), entries, Entry({subkey_of("anna"): Entry(value)})):
        assert len(list(owned_entries(found, 2))) <= 2
        assert len(addresses_in(found, PEERS[0])) <= MAX_REMEMBERED


# ---- a state, from the network ---------------------------------------------------------------------------------------


TENSORS = [torch.arange(6.0).view(2, 3), torch.ones(5, dtype=torch.int64)]
LAYOUT, CONTENT = pack(TENSORS)
SQUEEZED = squeeze(torch.linspace(-1, 1, 256).numpy().view(np.uint8))
sizes = some.integers(-2, 8) | some.integers(0, 2**63) | junk


@often(200)
@given(
    some.just(LAYOUT)
    | some.lists(
        some.tuples(some.sampled_from(["float32", "int64", "bool"]) | junk, some.lists(sizes, max_size=9) | junk),
        max_size=4,
    )
    | junk,
    some.integers(0, 80),
)
@example(LAYOUT, len(CONTENT))
def test_layouts(layout, length):
    content = CONTENT[:length]
    if not refused(lambda layout: unpack(layout, content), layout, RoundFailed):
        assert sum(tensor.nbytes for tensor in unpack(layout, content)) == len(content)


@often(200)
@given(
    damaged(SQUEEZED.buffer) | some.binary(max_size=99),
    some.lists(some.integers(0, 2**32 - 1) | some.sampled_from([255, 256, 2**14, 2**14 + 1, 2**32 - 1]), max_size=2),
)
@example(SQUEEZED.buffer, [256])
def test_squeezed_chunks(buffer, size):
    message = runtime_pb2.Tensor(buffer=buffer, size=size)
    if not refused(unsqueeze, message, RoundFailed):
        assert len(unsqueeze(message)) <= max(CHUNK_BYTES, len(buffer))


# ---- from the disk -------------------------------------------------------------------------------------------------


DEEP = 100_000 * b"["
"""More lists in lists than a parser can follow."""


@often(100)
@given(some.lists(json_junk.map(json.dumps).map(str.encode) | some.binary(max_size=30) | some.just(DEEP), max_size=4))
def test_files_of_lines(tmp_path, lines):
    path = tmp_path / "lines"
    path.write_bytes(b"\n".join(lines))
    assert all(isinstance(line, dict) for line in read_metrics(path))
    assert isinstance(read_book(path), list)
    assert Status.read(path) is None or isinstance(Status.read(path), Status)


@often(60)
@given(
    some.lists(
        damaged(LEDGER_LINE) | json_junk.map(json.dumps).map(str.encode) | some.just(DEEP), min_size=1, max_size=4
    )
)
def test_ledgers(tmp_path, lines):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    found = audit([path])
    assert found.findings, "a ledger begins with its peer's key, and is signed"
    assert found.credits == {}


@often(40)
@given(some.data())
def test_checkpoints(tmp_path, data):
    content = {"global_step": 7, VisionData.__qualname__: {}, "state_dict": {"weight": torch.zeros(3)}}
    torch.save(content, buffer := io.BytesIO())
    (tmp_path / "last.ckpt").write_bytes(data.draw(damaged(buffer.getvalue())))
    torch.save(content | {"global_step": 6}, tmp_path / "step=6.ckpt")
    _, found = newest_checkpoint(tmp_path, True, VisionData.__qualname__)
    assert set(found) == set(content)
