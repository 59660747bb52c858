"""Large TCP packets, as the kernel hands them to a packet socket: their size on the wire, and parts of them.

With PACKET_VNET_HDR, a frame is `struct virtio_net_hdr` (10 bytes; linux/virtio_net.h), Ethernet header, IPv4 packet. A
packet of up to 64 KB stands for several segments of at most `gso_size` bytes. Their checksums are not complete yet.
"""

from __future__ import annotations

import struct

VNET = struct.Struct("<BBHHHH")
"""`struct virtio_net_hdr`: flags, gso_type, hdr_len, gso_size, csum_start, csum_offset."""
IP = VNET.size + 14
"""Offset of the IPv4 header in a frame."""
_NEEDS_CHECKSUM, _TCP4 = 1, 1  # VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_TCPV4
_TCP, _UDP = 6, 17
_FIN_PSH, _CWR = 0x09, 0x80


def wire_size(frame: bytes) -> tuple[int, int]:
    """Number of IP packets that the frame stands for, and their bytes together, IP headers included."""
    size = len(frame) - IP
    gso_size = frame[4] | frame[5] << 8
    if not gso_size:
        return 1, size
    headers = _header_bytes(frame)
    segments = max(1, -(-(size - headers) // gso_size))
    return segments, size + (segments - 1) * headers


def _header_bytes(frame: bytes) -> int:
    ip_header = (frame[IP] & 15) * 4
    transport = frame[IP + 9]
    if transport == _TCP:
        return ip_header + (frame[IP + ip_header + 12] >> 4) * 4
    return ip_header + (8 if transport == _UDP else 0)


def is_large_tcp(frame: bytes) -> bool:
    """Whether `part` can take segments out of the frame."""
    return frame[1] & 0x7F == _TCP4 and bool(frame[0] & _NEEDS_CHECKSUM) and frame[IP + 9] == _TCP


def part(frame: bytes, first: int, last: int) -> bytes:
    """Segments `first` to `last` (exclusive) of a large TCP packet, as a frame of its own.

    Sequence number, flags, lengths and checksums are those that the kernel would give to the single segments (its
    tcp_gso_segment). The TCP checksum stays partial, as the kernel expects.
    """
    flags, gso_type, header_length, gso_size, checksum_start, checksum_offset = VNET.unpack_from(frame)
    ip_header, headers = (frame[IP] & 15) * 4, _header_bytes(frame)
    payload = frame[IP + headers :]
    segments = -(-len(payload) // gso_size)
    payload = payload[first * gso_size : last * gso_size]
    result = bytearray(frame[: IP + headers])
    tcp = IP + ip_header
    struct.pack_into(">H", result, IP + 2, headers + len(payload))
    identification, sequence = struct.unpack_from(">H", frame, IP + 4)[0], struct.unpack_from(">I", frame, tcp + 4)[0]
    struct.pack_into(">H", result, IP + 4, (identification + first) & 0xFFFF)
    struct.pack_into(">I", result, tcp + 4, (sequence + first * gso_size) & 0xFFFFFFFF)
    if last < segments:
        result[tcp + 13] &= ~_FIN_PSH
    if first > 0:
        result[tcp + 13] &= ~_CWR
    # The header's checksum is taken over the header with 0 in its place.
    struct.pack_into(">H", result, IP + 10, 0)
    struct.pack_into(">H", result, IP + 10, ~_sum16(result[IP : IP + ip_header]) & 0xFFFF)
    pseudo_header = result[IP + 12 : IP + 20] + struct.pack(">HH", _TCP, headers - ip_header + len(payload))
    struct.pack_into(">H", result, tcp + 16, _sum16(pseudo_header))
    if len(payload) <= gso_size:
        gso_type = gso_size = 0
    VNET.pack_into(result, 0, flags, gso_type, header_length, gso_size, checksum_start, checksum_offset)
    return bytes(result) + payload


def _sum16(data: bytes) -> int:
    """One's complement sum of 16-bit words (RFC 1071)."""
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total
