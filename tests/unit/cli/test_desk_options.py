"""What `swarm desk` refuses, and what it shows of an invitation."""

import multiprocessing
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from recipe.errors import InputError
from recipe.presets import preset
from swarm.cli.desk import able_to_order, history_in, main, run_card
from swarm.enrolment.join_line import JoinLine
from swarm.membership.run_manifest import PROTOCOL, RunManifest
from swarm.protocol.certificates import Right, Signer, warrant

ADDRESS = "/ip4/203.0.113.5/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
LINE = JoinLine("letters", b"o" * 32, (ADDRESS,), b"t" * 16, 31338, b"f" * 16)
OPEN = RunManifest(PROTOCOL, "letters", preset("digits"))
BY_INVITATION = replace(OPEN, organiser=LINE.organiser, signature="s", made=1)


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("INITIAL_PEERS", "SWARM_DESK_ALERTS"):
        monkeypatch.delenv(name, raising=False)


def test_an_open_run_shows_its_addresses():
    card = run_card(OPEN, [ADDRESS], None, None)
    assert card.join_command == f"swarm join {ADDRESS}"
    assert not card.by_invitation


def test_the_invitation_in_the_line_that_starts_the_desk_is_not_shown():
    card = run_card(BY_INVITATION, [ADDRESS], LINE, None)
    shown = JoinLine.parse(card.join_line)
    assert shown == replace(LINE, token=b"")
    assert (card.by_invitation, card.has_invitation) == (True, False)


def test_a_join_line_is_made_of_addresses():
    shown = JoinLine.parse(run_card(BY_INVITATION, [ADDRESS], None, None).join_line)
    assert shown == JoinLine("letters", LINE.organiser, (ADDRESS,))


def test_an_invitation_is_shown_if_the_organiser_says_so():
    card = run_card(BY_INVITATION, [ADDRESS], replace(LINE, token=b""), LINE)
    assert JoinLine.parse(card.join_line) == LINE
    assert card.has_invitation
    with pytest.raises(InputError, match="for another run"):
        run_card(OPEN, [ADDRESS], None, LINE)


def test_the_page_is_told_where_the_program_is():
    card = run_card(OPEN, [ADDRESS], None, None, "https://example.org/ada/swarm-vit")
    assert card.setup_command.startswith("git clone https://example.org/ada/swarm-vit swarm-vit && cd swarm-vit && ")
    assert not run_card(OPEN, [ADDRESS], None, None).project_url


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "No address was given: swarm desk ADDRESS, or a join line"),
        ([ADDRESS, "--still-minutes", "0"], "has to be above 0"),
        ([ADDRESS, "--still-minutes", "nan"], "has to be above 0"),
        ([ADDRESS, "--alert", "nonsense://ada:secret@example.org"], "--alert number 1 is no URL"),
        ([ADDRESS, "--invitation", str(replace(LINE, token=b""))], "make one with swarm invite"),
        ([str(LINE), "--invitation", str(replace(LINE, run_id="other"))], "is for another run, other"),
        ([ADDRESS, "--page-url", "http://desk.example.org"], "has to be like https://desk.example.org"),
        ([ADDRESS, "--project-url", "javascript:alert(1)"], "--project-url has to be like https://"),
        ([ADDRESS, "--project-url", "git@example.org:ada/swarm-vit"], "--project-url has to be like https://"),
        ([ADDRESS, "--project-url", "https://ada:secret@example.org/x"], "--project-url has to be like https://"),
        ([ADDRESS, "--project-url", "https://[example.org/x"], "--project-url has to be like https://"),
        ([ADDRESS, "--project-url", "https://example.org/a b"], "--project-url has to be like https://"),
        ([ADDRESS, "--host", "203.0.113.77", "--port", "0"], "203.0.113.77"),
        ([ADDRESS, "--port", "99999"], "--port 99999 does not exist"),
        ([NOBODY, "--port", "0"], "127.0.0.1"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(refusal, arguments, words):
    assert words in refusal(main, arguments)


def test_a_port_in_use_is_refused_in_one_sentence(refusal):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert refusal(main, [ADDRESS, "--port", str(port)]).startswith(f"Port {port} is in use on this machine")


def test_two_desks_do_not_write_over_each_other_s_history(tmp_path):
    assert history_in(tmp_path / "letters") == history_in(tmp_path / "letters")
    with multiprocessing.get_context("fork").Pool(1) as another:
        assert "give this one another --output-dir" in another.apply(why_not, [tmp_path / "letters"])
        assert another.apply(why_not, [tmp_path / "digits"]) == ""


def why_not(folder: Path) -> str:
    try:
        history_in(folder)
    except InputError as error:
        return str(error)
    return ""


def test_a_person_that_has_not_installed_the_desk_is_told_how(refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, "swarm.desk.desk", None)
    assert "pip install -e '.[desk]'" in refusal(main, [ADDRESS])


def deputy(organiser: Signer, rights: Right, end: int, run_id: str = "letters") -> Signer:
    key = Ed25519PrivateKey.generate()
    return Signer(key, warrant(organiser, run_id, Signer(key).public_key, rights, 0, end))


def test_a_desk_whose_deputy_s_time_is_over_shows_the_page_all_the_same(capsys):
    """A systemd unit would start it again every 15 s, and that could not help."""
    organiser, now = Signer(Ed25519PrivateKey.generate()), int(time.time())
    run = replace(BY_INVITATION, organiser=organiser.public_key)
    signer = deputy(organiser, Right.CONTROL, now + 60)
    assert able_to_order(signer, run) is signer
    assert capsys.readouterr().err == ""
    assert able_to_order(deputy(organiser, Right.CONTROL, now - 60), run) is None
    assert "warning: The warrant of --deputy has ended on " in capsys.readouterr().err
    for useless in (deputy(organiser, Right.ENROL, now + 60), deputy(organiser, Right.CONTROL, now - 60, "other")):
        with pytest.raises(InputError, match="This key cannot be used for run letters"):
            able_to_order(useless, run)
    with pytest.raises(InputError, match="has no organiser"):
        able_to_order(signer, OPEN)
