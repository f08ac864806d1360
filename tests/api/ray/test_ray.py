"""Replicas on a real Ray cluster on this machine: kills, scale-in, and the loss of the head."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from importlib.util import find_spec

import pytest
from openai import AsyncOpenAI, OpenAIError

from loraplex.api.cli.exit_codes import ExitCode
from loraplex.api.demo.recipe import BASE_NAME
from support.ray_fleet import MEMORY_OPTIONS, RayFleet, running_ray
from support.server import Caller
from support.waiting import wait_for

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("ray") is None, reason="`make test-ray` installs Ray"),
]
NUM_CALLERS = 4


@pytest.fixture(scope="module")
def fleet() -> Iterator[RayFleet]:
    with running_ray() as running:
        yield running


@pytest.fixture(scope="module")
def caller(fleet: RayFleet) -> Iterator[Caller]:
    """Of a server that has started the fleet."""
    on_ray = ("--replicas", "2", "--ray", fleet.address)
    with fleet.serving("api", *on_ray, *MEMORY_OPTIONS) as server:
        fleet.wait_ready(2)
        yield server.make_caller("acme")


@dataclass
class Load:
    """What a few callers were told who never stop asking."""

    num_whole: int = 0
    codes: list[str | None] = field(default_factory=list)
    """Of answers that were not whole."""


async def ask(client: AsyncOpenAI, load: Load) -> None:
    try:
        answer = await client.completions.create(
            model=BASE_NAME, prompt="write", max_tokens=8, extra_body={"ignore_eos": True}
        )
    except OpenAIError as exc:
        load.codes.append(getattr(exc, "code", type(exc).__name__))
    else:
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8
        load.num_whole += 1


def ask_meanwhile(caller: Caller, act: Callable[[], object]) -> Load:
    """Ask all the time while `act` runs, and once after it."""
    load = Load()

    async def scenario() -> None:
        async with caller.openai_async as client:
            acting = asyncio.create_task(asyncio.to_thread(act))

            async def keep_asking() -> None:
                while not acting.done():
                    await ask(client, load)
                await ask(client, load)

            await asyncio.gather(acting, *(keep_asking() for _ in range(NUM_CALLERS)))

    asyncio.run(scenario())
    return load


def test_an_open_cluster_and_public_addresses_are_refused() -> None:
    import grpc

    from loraplex.api.ray.cluster import ClusterRefused, check_addresses, check_requires_token

    answer = grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
    open_head = grpc.method_handlers_generic_handler(
        "ray.rpc.NodeInfoGcsService", {"CheckAlive": answer}
    )
    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=[open_head])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(ClusterRefused, match="no token authentication"):
            check_requires_token(f"127.0.0.1:{port}")
    finally:
        server.stop(None)
    check_addresses(["10.1.2.3", "127.0.0.1", "169.254.1.1", "fd00::1", "::1", "192.168.1.1"])
    for address in ("8.8.8.8", "2001:4860:4860::8888"):
        with pytest.raises(ClusterRefused, match="public address"):
            check_addresses([address])


def test_a_killed_agent_serves_again_at_its_address(fleet: RayFleet, caller: Caller) -> None:
    before = next(iter(fleet.rows().values()))

    def kill() -> None:
        fleet.kill_agent(before.id)
        assert fleet.wait_replaced(before).address == before.address

    load = ask_meanwhile(caller, kill)
    assert set(load.codes) <= {"engine_restarted"}
    assert len(load.codes) <= NUM_CALLERS
    assert load.num_whole > NUM_CALLERS


def test_a_killed_actor_is_replaced_and_its_row_moves(fleet: RayFleet, caller: Caller) -> None:
    before = next(iter(fleet.rows().values()))

    def kill() -> None:
        fleet.kill_actor(before.id)
        assert fleet.wait_replaced(before).address != before.address

    load = ask_meanwhile(caller, kill)
    assert set(load.codes) <= {"engine_restarted"}
    assert len(load.codes) <= NUM_CALLERS
    assert next(iter(fleet.rows())) == before.id
    fleet.wait_ready(2)


def test_a_fleet_that_is_up_is_joined_as_it_is_or_not_started_again(
    fleet: RayFleet, caller: Caller
) -> None:
    before = fleet.rows()
    joined, refused = fleet.up(3, "--join"), fleet.up(3)
    assert (joined.returncode, refused.returncode) == (ExitCode.OK, ExitCode.CONFLICT)
    assert fleet.rows() == before


def test_a_killed_controller_comes_back_and_scales_without_a_failed_request(
    fleet: RayFleet, caller: Caller
) -> None:
    before = list(fleet.rows())

    def kill_and_scale() -> None:
        killed = fleet.controller_pid()
        fleet.kill_controller()
        wait_for(lambda: fleet.controller_pid() not in (killed, None), seconds=60)
        for number in (3, 2):
            ended = fleet.command("scale", str(number))
            assert ended.returncode == ExitCode.OK, ended.stderr
            fleet.wait_ready(number)

    load = ask_meanwhile(caller, kill_and_scale)
    assert load.codes == []
    assert load.num_whole > NUM_CALLERS
    assert list(fleet.rows()) == before


def test_without_the_head_requests_go_on_and_lost_actors_are_not_replaced(
    fleet: RayFleet, caller: Caller
) -> None:
    first, second = fleet.rows().values()

    def kill() -> None:
        fleet.kill_head()
        fleet.kill_actor(second.id)
        fleet.kill_agent(first.id)  # its actor starts it again without being told
        fleet.wait_replaced(first)

    load = ask_meanwhile(caller, kill)
    assert set(load.codes) <= {"engine_restarted", "engine_unavailable"}
    assert load.num_whole > 0
    with pytest.raises(ValueError, match="not enough values"):
        fleet.agent_pid(second.id)
    after = ask_meanwhile(caller, lambda: None)
    assert after.codes == []
    assert after.num_whole >= NUM_CALLERS
