"""Machines and lines of the peers, on the page and for programs, and the traffic of the swarm."""

import json
import re
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from swarm.desk.seen import MOST_BYTES_A_SECOND
from swarm.protocol.notes import LOCAL, MAX_TRAFFIC_BYTES, PUBLIC, Profile
from tests.helpers.desk.pages import MARKUP, names_on, text_of

GPU = Profile("4 × NVIDIA H100", "0.1.0, protocol 19", PUBLIC, 12.5e6, 0, 0)


def sending(seen, profile: Profile, totals: list[int], name: str = "ada") -> None:
    """Look at this peer every two seconds, once for each total of bytes sent. It receives twice as much."""
    for total in totals:
        seen.look(seen.record(name, 1, profile=replace(profile, sent=total, received=2 * total)))


def test_the_page_says_what_each_peer_computes_on_and_how_it_is_reached(seen):
    quiet, hidden = seen.record("ben", 1, client_mode=True), seen.record("cy", 1, profile=Profile("", "0.1.0", LOCAL))
    helper = seen.record("dan", 1, rate=0.0, helps=True, profile=replace(GPU, device="CPU, 8 threads"))
    told = replace(GPU, sent=10**9, received=5 * 10**8)
    seen.look(seen.record("ada", 1, profile=told), quiet, hidden, helper)
    text = text_of(seen.web.get("/").text)
    for words in (
        "server-mode public address 4 × NVIDIA H100 0.1.0, protocol 19 1 10",
        "0.500 100 Mbit/s 1.5 GB now",
        "client-mode not reachable – 1",
        "server-mode local network – 0.1.0 1",
        "helper public address CPU, 8 threads",
        "1 GB in all",
    ):
        assert words in text, words


def test_programs_get_the_same(seen):
    sending(seen, GPU, [10**6, 3 * 10**6])
    seen.look(seen.record("ada", 1, profile=replace(GPU, sent=4 * 10**6)), seen.record("ben", 1))
    swarm, (ada, ben) = seen.web.get("/api/v1/swarm").json(), seen.web.get("/api/v1/peers").json()["peers"]
    assert (swarm["bytes_per_second"], swarm["sent_bytes"]) == (0.75e6, 4 * 10**6)
    assert (ada["device"], ada["version"], ada["reached"]) == ("4 × NVIDIA H100", "0.1.0, protocol 19", PUBLIC)
    assert (ada["upload_bytes_per_second"], ada["sent_bytes"]) == (12.5e6, 4 * 10**6)
    assert (ben["device"], ben["version"], ben["reached"], ben["sent_bytes"]) == (None, None, "reachable", None)
    families = {family.name: family for family in text_string_to_metric_families(seen.web.get("/metrics").text)}
    assert families["swarm_traffic_bytes_per_second"].samples[0].value == 0.75e6
    assert families["swarm_sent_bytes"].samples[0].value == 4e6
    assert {sample.labels["name"]: sample.value for sample in families["swarm_peer_sent_bytes"].samples} == {"ada": 4e6}
    (line,) = families["swarm_peer_upload_bytes_per_second"].samples
    assert (line.labels["name"], line.value) == ("ada", 12.5e6)
    devices = {sample.labels["name"]: sample.labels["device"] for sample in families["swarm_peer_info"].samples}
    assert devices == {"ada": "4 × NVIDIA H100", "ben": ""}


@pytest.mark.parametrize("path", ["/", "/peers", "/metrics"])
def test_names_of_devices_are_shown_as_text(seen, path):
    machine = Profile(MARKUP, "</td><script>x", LOCAL)
    seen.look(seen.record("ada", 1, profile=machine))
    page = seen.web.get(path).text
    if path == "/metrics":
        info = next(family for family in text_string_to_metric_families(page) if family.name == "swarm_peer_info")
        assert info.samples[0].labels["device"] == MARKUP
        return
    assert "<img src=x" not in page
    assert "<script>" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page
    assert "&lt;/td&gt;&lt;script&gt;x" in page


def test_the_traffic_is_what_was_sent_lately_and_all_that_was_sent(seen):
    history = seen.history
    assert history.bytes_per_second is None
    sending(seen, GPU, [5 * 10**9])
    assert history.bytes_per_second is None, "they were sent before the desk looked, at an unknown time"
    sending(seen, GPU, [5 * 10**9 + n * 10**6 for n in range(1, 30)])
    assert history.bytes_per_second == pytest.approx(0.5e6)
    assert history.sent == 5 * 10**9 + 29 * 10**6
    assert history.peers["ada"].received == 2 * history.sent
    assert history.points[-1].bytes_per_second == pytest.approx(0.5e6)
    assert "Traffic, Mbit/s" in seen.web.get("/").text
    sending(seen, GPU, 30 * [5 * 10**9 + 29 * 10**6])
    assert history.bytes_per_second == 0


def test_a_peer_that_starts_again_counts_on(seen):
    sending(seen, GPU, [1000, 3000, 500, 700])
    assert (seen.history.sent, seen.history.peers["ada"].received) == (3700, 7400)
    seen.look(seen.record("ada", 1))
    sending(seen, GPU, [800])
    assert seen.history.sent == 3800, "a record that says nothing takes nothing away"


def test_no_peer_is_believed_to_send_more_than_any_line_carries(seen):
    sending(seen, GPU, [0, MAX_TRAFFIC_BYTES])
    assert seen.history.sent == pytest.approx(2 * MOST_BYTES_A_SECOND)
    sending(seen, GPU, 40 * [0, MAX_TRAFFIC_BYTES])
    assert seen.history.bytes_per_second <= MOST_BYTES_A_SECOND
    seen.look(seen.record("dan", 1))
    before = seen.history.sent
    sending(seen, GPU, [MAX_TRAFFIC_BYTES], name="dan")
    assert seen.history.sent - before == pytest.approx(2 * MOST_BYTES_A_SECOND), "its first profile is no exception"
    assert seen.history.bytes_per_second <= MOST_BYTES_A_SECOND
    sending(seen, GPU, [MAX_TRAFFIC_BYTES, MAX_TRAFFIC_BYTES], name="eve")
    assert seen.history.peers["eve"].sent == MAX_TRAFFIC_BYTES
    seen.desk.save()
    assert json.loads(seen.path.read_text())["peers"]["eve"]["sent"] == MAX_TRAFFIC_BYTES
    seen.look(replace(seen.record("fay", 1), joined=0.0, time=1000.0))
    sending(seen, GPU, [MAX_TRAFFIC_BYTES], name="fay")
    assert seen.history.peers["fay"].sent == pytest.approx(2 * MOST_BYTES_A_SECOND), "as long as it was here"


def test_a_desk_that_is_started_again_knows_the_machines_also_from_a_file_of_an_earlier_version(seen, another):
    sending(seen, GPU, [1000, 3000])
    seen.desk.save()
    again = another()
    assert again.history.peers == seen.history.peers
    content = json.loads(seen.path.read_text())
    for peer in content["peers"].values():
        del peer["profile"], peer["sent"], peer["received"]
    for point in content["points"]:
        del point["bytes_per_second"]
    seen.path.write_text(json.dumps(content))
    assert [*another().history.peers] == ["ada"]


def test_peers_are_sorted_by_device_and_by_line(seen):
    lines = {"ada": ("CPU, 8 threads", 3e6), "ben": ("NVIDIA T4", 9e6), "cy": ("", None)}
    machines = {name: Profile(device, "0.1.0", LOCAL, upload) for name, (device, upload) in lines.items()}
    seen.look(*(seen.record(name, 1, profile=machine) for name, machine in machines.items()))
    assert names_on(seen, "/peers?sort=line") == ["ben", "ada", "cy"]
    assert names_on(seen, "/peers?sort=device") == ["ada", "ben", "cy"]
    assert re.search(r'aria-sort="ascending">\s*<a [^>]*>Device', seen.web.get("/peers?sort=device").text)
