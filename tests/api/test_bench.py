"""The benchmark's statistics, its prompts, and its client with a minimal server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
import pytest

from loraplex.api.bench.load_client import RequestFailed, run_workload
from loraplex.api.bench.models import BaseShape, text_token_ids
from loraplex.api.bench.serving import Plan, ServedBase, Target, measure
from loraplex.api.bench.summary import RequestTiming, Run, percentile, summarize
from loraplex.api.bench.workload import Workload, load_requests


def make_workload(**changes: object) -> Workload:
    settings: dict[str, object] = {
        "models": ("a", "b", "c"),
        "num_requests": 7,
        "concurrency": 3,
        "prompt_tokens": 5,
        "output_tokens": 4,
        "token_ids": range(10, 1_000),
        "seed": 3,
        **changes,
    }
    return Workload(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("percent", [0, 1, 50, 95, 99, 100])
@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_percentiles_are_numpys(percent: int, size: int) -> None:
    values = np.random.default_rng(size).exponential(size=size).tolist()
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_percentile_of_nothing_or_beyond_all_is_refused(
    values: Sequence[float], percent: float
) -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, percent)


def test_summary_takes_the_median_run_and_every_requests_latencies() -> None:
    runs = [
        Run((RequestTiming(sent=0.0, chunks=(0.1, 0.2, 0.4), output_tokens=4),), wall_seconds=wall)
        for wall in (1.0, 3.0, 0.5)
    ]
    summary = summarize(runs)
    assert summary.runs == (4.0, 4 / 3, 8.0)
    assert summary.output_tokens_per_second == 4.0
    assert summary.ttft_ms["p99"] == pytest.approx(100)
    assert summary.itl_ms["p50"] == pytest.approx(150)  # two of the four tokens came together
    assert summary.tpot_ms["p50"] == pytest.approx(100)


def test_an_answer_of_one_token_has_no_time_per_further_token() -> None:
    assert RequestTiming(sent=0.0, chunks=(0.1,), output_tokens=1).tpot_seconds is None


def test_requests_go_to_the_models_in_turn() -> None:
    assert [r.model for r in load_requests(make_workload())] == ["a", "b", "c", "a", "b", "c", "a"]


def test_prompts_are_reproducible_of_full_length_and_share_no_prefix() -> None:
    workload = make_workload(num_requests=40, prompt_tokens=16, token_ids=range(257, 32_000))
    prompts = [request.prompt for request in load_requests(workload)]
    assert prompts == [request.prompt for request in load_requests(workload)]
    assert all(len(p) == 16 and set(p) <= set(workload.token_ids) for p in prompts)
    assert all(one[:2] != other[:2] for one, other in combinations(prompts, 2))
    assert prompts[0] != load_requests(make_workload(seed=4))[0].prompt


def test_prompts_are_drawn_from_tokens_that_are_text() -> None:
    assert text_token_ids(BaseShape(vocab_size=400)) == range(257, 400)


class FakeServer:
    """Speaks as much HTTP as one streamed completion takes; `events` makes a request's stream."""

    def __init__(
        self, events: Callable[[dict[str, object]], list[str]], status: str = "200 OK"
    ) -> None:
        self.bodies: list[dict[str, object]] = []
        self.authorizations: set[str] = set()
        self.num_open = 0
        self.max_open = 0
        self._events = events
        self._status = status

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        self.bodies.append(body)
        self.authorizations.add(headers["authorization"])
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        writer.write(f"HTTP/1.1 {self._status}\r\nConnection: close\r\n\r\n".encode())
        for event in self._events(body):
            writer.write(f"data: {event}\n\n".encode())
            await writer.drain()
        self.num_open -= 1
        writer.close()


def stream_of(body: dict[str, object]) -> list[str]:
    """A whole answer, as the server streams it: text, the finish reason, the usage, the end."""
    text = ['{"choices":[{"text":"x"}]}'] * int(str(body["max_tokens"]))
    usage = json.dumps({"choices": [], "usage": {"completion_tokens": len(text)}})
    finish = '{"choices":[{"text":"","finish_reason":"length"}]}'
    return [*text, finish, usage.replace(" ", ""), "[DONE]"]


def run_against(server: FakeServer, workload: Workload) -> Run:
    async def run() -> Run:
        listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        async with listening:
            return await run_workload(workload, base_url=f"http://127.0.0.1:{port}/v1", api_key="k")

    return asyncio.run(run())


def test_client_sends_every_request_once_and_no_more_at_a_time_than_told() -> None:
    server = FakeServer(stream_of)
    workload = make_workload(num_requests=9)
    run = run_against(server, workload)
    sent = sorted(json.dumps([body["model"], body["prompt"]]) for body in server.bodies)
    planned = sorted(json.dumps([r.model, r.prompt]) for r in load_requests(workload))
    assert sent == planned
    assert 1 <= server.max_open <= workload.concurrency
    assert server.authorizations == {"bearer k"}
    assert len(run.timings) == 9


def test_client_asks_for_greedy_output_of_a_fixed_length() -> None:
    server = FakeServer(stream_of)
    run_against(server, make_workload(num_requests=1))
    body = server.bodies[0]
    assert (body["temperature"], body["ignore_eos"], body["max_tokens"]) == (0, True, 4)


def test_client_times_text_and_nothing_else() -> None:
    run = run_against(FakeServer(stream_of), make_workload(num_requests=2))
    for timing in run.timings:
        assert timing.output_tokens == len(timing.chunks) == 4
        assert timing.sent < timing.chunks[0] <= timing.chunks[-1] <= timing.sent + run.wall_seconds


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (lambda body: stream_of({"max_tokens": 3}), "3 of 4 tokens"),
        (lambda body: stream_of(body)[:-2], "None of 4 tokens"),
        (lambda body: [], "None of 4 tokens"),
        (lambda body: ['{"error":{"message":"engine gone"}}'], "engine gone"),
    ],
    ids=["too short", "without usage", "empty", "error"],
)
def test_client_refuses_an_answer_that_is_not_whole(
    events: Callable[[dict[str, object]], list[str]], message: str
) -> None:
    with pytest.raises(RequestFailed, match=message):
        run_against(FakeServer(events), make_workload(num_requests=1, concurrency=1))


def test_client_reports_an_error_status_with_its_body() -> None:
    server = FakeServer(lambda body: ["no such model"], status="404 Not Found")
    with pytest.raises(RequestFailed, match=r"HTTP 404: .*no such model"):
        run_against(server, make_workload(num_requests=1, concurrency=1))


def test_client_reports_a_server_that_is_not_there() -> None:
    workload = make_workload(num_requests=1)
    with pytest.raises(RequestFailed, match="a: "):
        asyncio.run(run_workload(workload, base_url="http://127.0.0.1:1/v1", api_key="k"))


def test_mix_and_base_take_turns_behind_a_warm_up_and_share_no_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Workload] = []

    async def fake_run(workload: Workload, **_: object) -> Run:
        sent.append(workload)
        speed = 10.0 if len(workload.models) > 1 else 20.0
        timing = RequestTiming(sent=0.0, chunks=(0.1, 0.2), output_tokens=2)
        return Run((timing,), wall_seconds=2 / speed)

    monkeypatch.setattr("loraplex.api.bench.serving.run_workload", fake_run)
    plan = Plan(concurrency=2, num_requests=5, num_adapters=3, repeats=2)
    base = ServedBase("base", dtype="float32", quantization="none")
    target = Target("http://x/v1", "k", base=base, adapters=["a", "b", "c"])
    report = measure(plan, target, BaseShape(), on_finished=lambda: None)
    assert [len(w.models) for w in sent] == [3, 1, 3, 1, 3, 1]
    assert [w.num_requests for w in sent] == [3, 3, 5, 5, 5, 5]
    assert sum(w.num_requests for w in sent) == plan.num_sent
    assert len({w.seed for w in sent}) == len(sent)
    assert report.ratio == pytest.approx(0.5)
    written = json.loads(json.dumps(report.as_json()))
    assert written["mixed"]["output_tokens_per_second"] == pytest.approx(10)
    assert written["ratio"] == report.ratio
