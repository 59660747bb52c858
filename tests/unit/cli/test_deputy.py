"""`swarm deputy`: a second key that signs in the organiser's place."""

import pytest

from recipe.errors import InputError
from swarm.cli.organiser import deputy
from swarm.enrolment.organiser_key import VARIABLE, check_right, read_key
from swarm.protocol.certificates import Right


def test_a_deputy_may_do_what_the_organiser_says(her_run, tmp_path, capsys):
    path = tmp_path / "ben.key"
    assert deputy.main([str(path), "--rights", "remove", *her_run.options()]) == 0
    assert f"{path}.warrant" in capsys.readouterr().out
    signer = read_key(path)
    check_right(signer, her_run.folder.authority, Right.REMOVE)
    with pytest.raises(Exception, match="no right to"):
        check_right(signer, her_run.folder.authority, Right.ENROL)


def test_the_person_that_makes_a_key_reads_whether_it_has_a_passphrase(her_run, tmp_path, monkeypatch, capsys):
    assert deputy.main([str(tmp_path / "ben.key"), *her_run.options()]) == 0
    assert "It has no passphrase" in capsys.readouterr().out
    read_key(tmp_path / "ben.key")
    monkeypatch.setenv(VARIABLE, "one of hers")
    assert deputy.main([str(tmp_path / "desk.key"), *her_run.options()]) == 0
    assert f"It has the passphrase that is in {VARIABLE}: a person who uses the key needs it" in capsys.readouterr().out
    with pytest.raises(InputError, match="needs its passphrase"):
        read_key(tmp_path / "desk.key")


@pytest.mark.parametrize(("rights", "says_where"), [("members", True), ("control", False)])
def test_the_person_that_makes_a_key_with_the_right_to_enrol_reads_where_lines_count(
    her_run, tmp_path, capsys, rights, says_where
):
    assert deputy.main([str(tmp_path / "ben.key"), "--rights", rights, *her_run.options()]) == 0
    said = "only the machine that enrols can make them" in capsys.readouterr().out
    assert said == says_where


@pytest.mark.parametrize(
    ("more", "says"),
    [(["--days", "0"], "cannot be made for 0 days"), (["--organiser-key", "no.key"], "is not there")],
)
def test_bad_input_is_refused(her_run, tmp_path, capsys, more, says):
    assert deputy.main([str(tmp_path / "ben.key"), *her_run.options(), *more]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "ben.key").exists()


def test_no_key_is_written_over(her_run, tmp_path, capsys):
    path = tmp_path / "ben.key"
    assert deputy.main([str(path), *her_run.options()]) == 0
    before = path.read_bytes()
    assert deputy.main([str(path), *her_run.options()]) == 2
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ben.key", "--initial-peers", "/ip4/127.0.0.1/tcp/1"], "--initial-peers goes with --revoke"),
        (
            ["eve.key", "--revoke"],
            "No deputy 'eve.key' of run digits is known: give one of ben.key, desk.key, twice",
        ),
        (["ben.key", "--revoke"], "has no right to give orders, and only that right can be taken back"),
        (["desk.key", "--revoke"], "The run cannot be reached"),
        (["desk.key", "--revoke", "--organiser-key", "desk.key"], "use the organiser's own key"),
        (["twice.key", "--revoke"], "Several deputies were made as twice.key: name the .warrant"),
        (["other.key", "--revoke"], "is no warrant of run digits: it"),
    ],
)
def test_what_cannot_be_revoked_is_said_in_one_sentence(her_run, tmp_path, capsys, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    for name in ("ben.key", "twice.key"):
        assert deputy.main([name, *her_run.options()]) == 0
    assert deputy.main(["desk.key", "--rights", "control", *her_run.options()]) == 0
    for file in tmp_path.glob("twice.key*"):
        file.unlink()
    assert deputy.main(["twice.key", *her_run.options()]) == 0
    (tmp_path / "twice.key.warrant").unlink()
    (tmp_path / "other.key.warrant").write_bytes(b"nothing")
    capsys.readouterr()
    assert deputy.main([*arguments, *her_run.options()]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
