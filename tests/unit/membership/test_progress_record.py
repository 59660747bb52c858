"""Progress records of strangers: honest ones survive the wire, and others are refused."""

import math
import random
import time
from dataclasses import replace

import msgpack
import pytest

from swarm.membership.progress_record import (
    FUTURE_SECONDS,
    JOINING,
    MAX_RATE,
    VALIDATING,
    Clocks,
    OwnClock,
    PeerProgress,
)
from swarm.protocol.attestation import Attestation
from swarm.protocol.notes import (
    LOCAL,
    MAX_DEVICE_BYTES,
    MAX_DEVICE_LETTERS,
    MAX_TRAFFIC_BYTES,
    MAX_UPLOAD,
    MAX_VERSION_LETTERS,
    MAX_WHY_BYTES,
    MAX_WHY_LETTERS,
    FailedRound,
    Profile,
    Score,
)
from swarm.protocol.wire import MAX_STEP
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS
from tests.helpers.mutation import mutated
from tests.helpers.records import NOW, RECORD

FIELDS = ("name", "step", "samples", "rate", "joined", "time", "client_mode", "phase", "loss", "accuracy")
FIELDS += ("ahead", "lineage", "attested", "helps", "failed", "tested", "granularity", "profile")
LONG = Attestation(MAX_STEP, b"L" * 16, b"D" * 16, (-1.5e-300,) * 16)
"""An attestation of the largest size."""
FAILED = FailedRound.after(None, MAX_STEP, "\U0001f41d" * 999)
LARGEST = Profile("é" * (MAX_DEVICE_BYTES // 2), "v" * MAX_VERSION_LETTERS, LOCAL, MAX_UPLOAD, *2 * [MAX_TRAFFIC_BYTES])
PROFILED = ["NVIDIA H100", "0.1.0, protocol 19", 1, 1e6, 5, 7]
ATTESTED = [12, b"L" * 16, b"D" * 16, [0.5] * 8]


def packed(**changes) -> bytes:
    """The record's bytes with some fields replaced by any value."""
    assert changes.keys() <= set(FIELDS)
    return msgpack.packb(
        list({**dict(zip(FIELDS, msgpack.unpackb(RECORD.to_bytes()), strict=True)), **changes}.values())
    )


@pytest.mark.parametrize(
    "record",
    [
        RECORD,
        replace(
            *(RECORD,),
            **{"client_mode": True, "step": MAX_STEP, "name": "\U0001f41d" * 64, "phase": JOINING, "attested": LONG},
            **{"failed": FAILED, "tested": Score(MAX_STEP, 0.1, 0.1), "profile": LARGEST},
        ),
    ],
)
def test_records_survive_the_wire(record):
    assert PeerProgress.from_bytes(record.to_bytes(), NOW) == record


def test_a_sketch_that_is_not_finite_is_none():
    attested = [*ATTESTED[:3], [math.nan, 1.0]]
    assert PeerProgress.from_bytes(packed(attested=attested), NOW).attested.sketch == ()


def test_a_reason_is_cut_and_failures_of_one_step_are_counted():
    first = FailedRound.after(None, 4, "ada\x1b[2J was lost")
    assert first == FailedRound(4, 1, "ada[2J was lost")
    assert FailedRound.after(first, 4, "x" * 999) == FailedRound(4, 2, "x" * MAX_WHY_LETTERS)
    assert FailedRound.after(first, 5, "\n") == FailedRound(5, 1, "it is not known why")
    assert len(FAILED.why.encode()) <= MAX_WHY_BYTES


def test_a_profile_is_cut_and_may_be_missing():
    profile = Profile("GPU\x1b[2J " + "\u2713" * 99, "1.0\n" + "0" * 99, LOCAL, 1e99, 10**30, 7)
    read = PeerProgress.from_bytes(replace(RECORD, profile=profile).to_bytes(), NOW).profile
    assert read.device == "GPU[2J " + "\u2713" * 19
    assert (read.version, read.reached) == ("1.0" + "0" * (MAX_VERSION_LETTERS - 4), LOCAL)
    assert (read.upload, read.sent, read.received) == (MAX_UPLOAD, MAX_TRAFFIC_BYTES, 7)
    assert PeerProgress.from_bytes(replace(RECORD, profile=Profile()).to_bytes(), NOW).profile == Profile()
    assert PeerProgress.from_bytes(RECORD.to_bytes(), NOW).profile is None


def test_a_person_reads_of_a_helper_that_it_helps():
    helper = PeerProgress.from_bytes(replace(RECORD, helps=True, samples=0, rate=0.0).to_bytes(), NOW)
    assert (RECORD.shown_phase, helper.shown_phase) == ("training", "helping")
    assert replace(helper, phase=JOINING).shown_phase == JOINING


def test_fields_that_are_not_known_yet_survive_the_wire():
    unknown = replace(RECORD, loss=math.nan, accuracy=math.nan, granularity=math.nan)
    record = PeerProgress.from_bytes(unknown.to_bytes(), NOW)
    assert math.isnan(record.granularity)
    assert math.isnan(record.loss)
    assert math.isnan(record.accuracy)


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 10**10},
        {"step": -1},
        {"step": True},
        {"step": 1.0},
        {"samples": -1},
        {"samples": 2**31 + 1},
        {"samples": "8"},
        {"rate": math.inf},
        {"rate": math.nan},
        {"rate": -1.0},
        {"rate": MAX_RATE * 1.01},
        {"time": NOW + FUTURE_SECONDS + 0.1},
        {"time": math.nan},
        {"time": math.inf},
        {"joined": NOW},
        {"joined": -1.0},
        {"joined": math.nan},
        {"name": ""},
        {"name": "a" * 65},
        {"name": "a\x1b[2J"},
        {"name": "two\nlines"},
        {"name": b"anna"},
        {"name": None},
        {"client_mode": 1},
        {"client_mode": None},
        {"phase": -1},
        {"phase": 99},
        {"phase": "training"},
        {"loss": None},
        {"accuracy": "0.5"},
        {"granularity": -0.1},
        {"granularity": math.inf},
        {"ahead": 1},
        {"lineage": b"short"},
        {"lineage": "a string of 16"},
        {"lineage": None},
        {"attested": 7},
        {"attested": []},
        {"attested": [-1, *ATTESTED[1:]]},
        {"attested": [12, b"short", *ATTESTED[2:]]},
        {"attested": [*ATTESTED[:2], b"D" * 17, ATTESTED[3]]},
        {"attested": [*ATTESTED[:2], b"D" * 15, ATTESTED[3]]},
        {"attested": [*ATTESTED[:3], [0.5] * 17]},
        {"attested": [*ATTESTED[:3], ["x"]]},
        {"attested": ATTESTED[:3]},
        {"attested": [*ATTESTED, 1]},
        {"helps": 1},
        {"helps": None},
        {"helps": True, "samples": 8, "rate": 0.0},
        {"helps": True, "samples": 0, "rate": 8.0},
        {"tested": 7},
        {"tested": [4, 0.5]},
        {"tested": [-1, 0.5, 1.0]},
        {"tested": [4, 1.1, 1.0]},
        {"tested": [4, math.nan, 1.0]},
        {"tested": [4, 0.5, -1.0]},
        {"tested": [4, 0.5, math.inf]},
        {"tested": [4, 0.5, "low"]},
        {"profile": 7},
        {"profile": PROFILED[:5]},
        {"profile": ["a" * (MAX_DEVICE_LETTERS + 1), *PROFILED[1:]]},
        {"profile": ["\U0001f41d" * (MAX_DEVICE_BYTES // 4 + 1), *PROFILED[1:]]},
        {"profile": ["\u202ecpu", *PROFILED[1:]]},
        {"profile": ["cpu", "v" * (MAX_VERSION_LETTERS + 1), *PROFILED[2:]]},
        {"profile": ["cpu", "\u00e9", *PROFILED[2:]]},
        {"profile": ["cpu", "\x1b[2J", *PROFILED[2:]]},
        {"profile": [*PROFILED[:2], 4, *PROFILED[3:]]},
        {"profile": [*PROFILED[:2], -1, *PROFILED[3:]]},
        {"profile": [*PROFILED[:3], -1.0, 5, 7]},
        {"profile": [*PROFILED[:3], math.nan, 5, 7]},
        {"profile": [*PROFILED[:3], math.inf, 5, 7]},
        {"profile": [*PROFILED[:4], -1, 7]},
        {"profile": [*PROFILED[:4], 5, 2**61]},
        {"profile": [*PROFILED[:4], 5.5, 7]},
        {"failed": 7},
        {"failed": [4, 1]},
        {"failed": [-1, 1, "why"]},
        {"failed": [4, 0, "why"]},
        {"failed": [4, 10**7, "why"]},
        {"failed": [4, 1, ""]},
        {"failed": [4, 1, b"why"]},
        {"failed": [4, 1, "two\nlines"]},
        {"failed": [4, 1, "a" * (MAX_WHY_LETTERS + 1)]},
        {"failed": [4, 1, "\U0001f41d" * (MAX_WHY_BYTES // 4 + 1)]},
    ],
    ids=lambda changes: "-".join(f"{key}={value!r}"[:24] for key, value in changes.items()),
)
def test_records_that_no_honest_peer_sends_are_refused(changes):
    data = packed(**changes)
    with pytest.raises(ValueError, match=r"."):
        PeerProgress.from_bytes(data, NOW)


@pytest.mark.parametrize("data", [b"", b"x" * 1025, "text", None, 7, msgpack.packb([1, 2]), msgpack.packb({})])
def test_data_that_are_no_record_are_refused(data):
    with pytest.raises(ValueError, match=r"."):
        PeerProgress.from_bytes(data, NOW)


def test_mutated_records_are_records_or_a_value_error():
    chance = random.Random(0)
    refused = 0
    for _ in range(2000):
        try:
            record = PeerProgress.from_bytes(mutated(RECORD.to_bytes(), chance), NOW)
        except ValueError:
            refused += 1
        else:
            assert 0 <= record.step <= MAX_STEP
            assert 0 <= record.rate <= MAX_RATE
            assert 0 <= record.joined <= record.time <= NOW + FUTURE_SECONDS
            assert record.name.isprintable()
    assert 1000 < refused < 2000


@pytest.mark.parametrize(
    ("record", "seconds", "in_last_group", "expected"),
    [
        ({}, 0.0, False, 96),
        ({}, 1.0, False, 96 + 250),  # the peer has gone on computing since
        ({}, 1000.0, False, 96 + 250 * 2 * DEFAULT_TIMEOUTS.report_seconds),  # but for an unknown time
        ({}, -3.0, False, 96),  # its clock is ahead of this peer's
        ({"phase": VALIDATING}, 1.0, False, 96),
        ({"step": 11}, 1.0, False, 0),
        ({"step": 13}, 1.0, False, 0),
        ({"step": 11}, 0.5, True, 125),  # it finished the last round with this peer and began this step then
        ({"step": 11}, 1000.0, True, 250 * 2 * DEFAULT_TIMEOUTS.report_seconds),
        ({"step": 13}, 1.0, True, 0),
    ],
)
def test_samples_by(record, seconds, in_last_group, expected):
    record = replace(RECORD, **record)
    now = record.time + seconds
    samples = record.samples_by(now, round=12, computing_since=now - seconds, in_last_group=in_last_group)
    assert samples == pytest.approx(expected)


def test_clocks_of_other_peers_are_corrected_only_if_they_are_clearly_off():
    clocks, late, ahead, right = Clocks(), "late", "ahead", "right"
    for second, delay in enumerate((0.3, 0.9, 0.2, 1.6)):
        now = NOW + second
        written = {late: now - 2.5, ahead: now + 2.5, right: now}
        records = {peer: replace(RECORD, time=at - delay) for peer, at in written.items()}
        found = clocks.corrected(records, now)
    assert found[right] == records[right], "an old record stays old"
    for peer in (late, ahead):
        assert found[peer].time == pytest.approx(now - 1.6, abs=0.3), "to within the least delay"
    assert found[late].samples_by(now, 12, NOW, True) < 96 + 250 * 2, "what it computed is not overestimated"
    assert clocks.corrected({}, now) == {}
    assert clocks.corrected({late: replace(RECORD, time=now - 1.4)}, now)[late].time == now, (
        "a peer that is gone is forgotten"
    )


def test_a_clock_that_is_set_is_noticed_once(monkeypatch):
    clock, system_time = OwnClock(), time.time
    assert clock.set_by_seconds() == 0.0
    monkeypatch.setattr("swarm.membership.progress_record.time.time", lambda: system_time() - 40)
    assert clock.set_by_seconds() == pytest.approx(-40, abs=0.9)
    assert clock.set_by_seconds() == 0.0
