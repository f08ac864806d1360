"""A real server whose data folder is on a small disk that tenants, and then others, fill.

`python -m support.full_disk BASE ADAPTER` mounts the disk in a separate mount namespace, which ends
with the process, and prints the responses to each party as one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from support.http_uploads import put
from support.server import Caller, ServerUnderTest, serving
from support.waiting import wait_for

DISK_BYTES = 60 * 1000 * 1000
SIZES = (8 << 20, 1 << 20, 256 << 10)
"""What a hog asks for, one after another, each until it is refused."""
NAMESPACE = ("unshare", "--mount", "--map-root-user")


@cache
def can_mount() -> bool:
    """Whether this user may mount a disk in a namespace of its own."""
    if shutil.which("unshare") is None:
        return False
    probe = "mount -t tmpfs -o size=1m none /mnt"
    return subprocess.run([*NAMESPACE, "sh", "-c", probe], capture_output=True).returncode == 0


def run_in_namespace(base: Path, adapter: Path) -> dict[str, Any]:
    """What `main` prints. Fails with its output if it does."""
    command = [*NAMESPACE, sys.executable, "-P", "-m", "support.full_disk", str(base), str(adapter)]
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


@contextmanager
def small_disk() -> Iterator[Path]:
    """A folder that is a file system of DISK_BYTES. Only in a mount namespace of one's own."""
    with tempfile.TemporaryDirectory(prefix="small-disk-") as directory:
        options = f"size={DISK_BYTES},mode=700"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", directory], check=True)
        try:
            yield Path(directory)
        finally:
            subprocess.run(["umount", "--lazy", directory], check=True)


def main(base: Path, adapter: Path) -> dict[str, Any]:
    with small_disk() as disk:
        answers: dict[str, Any] = {}
        with serving(base, disk) as server:
            hogs = [server.make_caller(f"hog-{number}") for number in range(2)]
            answers["hogs"] = [fill(hog) for hog in hogs]
            answers["free_when_filled"] = shutil.disk_usage(disk).free
            quiet = server.make_caller("quiet")
            answers["quiet"] = use(quiet, adapter)
            answers["after_giving_up"] = give_up(hogs[0])
            fill_entirely(disk / "not-ours.log")
            answers["free_when_full"] = shutil.disk_usage(disk).free
            wait_for(lambda: shutil.disk_usage(disk).free)  # the reserve's file gives way
            answers["full"] = ask(quiet)
        with serving(base, disk) as server:
            answers["restarted"] = ask(_same(server, quiet))
            (disk / "not-ours.log").unlink()
            answers["made_room"] = use(_same(server, quiet), adapter, name="again")
        return answers


def fill(hog: Caller) -> dict[str, Any]:
    """Declare and send uploads until nothing more is taken; how often, and with which codes."""
    codes = [_declare(hog, 1 << 40)["code"]]
    num_sent = 0
    for size in SIZES:
        while (answer := _declare(hog, size)).get("id"):
            sent = put(hog, answer, os.urandom(size), 0)
            if not sent.is_success:
                codes.append(sent.json()["error"]["code"])
                break
            num_sent += size
        else:
            codes.append(answer["code"])
    return {"codes": codes, "num_sent": num_sent}


def _declare(caller: Caller, size: int) -> dict[str, Any]:
    body = {
        "config": {"peft_type": "LORA"},
        "size_bytes": size,
        "sha256": hashlib.sha256(os.urandom(8)).hexdigest(),
    }
    answer = caller.http.post("/v1/adapters/junk/uploads", json=body).json()
    return dict(answer.get("error") or answer)


def use(caller: Caller, adapter: Path, name: str = "bot") -> dict[str, Any]:
    """What a tenant does on a good day."""
    pushed = caller.push(adapter, name)
    return {"pushed": pushed["state"], **ask(caller, name)}


def ask(caller: Caller, name: str = "bot") -> dict[str, Any]:
    """Make a key, and a conversation with it: the codes of what fails, else "ok"."""
    made = caller.http.post("/v1/keys", json={"name": "another", "scopes": ["infer"]})
    body = {"model": name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    key = made.json().get("key", caller.key)
    headers = {"authorization": f"Bearer {key}"}
    said = httpx.post(f"{caller.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    return {"key": _outcome(made), "chat": _outcome(said)}


def _outcome(answer: httpx.Response) -> str:
    return "ok" if answer.is_success else str(answer.json()["error"]["code"])


def give_up(hog: Caller) -> dict[str, Any]:
    """Abandon every upload; how much can be sent again."""
    for upload in hog.http.get("/v1/uploads").json()["data"]:
        assert hog.http.delete(f"/v1/uploads/{upload['id']}").json()["state"] == "abandoned"
    assert hog.http.get("/v1/uploads").json()["data"] == []
    return fill(hog)


def fill_entirely(path: Path) -> None:
    """Write until the disk takes nothing more, as a log does."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass


def _same(server: ServerUnderTest, caller: Caller) -> Caller:
    """The caller, at a server that was started again."""
    known = Caller(server.url, caller.tenant_id, caller.slug, caller.key)
    server.callers.append(known)
    return known


if __name__ == "__main__":
    sys.stdout.write(f"{json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2])))}\n")
