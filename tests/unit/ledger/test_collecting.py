"""Ledgers are handed out piece by piece. A fetched ledger is what the peer itself has signed, or nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hivemind.proto.averaging_pb2 import DownloadData

from recipe.errors import InputError
from swarm.cli.ledger import main
from swarm.ledger.audit import audit
from swarm.ledger.collector import (
    FILE_BYTES,
    MAX_LEDGERS,
    MORE_LATER,
    NO_ROOM,
    PEER_FULL,
    Collected,
    FetchLedgers,
    Refused,
    Room,
    Shelf,
    collect,
    fetch,
)
from swarm.ledger.lines import Signature, digest_of, read_line
from swarm.ledger.messages import PIECE_BYTES, LedgerOffer, LedgerWish
from swarm.ledger.server import CALLS, MAX_STREAMS, LedgerServer
from swarm.protocol.run_names import key_prefix
from tests.helpers.ledgers.ledger_run import NAMES, RUN, LedgerRun, owner, signed_again, where

pytestmark = pytest.mark.timeout(60)
FAST = 1e12
"""Bytes per second."""


async def nobody(peer, request):
    raise ConnectionError("nobody is asked in this test")
    yield


def server_of(run: LedgerRun, name: str = "anna", pass_on=nobody, known=()) -> LedgerServer:
    return LedgerServer(run.path(name), known.__contains__, pass_on, bytes_per_second=FAST)


def caller(server: LedgerServer, who: str = "dora"):
    """A function that calls the server as another peer does."""
    context = SimpleNamespace(remote_id=owner(who).own)
    return lambda request: server.rpc_download_ledger(request, context)


def fetched(run: LedgerRun, folder, call, name: str = "anna", of=None, **options) -> Shelf:
    folder.mkdir(exist_ok=True)
    shelf = Shelf(folder, owner(name).own, RUN, **options)
    asyncio.run(fetch(call, shelf, of))
    return shelf


def content_of(folder) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.iterdir())]


def test_a_ledger_arrives_as_it_is_and_then_only_what_is_new(run, tmp_path):
    folder = tmp_path / "fetched"
    first = fetched(run, folder, caller(server_of(run)))
    assert content_of(folder) == [run.path("anna").read_bytes()]
    assert first.num_bytes == run.path("anna").stat().st_size
    assert fetched(run, folder, caller(server_of(run))).num_bytes == 0
    run.start("anna")
    run.update({"anna": 96, "ben": 64}, written_by=["anna"])
    run.close()
    again = fetched(run, folder, caller(server_of(run)))
    assert content_of(folder) == [run.path("anna").read_bytes()]
    assert again.num_bytes == run.path("anna").stat().st_size - first.num_bytes


def test_a_ledger_that_another_version_has_fetched_stays_as_it_is(run, tmp_path):
    folder = tmp_path / "fetched"
    fetched(run, folder, caller(server_of(run)))
    (path,) = folder.iterdir()
    path.write_bytes(content := path.read_bytes().replace(b'"n":', b'"new":1,"n":'))
    with pytest.raises(Refused, match="another version of this program wrote"):
        fetched(run, folder, caller(server_of(run)))
    assert content_of(folder) == [content]


def test_what_was_fetched_adds_up_to_the_same(run, tmp_path):
    folder = tmp_path / "fetched"
    for name in ("anna", "ben", "cleo"):
        fetched(run, folder, caller(server_of(run, name)), name)
    assert audit([folder]).credits == run.audit().credits


def test_a_long_ledger_takes_several_calls(run, tmp_path, monkeypatch):
    for module in ("server", "collector"):
        monkeypatch.setattr(f"swarm.ledger.{module}.ANSWER_BYTES", 3000)
        monkeypatch.setattr(f"swarm.ledger.{module}.PIECE_BYTES", 1000)
    fetched(run, tmp_path / "fetched", caller(server_of(run)))
    assert content_of(tmp_path / "fetched") == [run.path("anna").read_bytes()]
    assert run.path("anna").stat().st_size > 2 * 3000


def test_what_is_not_signed_yet_is_left_for_the_next_time(run, tmp_path):
    lines = run.lines("anna")
    run.write("anna", lines[: where(lines)[-1] + 1])
    fetched(run, tmp_path / "fetched", caller(server_of(run)))
    (content,) = content_of(tmp_path / "fetched")
    assert content.splitlines() == lines[: where(lines)[-1]]


def test_a_file_that_a_crash_of_the_fetching_program_has_cut_is_mended(run, tmp_path):
    folder = tmp_path / "fetched"
    fetched(run, folder, caller(server_of(run)))
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    fetched(run, folder, caller(server_of(run)))
    assert content_of(folder) == [run.path("anna").read_bytes()]


def test_a_peer_that_has_lost_its_folder_begins_another_ledger(run, tmp_path):
    folder = tmp_path / "fetched"
    for number in range(1, MAX_LEDGERS + 1):
        fetched(run, folder, caller(server_of(run)))
        assert len(content_of(folder)) == number
        run.path("anna").unlink()
        run.start("anna")
    with pytest.raises(Refused, match="has begun"):
        fetched(run, folder, caller(server_of(run)))


def test_the_ledger_of_a_peer_that_cannot_be_called_is_passed_on(run, tmp_path):
    anna = owner("anna").own

    async def pass_on(peer, request):
        assert peer == anna
        async for message in caller(server_of(run, "anna"), "ben")(request):
            yield message

    relay = server_of(run, "ben", pass_on, known={anna})
    fetched(run, tmp_path / "fetched", caller(relay), "anna", of=anna)
    assert content_of(tmp_path / "fetched") == [run.path("anna").read_bytes()]
    with pytest.raises(Refused, match="does not hand over"):
        fetched(run, tmp_path / "other", caller(server_of(run, "ben", pass_on)), "anna", of=anna)


def test_two_programs_that_fetch_into_one_folder_tear_no_hole(run, tmp_path):
    """They do not see each other's lock here. A hole would show an honest peer as one that has changed lines."""
    content = run.path("anna").read_bytes()
    lines = content.splitlines(keepends=True)
    first, second = (sum(map(len, lines[: place + 1])) for place in where(lines, Signature)[:2])
    one, other = (Shelf(tmp_path, owner("anna").own, RUN) for _ in range(2))
    for shelf in (one, other):
        shelf.begin(shelf.wish(), LedgerOffer(digest_of(lines[0].rstrip()), 0, len(content)))
    one.add(content[:second])
    other.add(content[:first])
    with pytest.raises(OSError, match="another program has shortened it"):
        one.add(content[second:])
    (path,) = tmp_path.glob("*.jsonl")
    assert path.read_bytes() == content[:first]
    other.add(content[first:])
    assert path.read_bytes() == content
    assert audit([path]).findings == []


def test_one_process_fetches_into_a_folder_at_a_time(tmp_path):
    """A desk holds its folder until it ends."""
    for _ in range(2):
        collect(None, RUN, {}, tmp_path / "ledger")
    with multiprocessing.get_context("fork").Pool(1) as another:
        assert "swarm ledger fetch keeps its ledgers in" in another.apply(refusal, [tmp_path / "ledger"])
        assert another.apply(refusal, [tmp_path / "other"]) == ""
    collect(None, RUN, {}, tmp_path / "other")


def refusal(folder: Path) -> str:
    try:
        collect(None, RUN, {}, folder)
    except InputError as error:
        return str(error)
    return ""


# ---- liars ---------------------------------------------------------------------------------------------------------


def lying(*pieces: bytes, ledger: bytes | None = None, begin: int = 0, size: int | None = None):
    """A peer that sends these; it offers what it sends, unless `ledger` is another digest."""
    offered = digest_of(pieces[0].partition(b"\n")[0]) if ledger is None else ledger

    async def call(request):
        total = sum(map(len, pieces)) if size is None else size
        yield DownloadData(metadata=LedgerOffer(offered, begin, begin + total).to_bytes())
        for piece in pieces:
            yield DownloadData(metadata=piece)

    return call


def text_of(lines) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def changed(run: LedgerRun) -> bytes:
    lines = run.lines("anna")
    return text_of([*lines[:4], *lines[6:]])


def of_ben(run: LedgerRun) -> bytes:
    return run.path("ben").read_bytes()


def signed_by_ben(run: LedgerRun) -> bytes:
    return text_of(signed_again(map(read_line, run.lines("anna")), "ben"))


def of_another_run(run: LedgerRun) -> bytes:
    start, *rest = map(read_line, run.lines("anna"))
    other = "numbers-0123abcd"
    return text_of(signed_again([msgspec.structs.replace(start, run=other), *rest], "anna", other))


LIES = {
    "lines left out": (changed, "do not continue"),
    "another peer's": (of_ben, "another peer"),
    "signed by another peer": (signed_by_ben, "not signed"),
    "another run's": (of_another_run, "another run"),
    "rubbish": (lambda run: os.urandom(500) + b"\n", "not a ledger line"),
    "nothing but an end": (lambda run: b"\n" * 10, "not a ledger line"),
}


@pytest.mark.parametrize("how", LIES)
def test_a_file_that_is_no_ledger_of_this_peer_is_not_kept(run, tmp_path, how):
    make, why = LIES[how]
    with pytest.raises(Refused, match=why):
        fetched(run, tmp_path / "fetched", lying(make(run)))
    kept = b"".join(content_of(tmp_path / "fetched"))
    assert run.path("anna").read_bytes().startswith(kept)


def test_lines_invented_behind_a_true_ledger_are_not_kept(run, tmp_path):
    """So a peer that passes a ledger on cannot keep the true one out."""
    folder, true = tmp_path / "fetched", run.path("anna").read_bytes()
    last = run.lines("anna")
    invented = signed_again([*map(read_line, last), read_line(last[where(last)[0]])], "anna")[-1]
    with pytest.raises(Refused, match="do not continue"):
        fetched(run, folder, lying(true + invented + b"\n" + last[-1] + b"\n"))
    run.start("anna")
    fetched(run, folder, caller(server_of(run)))
    assert content_of(folder)[-1] == run.path("anna").read_bytes()


def test_a_true_ledger_under_an_invented_digest_is_not_kept(run, tmp_path):
    """With `MAX_LEDGERS` of them a relay could keep the next true one out."""
    folder = tmp_path / "fetched"
    with pytest.raises(Refused, match="another ledger than it offers"):
        fetched(run, folder, lying(run.path("anna").read_bytes(), ledger=b"L" * 32))
    assert content_of(folder) == []


def test_a_peer_that_sends_without_an_end_is_cut_off(run, tmp_path):
    piece = b"[" * PIECE_BYTES

    async def endless(request):
        yield DownloadData(metadata=LedgerOffer(b"L" * 32, 0, 2**50).to_bytes())
        while True:
            yield DownloadData(metadata=piece)

    with pytest.raises(Refused, match="without an end"):
        fetched(run, tmp_path / "fetched", endless)
    assert content_of(tmp_path / "fetched") == []


def test_a_peer_that_sends_empty_pieces_is_cut_off(run, tmp_path):
    with pytest.raises(Refused, match="pieces of another size"):
        fetched(run, tmp_path / "fetched", lying(b"", size=10))


def test_a_peer_that_breaks_off_has_not_handed_over_its_ledger(run, tmp_path, monkeypatch):
    first_line = text_of(run.lines("anna")[:1])
    breaks_off = lying(first_line, size=run.path("anna").stat().st_size)
    _, problems = fetch_by(monkeypatch, tmp_path / "fetched", {"anna": breaks_off}, {"anna": ["anna"]})
    assert problems == {"anna": "ended the transfer before its next signature"}


@pytest.mark.parametrize("answer", [b"", b"rubbish", LedgerOffer().to_bytes(), LedgerOffer(b"L" * 32, 5, 9).to_bytes()])
def test_a_peer_that_offers_nothing_of_use_is_told_so(run, tmp_path, answer):
    async def call(request):
        yield DownloadData(metadata=answer)

    with pytest.raises(Refused):
        fetched(run, tmp_path / "fetched", call)


def test_no_more_bytes_are_fetched_than_one_peer_may_have(run, tmp_path):
    with pytest.raises(Refused, match="the rest is not fetched"):
        fetched(run, tmp_path / "fetched", caller(server_of(run)), max_bytes=4000)
    (content,) = content_of(tmp_path / "fetched")
    assert 0 < len(content) <= 4000
    assert run.path("anna").read_bytes().startswith(content)


# ---- what strangers may take ---------------------------------------------------------------------------------------


def test_a_caller_that_calls_again_and_again_is_not_answered(run):
    server = server_of(run)

    async def call_often() -> int:
        answered = 0
        for _ in range(3 * CALLS):
            stream = caller(server)(DownloadData(metadata=LedgerWish().to_bytes()))
            answered += [message async for message in _first(stream)] != []
        return answered

    assert asyncio.run(call_often()) == CALLS


async def _first(stream):
    try:
        async for message in stream:
            yield message
            return
    finally:
        await stream.aclose()


def test_a_few_callers_are_served_at_a_time_and_each_once(run):
    server, wish = server_of(run), DownloadData(metadata=LedgerWish().to_bytes())

    async def call_together() -> list[bool]:
        streams = [caller(server, f"caller {number}")(wish) for number in (0, 0, 1, 2, 3, 4)]
        began = [await anext(stream, None) is not None for stream in streams]
        for stream in streams:
            await stream.aclose()
        again = caller(server, "caller 4")(wish)
        began.append(await anext(again, None) is not None)
        await again.aclose()
        return began

    assert asyncio.run(call_together()) == [True, False, True, True, True, False, True]
    assert MAX_STREAMS == 4


@pytest.mark.parametrize(
    "wish", [b"", b"rubbish", LedgerWish(b"\xff" * 34).to_bytes(), LedgerWish(begin=2**52).to_bytes()]
)
def test_odd_wishes_break_nothing(run, wish):
    async def ask():
        return [message async for message in _first(caller(server_of(run))(DownloadData(metadata=wish)))]

    for message in asyncio.run(ask()):
        assert LedgerOffer.from_bytes(message.metadata).begin == 0


def test_a_peer_without_a_ledger_says_so(run, tmp_path):
    run.path("anna").unlink()
    with pytest.raises(Refused, match="keeps no ledger"):
        fetched(run, tmp_path / "fetched", caller(server_of(run)))
    with pytest.raises(Refused, match="keeps no ledger"):
        fetched(run, tmp_path / "fetched", caller(LedgerServer(None, set().__contains__, nobody)))


# ---- several peers at once -----------------------------------------------------------------------------------------


NODE = SimpleNamespace(protocol=SimpleNamespace(p2p=None))


def answer_by(monkeypatch, calls: dict) -> None:
    """Replace each peer by a function that answers for it.

    Args:
        calls: these functions, by name of a peer
    """

    def stub(p2p, peer, namespace):
        (call,) = (call for name, call in calls.items() if owner(name).own == peer)

        async def rpc_download_ledger(request):
            return call(request)

        return SimpleNamespace(rpc_download_ledger=rpc_download_ledger)

    monkeypatch.setattr("swarm.ledger.calls.PeerService", SimpleNamespace(get_stub=stub))


def fetch_by(monkeypatch, folder, calls: dict, asked: dict, room_bytes=2**30) -> tuple[int, dict[str, str]]:
    """Fetch as the DHT process does.

    Args:
        calls: as of `answer_by`
        asked: by name of a peer, the peers that are asked for its ledger
    """
    answer_by(monkeypatch, calls)
    folder.mkdir(exist_ok=True)
    peers = {owner(name).own: [owner(other).own for other in others] for name, others in asked.items()}
    num_bytes, problems = asyncio.run(FetchLedgers(RUN, peers, folder, 2**20, room_bytes)(None, NODE))
    return sum(num_bytes.values()), {name: problems[owner(name).own] for name in asked}


async def silent(request):
    await asyncio.Event().wait()
    yield


async def broken(request):
    raise ConnectionError("nobody is there")
    yield


def test_a_peer_that_does_not_answer_keeps_no_other_ledger_from_being_fetched(run, tmp_path, monkeypatch):
    monkeypatch.setattr("swarm.ledger.collector.PEER_SECONDS", 0.2)
    calls = {"anna": silent, "ben": broken, "cleo": caller(server_of(run, "cleo"))}
    num_bytes, problems = fetch_by(monkeypatch, tmp_path / "fetched", calls, {name: [name] for name in calls})
    assert num_bytes == run.path("cleo").stat().st_size
    assert problems == {"anna": "takes too long", "ben": "does not answer (ConnectionError)", "cleo": ""}


def test_another_peer_is_asked_where_the_first_passes_nothing_on(run, tmp_path, monkeypatch):
    async def pass_on(peer, request):
        name = next(name for name in run.ledgers if owner(name).own == peer)
        async for message in caller(server_of(run, name), "ben")(request):
            yield message

    shy = {owner(name).own for name in ("anna", "cleo")}
    calls = {"dora": broken, "ben": caller(server_of(run, "ben", pass_on, known=shy))}
    asked = {"anna": ["dora", "ben"], "cleo": ["ben", "dora"], "ben": ["ben"]}
    num_bytes, problems = fetch_by(monkeypatch, tmp_path / "fetched", calls, asked)
    assert problems == dict.fromkeys(asked, ""), "each at its turn: a peer answers one call at a time"
    assert num_bytes == sum(run.path(name).stat().st_size for name in asked)
    assert audit([tmp_path / "fetched"]).credits == run.audit().credits


def test_a_ledger_that_no_peer_passes_on_is_reported(run, tmp_path, monkeypatch):
    _, problems = fetch_by(monkeypatch, tmp_path / "fetched", {}, {"anna": []})
    assert problems == {"anna": "cannot be called, and no other peer can pass its ledger on"}


def test_all_peers_together_get_no_more_than_the_folder_may_hold(run, tmp_path, monkeypatch):
    folder = tmp_path / "fetched"
    calls = {name: caller(server_of(run, name)) for name in run.ledgers}
    asked = {name: [name] for name in calls}
    most = 2 * FILE_BYTES + 100
    _, problems = fetch_by(monkeypatch, folder, calls, asked, Room.in_folder(tmp_path, most))
    assert NO_ROOM in problems.values()
    assert 0 <= Room.in_folder(folder, most) < FILE_BYTES, "a short file takes a block, too"
    fetch_by(monkeypatch, folder, calls, asked, Room.in_folder(folder, most))
    assert Room.in_folder(folder, most) >= 0


class DhtHere:
    """Runs in this process what a DHT process would run."""

    def run_coroutine(self, coroutine, return_future: bool):
        assert return_future
        found = asyncio.run(coroutine(None, NODE))
        return SimpleNamespace(result=lambda _seconds: found)


def through_anna(run: LedgerRun) -> LedgerServer:
    """Anna's server, which passes on the ledger of Ben, a client-mode peer."""
    ben = owner("ben").own

    async def pass_on(peer, request):
        assert peer == ben
        async for message in caller(server_of(run, "ben"), "anna")(request):
            yield message

    return server_of(run, "anna", pass_on, known={ben})


def collect_through_anna(monkeypatch, run: LedgerRun, folder, **options) -> Collected:
    answer_by(monkeypatch, {"anna": caller(through_anna(run))})
    return collect(DhtHere(), RUN, {owner("anna").own: False, owner("ben").own: True}, folder, **options)


def lengthen(run: LedgerRun, name: str) -> None:
    """Let this peer's ledger become longer than all others."""
    run.start(name)
    for _ in range(20):
        run.update(written_by=[name])
    run.close()


def test_a_peer_whose_ledger_takes_several_fetches_passes_on_that_of_another(run, tmp_path, monkeypatch):
    lengthen(run, "anna")
    size = run.path("ben").stat().st_size
    assert run.path("anna").stat().st_size > size
    for module in ("server", "collector"):
        monkeypatch.setattr(f"swarm.ledger.{module}.ANSWER_BYTES", size)
    monkeypatch.setattr("swarm.ledger.collector.MAX_CALLS", 1)
    found = collect_through_anna(monkeypatch, run, tmp_path / "fetched")
    anna, ben = owner("anna").own, owner("ben").own
    assert found.silent == {str(anna): MORE_LATER}
    assert set(found.answered) == {str(anna), str(ben)}, "anna has handed over a part"
    (path,) = (tmp_path / "fetched").glob(f"{ben}-*.jsonl")
    assert path.read_bytes() == run.path("ben").read_bytes()


def test_a_peer_that_has_used_up_its_part_of_the_folder_passes_on_the_ledger_of_another(run, tmp_path, monkeypatch):
    lengthen(run, "anna")
    size = run.path("ben").stat().st_size
    for _ in range(2):  # the second time nothing of Anna is new
        found = collect_through_anna(monkeypatch, run, tmp_path / "fetched", max_bytes=size)
        assert found.silent == {str(owner("anna").own): PEER_FULL}
        assert (found.is_peer_full, found.is_full) == (True, False)
        assert str(owner("ben").own) in found.answered


def test_what_a_relay_makes_of_a_ledger_is_not_said_of_its_owner(run, tmp_path, monkeypatch):
    calls = {"ben": lying(signed_by_ben(run)), "dora": broken}
    for relay, why in (("ben", "sends lines that their owner has not signed"), ("dora", "does not answer")):
        _, problems = fetch_by(monkeypatch, tmp_path / relay, calls, {"anna": [relay]})
        assert problems["anna"].startswith(f"was asked through {owner(relay).own}, which {why}")


def test_two_runs_of_the_same_peers_are_fetched_into_one_folder(tmp_path, monkeypatch, capsys):
    to, names = str(tmp_path / "ledger"), {owner(name).own: name for name in NAMES}
    records = {peer: SimpleNamespace(name=name, client_mode=False) for peer, name in names.items()}
    monkeypatch.setattr("swarm.membership.progress_store.progress_records", lambda *_: records)
    for run_id, *options in (("letters",), ("numbers", "--json")):
        run = LedgerRun(tmp_path / run_id, key_prefix(run_id, "0123abcd"))
        run.start(*NAMES)
        run.update()
        run.close()
        manifest = SimpleNamespace(run_id=run_id, key_prefix=run.run, authority=None)
        looking = contextlib.nullcontext((DhtHere(), manifest))
        monkeypatch.setattr("swarm.cli.probe.looking_at", lambda *_, looking=looking: looking)
        answer_by(monkeypatch, {name: caller(server_of(run, name)) for name in NAMES})
        assert main(["fetch", f"/ip4/203.0.113.5/tcp/31337/p2p/{owner('anna').own}", "--to", to, *options]) == 0
        said = capsys.readouterr().out
        if options:
            folder = json.loads(said)["folder"]
        else:
            assert "3 peers handed over" in said
            folder = said.split()[-1]
        assert main(["verify", folder]) == 0
        assert run_id in capsys.readouterr().out
