"""`swarm control` in a real DHT: members hear of an order, and who may not order is refused."""

from __future__ import annotations

import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from recipe.errors import InputError
from swarm.cli.organiser import deputy
from swarm.cli.organiser.control import main
from swarm.enrolment.organiser_folder import OrganiserFolder
from swarm.membership.control.giving import give_order
from swarm.membership.progress_record import PAUSED
from swarm.network.record_push import push_list
from swarm.protocol.certificates import Signer
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
        "peers, and everybody passes it on."
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
    forged = Orders("digits").with_order(Order(50, What.PAUSE)).signed_by(stranger)
    assert not push_list(ada.dht, ada.manifest.key_prefix, ORDERS, forged, (ben.dht.peer_id,)), "nobody takes it"
    key = tmp_path / "eve.key"
    assert deputy.main([str(key), "--output-dir", str(tmp_path)], lambda line: None) == 0
    assert run(folder, "pause", "--organiser-key", str(key))[0] == 2
    assert "was signed by a deputy who has no right to" in capsys.readouterr().err
    assert ada.ordered() == ben.ordered() == Orders("digits")
    key = tmp_path / "desk.key"
    assert deputy.main([str(key), "--rights", "control", "--output-dir", str(tmp_path)], lambda line: None) == 0
    assert run(folder, "pause", "--at-step", "50", "--organiser-key", str(key))[0] == 0
    assert ada.ordered().given == ben.ordered().given == (Order(50, What.PAUSE),)
