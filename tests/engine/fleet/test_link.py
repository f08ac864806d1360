"""Links over real sockets: the agent in an event loop of its own thread, the API server in another.

Strangers and broken peers are blocking sockets of the standard library, in the test's own thread.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

import pytest
import uvloop

from loraplex.engine.errors import (
    EngineError,
    MalformedMessage,
    ReplicaIncompatible,
    ReplicaLost,
    ReplicaReplaced,
    ReplicaUnreachable,
    ReplicaUntrusted,
)
from loraplex.engine.fleet import link as link_module
from loraplex.engine.fleet.certificates import (
    AGENT_NAME,
    API_NAME,
    Certificates,
    agent_context,
    api_context,
)
from loraplex.engine.fleet.link import (
    LOOK_SECONDS,
    LOOKS_PER_PING,
    SILENT_LOOKS,
    AgentLink,
    ApiLink,
    LinkServer,
    connect,
)
from loraplex.engine.messages import (
    Abort,
    FromAgent,
    GenerationRequest,
    Hello,
    StepEvents,
    Submit,
    ToAgent,
    TokensGenerated,
)
from loraplex.engine.process import frames as frames_module
from loraplex.engine.process.frames import FrameReader, Frames, pack
from loraplex.engine.process.transport import decode_hello, decode_to_agent, encode
from loraplex.engine.sampling_params import SamplingParams
from support.fleet_certificates import DAY, Authority
from support.stream_proxy import Pass, StreamProxy, corrupted, cut, delayed, swallowed

HOST = "127.0.0.1"
HELLO = Hello(base_id="base", runtime_id="runtime", incarnation="life-1")
PING = pack((b"", b""))
LoopFactory = Callable[[], asyncio.AbstractEventLoop]
LOOPS = pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
T = TypeVar("T")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder / "fleet")


@pytest.fixture(scope="module")
def stranger(folder: Path) -> Authority:
    return Authority(folder / "stranger")


@pytest.fixture(scope="module")
def agent_certificates(authority: Authority) -> Certificates:
    return authority.issue(AGENT_NAME)


@pytest.fixture(scope="module")
def api_certificates(authority: Authority) -> Certificates:
    return authority.issue(API_NAME)


class Owner:
    """Keeps what a link says. The agent's answers each request with its prompt."""

    def __init__(self) -> None:
        self.link: AgentLink | None = None
        self.messages: list[ToAgent | FromAgent] = []
        self.ends: list[tuple[EngineError, int]] = []
        """With the number of messages before."""

    def take(self, message: ToAgent | FromAgent) -> None:
        self.messages.append(message)
        if self.link is not None and isinstance(message, Submit):
            self.link.send(answer_to(message))

    def end(self, error: EngineError) -> None:
        self.ends.append((error, len(self.messages)))

    @property
    def codes(self) -> list[str]:
        return [error.code for error, _ in self.ends]


class Agent:
    """A listening agent in an event loop of its own, until the block is left."""

    def __init__(
        self,
        certificates: Certificates,
        *,
        hello: Hello = HELLO,
        loop_factory: LoopFactory = asyncio.new_event_loop,
    ) -> None:
        self._context = agent_context(certificates)
        self._hello = hello
        self._loop = loop_factory()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.owners: list[Owner] = []

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = self._run(
            LinkServer.start(HOST, 0, context=self._context, hello=self._hello, accept=self._accept)
        )
        self.port = self._server.port
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    def close(self) -> None:
        self._run(self._server.close())

    @property
    def num_links(self) -> int:
        return self._server.num_links

    def in_loop(self, function: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(function)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)

    def _accept(self, link: AgentLink) -> Owner:
        owner = Owner()
        owner.link = link
        self.owners.append(owner)
        return owner


@pytest.fixture
def agent(agent_certificates: Certificates) -> Iterator[Agent]:
    with Agent(agent_certificates) as agent:
        yield agent


def submit(name: str, prompt: list[int]) -> Submit:
    return Submit(GenerationRequest(name, "tenant", prompt, SamplingParams()))


def answer_to(message: Submit) -> StepEvents:
    request = message.request
    return StepEvents(tokens=[TokensGenerated(request.request_id, request.prompt_token_ids)])


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def wait_until(condition: Callable[[], object]) -> None:
    """Without an event loop, which has sockets of its own."""
    give_up_at = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)


def run(scenario: Coroutine[Any, Any, T], loop_factory: LoopFactory = asyncio.new_event_loop) -> T:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(asyncio.wait_for(scenario, timeout=60))


async def open_link(
    port: int, certificates: Certificates, owner: Owner, hello: Hello = HELLO
) -> ApiLink:
    context = api_context(certificates)
    return await connect(
        HOST, port, context=context, answer=lambda _: hello, accept=lambda _: owner
    )


async def refused(port: int, certificates: Certificates, hello: Hello = HELLO) -> EngineError:
    """The error of a connection that must not come about."""
    owner = Owner()
    with pytest.raises(EngineError) as raised:
        await open_link(port, certificates, owner, hello)
    assert (owner.messages, owner.ends) == ([], [])
    return raised.value


def open_sockets() -> int:
    return sum(
        os.readlink(path).startswith("socket:")
        for path in Path("/proc/self/fd").iterdir()
        if path.is_symlink()
    )


@contextmanager
def leaving_nothing_open() -> Iterator[None]:
    before = open_sockets()
    yield
    wait_until(lambda: open_sockets() == before)


# What links are for.


@LOOPS
def test_messages_of_any_size_arrive_in_order_in_both_directions(
    agent_certificates: Certificates, api_certificates: Certificates, loop_factory: LoopFactory
) -> None:
    sizes = (0, 1, 7, 70_000, 3, 300_000, 2, 0)
    sent = [submit(f"request-{index}", [5] * size) for index, size in enumerate(sizes)]

    async def scenario(port: int) -> list[ToAgent | FromAgent]:
        owner = Owner()
        link = await open_link(port, api_certificates, owner)
        assert all(link.send(message) for message in sent)
        await until(lambda: len(owner.messages) == len(sent))
        link.close()
        await link.wait_ended()
        assert owner.ends == []
        return owner.messages

    with Agent(agent_certificates, loop_factory=loop_factory) as agent:
        received = run(scenario(agent.port), loop_factory)
        wait_until(lambda: agent.owners[0].ends)
    assert received == [answer_to(message) for message in sent]
    assert agent.owners[0].messages == sent
    assert agent.owners[0].codes == ["replica_lost"]


def test_an_idle_link_stays(agent: Agent, api_certificates: Certificates) -> None:
    async def scenario() -> None:
        owner = Owner()
        link = await open_link(agent.port, api_certificates, owner)
        await asyncio.sleep(2 * SILENT_LOOKS * LOOK_SECONDS)
        assert link.send(submit("late", [1]))
        await until(lambda: owner.messages)
        assert owner.ends == agent.owners[0].ends == []
        link.close()
        await link.wait_ended()

    run(scenario())


@LOOPS
def test_the_last_message_is_delivered_before_the_end_and_closing_twice_is_closing(
    agent_certificates: Certificates, api_certificates: Certificates, loop_factory: LoopFactory
) -> None:
    async def scenario(agent: Agent) -> None:
        owner = Owner()
        link = await open_link(agent.port, api_certificates, owner)
        await until(lambda: agent.owners)
        far = agent.owners[0].link
        assert far is not None

        def say_and_close() -> None:
            for index in range(100):
                far.send(answer_to(submit(f"{index}", [index])))
            far.close()
            far.close()

        agent.in_loop(say_and_close)
        await until(lambda: owner.ends)
        await link.wait_ended()
        assert owner.messages == [answer_to(submit(f"{n}", [n])) for n in range(100)]
        assert [(type(error), number) for error, number in owner.ends] == [(ReplicaLost, 100)]
        assert not link.send(Abort("anything"))
        link.close()

    with Agent(agent_certificates, loop_factory=loop_factory) as agent:
        run(scenario(agent), loop_factory)
        assert agent.owners[0].ends == []  # who closes is not told


def test_a_message_that_is_too_long_is_refused_and_the_link_stays(
    agent: Agent, api_certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames_module, "MAX_PAYLOAD_BYTES", 4_000)

    async def scenario() -> None:
        owner = Owner()
        link = await open_link(agent.port, api_certificates, owner)
        with pytest.raises(MalformedMessage, match="at most 4000"):
            link.send(submit("long", [1] * 5_000))
        assert link.send(submit("short", [1]))
        await until(lambda: owner.messages)
        link.close()
        await link.wait_ended()

    run(scenario())


def test_an_error_of_the_owner_ends_the_link(
    agent: Agent, api_certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    class Defective(Owner):
        def take(self, message: ToAgent | FromAgent) -> None:
            raise RuntimeError("a defect")

    async def scenario() -> None:
        owner = Defective()
        link = await open_link(agent.port, api_certificates, owner)
        link.send(submit("any", [1]))
        await until(lambda: owner.ends)
        assert owner.codes == ["replica_lost"]

    run(scenario())
    assert "link_message_not_handled" in caplog.messages
    wait_until(lambda: agent.owners[0].ends)


# Who is refused.


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("protocol", 2, ReplicaIncompatible),
        ("base_id", "another", ReplicaIncompatible),
        ("runtime_id", "another", ReplicaIncompatible),
        ("incarnation", "life-2", ReplicaReplaced),
    ],
)
@LOOPS
def test_each_end_refuses_another_hello_by_name(
    agent_certificates: Certificates,
    api_certificates: Certificates,
    caplog: pytest.LogCaptureFixture,
    field: str,
    value: object,
    expected: type[EngineError],
    loop_factory: LoopFactory,
) -> None:
    other = replace(HELLO, **{field: value})  # type: ignore[arg-type]
    with Agent(agent_certificates, loop_factory=loop_factory) as agent, leaving_nothing_open():
        error = run(refused(agent.port, api_certificates, other), loop_factory)
        wait_until(lambda: "link_refused" in caplog.messages)
        assert (agent.owners, agent.num_links) == ([], 0)
    assert type(error) is expected
    assert str(error).startswith(f"{field} is {value} here and {getattr(HELLO, field)} there")
    assert [vars(record).get("code") for record in caplog.records] == [expected.code]


def bad_certificates(name: str, fleet: Authority, stranger: Authority) -> dict[str, Certificates]:
    """Those that must not be accepted where `name` is expected."""
    good, foreign = fleet.issue(name), stranger.issue(name)
    other = AGENT_NAME if name == API_NAME else API_NAME
    return {
        "another authority": foreign._replace(authority=good.authority),
        "expired": fleet.issue(name, ends_in=-DAY),
        "another part's": fleet.issue(other),
        "another part's, of the right purpose": fleet.issue(other, purpose=name),
        "the right name, of another purpose": fleet.issue(name, purpose=other),
    }


BAD_CERTIFICATES = pytest.mark.parametrize(
    "which",
    [
        "another authority",
        "expired",
        "another part's",
        "another part's, of the right purpose",
        "the right name, of another purpose",
    ],
)


@BAD_CERTIFICATES
@LOOPS
def test_an_agent_refuses_a_certificate_that_is_not_an_api_servers(
    agent_certificates: Certificates,
    authority: Authority,
    stranger: Authority,
    which: str,
    loop_factory: LoopFactory,
) -> None:
    certificates = bad_certificates(API_NAME, authority, stranger)[which]
    with Agent(agent_certificates, loop_factory=loop_factory) as agent, leaving_nothing_open():
        error = run(refused(agent.port, certificates), loop_factory)
        wait_until(lambda: agent.num_links == 0)
        assert agent.owners == []
    assert type(error) is ReplicaUntrusted


@BAD_CERTIFICATES
@LOOPS
def test_an_api_server_refuses_a_certificate_that_is_not_an_agents(
    api_certificates: Certificates,
    authority: Authority,
    stranger: Authority,
    which: str,
    loop_factory: LoopFactory,
) -> None:
    certificates = bad_certificates(AGENT_NAME, authority, stranger)[which]
    with Agent(certificates, loop_factory=loop_factory) as agent, leaving_nothing_open():
        error = run(refused(agent.port, api_certificates), loop_factory)
        assert agent.owners == []
    assert type(error) is ReplicaUntrusted


def test_who_is_not_there_is_unreachable(api_certificates: Certificates) -> None:
    with closing(socket.create_server((HOST, 0))) as listening:
        port = listening.getsockname()[1]
    assert type(run(refused(port, api_certificates))) is ReplicaUnreachable


# Strangers and broken peers, in blocking sockets.


@contextmanager
def tls_to(agent: Agent, context: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
    with (
        socket.create_connection((HOST, agent.port), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname=AGENT_NAME) as connection,
    ):
        yield connection


def is_ended(connection: socket.socket) -> bool:
    """Whether the peer ends the connection, whatever it says before."""
    try:
        while connection.recv(1 << 16):
            pass
    except (ConnectionError, ssl.SSLError):
        pass
    return True


def assert_ended(connection: socket.socket) -> None:
    assert is_ended(connection)


def without_certificate(certificates: Certificates) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=certificates.authority)
    context.check_hostname = False
    return context


def with_old_tls(certificates: Certificates) -> ssl.SSLContext:
    context = without_certificate(certificates)
    context.load_cert_chain(certificates.certificate, certificates.key)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


@pytest.mark.parametrize("make_context", [without_certificate, with_old_tls])
def test_who_has_no_certificate_or_an_old_protocol_hears_nothing(
    agent: Agent,
    api_certificates: Certificates,
    make_context: Callable[[Certificates], ssl.SSLContext],
) -> None:
    with leaving_nothing_open():
        with (
            suppress(ssl.SSLError, ConnectionError),
            tls_to(agent, make_context(api_certificates)) as connection,
        ):
            assert connection.recv(1) == b""
        assert (agent.owners, agent.num_links) == ([], 0)


GARBAGE = {
    "no frame": b"GET / HTTP/1.1\r\nHost: agent\r\n\r\n",
    "a long name": struct.pack("<II", 65, 0),
    "a huge payload": struct.pack("<II", 5, 2**32 - 1),
    "a ping instead of a hello": PING,
    "a message instead of a hello": pack(encode(submit("early", [1]))),
    "a hello that is none": pack((b"Hello", b"\x93\x01\x02\x03")),
    "another type": pack((b"os.system", b"\xa2id")),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_garbage_from_a_trusted_peer_ends_its_connection(
    agent: Agent,
    api_certificates: Certificates,
    garbage: bytes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with leaving_nothing_open():
        with tls_to(agent, api_context(api_certificates)) as connection:
            connection.sendall(garbage)
            assert is_ended(connection)
        wait_until(lambda: agent.num_links == 0 and bool(caplog.records))
    assert agent.owners == []
    assert [vars(record).get("code") for record in caplog.records] == ["malformed_message"]


@pytest.mark.parametrize("garbage", list(GARBAGE.values())[:3], ids=list(GARBAGE)[:3])
def test_garbage_after_the_hellos_ends_the_link(
    agent: Agent, api_certificates: Certificates, garbage: bytes
) -> None:
    with leaving_nothing_open():
        with tls_to(agent, api_context(api_certificates)) as connection:
            message = submit("good", [1, 2])
            connection.sendall(pack(encode(HELLO)) + pack(encode(message)) + garbage)
            assert is_ended(connection)
        wait_until(lambda: agent.owners[0].ends)
    assert agent.owners[0].messages == [message]
    assert agent.owners[0].codes == ["malformed_message"]


def test_random_bytes_before_and_after_tls_leave_the_agent_well(
    agent: Agent, api_certificates: Certificates
) -> None:
    drawn = random.Random(7)
    context = api_context(api_certificates)
    with leaving_nothing_open():
        for _ in range(20):
            with socket.create_connection((HOST, agent.port), timeout=20) as plain:
                plain.sendall(drawn.randbytes(drawn.randrange(10, 3_000)))
                plain.shutdown(socket.SHUT_WR)
                assert is_ended(plain)
            with tls_to(agent, context) as connection:
                connection.sendall(drawn.randbytes(drawn.randrange(8, 3_000)))
                assert is_ended(connection)
        wait_until(lambda: agent.num_links == 0)

    async def scenario() -> None:
        owner = Owner()
        link = await open_link(agent.port, api_certificates, owner)
        link.send(submit("after all", [1]))
        await until(lambda: owner.messages)
        link.close()
        await link.wait_ended()

    run(scenario())


@pytest.mark.parametrize("speaks_tls", [False, True])
def test_an_agent_does_not_wait_for_ever_for_a_hello(
    agent_certificates: Certificates,
    api_certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
    speaks_tls: bool,
) -> None:
    monkeypatch.setattr(link_module, "HELLO_SECONDS", 0.3)
    with Agent(agent_certificates) as agent, leaving_nothing_open(), ExitStack() as stack:
        if speaks_tls:
            connection: socket.socket = stack.enter_context(
                tls_to(agent, api_context(api_certificates))
            )
        else:
            connection = stack.enter_context(
                socket.create_connection((HOST, agent.port), timeout=20)
            )
        assert is_ended(connection)
        wait_until(lambda: agent.num_links == 0)


class Peer:
    """A listening peer that does what a test says in a thread."""

    def __init__(
        self, behave: Callable[[socket.socket], None], context: ssl.SSLContext | None = None
    ) -> None:
        self._behave = behave
        self._context = context
        self._listening = socket.create_server((HOST, 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.port = self._listening.getsockname()[1]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        with self._listening:
            accepted, _ = self._listening.accept()
        accepted.settimeout(20)
        if self._context is None:
            with accepted:
                self._behave(accepted)
            return
        with accepted, self._context.wrap_socket(accepted, server_side=True) as connection:
            self._behave(connection)


@pytest.mark.parametrize("speaks_tls", [False, True])
def test_an_api_server_does_not_wait_for_ever_for_a_hello(
    agent_certificates: Certificates,
    api_certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
    speaks_tls: bool,
) -> None:
    monkeypatch.setattr(link_module, "HELLO_SECONDS", 0.3)
    context = agent_context(agent_certificates) if speaks_tls else None
    with leaving_nothing_open(), Peer(assert_ended, context) as peer:
        assert type(run(refused(peer.port, api_certificates))) is ReplicaUnreachable


@pytest.mark.parametrize("speaks_tls", [False, True])
def test_who_gives_up_connecting_leaves_nothing_open(
    agent_certificates: Certificates, api_certificates: Certificates, speaks_tls: bool
) -> None:
    async def scenario(port: int) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await open_link(port, api_certificates, Owner())

    context = agent_context(agent_certificates) if speaks_tls else None
    with leaving_nothing_open(), Peer(assert_ended, context) as peer:
        run(scenario(peer.port))


def test_who_shakes_hands_while_an_agent_closes_is_not_accepted(
    agent_certificates: Certificates, api_certificates: Certificates
) -> None:
    context = api_context(api_certificates)
    with (
        leaving_nothing_open(),
        Agent(agent_certificates) as agent,
        socket.create_connection((HOST, agent.port), timeout=20) as plain,
    ):
        wait_until(lambda: len(agent._server._links) == 1)
        agent.close()
        with (
            suppress(ssl.SSLError, ConnectionError),
            context.wrap_socket(plain, server_hostname=AGENT_NAME) as connection,
        ):
            connection.sendall(pack(encode(HELLO)))
            assert is_ended(connection)
        wait_until(lambda: agent.num_links == 0)
        assert agent.owners == []


@pytest.mark.parametrize(
    ("speaks_tls", "expected"), [(False, ReplicaUntrusted), (True, MalformedMessage)]
)
def test_an_api_server_refuses_garbage(
    agent_certificates: Certificates,
    api_certificates: Certificates,
    speaks_tls: bool,
    expected: type[EngineError],
) -> None:
    def behave(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" * 100)
        assert is_ended(connection)

    context = agent_context(agent_certificates) if speaks_tls else None
    with leaving_nothing_open(), Peer(behave, context) as peer:
        assert type(run(refused(peer.port, api_certificates))) is expected


def take_hello(connection: socket.socket) -> None:
    """An agent's part of the hellos, by an agent that the test plays."""
    connection.sendall(pack(encode(HELLO)))
    reader = FrameReader()
    while (frames := reader.next()) is None:
        reader.add(connection.recv(1 << 16))
    assert decode_hello(frames) == HELLO


def test_what_is_sent_in_one_iteration_of_the_loop_is_one_write(
    agent_certificates: Certificates, api_certificates: Certificates
) -> None:
    records: list[list[Frames]] = []

    def behave(connection: socket.socket) -> None:
        take_hello(connection)
        while data := connection.recv(1 << 16):  # the content of one record of TLS
            reader = FrameReader()
            reader.add(data)
            found = []
            while (frames := reader.next()) is not None:
                found.append(frames)
            assert not reader
            records.append([frames for frames in found if frames != (b"", b"")])

    sent = [Abort(f"{index}") for index in range(32)]

    async def scenario(port: int) -> None:
        link = await open_link(port, api_certificates, Owner())
        for message in sent:
            link.send(message)
        await asyncio.sleep(0)
        link.close()
        await link.wait_ended()

    with Peer(behave, agent_context(agent_certificates)) as peer:
        run(scenario(peer.port))
    (together,) = [record for record in records if record]
    assert [decode_to_agent(frames) for frames in together] == sent


@LOOPS
def test_a_peer_that_does_not_read_ends_its_link_at_the_bound(
    agent_certificates: Certificates,
    api_certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
    loop_factory: LoopFactory,
) -> None:
    """It keeps pinging, so that it is not taken for silent."""
    bound = 2 << 20
    monkeypatch.setattr(link_module, "MAX_UNSENT_BYTES", bound)
    is_over = threading.Event()

    def behave(connection: socket.socket) -> None:
        take_hello(connection)
        while not is_over.wait(0.05):
            connection.sendall(PING)

    async def scenario(port: int) -> None:
        owner = Owner()
        link = await open_link(port, api_certificates, owner)
        message = submit("long", [1] * 50_000)
        most, num_sent = 0, 0
        while link.send(message):
            num_sent += 1
            await asyncio.sleep(0)
            most = max(most, len(link._unsent))
            # Beyond what the two systems' buffers take, nothing is kept elsewhere.
            assert num_sent * 50_000 < bound + (64 << 20)
        assert 0 < most <= bound
        await until(lambda: owner.ends)
        assert "unread" in str(owner.ends[0][0])
        await link.wait_ended()
        is_over.set()

    with Peer(behave, agent_context(agent_certificates)) as peer:
        try:
            run(scenario(peer.port), loop_factory)
        finally:
            is_over.set()


def test_an_end_that_was_held_up_itself_does_not_blame_its_peer(
    agent_certificates: Certificates, api_certificates: Certificates
) -> None:
    is_over = threading.Event()

    def behave(connection: socket.socket) -> None:
        take_hello(connection)
        while not is_over.wait(0.05):
            connection.sendall(PING)

    async def scenario(port: int) -> None:
        owner = Owner()
        link = await open_link(port, api_certificates, owner)
        time.sleep(2 * SILENT_LOOKS * LOOK_SECONDS)
        await asyncio.sleep(2 * LOOK_SECONDS)
        assert owner.ends == []
        link.close()
        await link.wait_ended()

    with Peer(behave, agent_context(agent_certificates)) as peer:
        try:
            run(scenario(peer.port))
        finally:
            is_over.set()


# What happens between the machines.


def test_a_silent_peer_is_lost_within_a_second() -> None:
    """By arithmetic: a byte that comes just after a look is seen by the next one."""
    assert LOOK_SECONDS * LOOKS_PER_PING == 0.25
    assert LOOK_SECONDS * (SILENT_LOOKS + 1) < 1.0
    assert SILENT_LOOKS > 2 * LOOKS_PER_PING  # two pings may be late


@pytest.mark.parametrize(
    ("treat", "reason"),
    [(swallowed, "silent"), (cut, "reset"), (corrupted, "SSL")],
    ids=["swallowed", "cut", "corrupted"],
)
@LOOPS
def test_both_ends_learn_of_a_broken_path_and_of_nothing_that_was_not_said(
    agent_certificates: Certificates,
    api_certificates: Certificates,
    treat: Pass,
    reason: str,
    loop_factory: LoopFactory,
) -> None:
    async def scenario(agent: Agent, proxy: StreamProxy) -> Owner:
        owner = Owner()
        link = await open_link(proxy.port, api_certificates, owner)
        link.send(submit("before", [1, 2, 3]))
        await until(lambda: owner.messages)
        proxy.treat = treat
        link.send(submit("after", [4]))
        await until(lambda: owner.ends and agent.owners[0].ends)
        return owner

    with (
        Agent(agent_certificates, loop_factory=loop_factory) as agent,
        leaving_nothing_open(),
        StreamProxy(agent.port) as proxy,
    ):
        near = run(scenario(agent, proxy), loop_factory)
        assert agent.num_links == 0
    far = agent.owners[0]
    assert far.messages == [submit("before", [1, 2, 3])]
    assert near.messages == [answer_to(submit("before", [1, 2, 3]))]
    assert near.codes == far.codes == ["replica_lost"]
    # Who notices first ends the connection, which may be what the other notices.
    assert any(reason in str(owner.ends[0][0]) for owner in (near, far))


def test_a_slow_path_is_not_a_broken_one(agent: Agent, api_certificates: Certificates) -> None:
    sent = [submit(f"{index}", [index] * 1_000) for index in range(50)]

    async def scenario(port: int) -> None:
        owner = Owner()
        link = await open_link(port, api_certificates, owner)
        for message in sent:
            link.send(message)
        await until(lambda: len(owner.messages) == len(sent))
        assert owner.messages == [answer_to(message) for message in sent]
        assert owner.ends == []
        link.close()
        await link.wait_ended()

    with StreamProxy(agent.port) as proxy:
        proxy.treat = delayed
        run(scenario(proxy.port))


def test_an_agent_that_closes_ends_all_its_links(
    agent_certificates: Certificates, api_certificates: Certificates
) -> None:
    async def scenario(agent: Agent) -> None:
        owners = [Owner() for _ in range(5)]
        for owner in owners:
            await open_link(agent.port, api_certificates, owner)
        await asyncio.to_thread(agent.close)
        await until(lambda: all(owner.ends for owner in owners))
        assert {code for owner in owners for code in owner.codes} == {"replica_lost"}
        assert type(await refused(agent.port, api_certificates)) is ReplicaUnreachable

    with leaving_nothing_open(), Agent(agent_certificates) as agent:
        run(scenario(agent))
