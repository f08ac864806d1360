"""Where a push takes an adapter from: folders, archives, the Hugging Face Hub, S3, tensors."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from loraplex.api.client.errors import (
    ClientError,
    InvalidAdapter,
    InvalidArgument,
    NotFound,
    SourceDenied,
    SourceUnavailable,
)
from loraplex.api.client.progress import Progress
from loraplex.api.client.sources import archive as archives
from loraplex.api.client.sources.source import open_source
from loraplex.api.client.sources.tensors import write_adapter
from support.hub import TOKEN, Hub, emulated_hub
from support.s3 import CREDENTIALS, emulated_s3, make_bucket
from support.server import child_environment

WEIGHTS = save({"a": np.arange(4, dtype=np.float32)})
ADAPTER = {
    "adapter_config.json": b'{"r": 8}',
    "adapter_model.safetensors": WEIGHTS,
    "tokenizer.json": b"{}",
}
TRAINERS_OWN = {"optimizer.pt": b"pickle", "trainer_state.json": b"{}", "rng_state.pth": b"pickle"}


def files_of(source: str | Path) -> dict[str, bytes]:
    """What a push would read."""
    with open_source(source, Progress()) as folder:
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def error_of(source: str | Path) -> ClientError:
    with pytest.raises(ClientError) as raised, open_source(source, Progress()):
        pass
    return raised.value


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def below(folder: str, files: Mapping[str, bytes] = ADAPTER) -> dict[str, bytes]:
    return {f"{folder}/{name}": content for name, content in files.items()}


# --- folders ------------------------------------------------------------------------------------


def test_a_trainers_checkpoint_is_a_source(tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint-500", {**ADAPTER, **TRAINERS_OWN})
    assert files_of(folder).items() >= ADAPTER.items()


def test_of_a_run_with_checkpoints_all_and_the_newest_are_named(tmp_path: Path) -> None:
    for step in (500, 1000, 90):
        write(tmp_path, below(f"checkpoint-{step}"))
    error = error_of(tmp_path)
    assert isinstance(error, InvalidAdapter)
    assert "3 adapters: checkpoint-90, checkpoint-500, checkpoint-1000" in str(error)
    assert str(error).endswith(f"Push the newest: {tmp_path / 'checkpoint-1000'}")


def test_a_run_with_one_checkpoint_or_its_own_adapter_is_a_source(tmp_path: Path) -> None:
    write(tmp_path, {**below("checkpoint-7"), **TRAINERS_OWN})
    assert files_of(tmp_path) == ADAPTER
    newer = {**ADAPTER, "adapter_config.json": b'{"r": 16}'}
    write(tmp_path, newer)
    assert files_of(tmp_path)["adapter_config.json"] == b'{"r": 16}'


def test_many_adapters_are_counted_and_not_all_named(tmp_path: Path) -> None:
    for number in range(20):
        write(tmp_path, below(f"bot-{number:02}"))
    error = str(error_of(tmp_path))
    assert "20 adapters: 12 more and bot-12" in error
    assert "Push one of them:" in error
    assert "bot-00" not in error


def test_a_folder_that_is_not_there_suggests_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "support-bot", ADAPTER)
    assert f"Did you mean {str(tmp_path / 'support-bot')!r}?" in str(
        error_of(tmp_path / "suport-bot")
    )
    assert "Did you mean" not in str(error_of(tmp_path / "nothing-alike"))


def test_what_looks_like_a_name_in_the_hub_says_how_to_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "hf://acme/support-bot" in str(error_of("acme/support-bot"))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write(tmp_path, ADAPTER)
    with (
        pytest.raises(ClientError, match=f"{tmp_path / 'gone'}: No such file"),
        open_source(tmp_path, Progress()) as folder,
    ):
        (folder / "gone").read_bytes()


@pytest.mark.parametrize("source", ["https://example.com/bot.zip", "gs://bucket/bot", "hf:///x"])
def test_other_addresses_are_refused(source: str) -> None:
    assert isinstance(error_of(source), InvalidArgument)


# --- archives -----------------------------------------------------------------------------------


def make_tar(path: Path, files: Mapping[str, bytes], *others: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as tar:
        for member in others:
            tar.addfile(member)
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def make_zip(path: Path, files: Mapping[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in files.items():
            file.writestr(name, content)
    return path


def make_archive(path: Path, files: Mapping[str, bytes]) -> Path:
    return make_zip(path, files) if path.suffix == ".zip" else make_tar(path, files)


ARCHIVES = ["bot.tar", "bot.tar.gz", "bot.tgz", "bot.zip"]


@pytest.mark.parametrize("folder", ["", "bot/", "./", "a/b/"])
@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_gives_the_adapters_files_and_no_other(
    tmp_path: Path, name: str, folder: str
) -> None:
    files = {f"{folder}{name}": content for name, content in {**ADAPTER, **TRAINERS_OWN}.items()}
    assert files_of(make_archive(tmp_path / name, files)) == ADAPTER


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_of_several_checkpoints_names_the_newest(tmp_path: Path, name: str) -> None:
    files = {**below("run/checkpoint-2"), **below("run/checkpoint-10")}
    error = str(error_of(make_archive(tmp_path / name, files)))
    assert error.endswith(f"{name}/run/checkpoint-10")


@pytest.mark.parametrize("name", ARCHIVES)
@pytest.mark.parametrize("folder", ["../", "/tmp/", "a/../../"])
def test_a_path_out_of_the_archive_is_not_unpacked(tmp_path: Path, name: str, folder: str) -> None:
    files = {f"{folder}{file}": content for file, content in ADAPTER.items()}
    assert isinstance(error_of(make_archive(tmp_path / name, files)), InvalidAdapter)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_an_adapters_file_that_is_a_link_is_refused(tmp_path: Path, kind: bytes) -> None:
    link = tarfile.TarInfo("adapter_config.json")
    link.type, link.linkname = kind, "/etc/passwd"
    files = {"adapter_model.safetensors": WEIGHTS}
    assert "tar -h" in str(error_of(make_tar(tmp_path / "bot.tar", files, link)))


def test_a_link_in_a_zip_is_refused(tmp_path: Path) -> None:
    info = zipfile.ZipInfo("adapter_config.json")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "bot.zip", "w") as file:
        file.writestr(info, "/etc/passwd")
    assert "is a link" in str(error_of(tmp_path / "bot.zip"))


def test_other_links_and_devices_in_an_archive_are_left_out(tmp_path: Path) -> None:
    link, device = tarfile.TarInfo("latest"), tarfile.TarInfo("null")
    link.type, link.linkname = tarfile.SYMTYPE, "/"
    device.type = tarfile.CHRTYPE
    assert files_of(make_tar(tmp_path / "bot.tar", ADAPTER, link, device)) == ADAPTER


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_damaged_archive_is_refused(tmp_path: Path, name: str) -> None:
    path = make_archive(
        tmp_path / name,
        {**ADAPTER, "adapter_model.safetensors": np.random.default_rng(0).bytes(99_999)},
    )
    path.write_bytes(path.read_bytes()[: len(path.read_bytes()) // 2])
    assert isinstance(error_of(path), InvalidAdapter)
    path.write_bytes(b"no archive")
    assert "cannot be unpacked" in str(error_of(path))


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MAX_WEIGHTS_BYTES", 1 << 20)
    files = {**ADAPTER, "adapter_model.safetensors": bytes((1 << 20) + 1)}
    assert "too large" in str(error_of(make_archive(tmp_path / name, files)))
    monkeypatch.setattr(archives, "MAX_MEMBERS", 2)
    assert "members" in str(error_of(tmp_path / name))


def test_pickled_weights_in_an_archive_are_explained(tmp_path: Path) -> None:
    files = {"adapter_config.json": b"{}", "adapter_model.bin": b"pickle"}
    error = error_of(make_zip(tmp_path / "bot.zip", files))
    assert "safe_serialization=True" in str(error)


# --- the Hugging Face Hub -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hub_server() -> Iterator[tuple[str, Hub]]:
    with emulated_hub() as running:
        yield running


@pytest.fixture
def hub(hub_server: tuple[str, Hub], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """A hub with `acme/bot`, to which huggingface_hub goes."""
    endpoint, hub = hub_server
    hub.__init__()  # type: ignore[misc]
    hub.repositories["acme/bot"] = {**ADAPTER, "README.md": b"#", "adapter_model.bin": b"pickle"}
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
        f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return hub


def test_an_adapter_comes_from_the_hub_with_the_callers_token(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert files_of("hf://acme/bot") == ADAPTER
    assert files_of("hf://acme/bot@main") == ADAPTER
    hub.private.add("acme/bot")
    assert "set HF_TOKEN" in str(error_of("hf://acme/bot"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert files_of("hf://acme/bot") == ADAPTER


def test_hf_endpoint_chooses_the_hub(hub_server: tuple[str, Hub], hub: Hub, tmp_path: Path) -> None:
    script = (
        "from loraplex.api.client.progress import Progress\n"
        "from loraplex.api.client.sources.source import open_source\n"
        "with open_source('hf://acme/bot', Progress()) as folder:\n"
        "    print(sorted(path.name for path in folder.iterdir() if path.is_file()))\n"
    )
    environment = child_environment(HF_ENDPOINT=hub_server[0], HF_HOME=str(tmp_path))
    printed = subprocess.check_output([sys.executable, "-c", script], text=True, env=environment)
    assert printed == f"{sorted(ADAPTER)}\n"


def test_only_an_adapters_files_are_downloaded(hub: Hub) -> None:
    files_of("hf://acme/bot")
    downloaded = {path.rpartition("/")[2] for path in hub.requests if "/resolve/" in path}
    assert downloaded == set(ADAPTER)


def test_a_folder_of_a_repository_is_a_source(hub: Hub) -> None:
    hub.repositories["acme/runs"] = {**below("checkpoint-9"), **below("checkpoint-10")}
    assert files_of("hf://acme/runs/checkpoint-9") == ADAPTER
    assert str(error_of("hf://acme/runs")).endswith("the newest: hf://acme/runs/checkpoint-10")
    near = error_of("hf://acme/runs@main/checkpiont-9")
    assert isinstance(near, NotFound)
    assert "Did you mean 'hf://acme/runs@main/checkpoint-9'?" in str(near)


def test_what_the_hub_does_not_have_suggests_the_nearest(hub: Hub) -> None:
    for source, near in (("hf://acme/bto", "acme/bot"), ("hf://acme/bot@mian", "main")):
        error = error_of(source)
        assert isinstance(error, NotFound)
        assert f"Did you mean {near!r}?" in str(error)


def test_what_the_hub_refuses_is_explained(hub: Hub) -> None:
    hub.gated.add("acme/bot")
    gated = error_of("hf://acme/bot")
    assert isinstance(gated, SourceDenied)
    assert "accept its terms" in str(gated)
    assert isinstance(error_of("hf://acme/bot..x"), InvalidArgument)


def test_a_hub_that_is_down_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.is_down = True
    error = error_of("hf://acme/bot")
    assert isinstance(error, SourceUnavailable)
    assert "status 503" in str(error)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    assert isinstance(error_of("hf://acme/bot"), SourceUnavailable)


# --- S3 -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with emulated_s3() as endpoint:
        yield endpoint


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A bucket `models`, to which boto3 goes."""
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint}.items():
        monkeypatch.setenv(name, value)
    bucket = make_bucket(endpoint, "models")
    bucket.objects.delete()
    return bucket


def put(bucket: Any, files: Mapping[str, bytes]) -> None:
    for key, content in files.items():
        bucket.put_object(Key=key, Body=content)


def test_an_adapter_comes_from_a_bucket(bucket: Any) -> None:
    put(bucket, {**below("team/bot"), **below("team/bot-2"), "team/bot/optimizer.pt": b"pickle"})
    assert files_of("s3://models/team/bot") == ADAPTER
    assert files_of("s3://models/team/bot/") == ADAPTER


def test_of_a_prefix_with_checkpoints_the_newest_is_named(bucket: Any) -> None:
    put(bucket, {**below("run/checkpoint-9"), **below("run/checkpoint-10")})
    error = str(error_of("s3://models/run"))
    assert error.endswith("the newest: s3://models/run/checkpoint-10")
    put(bucket, ADAPTER)
    assert files_of("s3://models") == ADAPTER


def test_what_a_bucket_does_not_have_suggests_the_nearest(bucket: Any) -> None:
    put(bucket, below("team/support-bot"))
    error = error_of("s3://models/team/suport-bot")
    assert isinstance(error, NotFound)
    assert "Did you mean 's3://models/team/support-bot'?" in str(error)
    assert "no bucket 'other'" in str(error_of("s3://other/bot"))
    assert isinstance(error_of("s3:///bot"), InvalidArgument)
    assert isinstance(error_of("s3://No Bucket/bot"), InvalidArgument)


def test_a_bucket_without_credentials_says_which_to_set(
    bucket: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    error = error_of("s3://models/bot")
    assert isinstance(error, SourceDenied)
    assert "AWS_ACCESS_KEY_ID" in str(error)


def test_a_store_that_is_down_is_named(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    assert isinstance(error_of("s3://models/bot"), SourceUnavailable)


# --- tensors --------------------------------------------------------------------------------------


def test_tensors_and_a_config_become_the_files_of_an_adapter(tmp_path: Path) -> None:
    class PeftConfig:
        def to_dict(self) -> dict[str, Any]:
            return {"r": 8, "target_modules": {"v_proj", "q_proj"}}

    tensors = {"b": np.arange(6.0, dtype=np.float32).reshape(2, 3).T}
    write_adapter(tmp_path, tensors, PeftConfig())
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config == {"r": 8, "target_modules": ["q_proj", "v_proj"]}
    written = load_file(tmp_path / "adapter_model.safetensors")
    assert np.array_equal(written["b"], tensors["b"])


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({}, {"r": 8}, "There are no tensors"),
        ({"a": np.zeros(1)}, None, "neither a PeftConfig"),
        ({"a": np.zeros(1)}, {"r": object()}, "as JSON"),
        ({"a": "text"}, {"r": 8}, "as safetensors"),
    ],
    ids=["no tensors", "no config", "a value of no JSON type", "no tensor"],
)
def test_what_is_no_adapter_in_memory_is_refused(
    tmp_path: Path, tensors: Mapping[str, Any], config: Any, message: str
) -> None:
    with pytest.raises(InvalidAdapter, match=message):
        write_adapter(tmp_path, tensors, config)
