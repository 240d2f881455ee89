"""The progress bar of long commands."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def counting_progress(console: Console, *, is_transient: bool) -> Progress:
    """What is being done, a bar, how many of how many, and the time so far."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=is_transient,
    )
