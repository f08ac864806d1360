"""The operator's identity provider: its endpoints, and the exchange of a code for an identity."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlencode, urlsplit

from ...platform.errors import SignInRejected
from ..contract.errors import ApiError
from .bounded_client import BoundedClient, unavailable
from .flow import Flow
from .id_token import Claims, Expected, key_id_of, read_id_token
from .metadata import Metadata, metadata_url, read_metadata
from .provider_config import ProviderConfig
from .signing_keys import SigningKeys

METADATA_SECONDS = 3600.0
RETRY_SECONDS = 5.0
"""After a failure, the provider's metadata is not requested again for this time."""


class Provider:
    """One per server."""

    def __init__(self, config: ProviderConfig, client: BoundedClient) -> None:
        self.config = config
        self._client = client
        self._keys = SigningKeys(self._fetch_keys)
        self._metadata: Metadata | None = None
        self._error: ApiError | None = None
        self._fetch_after = 0.0
        self._fetching = asyncio.Lock()

    async def authorization_url(self, flow: Flow, redirect_uri: str, *, again: bool) -> str:
        """Where the browser signs in. `again`: also if it is signed in there. Raises ApiError."""
        endpoint = (await self.metadata()).authorization_endpoint
        query = {
            "response_type": "code",
            "client_id": self.config.client_id,
            "redirect_uri": redirect_uri,
            "scope": " ".join(self.config.scopes),
            "state": flow.state,
            "nonce": flow.nonce,
            "code_challenge": flow.challenge,
            "code_challenge_method": "S256",
            **({"prompt": "login", "max_age": "0"} if again else {}),
        }
        return with_query(endpoint, query)

    async def sign_out_url(self, home: str) -> str | None:
        """Where the browser ends its session at the provider and returns to `home`; None: the
        provider publishes no such address, or cannot be reached."""
        try:
            endpoint = (await self.metadata()).sign_out_url
        except ApiError:
            return None
        query = {"client_id": self.config.client_id, "post_logout_redirect_uri": home}
        return None if endpoint is None else with_query(endpoint, query)

    async def authenticate(self, flow: Flow, code: str, redirect_uri: str) -> Claims:
        """The claims of the ID token for this code. Raises SignInRejected or ApiError."""
        id_token, access_token = await self._exchange(flow, code, redirect_uri)
        key = await self._keys.find(key_id_of(id_token))
        expected = Expected(self.config.issuer, self.config.client_id, flow.nonce)
        return read_id_token(id_token, key, expected, access_token, time.time())

    async def metadata(self) -> Metadata:
        """The provider's metadata, at most an hour old. Raises ApiError."""
        async with self._fetching:
            if time.monotonic() >= self._fetch_after:
                await self._fetch_metadata()
        if self._metadata is None:
            raise self._error or unavailable("it cannot be reached")
        return self._metadata

    async def _fetch_metadata(self) -> None:
        """Fetch the metadata, or keep what is known."""
        issuer = self.config.issuer
        try:
            answer = await self._client.send("GET", metadata_url(issuer))
            if answer.status != 200:
                raise unavailable("it has no metadata at this issuer")
            self._metadata = read_metadata(answer.content, issuer)
            self._fetch_after = time.monotonic() + METADATA_SECONDS
        except ApiError as error:
            self._error = error
            self._fetch_after = time.monotonic() + RETRY_SECONDS

    async def _fetch_keys(self) -> Claims:
        answer = await self._client.send("GET", (await self.metadata()).keys_url)
        if answer.status != 200:
            raise unavailable("it does not send its keys")
        return answer.content

    async def _exchange(self, flow: Flow, code: str, redirect_uri: str) -> tuple[str, str | None]:
        """The ID token and the access token for this code."""
        metadata, secret = await self.metadata(), self.config.client_secret
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect_uri,
            "client_id": self.config.client_id,
            "code_verifier": flow.verifier,
        }
        auth = None
        if secret is not None and metadata.takes_basic_auth:
            auth = (_form_encoded(self.config.client_id), _form_encoded(secret))
        elif secret is not None:
            form["client_secret"] = secret
        answer = await self._client.send("POST", metadata.token_endpoint, form=form, auth=auth)
        if answer.status != 200:
            is_refused = answer.content.get("error") == "invalid_grant"
            if is_refused:
                raise SignInRejected("the identity provider refuses the code")
            raise unavailable("it does not exchange the code")
        id_token, access_token = answer.content.get("id_token"), answer.content.get("access_token")
        if not isinstance(id_token, str):
            raise SignInRejected("there is no ID token")
        return id_token, access_token if isinstance(access_token, str) else None


def with_query(endpoint: str, query: dict[str, str]) -> str:
    """The endpoint with these parameters beside those that it has."""
    separator = "&" if urlsplit(endpoint).query else "?"
    return f"{endpoint}{separator}{urlencode(query)}"


def _form_encoded(text: str) -> str:
    """As HTTP Basic needs it (RFC 6749, section 2.3.1)."""
    return urlencode({"": text})[1:]
