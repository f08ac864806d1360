"""What the actor of a trainer does on its node, without Ray."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loraplex.api.ray import trainer_actor
from loraplex.api.ray.trainer_actor import TrainerActor
from loraplex.api.tuning import trainer_place
from loraplex.engine.checkpoint.base_identity import compute_base_id
from loraplex.engine.tuning.messages import (
    Checkpointed,
    Failed,
    Finished,
    FromTrainer,
    Open,
    Ready,
    Stop,
    Stopped,
)
from support.fake_trainer import State, read_state, write_state
from support.tuning import open_order
from support.tuning_jobs import examples, num_tokens
from support.waiting import wait_for

FAKE = "support.fake_trainer"
NUM_EXAMPLES = 6
MIB = 1 << 20

Act = Callable[[TrainerActor], Coroutine[Any, Any, None]]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a node's trainers."""
    monkeypatch.setenv("LORAPLEX_DATA_DIR", str(tmp_path / "node"))
    return tmp_path / "node" / "trainers"


@pytest.fixture
def order(tiny_base: Path, tmp_path: Path) -> Open:
    """With the paths of a server."""
    return open_order(tiny_base, tmp_path / "data.jsonl", tmp_path / "server")


def run(act: Act) -> None:
    """Act with an actor, and close it."""

    async def scenario() -> None:
        actor = TrainerActor()
        try:
            await act(actor)
        finally:
            await actor.close()

    asyncio.run(scenario())


async def started(actor: TrainerActor, order: Open, words: str = "") -> Failed | None:
    """Send the data in two parts, and start the trainer without a model."""
    content = examples(words, NUM_EXAMPLES)
    for part in (content[:50], content[50:]):
        await actor.write("training.jsonl", part)
    return await actor.start(order, compute_base_id(Path(order.model)), FAKE)


async def heard(actor: TrainerActor) -> list[FromTrainer]:
    return [message async for message in actor.hear()]


def test_a_trainer_trains_in_the_nodes_folder_and_its_files_are_read(
    node: Path, order: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_actor, "CHUNK_BYTES", 50)

    async def act(actor: TrainerActor) -> None:
        assert await started(actor, order) is None
        said = await heard(actor)
        assert said[-1] == Finished(NUM_EXAMPLES, num_tokens(NUM_EXAMPLES), 0.25)
        (checkpoint,) = (each for each in said if isinstance(each, Checkpointed))
        path = Path(checkpoint.file)
        assert path.is_relative_to(node)
        content = b""
        while chunk := await actor.read(f"checkpoints/{path.name}", len(content)):
            assert len(chunk) <= 50
            content += chunk
        assert content == path.read_bytes()
        assert len(content) > 50
        assert await actor.read("result/adapter_config.json", 0)

    run(act)
    wait_for(lambda: not list(node.iterdir()))
    assert not list((tmp_path / "server").rglob("*.*"))


def test_a_trainer_goes_on_from_the_checkpoint_that_was_sent(
    node: Path, order: Open, tmp_path: Path
) -> None:
    sent = write_state(tmp_path, State(5, num_tokens(5)))

    async def act(actor: TrainerActor) -> None:
        await actor.write(f"checkpoints/{sent.name}", sent.read_bytes())
        assert await started(actor, order) is None
        ready = (await heard(actor))[0]
        assert isinstance(ready, Ready)
        assert (ready.first_step, ready.num_tokens) == (5, num_tokens(5))

    run(act)


def test_orders_reach_the_trainer(node: Path, order: Open) -> None:
    async def act(actor: TrainerActor) -> None:
        assert await started(actor, order, "slow") is None
        await actor.tell(Stop())
        said = await heard(actor)
        assert isinstance(said[-1], Stopped)
        (checkpoint,) = (each for each in said if isinstance(each, Checkpointed))
        assert read_state(Path(checkpoint.file)).step == said[-1].step < NUM_EXAMPLES

    run(act)


def test_the_signal_that_ended_a_trainer_is_its_status(node: Path, order: Open) -> None:
    async def act(actor: TrainerActor) -> None:
        assert await started(actor, order, "die-1") is None
        assert not isinstance((await heard(actor))[-1], Finished)
        assert await actor.close() == -signal.SIGKILL

    run(act)


def test_a_node_without_the_served_base_refuses_the_job_by_name(
    node: Path, order: Open, tmp_path: Path
) -> None:
    async def act(actor: TrainerActor) -> None:
        other = await actor.start(order, "sha256:other", FAKE)
        missing = msgspec.structs.replace(order, model=str(tmp_path / "nothing"))
        name = await actor.node()
        assert (other, await actor.start(missing, "sha256:other", FAKE)) == (
            Failed(
                "base_not_tunable",
                f"{order.model} on the Ray node {name} is not the base that is served",
            ),
            Failed(
                "base_not_tunable", f"the Ray node {name} has no base at {tmp_path / 'nothing'}"
            ),
        )
        assert await actor.close() == 1

    run(act)


def test_a_file_outside_the_folder_is_not_read_through_a_link(
    node: Path, order: Open, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")

    async def act(actor: TrainerActor) -> None:
        (folder,) = node.iterdir()
        (folder / "result" / "adapter_config.json").symlink_to(secret)
        (folder / "checkpoints" / "folder").mkdir()
        with pytest.raises(OSError, match="symbolic links"):
            await actor.read("result/adapter_config.json", 0)
        with pytest.raises(OSError, match="is not a regular file"):
            await actor.read("checkpoints/folder", 0)

    run(act)


@pytest.mark.parametrize(("asked", "given"), [(None, 900), (100, 100), (5000, 900)])
def test_a_trainer_gets_no_more_memory_than_its_node_has(
    asked: int | None,
    given: int,
    node: Path,
    order: Open,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer_place, "available_host_bytes", lambda: 1000 * MIB)
    monkeypatch.setattr(trainer_place, "MAPPED_BYTES", 0)
    most = None if asked is None else asked * MIB
    sent: list[Any] = []

    class Recorder:
        @classmethod
        async def spawn(cls, *_command: Any, **_more: Any) -> Recorder:
            return cls()

        def send(self, message: Any) -> None:
            sent.append(message)

        async def close(self) -> int:
            return 0

    monkeypatch.setattr(trainer_actor, "Trainer", Recorder)

    async def act(actor: TrainerActor) -> None:
        assert await started(actor, msgspec.structs.replace(order, max_memory_bytes=most)) is None

    run(act)
    assert [each.max_memory_bytes for each in sent] == [given * MIB]
