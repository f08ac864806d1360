from __future__ import annotations

import fcntl
import hashlib
import http.server
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from botocore.exceptions import ClientError

from loraplex.adapters.errors import (
    ObjectCorrupt,
    ObjectNotFound,
    StorageFull,
    StoreDenied,
    StoreUnavailable,
)
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.store import ObjectStore, check_usable, object_key, open_store, s3
from loraplex.adapters.store.local import LocalStore
from loraplex.adapters.store.s3 import S3Store
from loraplex.adapters.store.s3_client import S3Settings, connect, reported
from support.s3 import CREDENTIALS, emulated_s3, make_bucket

KEY = f"t/tenant/a/{'0' * 64}.block"
CONTENT = bytes(range(256)) * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
PART_BYTES = 5 << 20
"""The protocol's smallest."""
YEAR_SECONDS = 365 * 24 * 3600


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    """A server given by the environment (`make test-s3`), else an emulator."""
    if given := os.environ.get("LORAPLEX_TEST_S3"):
        yield given
        return
    with emulated_s3() as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def credentials() -> Iterator[Mapping[str, str]]:
    given = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    used = {**CREDENTIALS, **given} if "LORAPLEX_TEST_S3" in os.environ else CREDENTIALS
    with pytest.MonkeyPatch.context() as patch:
        for name in given:
            patch.delenv(name)
        for name, value in used.items():
            patch.setenv(name, value)
        yield used


@pytest.fixture(scope="module")
def bucket(s3_endpoint: str, credentials: Mapping[str, str]) -> Any:
    return make_bucket(s3_endpoint, "adapters", credentials)


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
    for found in list(store.list_keys("t/")):
        store.delete(found.key)


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


def keys(store: ObjectStore, prefix: str, after: str = "") -> list[str]:
    return [found.key for found in store.list_keys(prefix, after=after)]


def test_lists_what_is_under_a_prefix_in_the_order_of_the_keys(
    store: ObjectStore, source: Path
) -> None:
    assert keys(store, "t/") == []
    names = ["t/a/1", "t/a-b", "t/a.c", "t/ab/x", "t/b/a/2", "t/b/a/1"]
    for name in names:
        store.put_file(name, source, sha256=SHA256)
    assert keys(store, "t/") == sorted(names)
    assert keys(store, "t/a") == sorted(name for name in names if name.startswith("t/a"))
    assert keys(store, "t/b/a/") == ["t/b/a/1", "t/b/a/2"]
    assert keys(store, "t/missing/") == []
    for after in [*names, "t/a/", "t/b", "s"]:
        assert keys(store, "t/", after) == sorted(name for name in names if name > after)


def test_tells_size_and_age_of_what_it_lists(store: ObjectStore, source: Path) -> None:
    store.put_file(KEY, source, sha256=SHA256)
    (found,) = store.list_keys("t/")
    assert (found.key, found.size_bytes) == (KEY, len(CONTENT))
    assert abs(found.modified_at - time.time()) < 3600


@pytest.mark.parametrize("prefix", ["/", "../", "t/../", "t//", " "])
def test_refuses_prefixes_that_no_key_begins_with(prefix: str, store: ObjectStore) -> None:
    with pytest.raises(ValueError, match="not an object key"):
        list(store.list_keys(prefix))


def test_tells_when_everything_is_sent(store: ObjectStore, source: Path) -> None:
    told: list[int] = []
    store.put_file(KEY, source, sha256=SHA256, on_progress=told.append)
    assert told == sorted(told)
    assert told[-1] == len(CONTENT)


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

    def test_what_a_killed_process_left_is_removed_at_the_next_start(self, tmp_path: Path) -> None:
        """And not what another server that shares the folder still writes, however slowly."""
        LocalStore(tmp_path / "store")
        incoming = tmp_path / "store" / ".incoming"
        left, written, young = (incoming / name for name in ("left", "written", "young"))
        for path in (left, written, young):
            path.write_bytes(b"partial")
        for path in (left, written):
            os.utime(path, (time.time() - 3600,) * 2)
        with written.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            LocalStore(tmp_path / "store")
        assert not left.exists()
        assert written.exists()
        assert young.exists()

    def test_tells_how_many_leftovers_it_removed(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path / "store")
        for name in ("one", "two"):
            (tmp_path / "store" / ".incoming" / name).write_bytes(b"partial")
        assert store.remove_abandoned(older_than_seconds=60) == 0
        assert store.remove_abandoned(older_than_seconds=-60) == 2
        assert store.remove_abandoned(older_than_seconds=-60) == 0

    def test_a_file_that_is_being_put_is_no_leftover(
        self, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = LocalStore(tmp_path / "store")
        removed: list[int] = []

        def sweep(num_bytes: int) -> None:
            removed.append(store.remove_abandoned(older_than_seconds=-3600))

        store.put_file(KEY, source, sha256=SHA256, on_progress=sweep)
        assert removed
        assert not any(removed)
        fetch(store, tmp_path / "copy")

    def test_failed_put_leaves_nothing(
        self, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = LocalStore(tmp_path / "store")

        def fail(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(StorageFull):
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


class _Response:
    """What the SDK looks at of an answer."""

    def __init__(self, status_code: int) -> None:
        self.status_code = status_code
        self.headers: dict[str, str] = {}


def client_error(code: str, status: int) -> Exception:
    response: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error: Exception = ClientError(response, "GetObject")
    return error


def every_call(
    store: S3Store, small: Path, large: Path, folder: Path
) -> list[Callable[[], object]]:
    return [
        lambda: store.put_file(KEY, small, sha256=SHA256),
        lambda: store.put_file(KEY, large, sha256=SHA256),
        lambda: fetch(store, folder / "copy"),
        lambda: store.delete(KEY),
        lambda: store.exists(KEY),
        lambda: list(store.list_keys("t/")),
        lambda: store.remove_abandoned(older_than_seconds=0),
    ]


class Large(NamedTuple):
    """A file of three parts."""

    path: Path
    content: bytes

    @classmethod
    def make(cls, path: Path, *, seed: bytes) -> Large:
        content = hashlib.shake_128(seed).digest(2 * PART_BYTES + 12345)
        path.write_bytes(content)
        return cls(path, content)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Large:
    monkeypatch.setattr(s3, "PART_BYTES", PART_BYTES)
    return Large.make(tmp_path / "large", seed=b"large")


@pytest.fixture
def sent_parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the parts that go over the wire, as they do."""
    sent: list[int] = []

    def watched(settings: S3Settings) -> Any:
        client = connect(settings)
        client.meta.events.register(
            "provide-client-params.s3.UploadPart",
            lambda params, **_: sent.append(params["PartNumber"]),
        )
        return client

    monkeypatch.setattr(s3, "connect", watched)
    return sent


class Interrupted(Exception):
    """As if the process had been killed."""


def interrupt(store: ObjectStore, large: Large, *, after_parts: int) -> None:
    def stop(num_bytes: int) -> None:
        if num_bytes >= after_parts * PART_BYTES:
            raise Interrupted

    with pytest.raises(Interrupted):
        store.put_file(KEY, large.path, sha256=large.sha256, on_progress=stop)


def unfinished(bucket: Any) -> list[str]:
    return [upload.id for upload in bucket.multipart_uploads.all()]


class TestS3:
    @pytest.fixture(autouse=True)
    def tidy(self, request: pytest.FixtureRequest) -> Iterator[None]:
        yield
        if "s3_store" in request.fixturenames or "bucket" in request.fixturenames:
            bucket = request.getfixturevalue("bucket")
            bucket.objects.all().delete()
            for upload in bucket.multipart_uploads.all():
                upload.abort()

    def test_keeps_the_hash_beside_the_object_under_the_prefix(
        self, bucket: Any, s3_store: ObjectStore, source: Path
    ) -> None:
        s3_store.put_file(KEY, source, sha256=SHA256)
        assert bucket.Object(f"a/prefix/{KEY}").metadata == {"sha256": SHA256}

    def test_large_files_go_up_in_parts(
        self, bucket: Any, s3_store: ObjectStore, large: Large, tmp_path: Path
    ) -> None:
        told: list[int] = []
        s3_store.put_file(KEY, large.path, sha256=large.sha256, on_progress=told.append)
        assert told == [PART_BYTES, 2 * PART_BYTES, len(large.content)]
        stored = bucket.Object(f"a/prefix/{KEY}")
        assert stored.e_tag.strip('"').endswith("-3")
        assert stored.metadata == {"sha256": large.sha256}
        fetch(s3_store, tmp_path / "copy", sha256=large.sha256, size_bytes=len(large.content))
        assert (tmp_path / "copy").read_bytes() == large.content

    @pytest.mark.parametrize("checksums", ["when_supported", "when_required"])
    def test_an_interrupted_upload_goes_on_where_it_ended(
        self,
        checksums: str,
        bucket: Any,
        s3_endpoint: str,
        large: Large,
        sent_parts: list[int],
        tmp_path: Path,
    ) -> None:
        store = open_store(
            f"s3://{bucket.name}/a/prefix?endpoint={s3_endpoint}&addressing_style=path"
            f"&checksums={checksums}"
        )
        interrupt(store, large, after_parts=2)
        assert sent_parts == [1, 2]
        assert not store.exists(KEY)
        store.put_file(KEY, large.path, sha256=large.sha256)
        assert sent_parts == [1, 2, 3]
        fetch(store, tmp_path / "copy", sha256=large.sha256, size_bytes=len(large.content))
        assert (tmp_path / "copy").read_bytes() == large.content
        assert unfinished(bucket) == []

    def test_parts_of_other_content_are_sent_again(
        self, bucket: Any, s3_store: ObjectStore, large: Large, tmp_path: Path
    ) -> None:
        other = Large.make(tmp_path / "other", seed=b"other")
        interrupt(s3_store, other, after_parts=2)
        s3_store.put_file(KEY, large.path, sha256=large.sha256)
        fetch(s3_store, tmp_path / "copy", sha256=large.sha256, size_bytes=len(large.content))
        assert bucket.Object(f"a/prefix/{KEY}").metadata == {"sha256": large.sha256}
        assert unfinished(bucket) == []

    def test_a_part_that_the_server_has_with_other_bytes_is_sent_again(
        self, bucket: Any, s3_store: ObjectStore, large: Large, tmp_path: Path
    ) -> None:
        interrupt(s3_store, large, after_parts=2)
        (begun,) = unfinished(bucket)
        upload = bucket.Object(f"a/prefix/{KEY}").MultipartUpload(begun)
        upload.Part(2).upload(Body=bytes(PART_BYTES))
        s3_store.put_file(KEY, large.path, sha256=large.sha256)
        fetch(s3_store, tmp_path / "copy", sha256=large.sha256, size_bytes=len(large.content))

    def test_an_upload_that_is_gone_is_begun_anew(
        self,
        bucket: Any,
        s3_store: ObjectStore,
        large: Large,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        interrupt(s3_store, large, after_parts=1)
        (stale,) = unfinished(bucket)
        bucket.Object(f"a/prefix/{KEY}").MultipartUpload(stale).abort()
        monkeypatch.setattr(S3Store, "_begun_uploads", lambda _store, _key: [stale])
        s3_store.put_file(KEY, large.path, sha256=large.sha256)
        fetch(s3_store, tmp_path / "copy", sha256=large.sha256, size_bytes=len(large.content))

    def test_abandoned_uploads_are_dropped_when_they_are_old_enough(
        self, bucket: Any, s3_store: ObjectStore, large: Large
    ) -> None:
        interrupt(s3_store, large, after_parts=1)
        # The emulator says that every upload began in 2010.
        assert s3_store.remove_abandoned(older_than_seconds=50 * YEAR_SECONDS) == 0
        assert len(unfinished(bucket)) == 1
        assert s3_store.remove_abandoned(older_than_seconds=-3600) == 1
        assert unfinished(bucket) == []

    def test_a_store_that_keeps_something_else_is_found_out(
        self, bucket: Any, s3_store: ObjectStore, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bucket.Object(f"a/prefix/{KEY}").put(Body=CONTENT[:-1], Metadata={"sha256": SHA256})
        monkeypatch.setattr(S3Store, "_put_at_once", lambda *_arguments, **_named: None)
        with pytest.raises(StoreUnavailable, match="another object"):
            s3_store.put_file(KEY, source, sha256=SHA256)

    def test_every_request_names_the_owner_and_new_objects_their_key(
        self, source: Path, large: Large, credentials: Mapping[str, str], tmp_path: Path
    ) -> None:
        settings = S3Settings("b", region="eu-1", kms_key_id="key-1", bucket_owner="123456789012")
        store = S3Store(settings)
        seen: list[tuple[str, dict[str, str]]] = []

        def answer(model: Any, params: dict[str, Any], **_: Any) -> tuple[Any, dict[str, Any]]:
            seen.append((model.name, params["headers"]))
            refusal = {"Error": {"Code": "Refused"}, "ResponseMetadata": {"HTTPStatusCode": 400}}
            return _Response(400), refusal

        store._client.meta.events.register("before-call.s3", answer)
        for call in every_call(store, source, large.path, tmp_path):
            with pytest.raises(StoreUnavailable, match="Refused"):
                call()
        assert {name for name, _ in seen} >= {
            *("PutObject", "GetObject", "HeadObject", "DeleteObject", "ListObjectsV2"),
            *("ListMultipartUploads", "CreateMultipartUpload"),
        }
        for name, headers in seen:
            assert headers["x-amz-expected-bucket-owner"] == "123456789012", name
            is_creation = name in ("PutObject", "CreateMultipartUpload")
            key = headers.get("x-amz-server-side-encryption-aws-kms-key-id")
            assert key == ("key-1" if is_creation else None), name

    @pytest.mark.parametrize(
        ("code", "status"),
        [
            ("AccessDenied", 403),
            ("InvalidAccessKeyId", 403),
            ("SignatureDoesNotMatch", 403),
            ("ExpiredToken", 400),
            ("403", 403),
            ("KMS.DisabledException", 403),
        ],
    )
    def test_a_refusal_names_what_the_operator_checks(self, code: str, status: int) -> None:
        with pytest.raises(StoreDenied, match=f"{code}.*credentials.*policies"), reported():
            raise client_error(code, status)

    @pytest.mark.skipif(
        "LORAPLEX_TEST_S3" not in os.environ, reason="the emulator takes any secret"
    )
    def test_a_wrong_secret_is_refused_and_not_repeated(
        self, s3_endpoint: str, bucket: Any, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "marked-secret")
        settings = S3Settings(bucket.name, endpoint=s3_endpoint, addressing_style="path")
        with pytest.raises(StoreDenied) as caught:
            S3Store(settings).put_file(KEY, source, sha256=SHA256)
        assert "marked-secret" not in str(caught.value)

    def test_a_wrong_clock_is_named(self) -> None:
        with pytest.raises(StoreDenied, match="clock"), reported():
            raise client_error("RequestTimeTooSkewed", 403)

    def test_missing_credentials_are_named(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("HOME", str(tmp_path))
        store = S3Store(S3Settings("bucket", endpoint="http://127.0.0.1:9", region="eu"))
        with pytest.raises(StoreDenied, match="AWS_ACCESS_KEY_ID"):
            store.put_file(KEY, source, sha256=SHA256)

    @pytest.mark.usefixtures("credentials")
    def test_server_that_is_down_is_unavailable_not_missing(
        self, tmp_path: Path, source: Path
    ) -> None:
        store = S3Store(S3Settings("bucket", endpoint="http://127.0.0.1:9", max_attempts=1))
        with pytest.raises(StoreUnavailable) as caught:
            fetch(store, tmp_path / "copy")
        assert "marked-secret" not in str(caught.value)
        with pytest.raises(StoreUnavailable):
            store.put_file(KEY, source, sha256=SHA256)
        with pytest.raises(StoreUnavailable):
            store.exists(KEY)

    @pytest.mark.usefixtures("bucket")
    def test_missing_bucket_is_a_wrong_setting_and_not_a_missing_object(
        self, s3_endpoint: str, tmp_path: Path
    ) -> None:
        store = S3Store(S3Settings("no-such-bucket", endpoint=s3_endpoint, addressing_style="path"))
        with pytest.raises(StoreDenied, match="no such bucket"):
            fetch(store, tmp_path / "copy")
        with pytest.raises(StoreDenied, match="no such bucket"):
            check_usable(store)

    @pytest.mark.usefixtures("credentials")
    def test_connection_lost_within_the_object_is_unavailable(self, tmp_path: Path) -> None:
        with http.server.HTTPServer(("127.0.0.1", 0), InterruptedAnswer) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            endpoint = f"http://127.0.0.1:{server.server_port}"
            store = S3Store(
                S3Settings("bucket", endpoint=endpoint, addressing_style="path", max_attempts=1)
            )
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
            "&checksums=when_required&kms=alias/adapters&owner=123456789012"
            "&connect_timeout=0.5&read_timeout=20&max_attempts=2"
        )
        open_store("s3://bucket")
        assert opened == [
            S3Settings(
                "bucket",
                "a/b",
                endpoint="https://host:9000",
                region="eu",
                addressing_style="path",
                checksums="when_required",
                kms_key_id="alias/adapters",
                bucket_owner="123456789012",
                connect_timeout_seconds=0.5,
                read_timeout_seconds=20.0,
                max_attempts=2,
            ),
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
            "s3://bucket?addressing_style=sideways",
            "s3://bucket?checksums=never",
            "s3://bucket?read_timeout=nan",
            "s3://bucket?read_timeout=0",
            "s3://bucket?connect_timeout=-1",
            "s3://bucket?max_attempts=0",
            "s3://bucket?max_attempts=1.5",
            "s3://bucket?kms=",
        ],
    )
    def test_refuses_what_it_cannot_read(self, url: str) -> None:
        with pytest.raises(ValueError, match=r".") as caught:
            open_store(url)
        assert "secret@" not in str(caught.value)
