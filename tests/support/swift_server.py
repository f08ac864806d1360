"""A real S3 server for the store's contract tests: OpenStack Swift on one node, from pip.

`python swift_server.py DIRECTORY COMMAND...`, run by a Python that has `swift` installed, starts
the four servers on free ports of this machine, runs the command with LORAPLEX_TEST_S3 and the
credentials in its environment, stops them and exits with the command's status.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

ACCOUNT, USER = "loraplex", "admin"
START_SECONDS = 60.0
STORAGE_KINDS = ("account", "container", "object")
PROXY_FILTERS: Mapping[str, Mapping[str, object]] = {
    "catch_errors": {},
    "gatekeeper": {},
    "healthcheck": {},
    "listing_formats": {},
    "bulk": {},
    "s3api": {
        "s3_acl": "false",
        "check_bucket_owner": "false",
        "location": "us-east-1",
        "min_segment_size": 5 << 20,
    },
    "tempauth": {},
    "copy": {},
    "slo": {},
    "symlink": {},
    "versioned_writes": {"allow_object_versioning": "true"},
}
"""In the order in which a request passes them."""

# The path of swift.conf is a constant of Swift's: set before its servers read it, it need not be
# /etc/swift.
_LAUNCH = (
    "import sys; import swift.common.utils as utils; utils.SWIFT_CONF_FILE = sys.argv[1]; "
    "from swift.common.wsgi import run_wsgi; sys.exit(run_wsgi(sys.argv[2], sys.argv[3]))"
)


def main(directory: Path, command: list[str]) -> int:
    """Run a command beside a server; the command's exit status."""
    secret = secrets.token_hex(16)
    with _running(directory, secret) as endpoint:
        environment = {
            **os.environ,
            "LORAPLEX_TEST_S3": endpoint,
            "AWS_ACCESS_KEY_ID": f"{ACCOUNT}:{USER}",
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        return subprocess.run(command, env=environment, check=False).returncode


@contextlib.contextmanager
def _running(directory: Path, secret: str) -> Iterator[str]:
    ports = dict(zip((*STORAGE_KINDS, "proxy"), _free_ports(4), strict=True))
    _write_configuration(directory, ports, secret)
    servers = [_launch(directory, kind) for kind in ports]
    endpoint = f"http://127.0.0.1:{ports['proxy']}"
    try:
        _wait_until_healthy(f"{endpoint}/healthcheck", servers)
        yield endpoint
    finally:
        for server in servers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)
        for server in servers:
            server.wait(30)


def _write_configuration(directory: Path, ports: Mapping[str, int], secret: str) -> None:
    (directory / "devices" / "disk").mkdir(parents=True, exist_ok=True)
    sections = {
        "swift-hash": {"swift_hash_path_suffix": "tests"},
        "storage-policy:0": {"name": "single", "default": "yes"},
    }
    _write(directory / "swift.conf", sections)
    for kind in STORAGE_KINDS:
        _make_ring(directory, kind, ports[kind])
        own = {
            "devices": directory / "devices",
            "mount_check": "false",
            "disable_fallocate": "true",
            "fallocate_reserve": 0,
        }
        _write(
            directory / f"{kind}.conf",
            {
                "DEFAULT": {**_common(directory, ports[kind]), **own},
                "pipeline:main": {"pipeline": f"{kind}-server"},
                f"app:{kind}-server": {"use": f"egg:swift#{kind}"},
            },
        )
    login = {f"user_{ACCOUNT}_{USER}": f"{secret} .admin"}
    filters = {
        f"filter:{name}": {
            "use": f"egg:swift#{name}",
            **options,
            **(login if name == "tempauth" else {}),
        }
        for name, options in PROXY_FILTERS.items()
    }
    _write(
        directory / "proxy.conf",
        {
            "DEFAULT": _common(directory, ports["proxy"]),
            "pipeline:main": {"pipeline": " ".join([*PROXY_FILTERS, "proxy-server"])},
            "app:proxy-server": {"use": "egg:swift#proxy", "account_autocreate": "true"},
            **filters,
        },
    )


def _common(directory: Path, port: int) -> dict[str, object]:
    return {
        "bind_ip": "127.0.0.1",
        "bind_port": port,
        "workers": 0,
        "user": getpass.getuser(),
        "swift_dir": directory,
        "log_address": os.devnull,
    }


def _write(path: Path, sections: Mapping[str, Mapping[str, object]]) -> None:
    lines: list[str] = []
    for name, options in sections.items():
        lines += [f"[{name}]", *(f"{key} = {value}" for key, value in options.items()), ""]
    path.touch(mode=0o600)
    path.write_text("\n".join(lines))


def _make_ring(directory: Path, kind: str, port: int) -> None:
    """Where the objects of this kind are: one replica, on one device."""
    builder = directory / f"{kind}.builder"
    builder.unlink(missing_ok=True)
    ring_builder = Path(sys.executable).parent / "swift-ring-builder"
    for arguments in (
        ["create", "4", "1", "0"],
        ["add", f"r1z1-127.0.0.1:{port}/disk", "1"],
        ["rebalance"],
    ):
        subprocess.run(
            [sys.executable, ring_builder, builder, *arguments],
            stdout=subprocess.DEVNULL,
            check=True,
        )


def _launch(directory: Path, kind: str) -> subprocess.Popen[bytes]:
    files = [str(directory / "swift.conf"), str(directory / f"{kind}.conf")]
    with (directory / f"{kind}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, *files, f"{kind}-server"],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _wait_until_healthy(url: str, servers: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2):
            return
        if time.monotonic() > deadline or any(server.poll() is not None for server in servers):
            raise SystemExit("Swift did not start; its logs are in its directory")
        time.sleep(0.1)


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute(), sys.argv[2:]))
