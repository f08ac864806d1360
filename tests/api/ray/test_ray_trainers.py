"""Trainers on a node of a real Ray cluster on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import select

from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.api.ray.relay_command import relay_arguments, relay_environment
from loraplex.api.telemetry.metrics import Metrics
from loraplex.api.tuning.attempt import Attempt, LastWord, TrainerSetup
from loraplex.api.tuning.trainer_place import TrainerPlace
from loraplex.api.tuning.work_folders import WorkFolder
from loraplex.engine.checkpoint.base_identity import compute_base_id
from loraplex.engine.config import EngineConfig
from loraplex.engine.tuning.messages import Failed, Finished, Stopped
from loraplex.platform.database import Database
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tuning.models import TuningEvent, TuningJob
from loraplex.platform.tuning.states import JobState
from support.attempts import INFO, make_job
from support.checkpoints import make_checkpoint_store
from support.fake_trainer import read_state
from support.ray_fleet import RayFleet, running_ray
from support.server import serving
from support.tuning_jobs import create, ended, examples, num_tokens, trained_tokens
from support.waiting import wait_for

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("ray") is None, reason="`make test-ray` installs Ray"),
]
NUM_EXAMPLES = 40
NUM_CPUS = 1
"""Of the cluster: room for one trainer."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayFleet]:
    with running_ray(num_cpus=NUM_CPUS) as running:
        yield running


class Server:
    """What attempts need of an API server that has one job."""

    def __init__(self, cluster: RayFleet, database: Database, base: Path, folder: Path) -> None:
        self.job = make_job(database)
        self.work = WorkFolder(folder / "work")
        self.work.make()
        self.work.training_file.write_bytes(examples("slow", NUM_EXAMPLES))
        self.nodes_folder = cluster.folder / "data" / "trainers"
        self.base_id = compute_base_id(base)
        self._cluster, self._database, self._base = cluster, database, base
        self._control_plane = ControlPlane(database, b"s" * 32)
        self._checkpoints = make_checkpoint_store(self._control_plane, folder / "store")

    def attempt(self, *, num_cpus: int = NUM_CPUS, address: str | None = None) -> Attempt:
        """`address`: of another cluster."""
        engine: Any = SimpleNamespace(stats=None, info=INFO)
        options = relay_arguments(
            address or self._cluster.address, base_id=self.base_id, num_cpus=num_cpus
        )
        setup = TrainerSetup(
            (sys.executable, "-P", "-m", "support.relay", "support.fake_trainer", *options),
            relay_environment({**os.environ, **self._cluster.environment}),
            self._base,
            EngineConfig(str(self._base)),
            engine,
            TrainerPlace("cpu", shares_engine=False, is_here=False),
        )
        metrics = Metrics(lambda: None)
        return Attempt(setup, self._control_plane, metrics, self.job, self.work, self._checkpoints)

    async def set_state(self, state: JobState) -> None:
        """What the job's owner asks for."""

        def change(session: TenantSession) -> None:
            session.get_one(TuningJob, self.job.id).state = state

        await self._control_plane.write(self.job.tenant_id, change)

    def pids(self) -> list[int]:
        """Of the trainers on the cluster's node, which work in their folders there."""
        found = ((entry, folder_of(entry)) for entry in Path("/proc").glob("[0-9]*"))
        return [int(entry.name) for entry, folder in found if str(self.nodes_folder) in folder]

    def texts(self) -> list[str]:
        """Of the job's events."""
        with self._database.transaction(self.job.tenant_id, read_only=True) as session:
            return list(session.scalars(select(TuningEvent.message)))

    def close(self) -> None:
        self._control_plane.close()


@pytest.fixture
def server(
    cluster: RayFleet, database: Database, tiny_base: Path, tmp_path: Path
) -> Iterator[Server]:
    made = Server(cluster, database, tiny_base, tmp_path)
    yield made
    made.close()


async def run_until(
    attempt: Attempt, happens: Callable[[], bool], act: Callable[[], Any]
) -> LastWord | None:
    """The last word of an attempt during which one acts once something has happened."""
    running = asyncio.create_task(attempt.run())
    while not happens() and not running.done():
        await asyncio.sleep(0.05)
    if (acting := act()) is not None:
        await acting
    return await running


def is_removed(server: Server) -> bool:
    """Nothing of a tenant's is on the node."""
    return not server.pids() and not any(server.nodes_folder.iterdir())


def test_a_lost_actor_costs_the_steps_since_the_last_checkpoint_which_count_once(
    server: Server,
) -> None:
    def kill_actor() -> None:
        (pid,) = server.pids()
        os.kill(parent_of(pid), signal.SIGKILL)

    lost = server.attempt()
    assert asyncio.run(run_until(lost, lambda: lost.job.step >= 10, kill_actor)) is None
    assert lost.status == 1
    wait_for(lambda: is_removed(server))
    newest = max(server.work.checkpoints.glob("step-*"), key=step_of)
    assert step_of(newest) >= 8
    server.job = lost.job
    resumed = server.attempt()
    last_word = asyncio.run(resumed.run())
    assert isinstance(last_word, Finished)
    assert (resumed.job.step, resumed.job.num_tokens) == (NUM_EXAMPLES, num_tokens(NUM_EXAMPLES))
    assert server.work.has_result
    wait_for(lambda: is_removed(server))


@pytest.mark.slow
def test_the_trainer_of_a_lost_node_goes_on_at_another_one(
    database: Database, tiny_base: Path, tmp_path: Path
) -> None:
    with running_ray(num_cpus=NUM_CPUS, head_cpus=0, num_nodes=3) as cluster:
        server = Server(cluster, database, tiny_base, tmp_path)
        attempt = server.attempt()
        node: set[int] = set()

        def lose_node() -> None:
            (pid,) = server.pids()
            node.update(cluster.nodes_of(pid))
            cluster.kill_node_of(pid)

        assert asyncio.run(run_until(attempt, lambda: attempt.job.step >= 10, lose_node)) is None
        newest = max(server.work.checkpoints.glob("step-*"), key=step_of)
        assert step_of(newest) >= 8
        wait_for(lambda: not server.pids())
        server.job = attempt.job
        resumed = server.attempt()

        def note_node() -> None:
            node.update(cluster.nodes_of(*server.pids()))

        last_word = asyncio.run(run_until(resumed, lambda: bool(server.pids()), note_node))
        assert isinstance(last_word, Finished)
        assert len(node) == 2
        done = (resumed.job.step, resumed.job.num_tokens)
        assert done == (NUM_EXAMPLES, num_tokens(NUM_EXAMPLES))
        server.close()


@pytest.mark.slow
def test_checkpoints_that_come_faster_than_they_are_copied_may_be_left_out(server: Server) -> None:
    server.work.training_file.write_bytes(examples(num=NUM_EXAMPLES))
    attempt = server.attempt()
    assert isinstance(asyncio.run(attempt.run()), Finished)
    assert (attempt.job.step, attempt.job.num_tokens) == (NUM_EXAMPLES, num_tokens(NUM_EXAMPLES))
    newest = max(server.work.checkpoints.glob("step-*"), key=step_of)
    assert read_state(newest).step == step_of(newest) == NUM_EXAMPLES
    assert not (server.work.checkpoints / ".incoming").exists()


def test_a_cancelled_job_leaves_nothing_on_the_node(server: Server) -> None:
    attempt = server.attempt()

    def cancel() -> Any:
        return server.set_state(JobState.CANCELLED)

    assert asyncio.run(run_until(attempt, lambda: attempt.job.step >= 5, cancel)) is None
    wait_for(lambda: is_removed(server))


@pytest.mark.slow
def test_a_paused_job_has_the_checkpoint_of_its_last_step_here(server: Server) -> None:
    attempt = server.attempt()

    def pause() -> Any:
        return server.set_state(JobState.PAUSED)

    last_word = asyncio.run(run_until(attempt, lambda: attempt.job.step >= 5, pause))
    assert isinstance(last_word, Stopped)
    newest = max(server.work.checkpoints.glob("step-*"), key=step_of)
    assert (step_of(newest), read_state(newest).step) == (last_word.step, last_word.step)
    wait_for(lambda: is_removed(server))


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [{"num_cpus": NUM_CPUS + 1}, {"address": "127.0.0.1:9"}],
    ids=["room", "cluster"],
)
def test_a_job_that_waits_for_a_place_says_so_and_can_be_paused(
    place: dict[str, Any], server: Server
) -> None:
    attempt = server.attempt(**place)

    def has_waited() -> bool:
        return "The trainer waits for a machine." in server.texts()

    def pause() -> Any:
        return server.set_state(JobState.PAUSED)

    assert asyncio.run(run_until(attempt, has_waited, pause)) == Stopped(0)


def test_a_node_with_another_base_refuses_the_job(server: Server) -> None:
    server.base_id = "sha256:" + "0" * 64
    last_word = asyncio.run(server.attempt().run())
    assert isinstance(last_word, Failed)
    assert last_word.code == "base_not_tunable"
    assert "is not the base that is served" in last_word.message


def test_a_server_publishes_what_a_confined_trainer_on_the_node_has_trained(
    cluster: RayFleet, tiny_base: Path, tmp_path: Path
) -> None:
    options = ("--served-model-name", "tiny", "--tuning", "--tuning-ray", cluster.address)
    environment = {**cluster.environment, "TEST_TRAINER": "support.quick_trainer"}
    with serving(tiny_base, tmp_path / "server", *options, **environment) as server:
        caller = server.make_caller("acme")
        job = ended(caller.openai, create(caller.openai, examples(num=8)).id)
        assert (job.status, job.fine_tuned_model) == ("succeeded", "bot@1")
        assert job.trained_tokens == trained_tokens(server, caller) > 0
        answer = caller.openai.completions.create(model="bot@1", prompt="hi", max_tokens=2)
        assert answer.choices[0].text is not None
        log = server.log.read_text()
    assert "trainers run on nodes of Ray" in log
    assert "trainer_placed" in log


def folder_of(process: Path) -> str:
    try:
        return os.readlink(process / "cwd")
    except OSError:  # it has just ended, or is another user's
        return ""


def step_of(path: Path) -> int:
    return int(path.name.split("-")[1])


def parent_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:"))
