"""Which headers pass the router."""

from __future__ import annotations

from collections.abc import Iterable

HOP_BY_HOP = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
# The body to the servers is a new one, and its answer must not be compressed: events are
# taken apart. The request id is set for both servers alike. A data-parallel rank means
# something behind one server only, and for Mooncake the router chooses it.
NOT_FORWARDED = HOP_BY_HOP | {
    "accept-encoding",
    "content-encoding",
    "content-length",
    "content-type",
    "expect",
    "host",
    "x-data-parallel-rank",
    "x-request-id",
}
NOT_RETURNED = HOP_BY_HOP | {"content-length", "date", "server"}
RawHeaders = list[tuple[bytes, bytes]]


def to_server(raw: Iterable[tuple[bytes, bytes]]) -> RawHeaders:
    """The client's end-to-end headers, its API key among them."""
    kept = [
        (name, value) for name, value in raw if name.lower().decode("latin-1") not in NOT_FORWARDED
    ]
    return [*kept, (b"content-type", b"application/json"), (b"accept-encoding", b"identity")]


def to_client(raw: Iterable[tuple[bytes, bytes]], request_id: str | None = None) -> RawHeaders:
    """A server's end-to-end headers plus the request id, if one is given."""
    kept = [
        (name.lower(), value)
        for name, value in raw
        if name.lower().decode("latin-1") not in NOT_RETURNED
    ]
    if request_id is not None and all(name != b"x-request-id" for name, _ in kept):
        kept.append((b"x-request-id", request_id.encode("latin-1")))
    return kept
