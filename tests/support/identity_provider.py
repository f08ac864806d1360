"""An OpenID provider that can be told to do everything wrong.

It signs with `cryptography` alone: what the server verifies was not made by its own library. It
checks the client's secret, the redirect URI and PKCE as RFC 6749 and RFC 7636 demand.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

CLIENT_ID = "loraplex-console"
CLIENT_SECRET = "s3cret of the client: %&+"
Json = dict[str, Any]


def encode(content: bytes) -> str:
    """Base64url without padding."""
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _number(value: int) -> str:
    return encode(value.to_bytes((value.bit_length() + 7) // 8))


@cache
def rsa_key(name: str) -> rsa.RSAPrivateKey:
    """The key of this name; `weak` is shorter than providers may use."""
    return rsa.generate_private_key(65537, 1024 if name == "weak" else 2048)


@cache
def ec_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


@cache
def ed_key() -> ed25519.Ed25519PrivateKey:
    return ed25519.Ed25519PrivateKey.generate()


def public_pem(name: str) -> bytes:
    """The public key as text that anybody can have."""
    return (
        rsa_key(name)
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )


def jwk_of(name: str) -> Json:
    """The public half of an RSA key as a JSON Web Key."""
    numbers = rsa_key(name).public_key().public_numbers()
    return {"kty": "RSA", "kid": name, "use": "sig", "n": _number(numbers.n), "e": "AQAB"}


def other_jwks() -> list[Json]:
    """The public halves of the other kinds, and keys that must be skipped."""
    point = ec_key().public_key().public_numbers()
    x, y = (encode(value.to_bytes(32)) for value in (point.x, point.y))
    raw = ed_key().public_key().public_bytes_raw()
    return [
        {"kty": "EC", "kid": "ec", "crv": "P-256", "x": x, "y": y},
        {"kty": "OKP", "kid": "ed", "crv": "Ed25519", "x": encode(raw)},
        {"kty": "oct", "kid": "shared", "k": encode(b"k" * 32)},
        jwk_of("weak"),
        {**jwk_of("encryption"), "use": "enc"},
        {"kty": "RSA", "kid": "broken", "n": "!", "e": "AQAB"},
        {"kty": "new"},
    ]


def _sign_rs256(content: bytes, key: str) -> bytes:
    return rsa_key(key).sign(content, padding.PKCS1v15(), hashes.SHA256())


def _sign_ps256(content: bytes, key: str) -> bytes:
    scheme = padding.PSS(padding.MGF1(hashes.SHA256()), 32)
    return rsa_key(key).sign(content, scheme, hashes.SHA256())


def _sign_es256(content: bytes, key: str) -> bytes:
    r, s = decode_dss_signature(ec_key().sign(content, ec.ECDSA(hashes.SHA256())))
    return r.to_bytes(32) + s.to_bytes(32)


SIGN: dict[str, Callable[[bytes, str], bytes]] = {
    "RS256": _sign_rs256,
    "PS256": _sign_ps256,
    "ES256": _sign_es256,
    "EdDSA": lambda content, key: ed_key().sign(content),
    "HS256": lambda content, key: hmac.digest(public_pem(key), content, "sha256"),
    "none": lambda content, key: b"",
}


def make_token(claims: Json, header: Json, key: str) -> str:
    """A JSON Web Token with this header, signed by its algorithm."""
    parts = (encode(json.dumps(part).encode()) for part in (header, claims))
    content = ".".join(parts)
    return f"{content}.{encode(SIGN[header['alg']](content.encode(), key))}"


def half_hash(text: str, algorithm: str = "RS256") -> str:
    digest = hashlib.new("sha512" if algorithm == "EdDSA" else "sha256", text.encode()).digest()
    return encode(digest[: len(digest) // 2])


@dataclass
class _Grant:
    """What a code stands for."""

    redirect_uri: str
    challenge: str | None
    nonce: str
    claims: Json


@dataclass
class IdentityProvider:
    """A provider at a port of this machine, and how its next answers differ from correct ones."""

    url: str
    header: Json = field(default_factory=dict)
    claims: Json = field(default_factory=dict)
    """Of the ID token; None removes one."""
    signed_by: str = "first"
    spoil: Callable[[str], str] = lambda token: token
    """What is done to the token after it was signed."""
    keys: list[Json] = field(default_factory=lambda: [jwk_of("first"), *other_jwks()])
    answers: dict[str, tuple[int, Json, bytes]] = field(default_factory=dict)
    """Status, headers and body by path, instead of the right ones."""
    metadata: Json = field(default_factory=dict)
    """Fields of the metadata that differ."""
    requests: list[str] = field(default_factory=list)
    """The paths that were requested."""
    _grants: dict[str, _Grant] = field(default_factory=dict)

    def sign_in(self, url: str, **claims: Any) -> dict[str, str]:
        """What the provider adds to the redirect URI when a person signs in at this address.
        Fails if the request is not what OpenID Connect and PKCE demand."""
        assert url.startswith(f"{self.url}/authorize?"), url
        query = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
        assert query["response_type"] == "code"
        assert query["client_id"] == CLIENT_ID
        assert query["code_challenge_method"] == "S256"
        assert "openid" in query["scope"].split()
        code = secrets.token_urlsafe(16)
        challenge = query["code_challenge"]
        grant = _Grant(query["redirect_uri"], challenge, query["nonce"], claims)
        self._grants[code] = grant
        return {"code": code, "state": query["state"]}

    def lose_challenge(self, code: str) -> None:
        """As if the request for this code had been another's, with another challenge."""
        self._grants[code].challenge = encode(hashlib.sha256(b"another verifier").digest())

    def answer(self, method: str, path: str, form: Json, authorization: str) -> Any:
        """Status, headers and body of the answer to a request."""
        self.requests.append(path)
        if path in self.answers:
            return self.answers[path]
        match method, path:
            case "GET", "/.well-known/openid-configuration":
                return 200, {}, json.dumps(self._metadata()).encode()
            case "GET", "/keys":
                return 200, {}, json.dumps({"keys": self.keys}).encode()
            case "POST", "/token":
                status, content = self._exchange(form, authorization)
                return status, {}, json.dumps(content).encode()
        return 404, {}, b"{}"

    def _metadata(self) -> Json:
        return {
            "issuer": self.url,
            "authorization_endpoint": f"{self.url}/authorize",
            "token_endpoint": f"{self.url}/token",
            "jwks_uri": f"{self.url}/keys",
            "end_session_endpoint": f"{self.url}/end?from=metadata",
            **self.metadata,
        }

    def _exchange(self, form: Json, authorization: str) -> tuple[int, Json]:
        if not self._is_client(form, authorization):
            return 401, {"error": "invalid_client"}
        grant = self._grants.pop(form.get("code", ""), None)
        verifier = form.get("code_verifier", "")
        challenge = encode(hashlib.sha256(verifier.encode()).digest())
        if grant is None or grant.redirect_uri != form.get("redirect_uri"):
            return 400, {"error": "invalid_grant"}
        if challenge != grant.challenge:
            return 400, {"error": "invalid_grant"}
        access_token = secrets.token_urlsafe(16)
        return 200, {
            "access_token": access_token,
            "token_type": "Bearer",
            "id_token": self._id_token(grant, access_token),
        }

    def _is_client(self, form: Json, authorization: str) -> bool:
        if authorization.startswith("Basic "):
            sent = base64.b64decode(authorization.removeprefix("Basic ")).decode().split(":")
            return [unquote(part.replace("+", " ")) for part in sent] == [CLIENT_ID, CLIENT_SECRET]
        return (form.get("client_id"), form.get("client_secret")) == (CLIENT_ID, CLIENT_SECRET)

    def _id_token(self, grant: _Grant, access_token: str) -> str:
        now = int(time.time())
        header = {"alg": "RS256", "kid": self.signed_by, **self.header}
        claims = {
            "iss": self.url,
            "aud": CLIENT_ID,
            "iat": now,
            "exp": now + 300,
            "nonce": grant.nonce,
            "at_hash": half_hash(access_token, header["alg"]),
            **grant.claims,
            **self.claims,
        }
        said = {name: value for name, value in claims.items() if value is not None}
        return self.spoil(make_token(said, header, self.signed_by))


@contextmanager
def identity_provider() -> Iterator[IdentityProvider]:
    """A provider that is right until it is told otherwise."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _respond(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            sent = self.rfile.read(length).decode()
            form = {name: values[0] for name, values in parse_qs(sent).items()}
            path = urlsplit(self.path).path
            authorization = self.headers.get("authorization", "")
            status, headers, body = provider.answer(self.command, path, form, authorization)
            self.send_response(status)
            for name, value in {"content-length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = _respond

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        provider = IdentityProvider(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield provider
        finally:
            server.shutdown()
            thread.join()
