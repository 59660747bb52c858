"""All times that a peer waits, in one place: many of them depend on each other."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields


def seconds_since_boot() -> float:
    """Seconds since the machine started. On Linux, the time that it slept counts, too."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


@dataclass(frozen=True)
class Timeouts:
    """Times in seconds. They need not agree with those of other peers, but a less patient peer loses the others.

    Times that depend on the link (a round, a download) are not here: they are computed from bytes and measured rates.

    Raises:
        ValueError: two of them contradict each other
    """

    # -- whether a peer is still there
    look_seconds: float = 0.5
    """Seconds between two looks at what has changed."""
    doubt_seconds: float = 1.0
    """Seconds without an answer after which it is no longer worthwhile to only wait for the peer."""
    silence_seconds: float = 2.5
    """Seconds without an answer after which a peer is lost; or two usual exchanges: the answer queues behind parts."""
    first_silence_seconds: float = 10.0
    """The same before the first exchange, as long as the usual time is not known."""
    longest_silence_seconds: float = 10.0
    """Upper limit of this time, also after long exchanges: few parts precede an answer (`averaging.send_window`)."""
    late_seconds: float = 3.0
    """Seconds after which an exchange is late, with peers that were in time before; or three usual ones, if longer."""

    # -- progress records
    report_seconds: float = 1.0
    """Seconds between two records of a training peer, unless the end of the step is nearer."""
    search_seconds: float = 5.0
    """Longest time between two searches in the DHT: a newcomer may have told only other peers."""
    record_seconds: float = 15.0
    """Seconds without a record after which a peer is no longer expected."""
    call_seconds: float = 5.0
    """Seconds for the answer to a call that asks whether a peer is there at all."""

    # -- meeting (a knock is a join request to a possible leader)
    redirect_seconds: float = 0.2
    """Seconds between two knocks at a peer that still follows another leader."""
    knock_again_seconds: float = 1.0
    """Seconds between two knocks at a senior peer that could not be reached and is still expected."""
    reply_seconds: float = 4.0
    """Seconds for the answer to a knock: a peer that is alive answers at once, whatever it is doing."""
    hold_seconds: float = 4.0
    """Seconds for which a leader holds its group open for a joiner that has just got the state."""

    # -- handing over the state
    settle_seconds: float = 5.0
    """Seconds for which a donor waits for the end of its update, before it copies its state."""
    making_seconds: float = 8.0
    """Seconds for which a donor lets a peer wait that asks for the average of the running round."""
    stream_seconds: float = 10.0
    """Seconds of silence after which a donor that was asked for something counts as gone."""
    open_seconds: float = 10.0
    """Seconds for which a donor waits until a peer says what it has opened a stream for."""
    stalled_seconds: float = 10.0
    """Seconds without a request after which an upload no longer keeps other peers waiting."""
    judge_seconds: float = 20.0
    """Seconds of sending after which a donor's rate is judged."""
    offer_seconds: float = 30.0
    """Seconds for which a donor copies its state and computes digests, on a busy machine."""
    follow_seconds: float = 30.0
    """Seconds for which a peer that trains on follows a download, besides the time that 2 Mbit/s need for it."""
    kept_seconds: float = 60.0
    """Seconds after the last request for which a copy of the state, or an incomplete download, is kept."""

    # -- choosing a donor
    first_donor_seconds: float = 1.0
    """Seconds after which other donors are tried, if the first one needs longer than `fast_donor_seconds`."""
    fast_donor_seconds: float = 3.0
    """Seconds for the rest of a state. If the first donor needs no longer, no others are tried."""
    race_seconds: float = 2.0
    """Seconds in which each donor has to show how fast it is, from its first piece on."""
    longest_race_seconds: float = 20.0
    """Seconds after which the race is over, also if a donor has not begun to send."""
    alone_seconds: float = 4.0
    """Seconds in which the fastest donor has to show how fast it is alone, and then the second."""

    # -- catching up
    pause_seconds: float = 0.5
    """Seconds before a peer that is behind, and could not catch up, tries again."""
    retry_seconds: float = 30.0
    """Seconds for which it tries again."""
    superior_seconds: float = 20.0
    """Seconds for which a peer looks for a peer that is ahead and has the state."""

    # -- own processes
    leave_seconds: float = 2.0
    """Seconds that a round has to end when this peer leaves."""
    dead_seconds: float = 10.0
    """Seconds without an averaging process after which a peer ends: by then it would have been started again."""
    hangs_seconds: float = 30.0
    """Seconds without a sign of life from the averaging process after which it is killed."""

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
