"""An asyncio loop on its own thread, for engines whose steps must not wait for the network."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines and calls in the background until ``close``."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Call it on the loop, soon; no result."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def wait_for(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 10.0) -> T:
        """Run it on the loop and wait for its result here."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def spawn(self, coroutine: Coroutine[Any, Any, object]) -> asyncio.Task[Any]:
        """Start a task; only from the loop itself."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def close(self) -> None:
        """Cancel what runs and end the thread."""
        if self._loop.is_closed():
            return

        async def cancel_all() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self.wait_for(cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        self._loop.close()
