"""A new user's terminal: a folder, environment variables, and the `loraplex` command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep

COMMAND_SECONDS = 120.0
START_SECONDS = 180.0
_ANNOUNCEMENT = re.compile(r"^Serving .* at (http://\S+)/v1$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended."""

    exit_code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """What the person reads, without line breaks and the frames that Typer draws."""
        return " ".join(re.sub(r"[│╭╮╰╯─]", " ", self.err).split())


@dataclass
class Terminal:
    """Runs commands in a folder; `variables` are what the person has exported."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    def run(self, *words: str, stdin: str = "", **variables: str) -> Outcome:
        """Run `loraplex …` and wait for its end."""
        ended = subprocess.run(
            [sys.executable, "-m", "loraplex", *words],
            cwd=self.folder,
            env=self.environment(**variables),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        return Outcome(ended.returncode, ended.stdout, ended.stderr)

    def must(self, *words: str, stdin: str = "", **variables: str) -> str:
        """What a command that has to succeed prints."""
        outcome = self.run(*words, stdin=stdin, **variables)
        assert outcome.exit_code == 0, f"loraplex {' '.join(words)}: {outcome.err}"
        return outcome.out.strip()

    def environment(self, **variables: str) -> dict[str, str]:
        """Nothing of this process's own settings: a home of its own below the folder."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("LORAPLEX_", "XDG_"))
        }
        home = self.folder / "home"
        own = {"HOME": str(home), "XDG_RUNTIME_DIR": str(home), "OMP_NUM_THREADS": "1"}
        path = os.pathsep.join(filter(None, sys.path))
        return {**inherited, **own, "PYTHONPATH": path, **self.variables, **variables}

    @contextmanager
    def serving(self, *options: str, **variables: str) -> Iterator[str]:
        """Run `loraplex serve` until the block is left; its URL."""
        log = self.folder / "serve.log"
        with log.open("ab") as output:
            server = subprocess.Popen(
                [sys.executable, "-m", "loraplex", "serve", *options],
                cwd=self.folder,
                env=self.environment(**variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield _wait_for_announcement(server, log)
        finally:
            server.terminate()
            server.wait(60)


def _wait_for_announcement(server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = monotonic() + START_SECONDS
    while monotonic() < deadline:
        if found := _ANNOUNCEMENT.search(log.read_text()):
            return found[1]
        assert server.poll() is None, log.read_text()[-4000:]
        sleep(0.1)
    raise AssertionError(f"no server within {START_SECONDS:g} s: {log.read_text()[-4000:]}")
