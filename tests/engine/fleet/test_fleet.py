from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial
from pathlib import Path

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.errors import EngineError, EngineUnavailable, NotNow, ReplicaUnreachable
from loraplex.engine.fleet import agent as agent_module
from loraplex.engine.fleet import replica_link
from loraplex.engine.fleet.adapter_name import adapter_name
from loraplex.engine.fleet.agent import AgentEnd
from loraplex.engine.fleet.fleet import Fleet
from loraplex.engine.fleet.rendezvous import RendezvousOrder
from loraplex.engine.fleet.replica_link import ReplicaLink
from loraplex.engine.messages import FinishReason, ReplicaState, RequestStarted
from loraplex.engine.process import proven_adapters
from loraplex.engine.process.quarantine import crash_of
from support.fake_client import (
    collect,
    end_of,
    error_of,
    kill,
    make_request,
    submit_started,
    tokens_of,
    until,
)
from support.fake_engine import BASE_ID_FILE, EXIT, HANG, QUEUE
from support.small_fleet import LEASE_SECONDS, RunningAgent, SmallFleet, running_fleet
from support.stream_proxy import StreamProxy, swallowed, unharmed

RESTARTED = "engine_restarted"


def replica_of(fleet: Fleet, request_id: str) -> str:
    (name,) = [link.id for link in fleet.links if request_id in open_at(fleet, link.id)]
    return name


def link_of(fleet: Fleet, name: str) -> ReplicaLink:
    return next(link for link in fleet.links if link.id == name)


def routed_state(fleet: Fleet, name: str) -> ReplicaState:
    return fleet._router_states[name]


def open_at(fleet: Fleet, name: str) -> set[str]:
    return {key for key, sent in fleet._requests._sent.items() if sent.replica == name}


async def started_server(small: SmallFleet) -> Fleet:
    """One more API server, for which all agents are ready."""
    server = small.add_api_server()
    await server.start()
    await settled(server)
    return server


def adapter_of(name: str, *others: str) -> str:
    """An adapter with this replica as the first of its order."""
    order = RendezvousOrder([name, *others])
    adapters = map(str, range(999))
    return next(
        each for each in adapters if order.of(adapter_name(AdapterKey("acme", each)))[0] == name
    )


def others(fleet: SmallFleet, name: str) -> list[RunningAgent]:
    return [agent for agent in fleet.agents.values() if agent.name != name]


async def settled(fleet: Fleet) -> None:
    await until(lambda: all(link.state is ReplicaState.READY for link in fleet.links))


# --- requests -------------------------------------------------------------------------------------


def test_two_replicas_answer_like_one_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path, "a", "b") as (_, fleet):
            streams = [fleet.submit(make_request(f"r{n}", [n + 1, 7])) for n in range(40)]
            for number, stream in enumerate(streams):
                events = await collect(stream)
                assert isinstance(events[0], RequestStarted)
                assert tokens_of(events) == [number + 1, 7, number + 1, 7]
                assert end_of(events).reason is FinishReason.LENGTH
            assert fleet.info.base_id == "base"
            assert fleet.stats is not None

    asyncio.run(scenario())


def test_a_request_that_starts_names_its_replica(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path, "a", "b") as (_, fleet):
            streams = {f"r{n}": fleet.submit(make_request(f"r{n}", [n])) for n in range(20)}
            expected = {name: replica_of(fleet, name) for name in streams}
            found = dict[str, str | None]()
            for name, stream in streams.items():
                first = (await collect(stream))[0]
                assert isinstance(first, RequestStarted)
                found[name] = first.replica
            assert found == expected
            assert set(found.values()) == {"a", "b"}

    asyncio.run(scenario())


def test_requests_for_one_adapter_run_on_one_replica(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path, "a", "b", "c") as (small, fleet):
            for number in range(6):
                await collect(fleet.submit(make_request(f"r{number}", [1], adapter="sums")))
            fetched = [agent.fetcher.fetched for agent in small.agents.values()]
            assert sorted(map(len, fetched)) == [0, 0, 1]

    asyncio.run(scenario())


def test_an_aborted_request_ends_at_its_replica(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path, "a", "b") as (small, fleet):
            async with aclosing(await submit_started(fleet, make_request("r", HANG))):
                name = replica_of(fleet, "r")
                assert small.agents[name].replica.num_open == 1
            await until(lambda: small.agents[name].replica.num_open == 0)

    asyncio.run(scenario())


# --- failures -------------------------------------------------------------------------------------


def test_when_an_engine_dies_begun_requests_end_and_the_others_run_elsewhere(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path, "a", "b") as (small, fleet):
            begun = await submit_started(fleet, make_request("begun", HANG, adapter="x"))
            name = replica_of(fleet, "begun")
            waiting = fleet.submit(make_request("waiting", QUEUE, adapter="x"))
            assert replica_of(fleet, "waiting") == name
            (other,) = others(small, name)
            # The other engine's second life does not hold the request up.
            kill(other.engine)
            await until(lambda: not other.engine.is_ready)
            await until(lambda: other.engine.is_ready)
            await settled(fleet)
            kill(small.agents[name].engine)
            assert error_of(await collect(begun)).code == RESTARTED
            assert tokens_of(await collect(waiting)) == QUEUE * 4

    asyncio.run(scenario())


def test_when_an_agent_is_lost_begun_requests_end_and_the_others_run_elsewhere(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path, "a", "b") as (small, fleet):
            begun = await submit_started(fleet, make_request("begun", HANG, adapter="x"))
            name = replica_of(fleet, "begun")
            (other,) = others(small, name)
            kill(other.engine)
            await until(lambda: not other.engine.is_ready)
            await until(lambda: other.engine.is_ready)
            await settled(fleet)
            waiting = fleet.submit(make_request("waiting", QUEUE, adapter="x"))
            assert replica_of(fleet, "waiting") == name
            small.agents[name].replica.close()
            assert error_of(await collect(begun)).code == RESTARTED
            assert tokens_of(await collect(waiting)) == QUEUE * 4
            await until(lambda: small.agents[name].replica.num_open == 0)
            await settled(fleet)  # it is connected again

    asyncio.run(scenario())


def test_a_lost_request_waits_for_the_only_replica(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path, "a") as (small, fleet):
            stream = fleet.submit(make_request("r", QUEUE))
            await until(lambda: small.agents["a"].replica.num_open == 1)
            kill(small.agents["a"].engine)
            assert tokens_of(await collect(stream)) == QUEUE * 4

    asyncio.run(scenario())


def test_a_replica_that_joins_loads_its_adapters_before_it_gets_requests(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path, "a", "b") as (small, fleet):
            names = [f"adapter-{number}" for number in range(12)]
            await small.agents["b"].stop()
            await until(lambda: not link_of(fleet, "b").is_linked)
            for name in names:
                await collect(fleet.submit(make_request(name, [1], adapter=name)))
            await small.agents["b"].start()
            await settled(fleet)
            loaded = small.agents["b"].fetcher.fetched
            await until(lambda: routed_state(fleet, "b") is ReplicaState.READY)
            assert 0 < len(loaded) < len(names), "those of which it is the first"
            num_loaded = len(loaded)
            for name in names:
                await collect(fleet.submit(make_request(name, [1], adapter=name)))
            assert len(loaded) == num_loaded

    asyncio.run(scenario())


def test_the_heirs_of_a_lost_replica_load_its_adapters_before_they_are_asked(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path, "a", "b") as (small, fleet):
            await collect(fleet.submit(make_request("r", [1], adapter="sums")))
            (holder,) = (agent for agent in small.agents.values() if agent.fetcher.fetched)
            (heir,) = others(small, holder.name)
            await until(lambda: bool(link_of(fleet, holder.name).stats))
            await holder.stop()
            await until(lambda: heir.fetcher.fetched == [AdapterKey("acme", "sums")])

    asyncio.run(scenario())


def test_a_draining_agent_gets_no_requests_and_finishes_those_that_it_has(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path, "a", "b") as (small, fleet):
            begun = await submit_started(fleet, make_request("begun", HANG, adapter="x"))
            name = replica_of(fleet, "begun")
            small.agents[name].agent.stop(drain_seconds=30.0)
            await until(lambda: small.agents[name].replica.state is ReplicaState.DRAINING)
            for number in range(8):  # the first ones may be refused there and go elsewhere
                events = await collect(fleet.submit(make_request(f"r{number}", [3], adapter="x")))
                assert tokens_of(events) == [3] * 4
            begun.abort()
            assert end_of(await collect(begun)).reason is FinishReason.ABORTED
            assert await small.agents[name].wait_end() is AgentEnd.STOPPED

    asyncio.run(scenario())


def test_a_replica_that_an_operator_drains_gets_no_requests(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path, "a", "b") as (small, fleet):
            small.table.rows["a"].is_draining = True
            await until(lambda: link_of(fleet, "a").member.is_draining)
            for number in range(20):
                stream = fleet.submit(make_request(f"r{number}", [1]))
                assert replica_of(fleet, f"r{number}") == "b"
                await collect(stream)
            small.table.rows["a"].is_draining = False
            await until(lambda: not link_of(fleet, "a").member.is_draining)
            streams = [fleet.submit(make_request(f"s{number}", [1])) for number in range(20)]
            assert open_at(fleet, "a")
            await asyncio.gather(*map(collect, streams))

    asyncio.run(scenario())


def test_without_a_ready_replica_requests_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path, "a") as (small, fleet):
            await small.agents["a"].stop()
            await until(lambda: not fleet.is_ready)
            with pytest.raises((EngineUnavailable, NotNow)):
                fleet.submit(make_request("r", [1]))
            await small.agents["a"].start()
            await until(lambda: fleet.is_ready)
            assert tokens_of(await collect(fleet.submit(make_request("r", [1])))) == [1] * 4

    asyncio.run(scenario())


def test_a_poisonous_request_ends_two_engines_at_most(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path, "a", "b", "c") as (small, fleet):
            codes = []
            for number in range(4):
                await settled(fleet)
                try:
                    stream = fleet.submit(make_request(f"r{number}", EXIT, adapter="poison"))
                except EngineError as exc:
                    codes.append(exc.code)
                else:
                    codes.append(error_of(await collect(stream)).code)
            assert codes[2:] == ["adapter_quarantined"] * 2
            assert sum(agent.engine.num_restarts for agent in small.agents.values()) <= 2
            await settled(fleet)
            healthy = await collect(fleet.submit(make_request("good", [5], adapter="sums")))
            assert tokens_of(healthy) == [5] * 4

    asyncio.run(scenario())


def test_an_unproven_adapter_runs_on_one_replica_at_any_load(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path, "a", "b", "c") as (_, fleet):
            names = {
                adapter: [f"{adapter}-{number}" for number in range(12)]
                for adapter in ("proven", "new")
            }
            fleet.note_proven(AdapterKey("acme", "proven"))
            streams = [
                fleet.submit(make_request(name, HANG, adapter=adapter))
                for adapter in names
                for name in names[adapter]
            ]
            assert len({replica_of(fleet, name) for name in names["new"]}) == 1
            assert len({replica_of(fleet, name) for name in names["proven"]}) > 1
            for stream in streams:
                stream.close()

    asyncio.run(scenario())


def test_all_api_servers_learn_which_adapters_are_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proven_adapters, "PROOF_SECONDS", 0.0)

    async def scenario() -> None:
        async with running_fleet(tmp_path, "a", "b") as (small, fleet):
            early = await started_server(small)
            key = AdapterKey("acme", "sums")
            for number in range(proven_adapters.PROOF_ANSWERS):
                assert not early._quarantine.is_proven(key)
                await collect(fleet.submit(make_request(f"r{number}", [1], adapter="sums")))
            await until(lambda: early._quarantine.is_proven(key))
            late = await started_server(small)
            await until(lambda: late._quarantine.is_proven(key))

    asyncio.run(scenario())


def test_a_server_that_connects_again_or_later_knows_each_crash_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path, "a", "b") as (small, fleet):
            poison = fleet.submit(make_request("poison", EXIT, adapter="poison"))
            assert error_of(await collect(poison)).code in (RESTARTED, "adapter_quarantined")
            key = AdapterKey("acme", "poison")
            await until(lambda: fleet.is_quarantined(key))
            await settled(fleet)
            for agent in small.agents.values():
                agent.replica.close()
            await until(lambda: not fleet.is_ready)
            await settled(fleet)
            late = await started_server(small)
            await until(lambda: late.is_quarantined(key))
            for server in (fleet, late):
                assert server._quarantine._num_crashes(key) == 2

    asyncio.run(scenario())


def test_what_is_open_of_an_adapter_in_quarantine_ends_on_every_replica(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path, "a", "b") as (small, fleet):
            begun = await submit_started(fleet, make_request("begun", HANG, adapter="x"))
            agent = small.agents[replica_of(fleet, "begun")]
            for _ in range(2):
                fleet.note_crash(crash_of([make_request("r", EXIT, adapter="x")], is_alone=True))
            assert error_of(await collect(begun)).code == "adapter_quarantined"
            await until(lambda: agent.replica.num_open == 0)
            assert agent.engine.num_restarts == 0

    asyncio.run(scenario())


# --- adapters -------------------------------------------------------------------------------------


def test_a_deletion_reaches_every_replica(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path, "a", "b", "c") as (small, fleet):
            key = AdapterKey("acme", "x")
            receipt = await fleet.evict_adapter(key)
            assert receipt.device_bytes == 300
            assert all(agent.fetcher.forgotten == [key] for agent in small.agents.values())

    asyncio.run(scenario())


def test_a_deletion_waits_for_a_lost_replica_until_it_is_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path, "a", "b") as (small, fleet):
            await small.agents["a"].stop()
            await until(lambda: not link_of(fleet, "a").is_linked)
            deletion = asyncio.create_task(fleet.evict_adapter(AdapterKey("acme", "x")))
            await until(lambda: bool(small.agents["b"].fetcher.forgotten))
            await asyncio.sleep(0.2)
            assert not deletion.done()
            await small.agents["a"].start()
            await deletion
            assert small.agents["a"].fetcher.forgotten == [AdapterKey("acme", "x")]

    asyncio.run(scenario())


def test_a_deletion_waits_for_a_lost_replica_until_its_lease_has_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path, "a", "b") as (small, fleet):
            await small.agents["a"].stop()
            await until(lambda: not link_of(fleet, "a").is_linked)
            deletion = asyncio.create_task(fleet.evict_adapter(AdapterKey("acme", "x")))
            await asyncio.sleep(0.2)
            assert not deletion.done()
            small.table.rows["a"].seen_at -= LEASE_SECONDS
            await deletion

    asyncio.run(scenario())


def test_a_deletion_does_not_wait_for_a_removed_replica(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path, "a", "b") as (small, fleet):
            await small.agents["a"].stop()
            await until(lambda: not link_of(fleet, "a").is_linked)
            deletion = asyncio.create_task(fleet.evict_adapter(AdapterKey("acme", "x")))
            await asyncio.sleep(0.1)
            del small.table.rows["a"]
            await deletion

    asyncio.run(scenario())


async def pinned_at(small: SmallFleet, key: AdapterKey) -> list[str]:
    found = []
    for name, agent in small.agents.items():
        if agent.engine.is_ready and (await agent.engine.explain_adapter(key)).load.is_pinned:
            found.append(name)
    return found


def test_a_pin_holds_on_one_replica_and_moves_when_that_is_lost(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path, "a", "b", "c") as (small, fleet):
            key = AdapterKey("acme", "x")
            await until(lambda: all(link.member.is_live for link in fleet.links))
            fleet.set_pinned([key], as_of=1.0)
            await until(lambda: sum(len(a.fetcher.fetched) for a in small.agents.values()) == 1)
            (first,) = await pinned_at(small, key)
            await small.agents[first].stop()
            small.table.rows[first].seen_at -= 10.0
            while not (now := await pinned_at(small, key)):
                await asyncio.sleep(0.01)
            assert len(now) == 1
            assert now != [first]

    asyncio.run(scenario())


def test_all_replicas_are_told_to_forget_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path, "a", "b") as (small, fleet):
            key, told = AdapterKey("acme", "x"), list[tuple[str, AdapterKey]]()
            await until(lambda: all(link.member.is_live for link in fleet.links))
            for name, agent in small.agents.items():
                note = partial(lambda name, key: told.append((name, key)), name)
                monkeypatch.setattr(agent.engine, "forget_outputs", note)
            fleet.forget_outputs(key)
            await until(lambda: len(told) == 2)
            assert sorted(told) == [("a", key), ("b", key)]

    asyncio.run(scenario())


def test_pins_that_were_read_earlier_do_not_replace_later_ones(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path, "a") as (small, fleet):
            key = AdapterKey("acme", "x")
            await until(lambda: link_of(fleet, "a").member.is_live)
            fleet.set_pinned([key], as_of=2.0)
            await until(lambda: small.agents["a"].fetcher.fetched == [key])
            late = small.add_api_server()
            late.set_pinned([], as_of=1.0)
            await late.start()
            await collect(late.submit(make_request("r", [1])))
            assert await pinned_at(small, key) == ["a"]

    asyncio.run(scenario())


def test_a_deleted_content_is_not_fetched(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path, "a") as (small, fleet):
            small.unknown.add(AdapterKey("acme", "gone"))
            events = await collect(fleet.submit(make_request("r", [1], adapter="gone")))
            assert error_of(events).code == "object_not_found"
            assert small.agents["a"].fetcher.fetched == []

    asyncio.run(scenario())


# --- leases ---------------------------------------------------------------------------------------


def test_an_agent_whose_lease_ends_ends_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "RENEWAL_SECONDS", 0.02)

    async def scenario() -> None:
        async with running_fleet(tmp_path, "a") as (small, fleet):
            begun = await submit_started(fleet, make_request("begun", HANG))
            small.table.is_available = False
            agent, now = small.agents["a"], small.agents["a"].now
            agent.now = lambda: now() + LEASE_SECONDS
            assert await agent.wait_end() is AgentEnd.FENCED
            assert error_of(await collect(begun)).code == RESTARTED
            assert agent.engine.pid is None

    asyncio.run(scenario())


def test_an_agent_whose_lease_has_ended_in_the_database_is_not_asked_again(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path, "a") as (small, fleet):
            small.table.rows["a"].seen_at -= LEASE_SECONDS
            await until(lambda: link_of(fleet, "a").member.has_expired)
            small.agents["a"].replica.close()  # the links end, and the agent lives on
            await until(lambda: not fleet.is_ready)
            await asyncio.sleep(0.3)
            assert not fleet.is_ready
            await small.agents["a"].stop()
            await small.agents["a"].start()
            await until(lambda: fleet.is_ready)

    asyncio.run(scenario())


def test_a_replica_with_another_runtime_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path, "a") as (small, fleet):
            (tmp_path / "b").mkdir()
            (tmp_path / "b" / BASE_ID_FILE).write_text("another")
            await small.add_agent("b")
            await until(lambda: len(fleet.links) == 2 and link_of(fleet, "b").failure is not None)
            failure = link_of(fleet, "b").failure
            assert failure is not None
            assert failure.code == "replica_incompatible"
            await collect(fleet.submit(make_request("r", [1])))

    asyncio.run(scenario())


def test_two_api_servers_share_the_replicas(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path, "a", "b") as (small, fleet):
            second = small.add_api_server()
            await second.start()
            await settled(second)
            for number in range(6):
                server = (fleet, second)[number % 2]
                await collect(server.submit(make_request(f"r{number}", [1], adapter="sums")))
            assert sum(len(agent.fetcher.fetched) for agent in small.agents.values()) == 1

    asyncio.run(scenario())


def test_an_agent_cut_off_from_one_api_server_serves_the_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path, "a", "b") as (small, fleet):
            with StreamProxy(small.agents["a"].port) as proxy:
                other = small.add_api_server({"a": proxy.port})
                await other.start()
                await settled(other)
                adapter = adapter_of("a", "b")
                begun = await submit_started(other, make_request("begun", HANG, adapter=adapter))
                assert replica_of(other, "begun") == "a"
                proxy.treat = swallowed
                assert error_of(await collect(begun)).code == RESTARTED
                for number, server in enumerate((fleet, other, fleet)):
                    request = make_request(f"r{number}", [number, 7], adapter=adapter)
                    stream = server.submit(request)
                    assert replica_of(server, f"r{number}") == ("b" if server is other else "a")
                    assert tokens_of(await collect(stream)) == [number, 7, number, 7]
                proxy.treat = unharmed
                await settled(other)
                await until(lambda: small.agents["a"].replica.num_open == 0)

    asyncio.run(scenario())


def test_a_renewal_counts_from_its_own_question(tmp_path: Path) -> None:
    """A later question may have been asked after the database was written."""

    async def scenario() -> None:
        async with running_fleet(tmp_path, "a") as (small, fleet):
            small.table.is_available = False
            await asyncio.sleep(0.05)  # nobody answers any more
            replica, now = small.agents["a"].replica, small.agents["a"].now
            replica.ask_for_lease()
            await until(lambda: bool(fleet.asked_renewals()))
            (early,) = fleet.asked_renewals()
            small.agents["a"].now = lambda: now() + LEASE_SECONDS / 2
            replica.ask_for_lease()
            await until(lambda: fleet.asked_renewals()[0].number > early.number)
            fleet.answer_renewal(early, None, LEASE_SECONDS)
            await asyncio.sleep(0.05)
            assert len(fleet.asked_renewals()) == 1, "the later question is still open"
            small.agents["a"].now = lambda: now() + LEASE_SECONDS
            assert replica.lease.is_lost

    asyncio.run(scenario())


def test_a_cancelled_connection_that_fails_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail_when_cancelled(*_: object, **__: object) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ReplicaUnreachable("refused at this moment") from None

    async def scenario() -> None:
        async with running_fleet(tmp_path, "a") as (small, fleet):
            monkeypatch.setattr(replica_link, "connect", fail_when_cancelled)
            await small.agents["a"].stop()
            await until(lambda: not link_of(fleet, "a").is_linked)
            await asyncio.sleep(0.2)  # it connects
            await fleet.stop()

    asyncio.run(scenario())
