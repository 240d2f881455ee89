"""A real vLLM server with two pipeline stages on the CPU, as a child process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import httpx


class ServerError(RuntimeError):
    """The server ended or didn't become healthy; the message has the end of its log."""


def cpu_env(num_stages: int = 2, kv_cache_gib: int = 1) -> dict[str, str]:
    """Environment for a CPU pipeline: one core a stage, and no model hub."""
    cores = sorted(os.sched_getaffinity(0))
    bind = "|".join(str(cores[stage % len(cores)]) for stage in range(num_stages))
    return {
        **os.environ,
        "VLLM_CPU_OMP_THREADS_BIND": bind,
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def free_port() -> int:
    """A TCP port on the loopback interface that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


class VllmServer:
    """``isochunk serve`` with a log file; stops with its process group.

    Args:
        model: model directory.
        args: further arguments of ``isochunk serve``.
        log: file for its output.
        env: environment, by default that of a two-stage CPU pipeline.
    """

    def __init__(
        self, model: Path, args: list[str], log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.model = str(model)
        self._log = log
        command = [sys.executable, "-m", "isochunk.cli", "serve", self.model, *args]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(env or cpu_env()),
                start_new_session=True,
            )

    def wait_until_healthy(
        self, timeout_s: float = 240.0, tick: Callable[[], None] = lambda: None
    ) -> None:
        """Wait for ``/health``, calling ``tick`` now and then.

        Raises:
            ServerError: the process ended or the time is over.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(f"the server ended with {self._process.returncode}{self.tail()}")
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            tick()
            time.sleep(0.25)
        raise ServerError(f"the server wasn't healthy within {timeout_s:.0f} s{self.tail()}")

    def tail(self, num_lines: int = 30) -> str:
        """The end of the log."""
        lines = self._log.read_text(errors="replace").splitlines()[-num_lines:]
        return "; the end of its log:\n" + "\n".join(lines)

    def stop(self, timeout_s: float = 30.0) -> int:
        """Ask it to stop, then make it; returns the exit status."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def __enter__(self) -> VllmServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
