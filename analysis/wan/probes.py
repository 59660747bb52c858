"""Small programs that measure the network from inside a host; each prints one JSON object.

python -m analysis.wan.probes ping 10.77.0.2 --count 100 --interval-ms 10
python -m analysis.wan.probes tcp-receive --skip-seconds 2 --seconds 5      # prints "ready" first
python -m analysis.wan.probes tcp-send 10.77.0.1
python -m analysis.wan.probes udp-receive
python -m analysis.wan.probes udp-send 10.77.0.1 --count 40000
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import socket
import statistics
import struct
import sys
import time

PORT = 5201
READY = "ready"
_ECHO_REQUEST, _ECHO_REPLY = 8, 0  # RFC 792
_CHUNK_BYTES = 1 << 20
_UDP_PACKET_BYTES, _UDP_PER_SECOND = 100, 8_000
_END = b"end"


def ping(address: str, count: int, interval_ms: float) -> dict[str, float]:
    """Sends ICMP echo requests at equal intervals; returns round-trip times in ms, without the first, which fills
    caches."""
    identity = os.getpid() & 0xFFFF
    times: dict[int, float] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as echo:
        begin, sent, end = time.perf_counter(), 0, None
        while len(times) < count and (end is None or time.perf_counter() < end):
            due = begin + sent * interval_ms / 1e3
            wait = due - time.perf_counter() if sent < count else 0.1
            if wait <= 0:
                body = struct.pack("!BBHHHd", _ECHO_REQUEST, 0, 0, identity, sent, time.perf_counter())
                echo.sendto(body[:2] + struct.pack("!H", _checksum(body)) + body[4:], (address, 0))
                sent += 1
                end = time.perf_counter() + 2 if sent == count else None
            elif select.select([echo], (), (), wait)[0]:
                reply = echo.recv(1500)[20:]
                kind, _, _, its_identity, number, sent_at = struct.unpack("!BBHHHd", reply[:16])
                if (kind, its_identity) == (_ECHO_REPLY, identity):
                    times[number] = (time.perf_counter() - sent_at) * 1e3
    values = [value for number, value in times.items() if number > 0]
    if len(values) < 2:
        return {"sent": sent, "received": len(times)}
    return {
        "sent": sent,
        "received": len(times),
        "median_ms": statistics.median(values),
        "mean_ms": statistics.mean(values),
        "max_ms": max(values),
        "stdev_ms": statistics.stdev(values),
    }


def tcp_receive(skip_seconds: float, seconds: float, connections: int = 1) -> dict[str, float]:
    """Accepts connections; returns the rate at which payload arrives by all of them after `skip_seconds`, in Mbit/s."""
    with contextlib.ExitStack() as stack:
        with socket.create_server(("", PORT)) as server:
            print(READY, flush=True)
            open_ones = [stack.enter_context(server.accept()[0]) for _ in range(connections)]
        _receive(open_ones, skip_seconds)
        total, elapsed = _receive(open_ones, seconds)
        return {"goodput_mbps": total * 8 / elapsed / 1e6, "seconds": elapsed}


def _receive(connections: list[socket.socket], seconds: float) -> tuple[int, float]:
    """Bytes received within about `seconds`, and the exact time."""
    buffer, total, begin = bytearray(_CHUNK_BYTES), 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds:
        for connection in select.select(connections, (), (), seconds - elapsed)[0]:
            total += connection.recv_into(buffer)
    return total, elapsed


def tcp_send(address: str) -> dict[str, float]:
    """Sends until the receiver closes the connection."""
    chunk, total = bytes(_CHUNK_BYTES), 0
    with socket.create_connection((address, PORT)) as connection, contextlib.suppress(OSError):
        while True:
            total += connection.send(chunk)
    return {"bytes": total}


def udp_receive() -> dict[str, float]:
    """Counts packets until the sender's end mark arrives."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        server.bind(("", PORT))
        print(READY, flush=True)
        received = 0
        while server.recv(2048) != _END:
            received += 1
    return {"received": received}


def udp_send(address: str, count: int) -> dict[str, float]:
    """Sends packets at an even pace; the end mark is repeated, in case it gets lost."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect((address, PORT))
        begin = time.perf_counter()
        for number in range(count):
            ahead = begin + number / _UDP_PER_SECOND - time.perf_counter()
            if ahead > 2e-3:
                time.sleep(ahead)
            client.send(bytes(_UDP_PACKET_BYTES))
        with contextlib.suppress(ConnectionRefusedError):  # the receiver has the end mark and is gone
            for _ in range(20):
                client.send(_END)
    return {"sent": count}


def _checksum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total & 0xFFFF) + (total >> 16)
    return ~(total + (total >> 16)) & 0xFFFF


def main() -> None:
    """Runs one probe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    probes = parser.add_subparsers(required=True)
    for name, probe in (("ping", ping), ("tcp-send", tcp_send), ("udp-send", udp_send)):
        command = probes.add_parser(name)
        command.add_argument("address")
        command.set_defaults(probe=probe)
        if name != "tcp-send":
            command.add_argument("--count", type=int, default=100)
        if name == "ping":
            command.add_argument("--interval-ms", type=float, default=10.0)
    receive = probes.add_parser("tcp-receive")
    receive.add_argument("--skip-seconds", type=float, default=2.0)
    receive.add_argument("--seconds", type=float, default=5.0)
    receive.add_argument("--connections", type=int, default=1)
    receive.set_defaults(probe=tcp_receive)
    probes.add_parser("udp-receive").set_defaults(probe=udp_receive)
    arguments = vars(parser.parse_args())
    json.dump(arguments.pop("probe")(**arguments), sys.stdout)


if __name__ == "__main__":
    main()
