"""A virtual environment away from the checkout, and servers in it."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import Distribution
from pathlib import Path
from typing import NamedTuple

from support.extras import brought


class Environment(NamedTuple):
    """A virtual environment, away from the checkout."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        (found,) = self.folder.glob("lib/python3*/site-packages")
        return found

    def variables(self) -> dict[str, str]:
        """Only these: no path of ours, no home."""
        return {"PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "HOME": str(self.folder)}

    def run(
        self, program: str, *arguments: str, stdin: str = "", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """One of the environment's programs."""
        return subprocess.run(
            [str(self.folder / "bin" / program), *arguments],
            cwd=self.folder,
            env={**self.variables(), **variables},
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )

    def loraplex(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return self.run("loraplex", *arguments, stdin=stdin)

    @contextmanager
    def serving(self, *arguments: str) -> Iterator[str]:
        """The address of a server."""
        log = self.folder / "server.log"
        with log.open("wb") as stderr:
            server = subprocess.Popen(
                [str(self.folder / "bin" / "loraplex"), "serve", "--port", "0", *arguments],
                cwd=self.folder,
                env=self.variables(),
                stderr=stderr,
            )
        try:
            yield _address(server, log)
        finally:
            server.terminate()
            server.wait(60)

    def link_engine(self) -> None:
        """Add what the extra `engine` brings, from our own environment: torch is large."""
        metadata = Distribution.at(next(self.packages.glob("loraplex-*.dist-info")))
        for distribution in brought(metadata.requires or (), "engine").values():
            for path in distribution.files or ():
                _link(Path(str(distribution.locate_file(""))), self.packages, path.parts[0])


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 240  # it compiles the CPU library first
    while time.monotonic() < deadline and server.poll() is None:
        if found := re.search(r"^Serving .* at (http://\S+)/v1$", log.read_text(), re.MULTILINE):
            return found[1]
        time.sleep(0.1)
    raise AssertionError(log.read_text()[-4000:])


def _link(source: Path, target: Path, name: str) -> None:
    if name != ".." and not (target / name).exists():
        (target / name).symlink_to(source / name)
