"""`swarm control` in a real DHT: members hear of an order, and an order without the right to it is refused."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from recipe.errors import InputError
from swarm.cli.organiser import deputy
from swarm.cli.organiser.control import main
from swarm.enrolment.organiser_folder import OrganiserFolder
from swarm.enrolment.organiser_key import make_deputy
from swarm.membership.control.giving import give_order
from swarm.membership.progress_record import PAUSED
from swarm.network.record_push import push_list
from swarm.protocol.certificates import Right, Signer
from swarm.protocol.orders import Order, Orders, What
from swarm.protocol.signed_lists import ORDERS

pytestmark = pytest.mark.timeout(120)


def run(folder: OrganiserFolder, *arguments: str) -> tuple[int, list[str]]:
    said: list[str] = []
    return main([*arguments, "--output-dir", str(folder.path.parent.parent)], said.append), said


def test_members_hear_of_orders_at_a_step_that_lies_ahead(folder, members):
    ada, ben = members
    total, target = ada.manifest.recipe.total_steps, ada.manifest.recipe.target_batch_size
    for member in members:
        member.train(step=10, rate=target / 10)  # together an update in five seconds
    status, said = run(folder, "learning-rate", "0.5")
    assert said == [
        "Ordered: from step 16 on the learning rate is 0.5 × the recipe's, in about 30 s. The list was handed to 2 "
        "peers, and the peers pass it on."
    ]
    assert (status, ada.ordered()) == (0, ben.ordered())
    assert run(folder, "pause", "--at-step", "12")[0] == 0
    assert ben.ordered().given == (Order(16, What.LEARNING_RATE, 0.5), Order(12, What.PAUSE))
    for member in members:
        member.train(step=12, rate=target / 10, phase=PAUSED)
    assert run(folder, "resume")[1][0].startswith("Ordered: go on at step 12, at once.")
    shown = json.loads(run(folder, "show", "--json")[1][0])
    assert not shown.pop("is_paused")
    assert [order["what"] for order in shown.pop("orders")] == ["learning-rate", "pause", "resume"]
    assert shown == {
        "run_id": "digits",
        "step": 12,
        "total_steps": total,
        "learning_rate_factor": 1.0,
        "target_batch_size": target,
        "evaluate_every": 0,
    }
    assert run(folder, "show")[1][1:] == [
        "- from step 16 on the learning rate is 0.5 × the recipe's (coming)",
        "- pause at step 12",
        "- go on at step 12",
    ]


def test_only_the_organiser_and_a_deputy_with_the_right_can_order(folder, members, tmp_path, capsys):
    ada, ben = members
    for member in members:
        member.train()
    stranger = Signer(Ed25519PrivateKey.generate())
    with pytest.raises(InputError, match="was not signed by the organiser of this run"):
        give_order(ada.dht, ada.manifest, stranger, What.PAUSE, at_step=50)
    forged = Orders(ada.manifest.key_prefix).with_order(Order(50, What.PAUSE)).signed_by(stranger)
    assert not push_list(ada.dht, ada.manifest.key_prefix, ORDERS, forged, (ben.dht.peer_id,)), "no peer takes it"
    key = tmp_path / "eve.key"
    assert deputy.main([str(key), "--output-dir", str(tmp_path)], lambda line: None) == 0
    assert run(folder, "pause", "--organiser-key", str(key))[0] == 2
    assert "was signed by a deputy who has no right to" in capsys.readouterr().err
    assert ada.ordered() == ben.ordered() == Orders(ada.manifest.key_prefix)
    key = tmp_path / "desk.key"
    assert deputy.main([str(key), "--rights", "control", "--output-dir", str(tmp_path)], lambda line: None) == 0
    assert run(folder, "pause", "--at-step", "50", "--organiser-key", str(key))[0] == 0
    assert ada.ordered().given == ben.ordered().given == (Order(50, What.PAUSE),)


def test_two_orders_given_at_the_same_moment_are_both_followed(folder, members, tmp_path):
    ada, ben = members
    for member in members:
        member.train(step=12, phase=PAUSED)
    organiser = folder.make_signer()
    desk = make_deputy(organiser, "digits", Right.CONTROL, 30, tmp_path / "desk.key", None)
    both_know = threading.Barrier(2)

    def order(member, signer, what, value):
        both_know.wait(20)
        return give_order(member.dht, member.manifest, signer, what, value, 14)

    people = ThreadPoolExecutor()
    try:
        given = [
            people.submit(order, ada, organiser, What.TARGET, 128),
            people.submit(order, ben, desk, What.LEARNING_RATE, 0.5),
        ]
        assert all(one.result(60).num_peers for one in given)
    finally:
        people.shutdown(wait=False)
    for member in members:
        found = member.ordered()
        assert found.target_batch_size(14, 64) == 128
        assert found.learning_rate_factor(14) == 0.5
    assert ada.admission.lists.signed(ORDERS) == ben.admission.lists.signed(ORDERS)


def test_a_deputy_that_is_revoked_orders_nothing_any_more(folder, members, tmp_path, capsys):
    ada, ben = members
    for member in members:
        member.train(step=10)
    key, own = tmp_path / "desk.key", ["--output-dir", str(tmp_path)]
    assert deputy.main([str(key), "--rights", "control", *own], lambda line: None) == 0
    for order in (["learning-rate", "0.5", "--at-step", "12"], ["end", "--at-step", "50"]):
        assert run(folder, *order, "--organiser-key", str(key))[0] == 0
    said: list[str] = []
    (tmp_path / "desk.key.warrant").rename(tmp_path / "away.warrant")  # the organiser no longer has the deputy's files
    assert deputy.main(["desk.key", "--revoke", *own], said.append) == 0
    assert said == [
        "desk.key can no longer give orders in run digits. The list was handed to 2 peers, and the peers pass it on.",
        "- from step 12 on the learning rate is 0.5 × the recipe's: still counts",
        "- end at step 50: does not count any more",
    ]
    assert ada.ordered().given == ben.ordered().given == (Order(12, What.LEARNING_RATE, 0.5),)
    (tmp_path / "away.warrant").rename(tmp_path / "desk.key.warrant")
    assert run(folder, "pause", "--organiser-key", str(key))[0] == 2
    assert "the organiser has revoked it" in capsys.readouterr().err
    assert deputy.main([str(key), "--revoke", *own], said.append) == 0, "again, for peers that have not heard of it"
    assert ben.ordered().given == (Order(12, What.LEARNING_RATE, 0.5),)
