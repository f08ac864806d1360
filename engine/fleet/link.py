"""The link between an API server and an agent on another machine.

TLS 1.3 with a certificate on each end (`certificates`), a hello from each end, and then messages in
both directions. The agent says hello first, as soon as it accepts the API server's certificate: one
that ends the connection without a hello has refused it. asyncio's TLS sends no alert that says so.

A link ends when it is silent, when the peer reads too slowly, and at the first byte that is wrong.
Messages are delivered in their order, and the end after the last of them.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar, cast
from weakref import WeakSet

from ..errors import (
    EngineError,
    MalformedMessage,
    ReplicaIncompatible,
    ReplicaLost,
    ReplicaReplaced,
    ReplicaUnreachable,
    ReplicaUntrusted,
)
from ..messages import FromAgent, Hello, ToAgent
from ..process.frames import MAX_PAYLOAD_BYTES, FrameReader, Frames, pack
from ..process.transport import decode_from_agent, decode_hello, decode_to_agent, encode
from .certificates import AGENT_NAME, API_NAME, certifies

HELLO_SECONDS = 5.0
"""Maximum time for the handshake of TLS and the hellos together; for `connect`, also to connect."""
LOOK_SECONDS = 0.125
LOOKS_PER_PING = 2
SILENT_LOOKS = 6
"""The number of consecutive looks without a byte from an agent that are its end. Looks are counted,
not seconds: an end that was held up itself has not looked meanwhile (`heartbeat.StallWatch`)."""
PATIENT_LOOKS = 40
"""The same for an API server, whose loop has more to do: a lost one costs an agent some unneeded
tokens, but one that is taken for lost loses its requests."""
MAX_UNSENT_BYTES = 2 * MAX_PAYLOAD_BYTES
"""What waits for a slow peer: the longest message, and as much again."""
ROOM_BYTES = 32 << 20
"""With less than this unsent, a peer keeps up."""
CLOSE_SECONDS = 1.0
"""Maximum time for the peer to answer the end of TLS."""
_WRITE_BYTES = 256 << 10
"""Written at a time, so that no more than a few of these wait in the transport, uncounted."""
_PING: Frames = (b"", b"")

SentT = TypeVar("SentT", bound=ToAgent | FromAgent)
ReceivedT = TypeVar("ReceivedT")
ReceivedT_contra = TypeVar("ReceivedT_contra", contravariant=True)

_log = logging.getLogger(__name__)


class Receiver(Protocol[ReceivedT_contra]):
    """The owner of one end of a link."""

    def take(self, message: ReceivedT_contra) -> None:
        """Handle a message. An error of this method ends the link."""

    def end(self, error: EngineError) -> None:
        """The link has ended, without the owner's `close`. Called once, after the last message."""


@dataclass(frozen=True, slots=True)
class _Side(Generic[ReceivedT]):
    """What differs between the two ends of a link."""

    peer_name: str
    """In the peer's certificate."""
    decode: Callable[[Frames], ReceivedT]
    silent_looks: int
    """After which the peer has ended."""


_AGENT_SIDE: _Side[ToAgent] = _Side(API_NAME, decode_to_agent, PATIENT_LOOKS)
_API_SIDE: _Side[FromAgent] = _Side(AGENT_NAME, decode_from_agent, SILENT_LOOKS)


class Link(asyncio.Protocol, Generic[SentT, ReceivedT]):
    """One end of a link. `connect` and `LinkServer` make it."""

    def __init__(
        self,
        side: _Side[ReceivedT],
        *,
        hello: Hello | None,
        answer: Callable[[Hello], Hello],
        on_agreed: Callable[[Link[SentT, ReceivedT]], Receiver[ReceivedT]],
        on_refused: Callable[[EngineError], None],
    ) -> None:
        """`hello`: of the end that says it first. `answer` gives this end's hello when the peer has
        said its own, or raises why the ends must not talk to each other."""
        self._loop = asyncio.get_running_loop()
        self._side = side
        self._first_hello = hello
        self._answer = answer
        self._on_agreed = on_agreed
        self._on_refused = on_refused
        self._is_made = False
        """Whether TLS has accepted the peer, so that there is a transport."""
        self._receiver: Receiver[ReceivedT] | None = None
        """None until both hellos agree."""
        self._is_agreed = False
        """True a moment earlier, so that the owner can send when it is given the link."""
        self._error: EngineError | None = None
        """Why this end has ended the link."""
        self._is_closed = False
        self._received = FrameReader()
        self._has_heard = False
        """Whether a byte has come since the last look."""
        self._num_looks = 0
        self._num_silent = 0
        self._unsent = bytearray()
        self._is_full = False
        """Whether the transport takes no more for now."""
        self._flush: asyncio.Handle | None = None
        """Scheduled while messages wait for the end of the loop's iteration."""
        self._ended = self._loop.create_future()
        late = ReplicaUnreachable(f"It did not say hello within {HELLO_SECONDS} s.")
        self._timer = self._loop.call_later(HELLO_SECONDS, self._fail, late)

    def send(self, message: SentT) -> bool:
        """Send without waiting, in one write with what else is sent in this iteration of the loop.

        False if the link has ended, which it does if the peer leaves more than MAX_UNSENT_BYTES
        unread. Raises MalformedMessage if the message is longer than a frame may be.
        """
        if not self._is_agreed or self._is_over:
            return False
        self._unsent += pack(encode(message))
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self._fail(ReplicaLost(f"It left more than {MAX_UNSENT_BYTES} bytes unread."))
            return False
        if self._flush is None:
            self._flush = self._loop.call_soon(self._send_more)
        return True

    @property
    def has_room(self) -> bool:
        """Whether the peer has read most of what was sent: more may follow without a risk."""
        return len(self._unsent) < ROOM_BYTES

    def close(self) -> None:
        """End the link. What the peer does not take at once is lost. Idempotent."""
        if self._is_over:
            return
        self._is_closed = True
        if self._is_made:
            self._send_more()
            self._transport.close()
        self._stop()

    def abort(self) -> None:
        """End the link without waiting for the peer to take anything. Idempotent."""
        self._is_closed = True
        self._stop()
        if self._is_made:
            self._transport.abort()

    @property
    def is_open(self) -> bool:
        """Whether there is a connection to a peer whose certificate TLS has accepted."""
        return self._is_made and not self._ended.done()

    async def wait_ended(self) -> None:
        """Return when the connection is closed."""
        await asyncio.shield(self._ended)

    # The methods of asyncio.Protocol, which the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._is_made = True
        if self._is_over:  # while TLS shook hands
            self._transport.abort()
        elif not certifies(transport.get_extra_info("peercert"), self._side.peer_name):
            self._fail(ReplicaUntrusted(f"Its certificate is not that of {self._side.peer_name}."))
        elif self._first_hello is not None:
            self._write(pack(encode(self._first_hello)))

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        self._has_heard = True
        self._received.add(data)
        try:
            while not self._is_over and (frames := self._received.next()) is not None:
                self._take(frames)
        except MalformedMessage as exc:
            self._fail(exc)
        except Exception:  # a defect of the receiver: the state of its requests is unknown
            _log.exception("link_message_not_handled")
            self._fail(ReplicaLost("A message of it could not be handled."))

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._send_more()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self._ended.set_result(None)
        if self._is_closed:
            return
        if self._error is None:
            self._error = self._why_lost(exc)
        if self._receiver is None:
            self._on_refused(self._error)
        else:
            self._receiver.end(self._error)

    @property
    def _is_over(self) -> bool:
        """Whether this end has ended the link, or knows that the peer has."""
        return self._is_closed or self._error is not None

    def _take(self, frames: Frames) -> None:
        if self._receiver is None:
            self._agree(decode_hello(frames))
        elif frames != _PING:
            self._receiver.take(self._side.decode(frames))

    def _agree(self, theirs: Hello) -> None:
        try:
            ours = self._answer(theirs)
            if self._first_hello is None:
                self._write(pack(encode(ours)))
            self._error = find_difference(ours, theirs)
        except EngineError as exc:
            self._error = exc
        if self._error is not None:
            self._stop()
            self._transport.close()  # not `abort`: the peer has to read our hello
            return
        self._timer.cancel()
        self._is_agreed = True
        self._receiver = self._on_agreed(self)
        if not self._is_over:  # the owner may have closed it
            self._look()

    def _look(self) -> None:
        """See whether the peer still speaks, and speak."""
        self._timer = self._loop.call_later(LOOK_SECONDS, self._look)
        self._num_silent = 0 if self._has_heard else self._num_silent + 1
        self._has_heard = False
        if self._num_silent == self._side.silent_looks:
            self._fail(ReplicaLost(f"It was silent for {self._num_silent * LOOK_SECONDS} s."))
        elif self._num_looks % LOOKS_PER_PING == 0 and not self._unsent:
            self._write(pack(_PING))
        self._num_looks += 1

    def _write(self, data: bytes) -> None:
        self._unsent += data
        self._send_more()

    def _send_more(self) -> None:
        self._flush = None
        while self._unsent and not self._is_full:
            piece = bytes(self._unsent[:_WRITE_BYTES])
            del self._unsent[:_WRITE_BYTES]
            self._transport.write(piece)

    def _fail(self, error: EngineError) -> None:
        """End the link at once, for this reason. `connection_lost` follows."""
        if self._is_over:
            return
        self._error = error
        self._stop()
        if self._is_made:
            self._transport.abort()

    def _stop(self) -> None:
        self._timer.cancel()
        if self._flush is not None:
            self._flush.cancel()
        self._unsent.clear()

    def _why_lost(self, exc: Exception | None) -> EngineError:
        if self._receiver is not None:
            return ReplicaLost(str(exc or "It has ended the connection."))
        if exc is not None:
            return _refusal(exc)
        if self._first_hello is not None:
            return ReplicaUnreachable("It has ended the connection without a hello.")
        return ReplicaUntrusted("It has refused this certificate: it ended without a hello.")


AgentLink = Link[FromAgent, ToAgent]
"""An agent's end."""
ApiLink = Link[ToAgent, FromAgent]
"""An API server's end."""


def find_difference(ours: Hello, theirs: Hello) -> EngineError | None:
    """Why ends with these hellos must not talk to each other; None: they may."""
    for name in ("protocol", "base_id", "runtime_id"):
        here, there = getattr(ours, name), getattr(theirs, name)
        if here != there:
            return ReplicaIncompatible(f"{name} is {here!s:.80} here and {there!s:.80} there")
    if ours.incarnation != theirs.incarnation:
        here, there = ours.incarnation, theirs.incarnation
        return ReplicaReplaced(f"incarnation is {here:.80} here and {there:.80} there")
    return None


async def connect(
    host: str,
    port: int,
    *,
    context: ssl.SSLContext,
    answer: Callable[[Hello], Hello],
    accept: Callable[[ApiLink], Receiver[FromAgent]],
) -> ApiLink:
    """Connect an API server to an agent; `accept` is given the link once it is agreed on.

    `answer` gives this end's hello after it has seen the agent's, or raises why there is none.
    Raises ReplicaUnreachable, ReplicaUntrusted, ReplicaIncompatible, ReplicaReplaced, or
    MalformedMessage if the hello is none, or what `answer` raises.
    """
    loop = asyncio.get_running_loop()
    agreed: asyncio.Future[None] = loop.create_future()

    def agree(link: ApiLink) -> Receiver[FromAgent]:
        if not agreed.done():
            agreed.set_result(None)
        return accept(link)

    def refuse(error: EngineError) -> None:
        if not agreed.done():
            agreed.set_exception(error)

    def make_link() -> ApiLink:
        return Link(_API_SIDE, hello=None, answer=answer, on_agreed=agree, on_refused=refuse)

    try:
        async with asyncio.timeout(HELLO_SECONDS):
            _, link = await loop.create_connection(
                make_link,
                host,
                port,
                ssl=context,
                server_hostname=AGENT_NAME,
                ssl_handshake_timeout=HELLO_SECONDS,
                ssl_shutdown_timeout=CLOSE_SECONDS,
            )
            try:
                await agreed
            except asyncio.CancelledError:
                link.abort()
                await link.wait_ended()
                raise
    except TimeoutError as exc:
        raise ReplicaUnreachable(f"It did not answer within {HELLO_SECONDS} s.") from exc
    except OSError as exc:
        raise _refusal(exc) from exc
    return link


def _refusal(exc: Exception) -> EngineError:
    """What an error of the connection means before the hellos."""
    kind = ReplicaUntrusted if isinstance(exc, ssl.SSLError) else ReplicaUnreachable
    return kind(str(exc))


class LinkServer:
    """An agent's listening socket and the links to it."""

    def __init__(self, server: asyncio.Server, links: WeakSet[AgentLink]) -> None:
        self._server = server
        self._links = links
        """Also those whose handshake goes on. A link is not told when TLS refuses its peer."""

    @classmethod
    async def start(
        cls,
        host: str,
        port: int,
        *,
        context: ssl.SSLContext,
        hello: Hello,
        accept: Callable[[AgentLink], Receiver[ToAgent]],
    ) -> Self:
        """Listen, and give each link that was agreed on to `accept`. Port 0 is any free port.
        Raises OSError."""
        links: WeakSet[AgentLink] = WeakSet()

        def make_link() -> AgentLink:
            link: AgentLink = Link(
                _AGENT_SIDE,
                hello=hello,
                answer=lambda _: hello,
                on_agreed=accept,
                on_refused=_log_refusal,
            )
            links.add(link)
            return link

        server = await asyncio.get_running_loop().create_server(
            make_link,
            host,
            port,
            ssl=context,
            ssl_handshake_timeout=HELLO_SECONDS,
            ssl_shutdown_timeout=CLOSE_SECONDS,
        )
        return cls(server, links)

    @property
    def port(self) -> int:
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def num_links(self) -> int:
        return sum(link.is_open for link in self._links)

    async def close(self) -> None:
        """Stop listening and end all links."""
        self._server.close()
        links = list(self._links)
        for link in links:
            link.close()
        for link in links:
            if link.is_open:
                await link.wait_ended()


def _log_refusal(error: EngineError) -> None:
    _log.warning("link_refused", extra={"code": error.code, "reason": str(error)})
