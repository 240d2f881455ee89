"""What ``isochunk up`` prints: its own lines, and the instances' logs with their names."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan")


class LogConsole:
    """Lines on standard output; coloured, with a progress display, on a terminal.

    Args:
        names: of the processes that will print.
        log_directory: where each gets a file ``NAME.log``, if anywhere.
    """

    def __init__(self, names: Sequence[str], log_directory: Path | None = None) -> None:
        self._width = max(len(name) for name in [*names, "isochunk"])
        self._colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
        self._files: dict[str, IO[str]] = {}
        self._console = Console(highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        if log_directory is not None:
            log_directory.mkdir(parents=True, exist_ok=True)
            self._files = {name: (log_directory / f"{name}.log").open("a") for name in names}

    def log(self, name: str, line: str) -> None:
        """A line of a process's output."""
        if name in self._files:
            try:
                print(line, file=self._files[name], flush=True)
            except OSError as error:  # a full disk must not take the servers down
                del self._files[name]
                self.say(f"no longer writing {name}.log: {error}")
        self._print(name, line)

    def say(self, line: str) -> None:
        """A line of the launcher."""
        self._print("isochunk", line)

    def announce(self, line: str) -> None:
        """A line without a name in front, for other programs to wait for."""
        self._write(line)

    def begin_waiting(self, names: Sequence[str]) -> None:
        """Show that these aren't ready yet; without a terminal, say it once."""
        if not self._console.is_terminal:
            self.say(f"waiting for {', '.join(names)}")
            return
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._progress.start()
        for name in names:
            self._tasks[name] = self._progress.add_task(f"{name}: starting")

    def show_step(self, name: str, step: str) -> None:
        """What a waiting process is at."""
        if self._progress is not None and name in self._tasks:
            self._progress.update(self._tasks[name], description=f"{name}: {step}")

    def end_waiting(self) -> None:
        """Take the progress display away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            self._tasks = {}

    def close(self) -> None:
        """End the display and close the log files."""
        self.end_waiting()
        for file in self._files.values():
            file.close()

    def _print(self, name: str, line: str) -> None:
        prefix = f"{name:<{self._width}} | "
        if self._console.is_terminal:
            style = self._colours.get(name, "bold")
            self._write(Text.assemble((prefix, style), Text.from_ansi(line)))
        else:
            self._write(prefix + line)

    def _write(self, text: Text | str) -> None:
        try:
            if isinstance(text, Text):
                self._console.print(text)
            else:
                print(text, flush=True)
        except OSError:  # nobody reads any more; the deployment goes on
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (until the end)
