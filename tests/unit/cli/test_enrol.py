"""`swarm enrol`: people become members until Ctrl-C."""

import os
import signal

import pytest
from hivemind.utils.crypto import RSAPrivateKey

from swarm.cli.organiser.enrol import main
from swarm.enrolment.client import enrol
from swarm.network.addresses import connects
from swarm.network.home.interfaces import has_ipv6, own_addresses
from swarm.protocol.certificates import EVERYTHING


@pytest.fixture
def usual_signals():
    """Set the signals as in a process of its own. Another test may have left a handler that ends this one."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("usual_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_people_enrol_until_it_is_told_to_end(her_run, number, capsys):
    registry, said = her_run.folder.registry, []
    tokens = [registry.invite(name, 1, 1, EVERYTHING) for name in ("ada", "")]

    def wait() -> None:
        enrol(her_run.folder.join_line(tokens[0]), RSAPrivateKey(), "Ada")
        signal.raise_signal(number)

    assert main(her_run.options("--port", "0"), said.append, wait) == 0
    port = her_run.folder.enrolment_port
    assert said == [
        f"People enrol for run digits at 127.0.0.1:{port}; this machine listens on TCP port {port}. Join lines that "
        "were made before name port 31338: make new ones with swarm invite.",
        "2 invitations are open, for 2 people.",
        "Members renew their certificates here. Newcomers also need a running peer that their join line names. While "
        "your peer is off, send them a line of swarm invite that was made while other members run.",
        "Ctrl-C ends it.",
        "Enrolment has ended here; members stay members as long as their certificates count.",
    ]
    (member,) = registry.members()
    assert member.name == "ada"
    assert f"ada has enrolled: {member.peer_id}" in capsys.readouterr().err


def test_the_port_of_the_join_lines_is_taken_again(her_run):
    """A person that has a line from before can use it."""

    def end() -> None:
        raise KeyboardInterrupt

    her_run.folder.note_contact(her_run.signer.public_key, her_run.folder.addresses, 31338, "100.64.0.7")
    main(her_run.options("--port", "0"), lambda _: None, end)
    assert her_run.folder.public_ip == "100.64.0.7"
    said = []
    assert main(her_run.options(), said.append, end) == 0
    port = her_run.folder.enrolment_port
    assert said[0] == f"People enrol for run digits at 127.0.0.1:{port}; this machine listens on TCP port {port}."
    assert said[1] == "No invitation is open: swarm invite makes one."


def test_another_port_does_not_make_this_run_the_one_that_was_started_last(her_run):
    """It is the one that is meant without --run-id."""

    def end() -> None:
        raise KeyboardInterrupt

    os.utime(her_run.folder.path / "contact.json", (1, 1))
    her_run.another("letters")
    said = []
    for words in (["--run-id", "digits"], []):
        assert main(her_run.options("--port", "0", *words), said.append, end) == 0
    runs = [sentence.split(" at ")[0] for sentence in said if sentence.startswith("People enrol")]
    assert runs == ["People enrol for run digits", "People enrol for run letters"]


def test_people_enrol_at_any_address_of_this_machine(her_run):
    """This includes IPv6, where the machine has it: a join line may name such an address first."""
    hosts = [host for host in own_addresses() if host != "::1" or has_ipv6()]
    answers = {}

    def call() -> None:
        answers.update((host, connects(host, her_run.folder.enrolment_port, 5)) for host in hosts)
        raise KeyboardInterrupt

    assert main(her_run.options("--port", "0"), lambda _: None, call) == 0
    assert answers == dict.fromkeys(hosts)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--port", "70000"], "--port is 70000: give 0 (any free port) to 65535."),
        (["--certificate-days", "0"], "--certificate-days is 0: it has to be more than 0."),
        (["--certificate-days", "1000"], "Certificates for 1000 days cannot be made"),
        (["--organiser-key", "no.key"], "The organiser's key no.key is not there"),
        (["--run-id", "letters"], "No run letters of yours is in"),
    ],
)
def test_bad_input_is_refused(her_run, refusal, arguments, sentence):
    assert refusal(main, her_run.options(*arguments)).startswith(sentence)
