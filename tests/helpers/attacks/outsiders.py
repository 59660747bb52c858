"""Attacks of a stranger that knows an address and nothing else. Each ends by itself when its time is over.

The numbers of the attacks are those of the review (`f4`: many records, and so on). `ATTACKS` maps names to attacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from hivemind.p2p import P2P
from hivemind.proto import averaging_pb2
from hivemind.utils import get_dht_time

from swarm.averaging.meeting.matchmaking_messages import parse_step, to_knock
from swarm.membership.failure_detector import FailureDetector, question
from swarm.membership.run_manifest import PROTOCOL, RUNS_KEY, RunManifest, read_manifests
from swarm.network.dht_storage import PROGRESS_SECONDS
from swarm.network.reachability import NONCE_BYTES, CallMe, ReachabilityService
from swarm.network.signed_records import OwnedRecords
from swarm.protocol.admission import OPEN, Admission
from swarm.protocol.messages import Ticket
from swarm.state_sync.download_messages import asked_for, piece_of
from tests.helpers.attacks import dht_nodes, tools
from tests.helpers.attacks.tools import (
    NAME,
    RECORD_SECONDS,
    HandOver,
    Messages,
    Outsider,
    PeerService,
    State,
    attackers_dht,
    hand_over,
    keys_of_one_modulus,
    offer_of,
    outsider,
    random_lineage,
    record,
    signed,
    sound_keys,
)

FALSE_STEP = 10**6
NEARLY_ALL_BYTES, LARGE_BYTES = 7_900_000, 100_000_000
"""Size of a message that is as long as one may be, and of one that is longer."""
KNOCKS, PARTS = "rpc_join_group", "rpc_aggregate_part"
DRIP_BYTES_PER_SECOND = 24_000
FLOOD_SECONDS = 0.75 * PROGRESS_SECONDS
"""Life of progress records that are stored by the thousand. Peers accept none of a longer life."""
HOP = "/libp2p/circuit/relay/0.2.0/hop"
RESERVE = b"\x02\x08\x00"
"""A message of libp2p's circuit relay: two bytes, type RESERVE."""


# ---- a step that no peer has reached ---------------------------------------------------------------------------------


async def claim(node: Outsider) -> None:
    """a1: claims to be at step 1,000,000, and does not answer."""
    async for _ in node.turns(1.0):
        await node.say(record(FALSE_STEP))
        node.report(f"says that it is at step {FALSE_STEP}")


async def silent_claim(node: Outsider) -> None:
    """a2: the same, and answers calls, but its state never comes."""

    async def nothing(_requests: Messages) -> Messages:
        await asyncio.sleep(node.remaining_seconds)
        yield averaging_pb2.DownloadData()

    await _offer(node, nothing, FALSE_STEP)


async def drip(node: Outsider) -> None:
    """a3: the same, and its state comes at 24 kB/s."""
    state = await node.steal_state()
    state.description["step"] = FALSE_STEP
    offer, content = offer_of(state, num_bytes=sum(tensor.nbytes for tensor in state.tensors))

    async def slowly(requests: Messages) -> Messages:
        yield averaging_pb2.DownloadData(metadata=offer.to_bytes())
        async for request in requests:
            index = asked_for(request.metadata)
            if index < offer.num_pieces:
                piece = content[piece_of(index)]
                await asyncio.sleep(len(piece) / DRIP_BYTES_PER_SECOND)
                message = averaging_pb2.DownloadData()
                message.tensor_part.buffer = piece
                yield message

    await _offer(node, slowly, FALSE_STEP)


async def false_state(node: Outsider) -> None:
    """a4: the same, and hands over a state of step 1,000,000: that of an honest peer, weights x -1."""
    await _offer(node, await _negated(node, FALSE_STEP), FALSE_STEP)


async def near_state(node: Outsider) -> None:
    """a4 with a step that could be: 500 more than the swarm has made."""
    step = await _swarm_step(node) + 500
    await _offer(node, await _negated(node, step), step)


async def next_state(node: Outsider) -> None:
    """a4 with a step that the swarm will soon reach: 30 more than it has made, again and again."""
    averager = await _answer(node, await _negated(node, await _swarm_step(node) + 30))
    async for turn in node.turns(2.0):
        step = await _swarm_step(node) + 30
        if turn:
            averager.hand_over = await _negated(node, step, keep=turn % 8 != 0)
        await _claim_to_have(node, averager, step)


async def _swarm_step(node: Outsider) -> int:
    return max((record.step for record in (await node.members()).values()), default=0)


async def _negated(node: Outsider, step: int, keep: bool = False) -> HandOver:
    """Return an honest peer's state with weights x -1 and another step; with `keep`, the one stolen before."""
    if not keep or node.stolen is None:
        node.stolen = await node.steal_state()
    honest, num_weights = node.stolen, node.stolen.num_model_tensors
    weights = [-tensor if tensor.is_floating_point() else tensor for tensor in honest.tensors[:num_weights]]
    description = {**honest.description, "step": step, "lineage": random_lineage()}
    false = State(description, weights + honest.tensors[num_weights:])
    return lambda requests: hand_over(false, requests)


async def _offer(node: Outsider, give: HandOver, step: int) -> None:
    averager = await _answer(node, give)
    async for _ in node.turns(1.0):
        await _claim_to_have(node, averager, step)


async def _answer(node: Outsider, give: HandOver) -> PeerService:
    """Answer calls from now on as a peer does."""
    averager = PeerService(give)
    await averager.add_p2p_handlers(node.p2p, namespace=node.namespace)
    await FailureDetector(node.p2p, node.namespace).answer()
    return averager


async def _claim_to_have(node: Outsider, averager: PeerService, step: int) -> None:
    await node.say(record(step))
    node.report(f"says that it is at step {step}; was asked {averager.asked} times for its state")


# ---- streams ---------------------------------------------------------------------------------------------------------


async def streams(node: Outsider, count: int = 2000) -> None:
    """f1: opens so many streams and sends no request."""
    await _hold_streams(node, count, b"")


async def buffers(node: Outsider, count: int = 200) -> None:
    """f2: sends 7.9 MB on each of so many streams, one byte short of what it announced."""
    await _hold_streams(node, count, _announced(NEARLY_ALL_BYTES + 1), NEARLY_ALL_BYTES)


async def parts(node: Outsider, count: int = 200) -> None:
    """f2 at the method by which peers send parts of gradients, which are as long as a message may be."""
    await _hold_streams(node, count, _announced(NEARLY_ALL_BYTES + 1), NEARLY_ALL_BYTES, PARTS)


async def large_messages(node: Outsider, count: int = 200) -> None:
    """f3: sends messages of 100 MB to that method."""
    await _hold_streams(node, count, _announced(LARGE_BYTES), LARGE_BYTES, PARTS)


def _announced(num_bytes: int) -> bytes:
    """Return the beginning of a message of so many bytes."""
    return P2P.MESSAGE_MARKER + num_bytes.to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER)


async def _hold_streams(node: Outsider, count: int, start: bytes, size: int = 0, method: str = KNOCKS) -> None:
    """Open streams, 50 at a time, and hold them. A closed stream is opened again, five times as many streams in all."""
    left, held, opened = 5 * count, [], 0
    body = memoryview(bytes(size))

    async def one() -> bool:
        try:
            reader, writer = await asyncio.wait_for(node.open_stream(method), 10)
        except Exception:  # no further stream is accepted, which is what the attack tests
            return False
        held.append((reader, writer))
        with contextlib.suppress(OSError, TimeoutError):
            writer.write(start)
            for begin in range(0, size, 2**16):
                writer.write(body[begin : begin + 2**16])
                await asyncio.wait_for(writer.drain(), 5)
        return True

    async for _ in node.turns(0.2):
        held = [(reader, writer) for reader, writer in held if not reader.at_eof() and not writer.is_closing()]
        missing = min(50, count - len(held), left)
        if missing > 0:
            left -= missing
            opened += sum(await asyncio.gather(*(one() for _ in range(missing))))
            node.report(f"opened {opened} streams, {len(held)} are open")
    node.report(f"opened {opened} streams in all, {len(held)} are open at the end")
    for _, writer in held:
        writer.close()


# ---- records ---------------------------------------------------------------------------------------------------------


async def records(node: Outsider, count: int = 10_000) -> None:
    """f4: records of so many peers that do not exist; their keys share one RSA modulus."""
    await _flood(node, keys_of_one_modulus(count))


async def sound_records(node: Outsider, count: int = 2500, life_seconds: float = FLOOD_SECONDS) -> None:
    """f4 with keys that look like those of real peers."""
    await _flood(node, sound_keys(count), life_seconds)


async def _flood(node: Outsider, signers: Iterable[OwnedRecords], life_seconds: float = FLOOD_SECONDS) -> None:
    """Store a record in each name, as fast as possible. A peer that reads them believes each for some seconds."""
    members = await node.members()
    step = max((record.step for record in members.values()), default=0)
    expiration = get_dht_time() + life_seconds
    stored = made = 0
    signers = await asyncio.to_thread(list, signers)
    node.report(f"made {len(signers)} keys")
    for begin in range(0, len(signers), 500):
        soon = record(step, samples=0, rate=0.0)
        value = replace(soon, time=soon.time + 3).to_bytes()  # the difference between clocks that peers allow
        batch = await asyncio.to_thread(
            lambda begin=begin, value=value: [
                signed(signer, node.progress_key, value, expiration) for signer in signers[begin : begin + 500]
            ]
        )
        stored, made = stored + await node.store(members, node.progress_key, batch, expiration), made + len(batch)
        if not node.remaining_seconds:
            break
    node.report(f"{stored} of {made} records were stored")
    await asyncio.sleep(node.remaining_seconds)


async def manifests(node: Outsider, count: int = 1100) -> None:
    """f5: so many run manifests of the same run with another learning rate."""
    found = await asyncio.to_thread(read_manifests, node.dht, [f"/p2p/{node.target}"])
    (manifest, *_), members = found.values(), await node.members()
    recipe = replace(manifest.recipe, learning_rate=manifest.recipe.learning_rate * 7)
    value, expiration = RunManifest(PROTOCOL, manifest.run_id, recipe).to_bytes(), get_dht_time() + 600
    batch = await asyncio.to_thread(
        lambda: [signed(signer, RUNS_KEY, value, expiration) for signer in sound_keys(count)]
    )
    node.report(f"{await node.store(members, RUNS_KEY, batch, expiration)} of {count} run manifests were stored")
    await asyncio.sleep(node.remaining_seconds)


async def waiting(node: Outsider, at_once: int = 20) -> None:
    """g1, g2: every two seconds so many new identities that claim to be in the next round, and cannot be called."""
    members = await node.members()
    async for turn in node.turns(2.0, most=60):
        members = await node.members() or members
        signers = list(sound_keys(at_once))
        step = max((record.step for record in members.values()), default=0)
        said = record(step, samples=0, rate=1.0, client_mode=bool(turn % 2)).to_bytes()
        expiration = get_dht_time() + RECORD_SECONDS
        batch = [signed(signer, node.progress_key, said, expiration) for signer in signers]
        stored = await node.store(members, node.progress_key, batch, expiration)
        node.report(f"{stored} of {at_once} identities were stored")


async def sybils(node: Outsider) -> None:
    """g2: the same with fifty at a time."""
    await waiting(node, 50)


# ---- calls -----------------------------------------------------------------------------------------------------------


async def knock(node: Outsider) -> None:
    """g3: asks to join the round with a false lineage, ten times a second, and leaves at once."""
    step = max(record.step for record in (await node.members()).values())
    schema_hash, answers = await node.schema_hash(), dict[str, int]()
    calls: set[asyncio.Task] = set()

    async def once() -> None:
        nonlocal step
        ticket = Ticket(step, 64, False, 1.0, random_lineage())
        request = averaging_pb2.JoinRequest(
            schema_hash=schema_hash, gather=to_knock(node.admission.show(ticket.to_bytes()))
        )
        stream = await node.averager(node.target).rpc_join_group(request)
        try:
            reply = await stream.__anext__()
            answers[name] = answers.get(name := averaging_pb2.MessageCode.Name(reply.code), 0) + 1
            step = parse_step(reply) or step
        finally:
            await stream.aclose()

    async def safely() -> None:
        with contextlib.suppress(Exception):  # a refusal is what the attack tests
            await asyncio.wait_for(once(), 2)

    async for turn in node.turns(0.1):
        calls.add(task := asyncio.ensure_future(safely()))
        task.add_done_callback(calls.discard)
        if turn % 25 == 24:
            node.report(f"knocked {turn + 1} times: {answers}")
    node.report(f"answers to all knocks: {answers}")


async def thief(node: Outsider) -> None:
    """Takes whatever it can get: the state, a place in a round, an answer of the failure detector."""
    bytes_of_state = answers = 0
    replies: set[str] = set()
    members = await node.members()

    async def come_to_a_round() -> None:
        ticket = Ticket(max((record.step for record in members.values()), default=0), 64, False, 1.0, random_lineage())
        request = averaging_pb2.JoinRequest(
            schema_hash=bytes(32), gather=to_knock(node.admission.show(ticket.to_bytes()))
        )
        async for reply in await node.averager(node.target).rpc_join_group(request):
            replies.add(averaging_pb2.MessageCode.Name(reply.code))

    async for _ in node.turns(1.0):
        with contextlib.suppress(Exception):  # a refusal is what the attack tests
            state = await asyncio.wait_for(node.steal_state(), 3)
            bytes_of_state += sum(tensor.nbytes for tensor in state.tensors)
        with contextlib.suppress(Exception):
            await asyncio.wait_for(come_to_a_round(), 2)
        with contextlib.suppress(Exception):
            stub = FailureDetector.get_stub(node.p2p, node.target, namespace=node.namespace)
            await asyncio.wait_for(stub.rpc_here(question(node.admission)), 2)
            answers += 1
        await node.say(record(FALSE_STEP))
        node.report(f"got {bytes_of_state} bytes of the state, {answers} answers, and {sorted(replies)} to knocks")


async def several(node: Outsider) -> None:
    """All that one peer id can do at once: a false claim, names that want to take part, records and silent streams."""
    await asyncio.gather(claim(node), waiting(node), records(node, 1000), streams(node))


async def relay(node: Outsider) -> None:
    """Asks for a place on the peer's circuit relay, through which other peers would then call it."""
    async for turn in node.turns(2.0):
        try:
            _, reader, writer = await node.p2p.call_binary_stream_handler(node.target, HOP)
            writer.write(RESERVE)
            answer = await asyncio.wait_for(_delimited(reader), 5)
            writer.close()
        except Exception as error:
            if turn == 0:
                node.report(f"no relay: {type(error).__name__}")
            continue
        is_given = b"\x28\x64" in answer  # status OK
        node.report(f"relay: {'reserved' if is_given else 'refused'} ({len(answer)} bytes)")


async def _delimited(reader: asyncio.StreamReader) -> bytes:
    """Read a message of at most 16 KiB behind its length, as libp2p sends them."""
    size = shift = 0
    while shift <= 14:
        (byte,) = await reader.readexactly(1)
        size, shift = size | (byte & 127) << shift, shift + 7
        if byte < 128:
            break
    return await reader.readexactly(min(size, 2**14))


async def callbacks(node: Outsider, at_once: int = 100) -> None:
    """Has itself called back until the peer calls no other peer back any more."""
    stub = ReachabilityService.get_stub(node.p2p, node.target)
    async for _ in node.turns(5.0):
        calls = (stub.rpc_call_back(CallMe(9, os.urandom(NONCE_BYTES)), timeout=10) for _ in range(at_once))
        found = await asyncio.gather(*calls, return_exceptions=True)
        called = sum(not isinstance(answer, BaseException) and bool(answer.host) for answer in found)
        node.report(f"called back {called} of {at_once} times")


ATTACKS: dict[str, Callable[[Outsider], Awaitable[None]]] = {
    "claim": claim,
    "silent-claim": silent_claim,
    "drip": drip,
    "false-state": false_state,
    "near-state": near_state,
    "next-state": next_state,
    "streams": streams,
    "buffers": buffers,
    "parts": parts,
    "large-messages": large_messages,
    "records": records,
    "sound-records": sound_records,
    "manifests": manifests,
    "waiting": waiting,
    "sybils": sybils,
    "knock": knock,
    "thief": thief,
    "relay": relay,
    "callbacks": callbacks,
    "several": several,
    **dht_nodes.ATTACKS,
}


def attack(
    name: str,
    initial_peers: Sequence[str],
    seconds: float,
    report: Callable[[str], None],
    namespace: str | None = None,
    identity: Path | None = None,
    certificate: bytes = b"",
    **sizes: float,
) -> None:
    """Run one attack. It is over after `seconds`, or a little later.

    Args:
        identity, certificate: of a former member
        namespace: of the run; by default that of the only run manifest
        sizes: of the attack, if not the usual ones

    Raises:
        InputError: an address that no attacker may call, or that does not answer
    """
    tools.own_name = f"{NAME} {name}"
    dht_nodes.PREPARATIONS.get(name, lambda: None)()
    admission = OPEN
    with attackers_dht(initial_peers, identity) as dht:
        if namespace is None:
            (manifest, *_) = read_manifests(dht, initial_peers).values()
            namespace = manifest.key_prefix
            admission = Admission(manifest.authority, certificate)

        async def run() -> None:
            async with outsider(dht, initial_peers, namespace, report, seconds, admission) as node:
                report("begins")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ATTACKS[name](node, **sizes), seconds + 10)

        asyncio.run(run())
    report("ends")
