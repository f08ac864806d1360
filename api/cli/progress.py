"""Progress bars and messages on stderr; the bars are shown only in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

from ..client.progress import Progress
from .output import note


class TerminalProgress(Progress):
    """For the person at the terminal. If it is quiet, only warnings are shown."""

    def __init__(self, *, is_quiet: bool) -> None:
        self._is_quiet = is_quiet

    def note(self, message: str) -> None:
        if not self._is_quiet:
            note(message)

    def warn(self, message: str) -> None:
        note(message)

    @contextmanager
    def transfer(self, name: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
        )
        is_hidden = self._is_quiet or not console.is_terminal
        with Bars(*columns, console=console, disable=is_hidden) as bars:
            task = bars.add_task(name, total=total_bytes)
            yield lambda num_bytes: bars.update(task, completed=num_bytes)
