"""A second key that signs in the organiser's place."""

import pytest

from swarm.cli.organiser import deputy
from swarm.enrolment.organiser_key import check_right, read_key
from swarm.protocol.certificates import Right


def test_a_deputy_may_do_what_the_organiser_says(her_run, tmp_path, capsys):
    path = tmp_path / "ben.key"
    assert deputy.main([str(path), "--rights", "remove", *her_run.options()]) == 0
    assert f"{path}.warrant" in capsys.readouterr().out
    signer = read_key(path)
    check_right(signer, her_run.folder.authority, Right.REMOVE)
    with pytest.raises(Exception, match="no right to"):
        check_right(signer, her_run.folder.authority, Right.ENROL)


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
