"""Socket options of a transfer connection."""

from __future__ import annotations

import asyncio
import socket

# A peer whose machine has gone silently is noticed after 10 + 3 · 5 seconds.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


def keep_alive(writer: asyncio.StreamWriter) -> None:
    """Notice a peer that has gone, also while nothing is sent; send small messages at once."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # Linux
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
