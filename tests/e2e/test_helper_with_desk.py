"""One command on a rented machine: a helper, and the page of its run."""

from __future__ import annotations

import json
import re
import urllib.request

import psutil
import pytest

from swarm.peer.status import Status
from tests.helpers.cli import LEAVE_SECONDS, PeerProgram, reaping, wait_until

pytestmark = pytest.mark.timeout(300)
LOOPBACK = ("--host-maddrs", "/ip4/127.0.0.1/tcp/0")


def test_the_helper_needs_no_desk_and_the_desk_tells_that_no_peer_trains(tmp_path):
    with reaping() as programs:
        options = ["--role", "helper", "--run-id", "shown", "--desk-port", "0", *LOOPBACK]
        helper = PeerProgram(tmp_path, "shown", "helper", *options)
        programs.append(helper)
        url = helper.wait_until(lambda: re.search(r"The desk of run shown: (http://\S+)", helper.output), "a page")[1]

        def told(what: str) -> dict:
            with urllib.request.urlopen(f"{url}/api/v1/{what}", timeout=10) as answer:
                return json.load(answer)

        def tells_that_nobody_trains() -> bool:
            try:
                sentence = told("swarm")["sentence"]
            except OSError:  # not yet
                return False
            return sentence == "Only helpers are here: the run waits for a training peer."

        helper.wait_until(tells_that_nobody_trains, "it tells")
        (shown,) = told("peers")["peers"]
        assert re.fullmatch(r"CPU, \d+ threads?", shown["device"])
        assert (shown["role"], shown["reached"]) == ("helper", "local network")
        children = psutil.Process(helper.process.pid).children()
        (desk,) = (child for child in children if "desk" in child.cmdline())
        desk.terminate()
        wait_until(lambda: desk.status() == psutil.STATUS_ZOMBIE, 30, "the desk ends")
        helper.folder.status.unlink()
        later: Status = wait_until(lambda: Status.read(helper.folder.status), 10, "it writes on")
        assert later.phase == "waiting for a training peer"
        helper.interrupt()
        assert helper.wait(LEAVE_SECONDS) == 0, helper.output
