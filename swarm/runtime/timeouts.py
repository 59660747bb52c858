"""How long a peer waits, in one place: many of these times depend on each other."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields


def seconds_since_boot() -> float:
    """Also those for which the machine slept, where the system counts them (Linux)."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


@dataclass(frozen=True)
class Timeouts:
    """Seconds; nothing here has to agree with other peers, but a peer that is less patient than they are loses them.

    Times that follow the link (a round, a download) are not here: they are computed from bytes and measured rates.

    Raises:
        ValueError: two of them contradict each other
    """

    # -- whether a peer is still there
    look_seconds: float = 0.5
    """Between two looks at what has changed."""
    doubt_seconds: float = 1.0
    """Without an answer, after which it is not worthwhile to do nothing but wait."""
    silence_seconds: float = 2.5
    """Without an answer, after which a peer is lost; or two usual exchanges, since the answer queues behind parts."""
    first_silence_seconds: float = 10.0
    """The same as long as nobody knows what is usual."""
    longest_silence_seconds: float = 10.0
    """The same however long exchanges are: few parts are on their way before an answer (`averaging.send_window`)."""
    late_seconds: float = 3.0
    """After which a peer that was always in time delays an exchange; or three usual exchanges, if that is longer."""

    # -- progress records
    report_seconds: float = 1.0
    """Between two records of a training peer, unless the end of the step is nearer."""
    search_seconds: float = 5.0
    """Longest time between two searches in the DHT: a newcomer may have told others only."""
    record_seconds: float = 15.0
    """Without a record, after which a peer is no longer expected."""
    call_seconds: float = 5.0
    """For the answer to a call that asks whether a peer is there at all."""

    # -- meeting
    redirect_seconds: float = 0.2
    """Between two knocks at a peer that still follows another one."""
    knock_again_seconds: float = 1.0
    """Between two knocks at a senior peer that could not be reached and is still expected."""
    reply_seconds: float = 4.0
    """For the answer to a knock: a peer that is alive answers at once, whatever it is doing."""
    hold_seconds: float = 4.0
    """For which a leader holds its group open for a joiner that has just got the state."""

    # -- handing over the state
    settle_seconds: float = 5.0
    """For which a donor waits for the end of its update, before it copies its state."""
    making_seconds: float = 8.0
    """For which a donor keeps a peer waiting that asks for the average of the round that is running."""
    stream_seconds: float = 10.0
    """Silence of a donor that was asked for something, after which it counts as gone."""
    open_seconds: float = 10.0
    """For which a donor waits until a peer says what it has opened a stream for."""
    stalled_seconds: float = 10.0
    """Without a request, after which an upload is in nobody's way."""
    judge_seconds: float = 20.0
    """Of a donor's sending, after which its rate is judged."""
    offer_seconds: float = 30.0
    """For which a donor copies its state and computes digests, on a busy machine."""
    follow_seconds: float = 30.0
    """For which a peer that trains on follows a download at least; and as long as 2 Mbit/s need for it."""
    kept_seconds: float = 60.0
    """After the last request, for which a copy of the state, or half a download, is kept."""

    # -- choosing a donor
    first_donor_seconds: float = 1.0
    """After which other donors are tried beside the first one, if that needs longer than `fast_donor_seconds`."""
    fast_donor_seconds: float = 3.0
    """A donor that needs no longer than this for the rest has no rivals."""
    race_seconds: float = 2.0
    """That each donor has to show how fast it is, from its first piece on."""
    longest_race_seconds: float = 20.0
    """After which the race is over, whoever has not begun."""
    alone_seconds: float = 4.0
    """That the fastest donor has to show how fast it is alone, and then the second."""

    # -- catching up
    pause_seconds: float = 0.5
    """Before a peer that is behind, and could not catch up, tries again."""
    retry_seconds: float = 30.0
    """For how long it does."""
    superior_seconds: float = 20.0
    """For which a peer looks for somebody who is ahead and has the state."""

    # -- own processes
    leave_seconds: float = 2.0
    """For a round to end, when this peer leaves."""
    dead_seconds: float = 10.0
    """Without an averaging process, after which a peer ends: whoever can start it again has done so by then."""
    hangs_seconds: float = 30.0
    """Without a sign of life from the averaging process, after which it is killed."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"{field.name} has to be more than 0.")
        for shorter, longer, why in (
            ("look_seconds", "silence_seconds", "a peer is looked at before it is lost"),
            ("doubt_seconds", "silence_seconds", "a peer is doubted before it is lost"),
            ("silence_seconds", "longest_silence_seconds", "the second bounds the first"),
            ("silence_seconds", "first_silence_seconds", "less is known at first"),
            ("report_seconds", "record_seconds", "a peer that reports is expected"),
            ("search_seconds", "record_seconds", "a record is found before it is too old"),
            ("redirect_seconds", "reply_seconds", "a knock is answered before the next one"),
            ("settle_seconds", "stream_seconds", "a donor that waits for its update is not taken for lost"),
            ("making_seconds", "stream_seconds", "a donor that waits for its round is not taken for lost"),
            ("stream_seconds", "offer_seconds", "copying takes longer than sending"),
            ("stalled_seconds", "kept_seconds", "what stalls can still go on"),
            ("race_seconds", "longest_race_seconds", "the second bounds the first"),
            ("pause_seconds", "retry_seconds", "there is a second attempt"),
            ("stream_seconds", "hangs_seconds", "a silent donor is not taken for an averaging process that hangs"),
        ):
            if getattr(self, shorter) > getattr(self, longer):
                raise ValueError(f"{shorter} may not be longer than {longer}: {why}.")


DEFAULT_TIMEOUTS = Timeouts()
