"""A server with a certificate of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from loraplex.api.serve import CannotUseCertificate, check_certificate
from loraplex.api.settings import Settings
from support.server import FAKE_ENGINE, ServerUnderTest, serving
from support.webhooks import make_certificates

HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, HOST)
    return folder


@pytest.fixture(scope="module")
def server(
    certificates: Path, tiny_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerUnderTest]:
    files = (certificates / "server.pem", certificates / "server.key")
    options = ("--ssl-certfile", str(files[0]), "--ssl-keyfile", str(files[1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(certificates / "authority.pem"))
        data_dir = tmp_path_factory.mktemp("tls") / "data"
        with serving(tiny_base, data_dir, *options, engine=FAKE_ENGINE) as running:
            yield running


def test_clients_are_served_over_tls(server: ServerUnderTest, tiny_base: Path) -> None:
    assert server.url.startswith("https://")
    caller = server.make_caller("acme")
    answer = caller.openai.completions.create(model=tiny_base.name, prompt="a", max_tokens=2)
    assert answer.usage
    assert answer.usage.completion_tokens == 2


def test_browsers_are_told_to_use_tls_and_may_sign_in(server: ServerUnderTest) -> None:
    answer = httpx.post(
        f"{server.url}/v1/session",
        json={"name": "nobody", "password": "no such password", "tenant": None},
        headers={"origin": server.url},
    )
    assert answer.json()["error"]["code"] == "sign_in_failed"
    assert "max-age" in answer.headers["strict-transport-security"]


def test_plain_http_is_not_served(server: ServerUnderTest) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{server.url.replace('https', 'http')}/health")


@pytest.mark.parametrize(
    ("certificate", "key", "message"),
    [
        (None, "server.key", "--ssl-keyfile needs --ssl-certfile"),
        ("missing.pem", "server.key", "No such file"),
        ("server.pem", "missing.key", "No such file"),
        ("server.pem", None, "cannot serve with"),
        ("authority.pem", "server.key", "cannot serve with"),
        ("server.key", "server.key", "cannot serve with"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_refused_before_the_model_is_loaded(
    certificates: Path, certificate: str | None, key: str | None, message: str
) -> None:
    settings = Settings(
        ssl_certfile=None if certificate is None else certificates / certificate,
        ssl_keyfile=None if key is None else certificates / key,
    )
    with pytest.raises(CannotUseCertificate, match=message):
        check_certificate(settings)
