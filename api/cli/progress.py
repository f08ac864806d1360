"""Progress bars on stderr, shown only in a terminal."""

from __future__ import annotations

from contextlib import AbstractContextManager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


def open_progress(is_quiet: bool) -> AbstractContextManager[Progress]:
    """Bars of bytes; nothing is shown if stderr is no terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    return Progress(*columns, console=console, disable=is_quiet or not console.is_terminal)
