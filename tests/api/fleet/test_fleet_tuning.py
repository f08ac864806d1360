"""Fine-tuning jobs on an API server whose engines are the replicas of a fleet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.api.tuning.served_values import check_served_values
from loraplex.engine.config import EngineConfig, KvDtype, Quantization
from loraplex.platform.errors import InvalidValue
from support.engine import LocalEngine
from support.models import make_tiny_llama
from support.mortal_agent import mortal_agents
from support.server import serving
from support.tuning_jobs import create, ended, examples, num_tokens, trained_tokens, trainers
from support.waiting import wait_for

ENGINE = "loraplex.engine.process.main"
NUM_EXAMPLES = 30


@pytest.mark.slow
def test_a_job_ends_though_the_replica_that_served_is_lost(tiny_base: Path, tmp_path: Path) -> None:
    with mortal_agents(2, tiny_base, tmp_path, engine=ENGINE, seconds=280) as found:
        agents, environment = found
        name = ("--served-model-name", "tiny", "--tuning")
        trainer = {"TEST_TRAINER": "support.fake_trainer"}
        with serving(tiny_base, tmp_path / "server", *name, **environment, **trainer) as server:
            caller = server.make_caller("acme")
            client = caller.openai
            job = create(client, examples("slow", NUM_EXAMPLES))
            wait_for(lambda: bool(trainers(server)), seconds=60)
            agents[0].kill()
            job = ended(client, job.id)
            assert (job.status, job.fine_tuned_model) == ("succeeded", "bot@1")
            assert trained_tokens(server, caller) == num_tokens(NUM_EXAMPLES)
            answer = client.completions.create(model="bot@1", prompt="hi", max_tokens=2)
            assert answer.choices[0].text is not None
            log = server.log.read_text()
    assert "a trainer on cpu" in log


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Iterator[LocalEngine]:
    """As a replica has it."""
    engine = LocalEngine(tiny_base, tmp_path_factory.mktemp("engine"))
    yield engine
    engine.close()


def test_the_options_and_the_base_of_the_replicas_are_accepted(
    engine: LocalEngine, tiny_base: Path
) -> None:
    check_served_values(EngineConfig(str(tiny_base)), tiny_base, engine.core.info)


@pytest.mark.parametrize(
    "config",
    [EngineConfig("m", quantization=Quantization.INT8), EngineConfig("m", kv_dtype=KvDtype.INT8)],
)
def test_other_engine_options_are_refused(
    config: EngineConfig, engine: LocalEngine, tiny_base: Path
) -> None:
    with pytest.raises(InvalidValue, match="engine options of the fleet's agents"):
        check_served_values(config, tiny_base, engine.core.info)


def test_another_base_in_the_servers_folder_is_refused(engine: LocalEngine, tmp_path: Path) -> None:
    other = make_tiny_llama(tmp_path, seed=9)
    with pytest.raises(InvalidValue, match="is not the base"):
        check_served_values(EngineConfig(str(other)), other, engine.core.info)
