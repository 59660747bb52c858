"""`swarm invite`: the printed line can be used, and what cannot be made is refused."""

import base64
import contextlib
import errno
import json
import os
import shutil
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from hivemind.p2p import PeerID

from recipe.run_folder import RunFolder
from swarm.cli.organiser.deputy import main as deputy
from swarm.cli.organiser.invite import main
from swarm.cli.organiser.organiser_options import date, roles_shown
from swarm.enrolment import organiser_folder
from swarm.enrolment.join_line import JoinLine
from swarm.enrolment.organiser_key import make_deputy
from swarm.network.known_peers import write_book
from swarm.protocol.certificates import EVERYTHING, HELPER, Certificate, Right, Role

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
DAY = 24 * 3600


def invited(arguments: list[str]) -> tuple[list[str], str]:
    """The arguments of the printed `swarm join` command, and the sentence after it."""
    said: list[str] = []
    assert main(arguments, said.append) == 0
    command, sentence = "\n".join(said).split("\n\n")
    words = command.split()
    assert words[:2] == ["swarm", "join"]
    return words[2:], sentence


def test_the_line_makes_a_person_a_member(her_run):
    (line,), sentence = invited(her_run.options("--name", "Ada Byron", "--roles", "train"))
    assert sentence.splitlines()[0] == (
        f"One person can join run digits with this line until {date(time.time() + 30 * DAY)}. Anyone with the line "
        "can use it. If something goes wrong, `swarm remove 'Ada Byron'` takes the member out again."
    )
    peer_id = PeerID(b"\x12\x20" + os.urandom(32))
    member = her_run.folder.registry.use_invitation(JoinLine.parse(line).token, peer_id, "another name")
    assert (member.name, member.roles) == ("Ada Byron", Role.TRAIN | Role.WATCH)


def test_the_line_makes_a_person_a_helper(her_run):
    (line,), _ = invited(her_run.options("--name", "rented", "--roles", "helper"))
    peer_id = PeerID(b"\x12\x20" + os.urandom(32))
    member = her_run.folder.registry.use_invitation(JoinLine.parse(line).token, peer_id, "")
    assert member.roles == HELPER
    assert roles_shown(member.roles) == "helper"


def test_the_line_names_other_members_that_answer(her_run):
    """People join through them while her own peer is off and `swarm enrol` runs, but not through a removed member."""
    removed = her_run.add("mallory")
    her_run.folder.registry.remove([removed.serial], "", her_run.signer, her_run.folder.authority)
    ids = [str(removed.peer_id), *(PEER[:-1] + letter for letter in "ABC")]
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(a_peer()) for _ in range(3)]
        there = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}" for port, peer in zip(ports, ids, strict=False)]
        gone = f"/ip4/127.0.0.1/tcp/1/p2p/{ids[3]}"
        folder = RunFolder.create(her_run.output_dir, "digits", "first")
        write_book(folder.peers, [gone, f"/ip4/127.0.0.1/tcp/{ports[0]}/p2p/{PEER}", *there])
        (line,), _ = invited(her_run.options())
    found = JoinLine.parse(line)
    assert found.addresses == (*her_run.folder.addresses, *there[1:])
    assert len(found.enrolment_endpoints) == 1


@contextlib.contextmanager
def a_peer() -> Iterator[int]:
    """The port of a server that greets each caller, as a peer does."""

    def greet() -> None:
        with contextlib.suppress(OSError):
            while True:
                with server.accept()[0] as line:
                    line.send(b"hello")

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=greet, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("arguments", [[], ["--peer-id", PEER]])
def test_the_organiser_is_told_where_no_peer_outside_could_use_the_line(her_run, arguments):
    """Hours after the start, the first message about it has scrolled away."""
    said = invited(her_run.options(*arguments))[1]
    assert "\nNo peer on the internet can join: forward TCP port 1" in said
    assert ("TCP port 31338" in said) == (not arguments), "a certificate needs no enrolment"
    key, (here,) = her_run.signer.public_key, her_run.folder.addresses
    her_run.folder.note_contact(key, [here.replace("127.0.0.1", "1.1.1.1")], 31338)
    assert "No peer on the internet" not in invited(her_run.options(*arguments))[1]
    her_run.folder.note_contact(key, [here.replace("127.0.0.1", "100.64.0.7")], 31338, public_ip="100.64.0.7")
    assert "No peer on the internet" not in invited(her_run.options(*arguments))[1], (
        "she has said that others can call it"
    )


@pytest.mark.parametrize("arguments", [[], ["--close"]])
def test_a_deputy_with_a_copy_is_told_where_lines_count(her_run, tmp_path, monkeypatch, capsys, arguments):
    """The line of a copy is refused at the machine that enrols, which does not know its invitation."""
    make_deputy(her_run.signer, "digits", Right.ENROL, 3.0, tmp_path / "ben.key", None)
    of_ben = her_run.options(*arguments, "--organiser-key", str(tmp_path / "ben.key"))
    her_own = her_run.folder.key.rename(tmp_path / "in-a-drawer.key")
    monkeypatch.setattr(organiser_folder, "own_addresses", lambda: ["127.0.0.1", "192.168.1.5"])
    for hosts, options, is_told in (
        (["127.0.0.1"], of_ben, False),
        (["1.1.1.1", "192.168.1.5"], of_ben, False),
        (["1.1.1.1", "127.0.0.1"], of_ben, True),
        (["1.1.1.1"], her_run.options(*arguments), True),
        (["1.1.1.1"], her_run.options(*arguments, "--organiser-key", str(her_own)), False),
    ):
        addresses = [f"/ip4/{host}/tcp/1/p2p/{PEER}" for host in hosts]
        her_run.folder.note_contact(her_run.signer.public_key, addresses, 31338)
        assert main(options) == 0
        said = capsys.readouterr().out
        assert ("This may be a copy of the organiser's folder" in said) == is_told
        assert ("make a certificate here" in said) == (is_told and not arguments), "none closes a line"


def test_a_line_for_many(her_run):
    _, sentence = invited(her_run.options("--uses", "30", "--days", "7"))
    assert sentence.startswith(f"30 people can join run digits with this line until {date(time.time() + 7 * DAY)}. ")
    assert "`swarm remove NAME`" in sentence
    (invitation,) = her_run.folder.registry.invitations()
    assert (invitation.name, invitation.uses_left, invitation.roles) == ("", 30, EVERYTHING)


def test_a_certificate_is_made_for_a_peer_that_cannot_reach_the_enrolment_server(her_run):
    (line, option, text), sentence = invited(her_run.options("--peer-id", PEER, "--name", "ada", "--days", "10"))
    assert option == "--certificate"
    assert JoinLine.parse(line) == her_run.folder.join_line(), "no other peer can join with it"
    certificate = Certificate.read(base64.b64decode(text, validate=True), her_run.folder.authority)
    certificate.check_time()
    assert (str(certificate.peer_id), certificate.name, certificate.roles) == (PEER, "ada", EVERYTHING)
    assert certificate.end - time.time() == pytest.approx(10 * DAY, abs=60)
    assert f"joins until {date(certificate.end)}, and no other peer can use it" in sentence
    (member,) = her_run.folder.registry.members()
    assert (member.serial, member.certificate_ends_at) == (certificate.serial, certificate.end)
    assert her_run.folder.registry.invitations() == []
    (_, _, text), sentence = invited(her_run.options("--peer-id", PEER, "--name", "eve", "--roles", "train"))
    again = Certificate.read(base64.b64decode(text), her_run.folder.authority)
    assert (again.serial, again.name, again.roles) == (certificate.serial, "ada", EVERYTHING), "the books count"
    assert sentence.startswith("ada (…7DWjhx5N) is a member of run digits (roles: everything)")


def test_a_deputys_copy_is_without_the_tls_key_and_its_lines_name_the_organisers_machine(her_run, tmp_path, capsys):
    key, contact = tmp_path / "ben.key", her_run.folder.path / "contact.json"
    noted = json.loads(contact.read_text())
    del noted["fingerprint"]
    contact.write_text(json.dumps(noted))  # as an earlier version has left it
    assert deputy([str(key), *her_run.options()]) == 0
    left_out = ("organiser.key", "first_line.json", "tls.pem")
    assert (
        f"a copy of {her_run.folder.path} without your own key, first_line.json and tls.pem." in capsys.readouterr().out
    )
    bens = tmp_path / "bens"
    shutil.copytree(her_run.folder.path, bens / "organiser" / "digits", ignore=shutil.ignore_patterns(*left_out))
    arguments = ["--peer-id", PEER, "--organiser-key", str(key), "--output-dir", str(bens)]
    (line, _, _), _ = invited(arguments)
    assert JoinLine.parse(line) == her_run.folder.join_line()
    assert not (bens / "organiser" / "digits" / "tls.pem").exists()


def test_a_certificate_of_a_deputy_ends_with_the_warrant(her_run, tmp_path):
    make_deputy(her_run.signer, "digits", Right.ENROL, 3.0, tmp_path / "ben.key", None)
    options = her_run.options("--peer-id", PEER, "--days", "30", "--organiser-key", str(tmp_path / "ben.key"))
    _, sentence = invited(options)
    assert f"joins until {date(time.time() + 3 * DAY)}, and" in sentence
    (member,) = her_run.folder.registry.members()
    assert member.certificate_ends_at - time.time() == pytest.approx(3 * DAY, abs=60)


def test_a_removed_member_gets_no_certificate(her_run, refusal):
    member = her_run.add("ada")
    registry, peer_id = her_run.folder.registry, str(member.peer_id)
    registry.remove([member.serial], "sends noise", her_run.signer, her_run.folder.authority)
    assert f"was removed: `swarm remove {peer_id} --restore`" in refusal(main, her_run.options("--peer-id", peer_id))


def test_the_newest_run_is_meant_unless_one_is_named(her_run):
    older = her_run.another("older")
    os.utime(older.folder.path / "contact.json", (1, 1))
    (her_run.output_dir / "organiser" / "not-a-run").mkdir()
    assert JoinLine.parse(invited(her_run.options())[0][0]).run_id == "digits"
    assert JoinLine.parse(invited(her_run.options("--run-id", "older"))[0][0]).run_id == "older"


def test_runs_that_are_not_there(her_run, refusal, tmp_path):
    assert refusal(main, her_run.options("--run-id", "digit")) == (
        f"No run digit of yours is in {her_run.output_dir}/organiser: give --run-id one of digits."
    )
    assert "cannot name a folder: give --run-id" in refusal(main, her_run.options("--run-id", "../digits"))
    assert "start one with swarm start" in refusal(main, ["--output-dir", str(tmp_path / "elsewhere")])
    assert not (tmp_path / "elsewhere").exists()
    (her_run.folder.path / "contact.json").unlink()
    assert her_run.folder.registry.members() == []
    assert "does not say where run digits can be joined" in refusal(main, her_run.options())
    assert her_run.folder.registry.invitations() == []


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_run_of_another_user_is_not_said_to_be_missing(her_run, refusal, monkeypatch, is_listed):
    """For example, a helper under systemd has a user of its own, and its organiser is another user."""
    folder = her_run.folder.path
    locked = folder if is_listed else folder.parent
    look, read = Path.iterdir, Path.stat

    def iterdir(path):
        return look(path) if is_listed else refused(path)

    def stat(path, **options):
        return refused(path) if is_listed and path.parent == folder else read(path, **options)

    def refused(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", iterdir)
    monkeypatch.setattr(Path, "stat", stat)
    assert refusal(main, her_run.options()).startswith(f"{locked} cannot be read by this user: give the command as")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--uses", "0"], "--uses is 0: it has to be at least 1"),
        (["--uses", "1000000"], "An invitation for 1000000 members cannot be made"),
        (["--days", "0"], "--days is 0: it has to be more than 0"),
        (["--days", "nan"], "--days is nan: it has to be more than 0"),
        (["--days", "5000"], "An invitation for 5000 days cannot be made"),
        (["--name", "a" * 65], "--name has letters that cannot be shown, or more than 64"),
        (["--name", "\x1b[31m"], "--name has letters that cannot be shown"),
        (["--peer-id", "QmX"], "--peer-id 'QmX' is no peer id: it has 46 letters"),
        (["--peer-id", f"{PEER}/p2p-circuit/p2p/{PEER}"], "--peer-id 'QmYyQSo1c1Y"),
        (["--peer-id", PEER, "--uses", "2"], "A certificate is for one peer: leave out --uses"),
        (["--peer-id", PEER, "--days", "400"], "--days is 400: a certificate counts for at most 365"),
        (["--peer-id", PEER, "--organiser-key", "no.key"], "The organiser's key no.key is not there"),
    ],
)
def test_bad_input_is_refused(her_run, refusal, arguments, sentence):
    assert refusal(main, her_run.options(*arguments)).startswith(sentence)
    assert her_run.folder.registry.invitations() == []


class FakeCode:
    """A stand-in for the code class of the package `segno`."""

    def __init__(self, text: str):
        self.text = text

    def symbol_size(self, border):
        return 61, 61

    def terminal(self, out, border, compact):
        out.write(f"QR of {self.text}\n")


def test_the_line_as_a_qr_code(her_run, monkeypatch, refusal):
    monkeypatch.setitem(sys.modules, "segno", types.SimpleNamespace(make=lambda text, error, micro: FakeCode(text)))
    for columns, shown in ((80, "QR of swarm://"), (60, "(For a QR code the terminal needs 61 columns.)")):
        monkeypatch.setenv("COLUMNS", str(columns))
        said: list[str] = []
        assert main(her_run.options("--qr"), said.append) == 0
        assert said[0].startswith(shown)
        assert said[1].startswith("swarm join swarm://")
        assert said[0] == shown or said[0].split()[2] == said[1].split()[2]
    monkeypatch.setitem(sys.modules, "segno", None)
    assert refusal(main, her_run.options("--qr")) == "--qr needs a package that is missing: pip install segno."
    assert len(her_run.folder.registry.invitations()) == 2
