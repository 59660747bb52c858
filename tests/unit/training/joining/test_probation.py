"""How a newcomer judges the state that a donor has handed over, by what other peers say of theirs."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from swarm.membership.attestations import MAX_KEPT, Attestations
from swarm.protocol.attestation import DIGEST_BYTES, Attestation
from swarm.protocol.messages import RoundFailed
from swarm.state_sync.state_version import SKETCH_EVERY, StateVersion
from swarm.state_sync.training_state import SharedState
from swarm.training.joining.probation import MAX_REFUSED, MAX_SECONDS, MAX_UPDATES, Probation, StateVerdict, judge

LINEAGE = b"L" * 16
HERE = (1.0, -2.0, 3.0, 0.5, 1.5, -1.0, 2.0, 1.0)
NEAR = (*HERE[:-1], 1.0001)
FAR = tuple(-number for number in HERE)
CONFIRMED, REFUTED, OPEN = StateVerdict.CONFIRMED, StateVerdict.REFUTED, StateVerdict.OPEN


def says(digest: str, sketch=HERE, step: int = 7) -> Attestation:
    return Attestation(step, LINEAGE, digest.encode() * DIGEST_BYTES, sketch)


OWN, SAME, ROUNDED, FALSE, ODD = says("a"), says("a"), says("b", NEAR), says("f", FAR), says("o", (9.0,) * 8)


@pytest.mark.parametrize(
    ("others", "is_as_received", "verdict"),
    [
        ([], True, OPEN),
        ([SAME], True, CONFIRMED),
        ([FALSE], True, OPEN),  # one statement against the donor's
        ([FALSE, FALSE], True, REFUTED),
        ([FALSE, ODD], True, OPEN),  # the two do not agree with each other
        ([FALSE, SAME], True, OPEN),
        ([FALSE, SAME, SAME], True, CONFIRMED),
        ([FALSE, FALSE, SAME], True, OPEN),  # two against two, with the donor
        ([FALSE, FALSE, FALSE, SAME], True, REFUTED),
        ([FALSE, FALSE, SAME, SAME], True, OPEN),
        ([ROUNDED], True, OPEN),  # the donor knows the signs of this sketch
        ([ROUNDED], False, CONFIRMED),  # the donor did not know the signs of the next sketch
        ([ROUNDED, ROUNDED], True, OPEN),  # other hardware is no lie
        ([FALSE, FALSE, ROUNDED], False, OPEN),
        ([FALSE, FALSE, FALSE, ROUNDED], False, REFUTED),
        ([says("f", FAR), says("g", FAR)], True, REFUTED),  # the two agree, but for rounding
        ([says("f", ()), says("g", ())], True, OPEN),
        ([says("f", ()), says("f", ())], True, REFUTED),
        ([says("b", ())], False, OPEN),
        ([says("", HERE)], True, OPEN),  # a sketch alone is no proof of what was handed over
        ([says("", HERE)], False, CONFIRMED),
        ([says("", FAR), says("", FAR)], True, REFUTED),
        ([says("", ()), says("", ())], True, OPEN),
    ],
)
def test_statements_of_other_peers_decide(others, is_as_received, verdict):
    assert judge(OWN, others, is_as_received) is verdict


class Tracker:
    """A tracker whose other peers say what the test says."""

    def __init__(self):
        self.said, self.others, self.told, self.given_up = {}, {}, [], []
        self.knows_nobody = False
        self.trust = SimpleNamespace(handed_over_false=self.given_up.append)

    def say(self, peer: str, attestation: Attestation | None) -> None:
        self.others[peer] = SimpleNamespace(attested=attestation)
        self.said[peer] = attestation

    def attestations(self, step, lineage, sources):
        return {
            peer: said
            for peer, said in self.said.items()
            if peer not in sources and said is not None and (said.step, said.lineage) == (step, lineage)
        }

    def name_of(self, peer: str) -> str:
        return peer

    def report(self, **changes) -> None:
        self.told.append(changes)


class Attester:
    """An attester that makes a digest of the state when it is told to."""

    def __init__(self, version):
        self._version = version

    def attest_now(self) -> Attestation:
        return self._version.attest()


def make(seed: int = 0) -> StateVersion:
    torch.manual_seed(seed)
    model = nn.Linear(40, 10)
    state = SharedState(model, [torch.optim.AdamW(model.parameters())])
    return StateVersion(state, 7, list(model.parameters()))


class Newcomer:
    """A newcomer that takes over a state, and compares it with statements of other peers."""

    def __init__(self, **words: Attestation | None):
        self.version, self.donor, self.tracker = make(1), make(), Tracker()
        self.attester = Attester(self.version)
        self.probation = Probation(self.version, self.tracker, self.attester)
        for peer, said in words.items():
            self.tracker.say(peer, said)

    def true(self) -> Attestation:
        with self.donor.lock:
            return self.donor.attest()

    def take_over(self, false: bool = False) -> None:
        description, tensors = self.donor.export()
        tensors = [-tensor for tensor in tensors] if false else tensors
        examined = self.probation.examine("donor", description, tensors)
        self.version.load(description, tensors)
        self.probation.begin("donor", examined)


@pytest.fixture
def newcomer():
    made = Newcomer(donor=OWN, ben=OWN, carl=OWN)
    return made


def test_a_state_can_be_attested_before_it_is_taken_over(newcomer):
    received = newcomer.version.attest_received(*newcomer.donor.export())
    assert received == newcomer.true()
    assert received != newcomer.version.attest()
    newcomer.version.load(*newcomer.donor.export())
    assert newcomer.version.attest() == received, "and afterwards"


def test_a_confirmed_state_is_used_at_once(newcomer):
    newcomer.tracker.say("ben", newcomer.true())
    newcomer.take_over()
    assert newcomer.probation.gives_nothing
    newcomer.probation.review()
    assert not newcomer.probation.gives_nothing
    assert newcomer.tracker.told == [{"attested": None}, {"attested": newcomer.true()}]


def test_a_false_state_is_refused_before_anything_changes(newcomer):
    before = newcomer.version.attest()
    for peer in ("ben", "carl"):
        newcomer.tracker.say(peer, newcomer.true())
    with pytest.raises(RoundFailed, match="its state of step 7 differs from that of ben and carl"):
        newcomer.take_over(false=True)
    assert newcomer.version.attest() == before
    assert newcomer.tracker.given_up == ["donor"]


def test_a_false_state_gives_nothing_and_is_refuted_by_later_statements(newcomer, caplog):
    newcomer.take_over(false=True)
    newcomer.probation.review()
    assert newcomer.probation.gives_nothing
    for peer in ("ben", "carl"):
        newcomer.tracker.say(peer, newcomer.true())
    newcomer.probation.review()
    assert newcomer.probation.refuters == {"ben", "carl"}
    assert newcomer.tracker.given_up == ["donor"]
    assert newcomer.version.is_refuted, "no peer needs a copy of these"
    assert "The weights of step 7 from donor differ from those of ben and carl: this peer drops them" in caplog.text
    for _ in range(MAX_UPDATES):
        newcomer.probation.note_update()
    newcomer.probation.review()
    assert newcomer.probation.gives_nothing, "however long it takes"
    newcomer.tracker.say("ben", newcomer.true())
    newcomer.take_over()
    newcomer.probation.review()
    assert not newcomer.probation.gives_nothing
    assert not newcomer.version.is_refuted


def test_a_donor_is_believed_where_no_other_peer_has_something_to_say():
    newcomer = Newcomer(donor=OWN, another_newcomer=None)
    newcomer.take_over()
    assert not newcomer.probation.gives_nothing


def test_a_donor_is_believed_where_all_other_peers_leave(newcomer):
    newcomer.take_over()
    newcomer.tracker.others = {"donor": newcomer.tracker.others["donor"]}
    newcomer.probation.review()
    assert not newcomer.probation.gives_nothing


def test_silence_shuts_no_newcomer_out(newcomer, caplog, monkeypatch):
    for by_time in (False, True):
        newcomer.take_over()
        newcomer.probation.review()
        if by_time:
            now = MAX_SECONDS + 1 + newcomer.probation.since
            monkeypatch.setattr("swarm.training.joining.probation.time.monotonic", lambda now=now: now)
        else:
            for _ in range(MAX_UPDATES):
                assert newcomer.probation.gives_nothing
                newcomer.probation.note_update()
        newcomer.probation.review()
        assert not newcomer.probation.gives_nothing
        assert "No peer has confirmed the state from donor" in caplog.text
        caplog.clear()


def test_strangers_of_an_open_run_delay_a_newcomer_and_do_not_shut_it_out(newcomer, caplog):
    """Two peers with new names, which cost nothing, say that every state is false."""
    newcomer.tracker.knows_nobody = True
    for peer in ("ben", "carl"):
        newcomer.tracker.say(peer, says("f", FAR))
        newcomer.tracker.said[peer] = Attestation(7, newcomer.donor.lineage, b"f" * DIGEST_BYTES, FAR)
    for _ in range(MAX_REFUSED):
        with pytest.raises(RoundFailed, match="differs from that of ben and carl"):
            newcomer.take_over()
    newcomer.take_over()
    for _ in range(MAX_UPDATES):
        newcomer.probation.review()
        assert newcomer.probation.gives_nothing
        newcomer.probation.note_update()
    newcomer.probation.review()
    assert not newcomer.probation.gives_nothing
    assert "No peer has confirmed the state from donor" in caplog.text


def test_false_averages_are_found_and_a_peer_that_missed_one_gives_on_meanwhile(newcomer):
    version, lineage = newcomer.version, b"M" * 16
    version.step = SKETCH_EVERY - 1
    version.advance(lineage)
    newcomer.probation.note_followed("donor")
    newcomer.probation.review()
    assert newcomer.probation.is_on
    assert not newcomer.probation.gives_nothing, "it has missed an average, and no more"
    for peer in ("ben", "carl"):
        newcomer.tracker.say(peer, Attestation(SKETCH_EVERY, lineage, bytes(DIGEST_BYTES), HERE))
    newcomer.probation.review()
    assert newcomer.probation.gives_nothing
    assert newcomer.tracker.given_up == ["donor"]


def test_a_true_state_does_not_vouch_for_averages_on_top_of_it(newcomer):
    newcomer.tracker.say("ben", newcomer.true())
    newcomer.take_over()
    lineage = b"M" * 16
    newcomer.version.advance(lineage)
    newcomer.probation.note_followed("liar")
    newcomer.probation.review()
    assert newcomer.probation.gives_nothing
    newcomer.tracker.say("ben", newcomer.version.attest())
    newcomer.probation.review()
    assert not newcomer.probation.gives_nothing


def test_a_peer_attests_its_state_to_others_only_when_it_is_confirmed(newcomer):
    newcomer.attester.tell(SAME)
    newcomer.take_over()
    newcomer.attester.tell(says("x", step=8))
    assert newcomer.tracker.told == [{"attested": SAME}, {"attested": None}]
    newcomer.tracker.say("ben", says("x", step=8))
    newcomer.probation.review()
    assert newcomer.tracker.told[2:] == [{"attested": says("x", step=8)}], "and it was compared"


def test_attestations_are_kept_for_some_steps_and_not_changed_afterwards():
    kept = Attestations()
    for step in range(MAX_KEPT + 3):
        kept.note({"ben": SimpleNamespace(step=step, lineage=LINEAGE, attested=says("a", step=step))})
    kept.note({"ben": SimpleNamespace(step=MAX_KEPT, lineage=LINEAGE, attested=says("z", step=MAX_KEPT))})
    assert kept.of(MAX_KEPT, LINEAGE) == {"ben": says("a", step=MAX_KEPT)}
    assert [bool(kept.of(step, LINEAGE)) for step in range(5)] == [False, False, False, True, True]
    kept.note({"carl": SimpleNamespace(step=1, lineage=LINEAGE, attested=None)})
    assert kept.of(MAX_KEPT, LINEAGE) == {}, "ben has left"


def test_two_peers_that_agree_refute_nothing_while_most_are_silent():
    """Where a digest takes long, honest peers are silent about most steps, and two liars are not."""
    assert judge(OWN, [FALSE, FALSE], True, num_attesting=3) is REFUTED
    assert judge(OWN, [FALSE, FALSE], True, num_attesting=4) is OPEN


def test_a_donor_is_given_up_when_a_group_holds_other_weights(newcomer):
    """The comparison in a round may come before the statements in records."""
    newcomer.probation.note_stray()
    assert newcomer.tracker.given_up == []
    newcomer.take_over(false=True)
    newcomer.probation.note_stray()
    assert newcomer.tracker.given_up == ["donor"]
