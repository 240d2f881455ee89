"""Messages between ranks: a JSON header and, for blocks, their bytes."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

MAX_HEADER_BYTES = 4 << 20
MAX_PAYLOAD_BYTES = 64 << 20
_SIZES = struct.Struct("!II")


class ProtocolError(RuntimeError):
    """The other side sent something that isn't a valid message."""


async def send(
    writer: asyncio.StreamWriter, header: dict[str, Any], payload: bytes | memoryview = b""
) -> None:
    """Send one message; waits while the other side is slower."""
    text = json.dumps(header).encode()
    writer.write(_SIZES.pack(len(text), len(payload)) + text)
    if payload:
        writer.write(payload)
    await writer.drain()


async def receive(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    """The next message.

    Raises:
        ProtocolError: it is malformed or too long.
        asyncio.IncompleteReadError: the other side has closed.
    """
    num_header, num_payload = _SIZES.unpack(await reader.readexactly(_SIZES.size))
    if num_header > MAX_HEADER_BYTES or num_payload > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"message of {num_header} + {num_payload} bytes is too long")
    try:
        header = json.loads(await reader.readexactly(num_header))
    except ValueError as error:
        raise ProtocolError(f"header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise ProtocolError(f"header is {type(header).__name__}, not an object")
    return header, await reader.readexactly(num_payload)
