"""A volunteer's identity is backed up, and moved to another machine with its memberships."""

import os
import shutil
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hivemind.p2p import PeerID

from recipe.run_folder import RunFolder
from swarm.cli import identity
from swarm.enrolment.join_line import JoinLine
from swarm.network.signed_records import LISTS, prepare_identity
from swarm.peer.membership.credentials import Credentials, become_member
from swarm.peer.membership.identity_backup import MAX_MEMBERSHIPS
from swarm.protocol.signed_lists import REMOVED
from tests.helpers.owners import DAY_SECONDS, Organiser

ADDRESS = "/ip4/127.0.0.1/tcp/9/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
PASSPHRASE = "correct horse"


@pytest.fixture(scope="module")
def key(tmp_path_factory) -> Path:
    """The private key of a peer. One serves all tests, since making one takes up to a second."""
    path = tmp_path_factory.mktemp("key") / "ada.key"
    prepare_identity(path)
    return path


class Machine:
    """A machine with a folder of runs, on which a person types commands."""

    def __init__(self, output_dir: Path):
        self.output_dir = output_dir
        self.key = output_dir / "identities" / "ada.key"
        self.said: list[str] = []

    def run(self, *words: str | Path) -> int:
        return self.main(list(words))

    def main(self, words: list[str | Path]) -> int:
        self.said.clear()
        return identity.main([*map(str, words), "--output-dir", str(self.output_dir)], self.said.append)

    @property
    def text(self) -> str:
        return "\n".join(self.said)


@pytest.fixture(autouse=True)
def passphrase(monkeypatch):
    monkeypatch.setenv("SWARM_KEY_PASSPHRASE", PASSPHRASE)
    monkeypatch.setenv("HIVEMIND_LOGLEVEL", "WARNING")


@pytest.fixture
def old(tmp_path, key) -> Machine:
    machine = Machine(tmp_path / "old" / "runs")
    machine.key.parent.mkdir(parents=True)
    shutil.copy(key, machine.key)
    return machine


@pytest.fixture
def new(tmp_path) -> Machine:
    return Machine(tmp_path / "new" / "runs")


@pytest.fixture
def backup(tmp_path) -> Path:
    return tmp_path / "ada.backup"


@pytest.fixture
def organiser() -> Organiser:
    return Organiser("night-1")


def join(machine: Machine, organiser: Organiser, end: float = DAY_SECONDS) -> bytes:
    """Make the peer of this machine a member, and return its certificate."""
    peer_id = PeerID.from_identity(machine.key.read_bytes())
    line = JoinLine("night-1", organiser.signer.public_key, (ADDRESS,))
    credentials = Credentials(line, organiser.certificate(peer_id, end=end))
    credentials.write(RunFolder.create(machine.output_dir, "night-1", "ada").membership)
    return credentials.certificate


@pytest.mark.slow
def test_a_member_moves_with_its_key_and_its_certificate(old, new, backup, organiser):
    certificate = join(old, organiser)
    assert old.run("export", backup) == 0
    assert "with 1 membership" in old.text
    assert stat.S_IMODE(backup.stat().st_mode) == 0o600
    assert b"night-1" not in backup.read_bytes()
    assert new.run("import", backup) == 0
    assert new.key.read_bytes() == old.key.read_bytes()
    assert stat.S_IMODE(new.key.stat().st_mode) == 0o600
    folder = RunFolder(new.output_dir / "night-1" / "ada")
    assert stat.S_IMODE(folder.membership.stat().st_mode) == 0o600
    # A peer does the same when it starts. It asks no server and uses no invitation, or this would fail.
    (words,) = (line.split() for line in new.text.splitlines() if line.strip().startswith("swarm join"))
    member = become_member(JoinLine.parse(words[2]), new.key, "ada", folder)
    assert member.credentials.certificate == certificate


def test_show_says_which_identity_and_of_which_runs(old, key, organiser):
    peer_id = str(PeerID.from_identity(key.read_bytes()))
    assert old.run("show") == 0
    assert peer_id in old.text
    assert "a member of no run" in old.text
    join(old, organiser)
    assert old.run("show", "--public-name", "ada") == 0
    assert "member ada of run night-1, until" in old.text
    join(old, organiser, end=-5)
    assert old.run("show", "--identity-path", old.key) == 0
    assert "certificate has ended on" in old.text


def test_show_names_removed_members(old, organiser):
    join(old, organiser)
    path = RunFolder(old.output_dir / "night-1" / "ada").membership
    kept = Credentials.read(path)
    serial = kept.certificate_of(PeerID.from_identity(old.key.read_bytes())).serial
    for number, why in enumerate(("noise", "\x1b[2Jnoise")):  # a deputy can sign any reason
        removals = replace(organiser.removals, number=1000 * int(time.time()) + number, removed={serial: why})
        Credentials(kept.line, kept.certificate, {REMOVED: removals.signed_by(organiser.signer)}).write(path)
        assert old.run("show") == 0
        assert f"removed from run night-1: {why.lstrip(chr(27))}" in old.text


@pytest.mark.slow
def test_a_longer_certificate_that_is_there_already_stays(old, new, backup, organiser):
    join(old, organiser)
    assert old.run("export", backup) == 0
    assert new.run("import", backup) == 0
    longer = join(new, organiser, end=2 * DAY_SECONDS)
    assert new.run("import", backup) == 0, "the same identity again is no harm"
    assert Credentials.read(RunFolder(new.output_dir / "night-1" / "ada").membership).certificate == longer


def test_a_backup_holds_the_memberships_that_end_last_however_long_their_lists_are(old, new, backup):
    peer_id, full = PeerID.from_identity(old.key.read_bytes()), os.urandom(2**16)
    for number in range(MAX_MEMBERSHIPS + 1):
        organiser = Organiser(run_id := f"night-{number}")
        certificate = organiser.certificate(peer_id, end=(100 - number) * DAY_SECONDS)
        line = JoinLine(run_id, organiser.signer.public_key, (ADDRESS,))
        folder = RunFolder.create(old.output_dir, run_id, "ada")
        Credentials(line, certificate, dict.fromkeys(LISTS, full), full).write(folder.membership)
    assert old.run("export", backup) == 0
    assert f"with {MAX_MEMBERSHIPS} memberships. 1 that ends earlier is left out" in old.text
    assert new.run("import", backup) == 0
    there = {path.parent.parent.name for path in new.output_dir.glob("*/ada/membership.json")}
    assert there == {f"night-{number}" for number in range(MAX_MEMBERSHIPS)}


@pytest.mark.slow
def test_another_name_and_place(old, new, backup, organiser):
    join(old, organiser)
    assert old.run("export", backup) == 0
    place = new.output_dir.parent / "my stick" / "own.key"
    assert new.run("import", backup, "--public-name", "ada-2", "--identity-path", place) == 0
    assert place.read_bytes() == old.key.read_bytes()
    assert not (new.output_dir / "identities").exists()
    assert f"--public-name ada-2 --output-dir {new.output_dir} --identity-path '{place}'" in new.text
    assert new.run("export", backup.with_name("again"), "--identity-path", place) == 0
    assert "with 1 membership" in new.text, "it is found by its peer id, not by a name"


@pytest.mark.slow
def test_nothing_is_written_over_without_being_asked(old, new, backup, refusal, tmp_path):
    assert old.run("export", backup) == 0
    sealed = backup.read_bytes()
    assert "add --overwrite" in refusal(old.main, ["export", backup])
    assert backup.read_bytes() == sealed
    assert old.run("export", backup, "--overwrite") == 0
    assert backup.read_bytes() != sealed, "each has its own salt"
    prepare_identity(new.key)
    before = new.key.read_bytes()
    assert "is another identity" in refusal(new.main, ["import", backup])
    assert new.key.read_bytes() == before
    assert new.run("import", backup, "--overwrite") == 0
    assert new.key.read_bytes() == old.key.read_bytes()
    assert [path.name for path in tmp_path.rglob(".*")] == [], "nothing half is left"


@pytest.mark.slow
def test_what_cannot_be_opened_is_refused_in_a_sentence(old, new, backup, refusal, monkeypatch):
    assert old.run("export", backup) == 0
    whole = backup.read_text()
    with monkeypatch.context() as patch:
        patch.setenv("SWARM_KEY_PASSPHRASE", "correct hose")
        assert "The passphrase is wrong" in refusal(new.main, ["import", backup])
        patch.delenv("SWARM_KEY_PASSPHRASE")
        assert "there is no terminal to ask at" in refusal(new.main, ["import", backup])
        patch.setenv("SWARM_KEY_PASSPHRASE", "x" * 2000)
        assert "at most 1023 bytes" in refusal(old.main, ["export", backup.with_suffix(".2")])
    title, body = whole.split("\n", 1)
    swapped = "B" if body[200] == "A" else "A"
    damaged = [whole[:300], f"{title}\n", f"{title}\n{body[:200]}{swapped}{body[201:]}", f"{title}\nno base64!\n"]
    for text in damaged:
        backup.write_text(text)
        assert "was cut or changed on its way" in refusal(new.main, ["import", backup])
    for content in (b"", b"\xff\xfe", b"-----BEGIN PRIVATE KEY-----\n", old.key.read_bytes()):
        backup.write_bytes(content)
        said = refusal(new.main, ["import", backup])
        assert "is no backup of an identity" in said or "it is no text" in said
    assert "cannot be read" in refusal(new.main, ["import", backup.with_name("nothing")])
    assert not new.output_dir.exists()
    backup.write_text(whole.replace("\n", "\r\n\n"))  # as a mail program may hand it on
    assert new.run("import", backup) == 0


def test_it_has_to_be_clear_which_identity_is_meant(old, new, backup, refusal):
    assert "No identities are in" in refusal(new.main, ["export", backup])
    assert "cannot be read" in refusal(old.main, ["export", backup, "--public-name", "eve"])
    prepare_identity(old.key.with_name("ben.key"))
    assert "2 identities" in refusal(old.main, ["export", backup])
    assert "none with show" in refusal(old.main, ["show", backup])
    assert "none with show" in refusal(old.main, ["export"])
    assert "--public-name" in refusal(old.main, ["export", backup, "--public-name", "../eve"])
    old.key.write_bytes(b"no key")
    assert "holds no private key of a peer" in refusal(old.main, ["export", backup, "--public-name", "ada"])
    assert not backup.exists()
