"""The metrics under vLLM's names, read as routers read them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loraplex.api.telemetry.metrics import Metrics
from loraplex.api.telemetry.vllm_metrics import AskedAdapters, EngineSizes
from loraplex.engine.messages import EngineStats
from support.server import Caller, ServerUnderTest, serving
from support.waiting import wait_for

STATS = EngineStats(
    num_steps=1,
    num_running=2,
    num_waiting=3,
    num_free_kv_blocks=4,
    num_preemptions=5,
    num_prompt_tokens=6,
    num_cached_tokens=7,
    num_generated_tokens=8,
    num_adapter_loads=0,
    num_adapter_evictions=0,
    kv_usage=0.75,
    num_prefix_query_tokens=13,
)
Samples = dict[str, tuple[dict[str, str], float]]


def samples_of(text: str) -> Samples:
    """The samples without those of buckets, by name: their labels and their values."""
    return {
        sample.name: (sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("vllm:") and not sample.name.endswith("_bucket")
    }


def shown(stats: EngineStats | None, adapters: AskedAdapters = AskedAdapters()) -> Samples:
    metrics = Metrics(lambda: stats)
    metrics.sequences.first_token_seconds.observe(0.25)
    metrics.sequences.token_gap_seconds.observe(0.5)
    metrics.show_vllm_names(
        model_name="base",
        stats=lambda: stats,
        sizes=lambda: EngineSizes(16, 100, 64),
        adapters=lambda: adapters,
    )
    return samples_of(metrics.render().decode())


def test_the_figures_of_the_engine_have_the_names_of_vllm() -> None:
    samples = shown(STATS)
    values = {
        "vllm:num_requests_running": 2,
        "vllm:num_requests_waiting": 3,
        "vllm:kv_cache_usage_perc": 0.75,
        "vllm:gpu_cache_usage_perc": 0.75,
        "vllm:num_preemptions_total": 5,
        "vllm:prompt_tokens_total": 6,
        "vllm:generation_tokens_total": 8,
        "vllm:prefix_cache_queries_total": 13,
        "vllm:gpu_prefix_cache_queries_total": 13,
        "vllm:prefix_cache_hits_total": 7,
        "vllm:gpu_prefix_cache_hits_total": 7,
    }
    assert {name: samples[name] for name in values} == {
        name: ({"model_name": "base"}, value) for name, value in values.items()
    }
    labels, value = samples["vllm:cache_config_info"]
    assert (labels, value) == ({"block_size": "16", "num_gpu_blocks": "100"}, 1)


ENDPOINT_PICKER = (
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:lora_requests_info",
    "vllm:cache_config_info",
)
"""The names in llm-d-router's `extractor/metrics/factories.go`."""
RESIDENCY = (
    "vllm:lora_adapter_loaded",
    "vllm:num_gpu_loaded_lora_adapters",
    "vllm:max_gpu_lora_adapters",
    "vllm:lora_adapter_load_seconds",
)
"""Others there. One of them alone would say that no adapter is loaded."""
PRODUCTION_STACK = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:gpu_cache_usage_perc",
    "vllm:gpu_prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_queries_total",
)
"""The names in production-stack's `stats/engine_stats.py` that vLLM still has."""


def test_routers_find_every_name_that_the_documentation_says_they_find() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and " | all" in line]
    assert len(rows) == 2
    samples = shown(STATS, AskedAdapters(frozenset({"a"}), frozenset()))
    for row, names in zip(rows, (ENDPOINT_PICKER, PRODUCTION_STACK), strict=True):
        assert all(f"`{name}`" in row for name in names)
        assert set(names) <= samples.keys()
    assert not samples.keys() & set(RESIDENCY)
    assert all(f"`{name}`" in page for name in RESIDENCY)


def test_histograms_are_ours_under_other_names() -> None:
    samples = shown(STATS)
    for name, seconds in (("time_to_first_token", 0.25), ("inter_token_latency", 0.5)):
        labels, total = samples[f"vllm:{name}_seconds_sum"]
        assert (labels, total) == ({"model_name": "base"}, seconds)
        assert samples[f"vllm:{name}_seconds_count"][1] == 1


def test_the_adapters_of_open_requests_are_labels() -> None:
    asked = AskedAdapters(frozenset({"b", "a@prod"}), frozenset({"c"}))
    labels, when = shown(STATS, asked)["vllm:lora_requests_info"]
    assert labels == {
        "max_lora": "64",
        "running_lora_adapters": "a@prod,b",
        "waiting_lora_adapters": "c",
    }
    assert abs(when - time.time()) < 60


def test_nothing_is_said_of_an_engine_that_is_down() -> None:
    assert not {"vllm:num_requests_running", "vllm:lora_requests_info"} & set(shown(None))


def test_a_server_without_the_option_has_no_such_names(server: ServerUnderTest) -> None:
    assert samples_of(httpx.get(f"{server.url}/metrics").text) == {}


@pytest.fixture(scope="module")
def running(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    """A server with the option."""
    data_dir = tmp_path_factory.mktemp("vllm-metrics")
    with serving(tiny_base, data_dir, "--vllm-metrics", "--served-model-name", "tiny") as made:
        yield made


@pytest.fixture(scope="module")
def vllm_caller(running: ServerUnderTest, adapters: list[Path]) -> Caller:
    caller = running.make_caller("vllm-metrics")
    caller.push(adapters[0], "bot")
    return caller


def test_a_router_sees_the_adapter_of_a_running_request_until_it_ends(
    running: ServerUnderTest, vllm_caller: Caller
) -> None:
    def scrape() -> Samples:
        return samples_of(httpx.get(f"{running.url}/metrics").text)

    def running_adapters() -> str:
        return scrape()["vllm:lora_requests_info"][0]["running_lora_adapters"]

    is_seen = threading.Event()

    def generate() -> None:
        body = {"model": "bot@1", "prompt": "x", "max_tokens": 400, "ignore_eos": True}
        while not is_seen.is_set():
            assert vllm_caller.http.post("/v1/completions", json=body).is_success

    asking = threading.Thread(target=generate)
    asking.start()
    try:
        assert wait_for(running_adapters) == "bot@1"
    finally:
        is_seen.set()
        asking.join()
    assert running_adapters() == ""
    generated = "vllm:generation_tokens_total"
    wait_for(lambda: scrape()[generated][1] >= 400)
    assert scrape()[generated][0] == {"model_name": "tiny"}
    assert scrape()["vllm:time_to_first_token_seconds_count"][1] >= 1
