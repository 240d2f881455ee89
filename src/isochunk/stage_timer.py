"""Times a stage's model call for tagged batches. Knows modules and clocks, but no engine.

Anything with PyTorch's ``register_forward_pre_hook`` and ``register_forward_hook`` will do as
a model; nothing here imports torch.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from isochunk.timings import Timing

# Timings wait here until drained; a bound in case nobody drains.
MAX_PENDING = 4096


class Clock(Protocol):
    """Marks points in time, possibly on a device that runs behind the host."""

    def mark(self) -> Any:
        """Mark now."""

    def is_done(self, mark: Any) -> bool:
        """Whether a mark has been passed; never waits."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two passed marks."""

    def wait(self) -> None:
        """Wait until all marks are passed (startup only)."""


class HostClock:
    """The monotonic clock, for devices on which the model call itself blocks (CPU)."""

    def mark(self) -> float:
        """Seconds."""
        return time.monotonic()

    def is_done(self, mark: float) -> bool:
        """Always."""
        return True

    def elapsed_ms(self, start: float, end: float) -> float:
        """Milliseconds from ``start`` to ``end``."""
        return (end - start) * 1e3

    def wait(self) -> None:
        """Nothing to wait for."""


class DeviceClock:
    """Events on an accelerator's stream, read only once they have been passed.

    Args:
        make_event: an event with ``record``, ``query`` and ``elapsed_time`` (ms), as
            ``torch.Event`` has them.
        synchronize: waits until the device is idle.
    """

    def __init__(self, make_event: Callable[[], Any], synchronize: Callable[[], object]) -> None:
        self._make_event, self._synchronize = make_event, synchronize

    def mark(self) -> Any:
        """Record an event on the current stream."""
        event = self._make_event()
        event.record()
        return event

    def is_done(self, mark: Any) -> bool:
        """Whether the device has passed the event."""
        return bool(mark.query())

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two passed events."""
        return float(start.elapsed_time(end))

    def wait(self) -> None:
        """Until the device is idle."""
        self._synchronize()


class StageTimer:
    """Times the model call, and only that: no input staging, no transfer between stages.

    Set ``tag`` around a forward that is to be timed. One forward is timed per tag.
    """

    def __init__(self, model: Any, clock: Clock) -> None:
        self.tag: int | None = None
        self.clock = clock
        self._start: tuple[float, Any] | None = None
        self._last_end: Any = None
        # tag, host time of the start, marks: end of the forward before (or None), start, end
        self._pending: deque[tuple[int, float, Any, Any, Any]] = deque(maxlen=MAX_PENDING)
        self._handles = [
            model.register_forward_pre_hook(self._before),
            model.register_forward_hook(self._after),
        ]

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def _before(self, module: Any, args: Any) -> None:
        if self.tag is not None:
            self._start = (time.monotonic(), self.clock.mark())

    def _after(self, module: Any, args: Any, output: Any) -> None:
        if self.tag is not None and self._start is not None:
            start_s, start = self._start
            end = self.clock.mark()
            self._pending.append((self.tag, start_s, self._last_end, start, end))
            self._start, self._last_end = None, end

    def drain(self) -> list[Timing]:
        """Finished timings since the last drain, oldest first. Never waits for a device."""
        done = []
        while self._pending and self.clock.is_done(self._pending[0][-1]):
            tag, start_s, last_end, start, end = self._pending.popleft()
            gap_ms = math.inf if last_end is None else self.clock.elapsed_ms(last_end, start)
            done.append(Timing(tag, start_s, self.clock.elapsed_ms(start, end), gap_ms))
        return done
