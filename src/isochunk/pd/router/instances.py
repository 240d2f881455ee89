"""The servers behind the router and what each of them has in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Literal

import httpx

from isochunk.latency import LatencyModel
from isochunk.pd.router.prediction import prefill_ms
from isochunk.pd.router.settings import Address

Role = Literal["prefill", "decode"]


class SilentServerError(Exception):
    """The server took a request but shows no sign of life."""


@dataclass(eq=False)
class Leg:
    """One request at one server."""

    num_tokens: float
    left_ms: float | None = None
    """Predicted work that is still to do; None without a latency model."""
    _waiting_since_s: float = 0.0
    _deadline: asyncio.Timeout | None = None
    _given_up: bool = False

    @asynccontextmanager
    async def waiting(self, timeout_s: float | None) -> AsyncIterator[None]:
        """Wait for the server's answer.

        Raises:
            SilentServerError: the server was found dead meanwhile.
            TimeoutError: no answer within ``timeout_s``.
        """
        self._waiting_since_s = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s) as self._deadline:
                yield
        except TimeoutError:
            if self._given_up:
                raise SilentServerError from None
            raise
        finally:
            self._deadline = None

    def give_up(self, since_s: float) -> None:
        """End a wait that began after ``since_s``."""
        if self._deadline is not None and self._waiting_since_s > since_s and not self._given_up:
            self._given_up = True
            self._deadline.reschedule(asyncio.get_running_loop().time())


@dataclass(eq=False)
class Instance:
    """One server. Its loads are sums over ``legs``, so that they can't drift."""

    role: Role
    address: Address
    up: bool = False
    keeps_kv: bool = True
    """Whether its last prefill answer had KV transfer parameters."""
    stages: tuple[LatencyModel, ...] = ()
    legs: list[Leg] = field(default_factory=list)
    suspect: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to have the server probed at once."""
    alive_s: float = 0.0
    """When the last probe that it answered was sent, on ``time.monotonic``."""
    last_picked: int = 0
    clock: Callable[[], float] = time.monotonic
    _worked_until_s: float = 0.0
    _urls: dict[str, httpx.URL] = field(default_factory=dict)

    def url(self, path: str) -> httpx.URL:
        """Parsed once: parsing is slow."""
        if path not in self._urls:
            self._urls[path] = httpx.URL(self.address.url + path)
        return self._urls[path]

    @property
    def name(self) -> str:
        """``host:port``."""
        return self.address.name

    @property
    def num_tokens(self) -> float:
        """Tokens in flight."""
        return sum(leg.num_tokens for leg in self.legs)

    @contextmanager
    def leg(self, num_tokens: float) -> Iterator[Leg]:
        """Count a request here until it leaves, by whatever way."""
        self._work()
        leg = Leg(num_tokens, prefill_ms(self.stages, num_tokens) if self.stages else None)
        self.legs.append(leg)
        try:
            yield leg
        finally:
            self._work()
            self.legs.remove(leg)

    def remaining_ms(self) -> float:
        """Predicted time until all prefills in flight are done [ms]; 0 without a model."""
        self._work()
        return sum(leg.left_ms or 0.0 for leg in self.legs)

    def set_stages(self, stages: tuple[LatencyModel, ...]) -> None:
        """A latency model was installed, or is gone."""
        self._work()
        for leg in self.legs:
            if not stages:
                leg.left_ms = None
            elif leg.left_ms is None:
                leg.left_ms = prefill_ms(stages, leg.num_tokens)
        self.stages = stages

    def mark_down(self) -> None:
        """Send nothing here until a probe succeeds."""
        self.up = False
        self.suspect.set()

    def give_up_unanswered(self) -> None:
        """Fail requests that were sent after the server's last sign of life.

        A process that died can leave its listening socket with a child of it: such a
        socket takes connections that nobody will ever answer. Requests from before
        have a connection that the kernel resets.
        """
        for leg in self.legs:
            leg.give_up(self.alive_s)

    def _work(self) -> None:
        """Let the time that passed do predicted work, first come, first served."""
        now_s = self.clock()
        passed_ms = (now_s - self._worked_until_s) * 1000
        self._worked_until_s = now_s
        for leg in self.legs:
            done_ms = min(passed_ms, leg.left_ms or 0.0)
            if leg.left_ms is not None:
                leg.left_ms -= done_ms
            passed_ms -= done_ms


class Pool:
    """All servers of one role."""

    def __init__(self, role: Role, addresses: Sequence[Address]) -> None:
        self.role = role
        self.instances = [Instance(role, address) for address in addresses]
        self._num_picked = 0

    def available(self, excluded: Collection[Instance] = ()) -> list[Instance]:
        """The servers that are up."""
        return [i for i in self.instances if i.up and i not in excluded]

    def pick(self, num_tokens: float, excluded: Collection[Instance] = ()) -> Instance | None:
        """The least-loaded server that is up; None without one.

        Prefill: where a prompt of ``num_tokens`` is predicted to be done first, or by tokens
        in flight as long as one of the servers has no latency model. Decode: by tokens in
        flight. Ties go to fewer requests, then in turn.
        """
        candidates = self.available(excluded)
        if not candidates:
            return None
        by_time = self.role == "prefill" and all(i.stages for i in candidates)

        def load(instance: Instance) -> float:
            if by_time:
                return instance.remaining_ms() + prefill_ms(instance.stages, num_tokens)
            return instance.num_tokens

        best = min(candidates, key=lambda i: (load(i), len(i.legs), i.last_picked))
        self._num_picked += 1
        best.last_picked = self._num_picked
        return best

    def down(self) -> list[Instance]:
        """The servers that are not up."""
        return [i for i in self.instances if not i.up]
