"""`swarm members`: the content of the organiser's books, for a person and for a program."""

import io
import json
import time

import pytest
from rich.console import Console

from swarm.cli.organiser.members import main
from swarm.cli.organiser.organiser_options import date
from swarm.protocol.certificates import EVERYTHING, Role

DAY = 24 * 3600


def shown(her_run) -> str:
    console = Console(width=110, record=True, file=io.StringIO())
    assert main(her_run.options(), make_console=lambda: console) == 0
    return console.export_text()


def row_of(text: str, name: str) -> list[str]:
    return next(line for line in text.splitlines() if line.strip().startswith(name)).split()


def test_the_table_shows_members_and_invitations(her_run):
    registry, now = her_run.folder.registry, time.time()
    ada, ben = her_run.add("ada"), her_run.add("[red]ben", Role.TRAIN | Role.WATCH)
    her_run.add("cleo", Role.TRAIN | Role.SERVE)
    registry.note_certificate(ada.serial, int(now + 5 * DAY))
    registry.note_certificate(ben.serial, int(now - 5 * DAY))
    registry.remove([ben.serial], "sends [b]noise[/b]", her_run.signer, her_run.folder.authority)
    registry.invite("dora", 3, 2, EVERYTHING)
    registry.invite("", 3, 20, Role.WATCH)
    her_run.note_rounds("first", (1, {ada: 500, ben: 64}), (2, {ada: 1000}))
    her_run.note_rounds("second", (2, {ada: 1000}))
    text = shown(her_run)
    assert "run digits: 3 members, 1 of them removed" in text
    today, peer = date(now), str(ada.peer_id)[-8:]
    assert row_of(text, "ada") == ["ada", f"…{peer}", today, "everything", "1,500", date(now + 5 * DAY)]
    assert row_of(text, "[red]ben")[2:] == [today, "train", "64", "ended", date(now - 5 * DAY), "sends", "[b]noise[/b]"]
    assert row_of(text, "cleo")[2:] == [today, "train,", "serve", "0", "none", "yet"]
    assert row_of(text, "dora") == ["dora", "2", date(now + 3 * DAY), "everything"]
    assert row_of(text, "anyone with it")[3:] == ["20", date(now + 3 * DAY), "watch"]
    assert str(ada.serial) not in text


def test_the_table_of_a_run_without_members_says_so(her_run):
    text = shown(her_run)
    assert "run digits: 0 members" in text
    assert "No invitation is open: swarm invite makes one." in text


def test_the_same_for_a_program(her_run):
    registry, said = her_run.folder.registry, []
    ada = her_run.add("ada")
    registry.remove([ada.serial], "", her_run.signer, her_run.folder.authority)
    registry.invite("", 1, 20, Role.WATCH)
    assert main(her_run.options("--json"), said.append) == 0
    books = json.loads(said[0])
    assert books["run_id"] == "digits"
    assert books["members"] == [
        {
            "name": "ada",
            "peer_id": str(ada.peer_id),
            "serial": ada.serial,
            "since": ada.enrolled_at,
            "roles": "everything",
            "samples": 0,
            "certificate_until": None,
            "why_removed": "",
        }
    ]
    (invitation,) = books["invitations"]
    assert invitation.pop("until") == pytest.approx(time.time() + DAY, abs=60)
    assert invitation == {"name": None, "roles": "watch", "uses_left": 20}


def test_a_run_that_is_missing_is_refused(her_run, refusal):
    assert "give --run-id one of digits" in refusal(main, her_run.options("--run-id", "letters"))
