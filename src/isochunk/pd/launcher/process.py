"""One process of a deployment: started under its keeper, its output read, stopped for certain."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_KEEPER = Path(__file__).with_name("keeper.py")
_NUM_LAST_LINES = 20
_AFTER_GRACE_S = 5.0
_LAST_OUTPUT_S = 2.0
_MAX_LINE = 64 * 1024


class ManagedProcess:
    """A command with everything it starts.

    Args:
        name: its name in the deployment.
        command: program and arguments.
        env: the whole environment.
        grace_s: how long it may take to stop before it is killed.
        on_line: gets each line of its output.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        grace_s: float,
        on_line: Callable[[str, str], None],
    ) -> None:
        self.name = name
        self._command, self._env, self._grace_s = list(command), dict(env), grace_s
        self._on_line = on_line
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self.last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)

    @property
    def pid(self) -> int:
        """The keeper's process id, which is also that of the process group."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it was started and hasn't ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start it in a process group of its own."""
        keeper = [sys.executable, str(_KEEPER), str(os.getpid()), str(self._grace_s)]
        # A pipe of our own: with asyncio's, waiting for the process would also wait for whoever
        # else holds the pipe.
        read_end, write_end = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *keeper,
                *self._command,
                env=self._env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        self._reader = asyncio.create_task(self._read(read_end))

    async def wait(self) -> int:
        """Wait for its end and that of its output; a negative status is a signal's number."""
        assert self._process is not None
        status = await self._process.wait()
        # Only a keeper that was killed itself leaves others in the group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._reader is not None:
            await asyncio.wait({self._reader}, timeout=_LAST_OUTPUT_S)
            self._reader.cancel()
        return status

    async def stop(self, grace_s: float | None = None) -> None:
        """Ask it to end, kill it after the grace period, and wait until nothing is left.

        Args:
            grace_s: a shorter grace period than it was started with [s].
        """
        if self._process is None:
            return
        self._signal(signal.SIGTERM)
        if grace_s is not None and not await self._ends_within(grace_s):
            self.kill()
        if not await self._ends_within(self._grace_s + _AFTER_GRACE_S):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self.wait()

    async def _ends_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def kill(self) -> None:
        """End it and everything it started, at once; the keeper does so at a second signal."""
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGINT)

    def _signal(self, signum: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signum)

    async def _read(self, read_end: int) -> None:
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read_end, "rb")
        )
        try:
            rest = b""
            while data := await stream.read(_MAX_LINE):
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > _MAX_LINE:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._emit(line)
            if rest:
                self._emit(rest)
        finally:
            transport.close()

    def _emit(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        self.last_lines.append(text)
        self._on_line(self.name, text)


def describe_status(status: int) -> str:
    """``-9`` -> "was killed by SIGKILL", ``3`` -> "exited with status 3"."""
    if status >= 0:
        return f"exited with status {status}"
    return f"was killed by {signal.Signals(-status).name}"
