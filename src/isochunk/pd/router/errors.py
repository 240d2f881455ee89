"""Errors as OpenAI-style answers."""

from __future__ import annotations

from starlette.responses import JSONResponse

RETRY_AFTER_S = 2


class RouterError(Exception):
    """An answer of the router's own; the message is for the client.

    Args:
        status: HTTP status.
        message: what went wrong; never the text of an internal exception.
        kind: OpenAI's error type.
        param: the field of the request that is wrong.
        outcome: label of the requests counter.
    """

    def __init__(
        self, status: int, message: str, kind: str, *, param: str | None = None, outcome: str
    ) -> None:
        super().__init__(message)
        self.status = status
        self.outcome = outcome
        self.body = {
            "error": {"message": message, "type": kind, "param": param, "code": status},
        }

    def response(self) -> JSONResponse:
        """The answer to the client."""
        headers = {"Retry-After": str(RETRY_AFTER_S)} if self.status == 503 else {}
        return JSONResponse(self.body, self.status, headers)


def bad_request(message: str, param: str | None = None) -> RouterError:
    """400: the request itself can't be served."""
    return RouterError(400, message, "BadRequestError", param=param, outcome="bad_request")


def unavailable(message: str) -> RouterError:
    """503: no server can take the request now."""
    return RouterError(503, message, "ServiceUnavailableError", outcome="unavailable")


def bad_gateway(message: str) -> RouterError:
    """502: the server that had the request failed."""
    return RouterError(502, message, "BadGatewayError", outcome="decode_failed")
