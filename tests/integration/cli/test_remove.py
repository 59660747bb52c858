"""`swarm remove` in a real DHT: members hear of it, and a list that was signed elsewhere is not lost."""

from __future__ import annotations

import time

import pytest

from swarm.cli.organiser.remove import main
from swarm.enrolment.organiser_folder import OrganiserFolder
from swarm.network.record_push import push_list
from swarm.protocol.certificates import Removals
from swarm.protocol.signed_lists import REMOVED

pytestmark = pytest.mark.timeout(120)
RUN = "digits"


def run(folder: OrganiserFolder, *arguments: str) -> tuple[int, list[str]]:
    said: list[str] = []
    return main([*arguments, "--output-dir", str(folder.path.parent.parent)], said.append), said


def test_members_hear_of_a_removal(folder, members):
    ada, ben = members
    assert run(folder, "ben", "--why", "sends noise", "--offline")[0] == 0
    assert ben.heard() == {}
    ada.train()
    ben.train()
    elsewhere = Removals(RUN, int(1000 * time.time()), {}).with_removed([7], "signed on another machine")
    push_list(ada.dht, ada.manifest.key_prefix, REMOVED, elsewhere.signed_by(folder.signer()), (ben.dht.peer_id,))
    status, said = run(folder, "ben", "--why", "sends noise")
    assert said == [
        f"ben (…{str(ben.dht.peer_id)[-8:]}) is removed from run digits: sends noise.",
        "The new list was handed to 2 peers, and the peers pass it on.",
    ]
    assert status == 0
    expected = {7: "signed on another machine", ben.member.serial: "sends noise"}
    assert ada.heard() == ben.heard() == expected
    status, said = run(folder, "ben", "--restore")
    assert (status, ada.heard()) == (0, {7: "signed on another machine"})
    assert said[0].endswith("may take part in run digits again.")


def test_a_list_that_was_signed_offline_lets_in_no_member_that_another_signer_has_removed(folder, members):
    _, ben = members
    prefix, to = ben.manifest.key_prefix, (ben.dht.peer_id,)
    elsewhere = Removals(RUN, int(1000 * time.time()), {}).with_removed([7], "signed on another machine")
    push_list(members[0].dht, prefix, REMOVED, elsewhere.signed_by(folder.signer()), to)
    assert run(folder, "ada", "--why", "sends noise", "--offline")[0] == 0
    push_list(members[0].dht, prefix, REMOVED, folder.registry.removals(), to)  # as one that has enrolled would
    assert ben.heard() == elsewhere.removed
    both = folder.registry.merged(ben.dht.newest_list(REMOVED), folder.signer(), folder.authority)
    push_list(members[0].dht, prefix, REMOVED, both, to)
    assert ben.heard() == elsewhere.removed | {members[0].member.serial: "sends noise"}
