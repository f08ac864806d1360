from __future__ import annotations

import hashlib
import http.server
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from loraplex.adapters.errors import ObjectCorrupt, ObjectNotFound, StoreUnavailable
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.store import ObjectStore, object_key, open_store, s3
from loraplex.adapters.store.local import LocalStore
from loraplex.adapters.store.s3 import S3Store
from loraplex.adapters.store.s3_client import S3Settings

KEY = f"t/tenant/a/{'0' * 64}.block"
CONTENT = bytes(range(256)) * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="module")
def credentials() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "marked-secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield


@pytest.fixture(scope="module")
def bucket(s3_endpoint: str, credentials: None) -> Any:
    bucket = boto3.resource("s3", endpoint_url=s3_endpoint).Bucket("adapters")
    bucket.create()
    return bucket


@pytest.fixture(scope="module")
def s3_store(s3_endpoint: str, bucket: Any) -> ObjectStore:
    return open_store(f"s3://{bucket.name}/a/prefix?endpoint={s3_endpoint}&addressing_style=path")


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    if request.param == "local":
        yield open_store(f"file://{tmp_path}/store")
        return
    store = request.getfixturevalue("s3_store")
    yield store
    store.delete(KEY)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(CONTENT)
    return path


def fetch(
    store: ObjectStore,
    path: Path,
    *,
    sha256: str = SHA256,
    size_bytes: int = len(CONTENT),
    deadline: float | None = None,
) -> None:
    store.fetch_file(KEY, path, sha256=sha256, size_bytes=size_bytes, deadline=deadline)


def test_gives_back_what_was_put(store: ObjectStore, source: Path, tmp_path: Path) -> None:
    assert not store.exists(KEY)
    store.put_file(KEY, source, sha256=SHA256)
    store.put_file(KEY, source, sha256=SHA256)
    assert store.exists(KEY)
    fetch(store, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == CONTENT


def test_deleted_object_is_not_found(store: ObjectStore, source: Path, tmp_path: Path) -> None:
    store.put_file(KEY, source, sha256=SHA256)
    store.delete(KEY)
    store.delete(KEY)
    assert not store.exists(KEY)
    with pytest.raises(ObjectNotFound):
        fetch(store, tmp_path / "copy")


DAMAGED = {
    "one bit flipped": CONTENT[:999] + bytes([CONTENT[999] ^ 1]) + CONTENT[1000:],
    "truncated": CONTENT[:-1],
    "longer": CONTENT + b"\0",
    "empty": b"",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_object_is_never_taken_for_whole(
    content: bytes, store: ObjectStore, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    damaged.write_bytes(content)
    store.put_file(KEY, damaged, sha256=SHA256)
    with pytest.raises(ObjectCorrupt):
        fetch(store, tmp_path / "copy")


def test_transfer_past_its_deadline_is_given_up(
    store: ObjectStore, source: Path, tmp_path: Path
) -> None:
    store.put_file(KEY, source, sha256=SHA256)
    with pytest.raises(StoreUnavailable):
        fetch(store, tmp_path / "copy", deadline=time.monotonic() - 1)
    fetch(store, tmp_path / "copy", deadline=time.monotonic() + 60)


HOSTILE_KEYS = [
    "",
    "/etc/passwd",
    "../x",
    "t/../../x",
    "t//x",
    "t/./x",
    "t/.hidden",
    "t/a b",
    "t/\n",
]


@pytest.mark.parametrize("key", HOSTILE_KEYS)
def test_refuses_keys_that_are_not_plain_paths(key: str, store: ObjectStore, source: Path) -> None:
    with pytest.raises(ValueError, match="not an object key"):
        store.put_file(key, source, sha256=SHA256)
    with pytest.raises(ValueError, match="not an object key"):
        store.exists(key)


def test_object_key_is_of_tenant_and_digest() -> None:
    key = object_key(AdapterKey("0190-tenant", "sha256:" + "ab" * 32))
    assert key == f"t/0190-tenant/a/{'ab' * 32}.block"


@pytest.mark.parametrize(
    ("tenant", "digest"),
    [
        ("tenant", "sha256:short"),
        ("tenant", "sha256:" + "AB" * 32),
        ("tenant", "../" + "a" * 61),
        ("", "sha256:" + "a" * 64),
        ("a/b", "sha256:" + "a" * 64),
        ("..", "sha256:" + "a" * 64),
    ],
)
def test_object_key_refuses_what_is_no_identity(tenant: str, digest: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        object_key(AdapterKey(tenant, digest))


class TestLocal:
    def test_folder_is_readable_by_its_owner_only(self, tmp_path: Path, source: Path) -> None:
        store = LocalStore(tmp_path / "store")
        store.put_file(KEY, source, sha256=SHA256)
        assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "store" / KEY).stat().st_mode & 0o777 == 0o600

    def test_process_killed_before_the_rename_leaves_no_object(
        self, tmp_path: Path, source: Path
    ) -> None:
        script = (
            "import os, pathlib, sys\n"
            "from loraplex.adapters.store.local import LocalStore\n"
            "pathlib.Path.replace = lambda *paths: os._exit(9)\n"
            "LocalStore(pathlib.Path(sys.argv[1])).put_file(sys.argv[2], pathlib.Path(sys.argv[3]),"
            " sha256='')\n"
        )
        command = [sys.executable, "-c", script, str(tmp_path / "store"), KEY, str(source)]
        environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
        assert subprocess.run(command, env=environment, check=False).returncode == 9
        store = LocalStore(tmp_path / "store")
        assert not store.exists(KEY)
        store.put_file(KEY, source, sha256=SHA256)
        fetch(store, tmp_path / "copy")

    def test_what_a_killed_process_left_is_removed_a_day_later(self, tmp_path: Path) -> None:
        LocalStore(tmp_path / "store")
        old, young = (tmp_path / "store" / ".incoming" / name for name in ("old", "young"))
        for path in (old, young):
            path.write_bytes(b"partial")
        os.utime(old, (time.time() - 25 * 3600,) * 2)
        LocalStore(tmp_path / "store")
        assert not old.exists()
        assert young.exists()

    def test_failed_put_leaves_nothing(
        self, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = LocalStore(tmp_path / "store")

        def fail(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(StoreUnavailable, match="No space"):
            store.put_file(KEY, source, sha256=SHA256)
        assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]

    def test_unusable_folder_is_the_stores_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(StoreUnavailable):
            LocalStore(tmp_path / "file" / "store")


class InterruptedAnswer(http.server.BaseHTTPRequestHandler):
    """Announces the whole object, sends half of it and hangs up."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[: len(CONTENT) // 2])
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


class TestS3:
    def test_keeps_the_hash_beside_the_object_under_the_prefix(
        self, bucket: Any, s3_store: ObjectStore, source: Path
    ) -> None:
        s3_store.put_file(KEY, source, sha256=SHA256)
        assert bucket.Object(f"a/prefix/{KEY}").metadata == {"sha256": SHA256}

    def test_large_files_go_up_in_parts(
        self, bucket: Any, s3_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)  # the protocol's smallest
        content = os.urandom((5 << 20) + 12345)
        (tmp_path / "large").write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        s3_store.put_file(KEY, tmp_path / "large", sha256=sha256)
        assert bucket.Object(f"a/prefix/{KEY}").e_tag.strip('"').endswith("-2")
        fetch(s3_store, tmp_path / "copy", sha256=sha256, size_bytes=len(content))
        assert (tmp_path / "copy").read_bytes() == content

    @pytest.mark.usefixtures("credentials")
    def test_server_that_is_down_is_unavailable_not_missing(
        self, tmp_path: Path, source: Path
    ) -> None:
        store = S3Store(S3Settings("bucket", endpoint="http://127.0.0.1:9"))
        with pytest.raises(StoreUnavailable) as caught:
            fetch(store, tmp_path / "copy")
        assert "marked-secret" not in str(caught.value)
        with pytest.raises(StoreUnavailable):
            store.put_file(KEY, source, sha256=SHA256)
        with pytest.raises(StoreUnavailable):
            store.exists(KEY)

    def test_missing_bucket_is_unavailable_not_a_missing_object(
        self, bucket: Any, s3_endpoint: str, tmp_path: Path
    ) -> None:
        store = S3Store(S3Settings("no-such-bucket", endpoint=s3_endpoint, addressing_style="path"))
        with pytest.raises(StoreUnavailable, match="NoSuchBucket"):
            fetch(store, tmp_path / "copy")

    @pytest.mark.usefixtures("credentials")
    def test_connection_lost_within_the_object_is_unavailable(self, tmp_path: Path) -> None:
        with http.server.HTTPServer(("127.0.0.1", 0), InterruptedAnswer) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            endpoint = f"http://127.0.0.1:{server.server_port}"
            store = S3Store(S3Settings("bucket", endpoint=endpoint, addressing_style="path"))
            try:
                with pytest.raises(StoreUnavailable):
                    fetch(store, tmp_path / "copy")
            finally:
                server.shutdown()
                thread.join()


class TestOpenStore:
    @pytest.mark.parametrize("form", ["{}", "file://{}"])
    def test_opens_a_folder(self, form: str, tmp_path: Path) -> None:
        open_store(form.format(tmp_path / "made"))
        assert (tmp_path / "made").is_dir()

    @pytest.mark.usefixtures("credentials")
    def test_reads_the_options_of_a_bucket(self, monkeypatch: pytest.MonkeyPatch) -> None:
        opened: list[S3Settings] = []
        monkeypatch.setattr(s3.S3Store, "__init__", lambda self, settings: opened.append(settings))
        open_store(
            "s3://bucket/a/b/?endpoint=https://host:9000&region=eu&addressing_style=path"
            "&checksums=when_required"
        )
        open_store("s3://bucket")
        assert opened == [
            S3Settings("bucket", "a/b", "https://host:9000", "eu", "path", "when_required"),
            S3Settings("bucket"),
        ]

    @pytest.mark.parametrize(
        "url",
        [
            "http://host/bucket",
            "file://host/path",
            "file:///path?option=1",
            "s3://",
            "s3://key:secret@bucket",
            "s3://bucket?secret_key=x",
            "s3://bucket?endpoint",
        ],
    )
    def test_refuses_what_it_cannot_read(self, url: str) -> None:
        with pytest.raises(ValueError, match=r".") as caught:
            open_store(url)
        assert "secret@" not in str(caught.value)
