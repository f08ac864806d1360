"""The servers that `bench_peers` compares: ours, and vLLM's build for CPUs.

Each runs as long as a block, and no longer: beside another server's weights it would plan less
memory for itself, and three copies of a large base in fp32 do not fit.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Protocol

import httpx

from loraplex.api.bench.load_client import run_workload
from loraplex.api.bench.serving import push_adapters
from loraplex.api.bench.summary import Run
from loraplex.api.bench.workload import Workload
from loraplex.api.local.installation import Installation, TenantAccess
from loraplex.api.local.server import HOST, free_port, running_server

BASE = "base"
"""The base's name in requests, at every peer."""
PEERS_PYTHON = Path(".venv-peers/bin/python")
TCMALLOC = "libtcmalloc_minimal.so.4"
TCMALLOC_PACKAGE = "libtcmalloc-minimal4"
READ_TIMEOUT_SECONDS = 3_600.0
"""vLLM computes long prompts of adapters for minutes before the first token."""
START_SECONDS = 900.0
"""Compiling and loading a large base takes minutes on busy cores."""
STOP_SECONDS = 30.0
POLL_SECONDS = 0.2
LOG_TAIL_LINES = 20


class PeerFailed(Exception):
    """A peer cannot be started or has ended; the message says what to do, or ends with its log."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What all peers serve, and with what; paths are absolute."""

    base: Path
    adapters: Sequence[Path]
    rank: int
    """Of each adapter."""
    dtype: str
    """A name of torch's, for the weights, adapters and KV cache of all."""
    kv_gib: int
    max_model_len: int
    max_num_seqs: int
    work: Path
    """Folder for the logs, and for what a peer keeps from one start to the next."""

    def log(self, name: str) -> Path:
        """The log of all starts of a peer."""
        return self.work / f"{name}.log"


class Running(Protocol):
    """A peer that answers requests."""

    @property
    def adapters(self) -> Sequence[str]:
        """Their names in requests; none if it serves the base alone."""

    def run(self, workload: Workload) -> Run:
        """Run it once. Raises `RequestFailed` or `PeerFailed`."""


class Peer(Protocol):
    """Something that serves the base and its adapters."""

    def running(self) -> AbstractContextManager[Running]:
        """Answers requests within the block. Raises `PeerFailed`, or as our own server does."""


@dataclass(frozen=True, slots=True)
class Served:
    """A server with OpenAI's routes."""

    base_url: str
    """Ends in `/v1`."""
    adapters: Sequence[str]
    api_key: str

    def run(self, workload: Workload) -> Run:
        return asyncio.run(
            run_workload(
                workload,
                base_url=self.base_url,
                api_key=self.api_key,
                read_timeout_seconds=READ_TIMEOUT_SECONDS,
            )
        )


class Ours:
    """`loraplex serve` with its default options. The tenant and its adapters stay from one start to
    the next."""

    def __init__(self, setup: Setup, name: str, options: Sequence[str] = ()) -> None:
        """`options`: more of `loraplex serve`."""
        self.setup = setup
        self._name = name
        self._data_dir = setup.work / f"{name}-data"
        self._options = options
        self._pushed: tuple[TenantAccess, list[str]] | None = None

    def command_options(self) -> list[str]:
        """Of `loraplex serve`."""
        setup = self.setup
        return [
            *("--model", str(setup.base), "--served-model-name", BASE),
            *("--data-dir", str(self._data_dir)),
            *("--dtype", setup.dtype, "--kv-cache-gib", str(setup.kv_gib)),
            *self._options,
        ]

    @contextmanager
    def running(self) -> Iterator[Served]:
        log = self.setup.log(self._name)
        with running_server(
            self.command_options(), port=None, log=log, start_seconds=START_SECONDS
        ) as server:
            self._pushed = self._pushed or self._push(server.url)
            tenant, adapters = self._pushed
            yield Served(f"{server.url}/v1", adapters, tenant.api_key)

    def _push(self, url: str) -> tuple[TenantAccess, list[str]]:
        site = Installation(self._data_dir, url, lambda command: None).with_operator()
        tenant = site.create_tenant("bench")
        return tenant, push_adapters(site, tenant, self.setup.adapters)


class Vllm:
    """vLLM on both cores, from an environment of its own."""

    def __init__(
        self,
        setup: Setup,
        name: str,
        *,
        with_adapters: bool,
        python: Path,
        tcmalloc: Path | None,
    ) -> None:
        """Without adapters it compiles the base, which it does not do with `--enable-lora`.

        `python` is that of its environment, `tcmalloc` the library (None: Debian's). Raises
        `PeerFailed` if a file is missing.
        """
        self._setup = setup
        self._name = name
        self._with_adapters = with_adapters
        self._python = python.absolute()  # not resolved: it is a link out of its environment
        openmp = self._python.parent.parent / "lib" / "libiomp5.so"
        for file in (self._python, openmp):
            if not file.exists():
                raise PeerFailed(f"{file} is missing: make bench-peers creates it")
        self._preloaded = (tcmalloc or find_tcmalloc(), openmp)

    @property
    def adapters(self) -> dict[str, Path]:
        """By their names in requests."""
        folders = self._setup.adapters if self._with_adapters else ()
        return {f"adapter-{index}": folder for index, folder in enumerate(folders)}

    def command(self, port: int) -> list[str]:
        setup = self._setup
        return [
            *(str(self._python), "-m", "vllm.entrypoints.openai.api_server"),
            *("--host", HOST, "--port", str(port)),
            *("--model", str(setup.base), "--served-model-name", BASE, "--dtype", setup.dtype),
            *("--max-model-len", str(setup.max_model_len)),
            *("--max-num-seqs", str(setup.max_num_seqs), "--max-num-batched-tokens", "2048"),
            "--no-enable-prefix-caching",
            *self._lora_options(),
        ]

    def environment(self) -> dict[str, str]:
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        # Our own folders are not for its interpreter.
        inherited = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
        return {
            **inherited,
            "LD_PRELOAD": ":".join(map(str, self._preloaded)),
            "VLLM_CPU_KVCACHE_SPACE": str(self._setup.kv_gib),
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            # It would leave a core to its own API server: half of this machine.
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CACHE_ROOT": str(self._setup.work / "vllm-cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    @contextmanager
    def running(self) -> Iterator[Served]:
        port, log = free_port(), self._setup.log(self._name)
        with running_process(
            self.command(port), self.environment(), log=log, folder=self._setup.work
        ) as process:
            wait_until_healthy(f"http://{HOST}:{port}/health", process, log)
            yield Served(f"http://{HOST}:{port}/v1", list(self.adapters), "none")

    def _lora_options(self) -> list[str]:
        if not self.adapters:
            return []
        number = str(len(self.adapters))
        return [
            *("--enable-lora", "--max-lora-rank", str(self._setup.rank)),
            *("--max-loras", number, "--max-cpu-loras", number),
            *("--lora-modules", *(f"{name}={path}" for name, path in self.adapters.items())),
        ]


def find_tcmalloc() -> Path:
    """Debian's library. Raises `PeerFailed` if it is not installed."""
    found = sorted(Path("/usr/lib").glob(f"*/{TCMALLOC}"))
    if not found:
        raise PeerFailed(
            f"{TCMALLOC} is missing, which vLLM is to be run with: install Debian's "
            f"{TCMALLOC_PACKAGE}, or name the file with --tcmalloc"
        )
    return found[0]


@contextmanager
def running_process(
    command: Sequence[str], environment: Mapping[str, str], *, log: Path, folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run it in `folder` until the block is left; its output is appended to `log`."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
            start_new_session=True,  # so that its children can be stopped with it
        )
    try:
        yield process
    finally:
        _stop(process)


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Raises `PeerFailed` if the process ends, or is not healthy in time."""
    deadline = monotonic() + START_SECONDS
    while not _is_healthy(url):
        if process.poll() is not None:
            raise PeerFailed(f"the server ended while it started\n{tail(log)}")
        if monotonic() > deadline:
            raise PeerFailed(f"the server was not ready in time\n{tail(log)}")
        sleep(POLL_SECONDS)


def tail(log: Path) -> str:
    """The last lines of a log."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:])


@contextmanager
def burnt_core(is_burnt: bool) -> Iterator[None]:
    """While the block runs, another process keeps a core busy, if `is_burnt`."""
    if not is_burnt:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2.0).is_success
    except httpx.TransportError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError):  # nothing is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
