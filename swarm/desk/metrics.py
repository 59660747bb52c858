"""The run as metrics for Prometheus. At most `MAX_PEERS` peers have metrics of their own: each label costs memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import get_args

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from swarm.desk.health import Kind
from swarm.desk.report import PeerReport, SwarmReport

MAX_PEERS = 200


def metrics_text(swarm: SwarmReport, peers: Iterable[PeerReport]) -> bytes:
    """The answer of `/metrics`.

    Args:
        peers: of the run, the fastest first
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Metrics(swarm, [peer for peer in peers if peer.state == "here"][:MAX_PEERS]))
    return generate_latest(registry)


class _Metrics:
    """One report as prometheus_client collects it."""

    def __init__(self, swarm: SwarmReport, peers: list[PeerReport]):
        self._swarm, self._peers = swarm, peers

    def collect(self) -> Iterator[Metric]:
        swarm = self._swarm
        yield InfoMetricFamily(
            "swarm_run", "Name and model of the run", value={"run_id": swarm.run_id, "model": swarm.model}
        )
        yield _gauge("swarm_updates", "Updates made so far", swarm.step)
        yield _gauge("swarm_planned_updates", "Updates after which the run ends", swarm.total_steps)
        yield _gauge("swarm_loss", "Training loss, median of the peers", swarm.loss)
        yield _gauge("swarm_accuracy_ratio", "Validation accuracy, median of the peers, 0 to 1", swarm.accuracy)
        yield _gauge(
            "swarm_samples_per_second",
            "Samples per second of all peers, as they claim",
            swarm.samples_per_second,
        )
        yield _gauge("swarm_updates_per_minute", "Updates per minute, from the last updates", swarm.updates_per_minute)
        yield _gauge(
            "swarm_traffic_bytes_per_second",
            "Bytes per second sent by all peers, as they say",
            swarm.bytes_per_second,
        )
        yield CounterMetricFamily(
            "swarm_sent_bytes", "Bytes sent by all peers seen, as they say", value=swarm.sent_bytes
        )
        yield _gauge("swarm_peers", "Peers in the run now", swarm.num_peers)
        yield _gauge("swarm_full_peers", "Peers that others can call", swarm.num_full_peers)
        yield _gauge("swarm_last_update_timestamp_seconds", "When the last update was seen", swarm.updated_at)
        yield _gauge("swarm_paused", "1 if the organiser has paused the run", int(swarm.is_paused))
        yield _gauge("swarm_healthy", "1 if nothing is wrong", int(not swarm.findings))
        wrong = {finding.kind for finding in swarm.findings}
        found = GaugeMetricFamily("swarm_finding", "1 if something of this kind is wrong now", labels=["kind"])
        for kind in get_args(Kind):
            found.add_metric([kind], int(kind in wrong))
        yield found
        labels = ["peer", "name"]
        rates = GaugeMetricFamily(
            "swarm_peer_samples_per_second", "Samples per second of the peer, as it claims", labels=labels
        )
        claimed = GaugeMetricFamily(
            "swarm_peer_claimed_samples",
            "Samples of the peer in the updates seen, from its claims",
            labels=labels,
        )
        lines = GaugeMetricFamily(
            "swarm_peer_upload_bytes_per_second", "Fastest upload of the peer among its latest averages", labels=labels
        )
        sent = CounterMetricFamily("swarm_peer_sent_bytes", "Bytes that the peer has sent, as it says", labels=labels)
        received = CounterMetricFamily(
            "swarm_peer_received_bytes", "Bytes that the peer has received, as it says", labels=labels
        )
        told = InfoMetricFamily("swarm_peer", "Machine and role of the peer, as it says", labels=labels)
        for peer in self._peers:
            of_peer = [peer.peer_id, peer.name]
            rates.add_metric(of_peer, peer.samples_per_second)
            claimed.add_metric(of_peer, peer.claimed_samples)
            if peer.upload_bytes_per_second is not None:
                lines.add_metric(of_peer, peer.upload_bytes_per_second)
            if peer.sent_bytes is not None:
                sent.add_metric(of_peer, peer.sent_bytes)
                received.add_metric(of_peer, peer.received_bytes)
            machine = {"device": peer.device or "", "version": peer.version or "", "reached": peer.reached}
            told.add_metric(of_peer, machine | {"role": peer.role})
        yield from (rates, claimed, lines, sent, received, told)


def _gauge(name: str, text: str, value: float | None) -> GaugeMetricFamily:
    """A gauge; without a sample as long as its value is not known."""
    gauge = GaugeMetricFamily(name, text)
    if value is not None:
        gauge.add_metric([], value)
    return gauge
