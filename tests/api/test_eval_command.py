"""`loraplex eval` with a running server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loraplex.api.cli.exit_codes import ExitCode
from loraplex.api.client.api_client import ApiClient
from support.command import Command
from support.server import Caller, ServerUnderTest

PROMPTS = ["one", "two two", "three"]


@pytest.fixture
def owner(caller: Caller, adapters: list[Path]) -> Caller:
    """A tenant with `bot@1`, which requests get, and `bot@2`."""
    caller.push(adapters[0], "bot", aliases=["prod"])
    caller.push(adapters[1], "bot", aliases=["next"])
    return caller


@pytest.fixture
def evaluate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], owner: Caller
) -> Command:
    return Command(monkeypatch, capsys, owner, "eval")


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes a golden set; its path."""

    def write(*cases: dict[str, Any]) -> str:
        path = tmp_path / "golden.jsonl"
        path.write_text("".join(f"{json.dumps(case)}\n" for case in cases))
        return str(path)

    return write


def answer(caller: Caller, model: str, prompt: str) -> str:
    """The greedy answer, asked directly."""
    asked = caller.openai.completions.create(
        model=model, prompt=prompt, max_tokens=6, temperature=0
    )
    return asked.choices[0].text


def expecting(caller: Caller, model: str, **more: Any) -> list[dict[str, Any]]:
    """Cases that the model answers as expected."""
    return [
        {
            "id": prompt,
            "prompt": prompt,
            "expected": answer(caller, model, prompt),
            "request": {"max_tokens": 6},
            **more,
        }
        for prompt in PROMPTS
    ]


def num_batches(caller: Caller) -> int:
    return len(list(caller.openai.batches.list()))


@pytest.mark.slow
def test_a_better_version_is_compared_with_the_one_that_requests_get(
    evaluate: Command, owner: Caller, write: Callable[..., str], tmp_path: Path
) -> None:
    cases = expecting(owner, "bot@2")
    cases[0]["slices"] = ["first"]
    golden_set = write(*cases)
    report = evaluate.ask("bot@next", "--set", golden_set)
    assert report["models"] == {"candidate": "bot@2", "against": "bot@1", "base": "tiny"}
    assert not report["is_regression"]
    for case, prompt in zip(report["cases"], PROMPTS, strict=True):
        for model in ("bot@2", "bot@1", "tiny"):
            alone = answer(owner, model, prompt)
            assert case["answers"][model] == alone, "as without a batch"
            assert case["scores"][model] == (alone.strip() == case["answers"]["bot@2"].strip())
    first, second = report["slices"]
    assert (first["slice"], first["num_cases"]) == ("all", 3)
    assert (second["slice"], second["num_cases"]) == ("first", 1)
    assert first["candidate"]["mean"] == 1.0
    gains = [1.0 - case["scores"]["bot@1"] for case in report["cases"]]
    assert first["difference"]["mean"] == pytest.approx(sum(gains) / 3)
    assert sum(gains) > 0, "the versions differ"
    kept = tmp_path / "golden.eval" / "bot@2" / "report.json"
    assert json.loads(kept.read_text()) == report


@pytest.mark.slow
def test_a_regression_beyond_the_tolerance_fails(
    evaluate: Command, owner: Caller, write: Callable[..., str]
) -> None:
    golden_set = write(*expecting(owner, "bot@1"))
    code, out, err = evaluate("bot@2", "--set", golden_set)
    assert code == ExitCode.FAILED
    assert "bot@2 is worse than bot@1: all" in err
    header, every, _, _, *worse = out.splitlines()
    assert header.split() == [
        "slice",
        "cases",
        "tiny",
        "bot@1",
        "bot@2",
        "difference",
        "regression",
    ]
    assert every.split()[:2] == ["all", "3"]
    assert every.endswith("yes")
    assert worse, "cases that are worse are listed"
    assert evaluate("bot@2", "--set", golden_set, "--tolerance", "1")[0] == ExitCode.OK


def test_the_version_that_requests_get_is_compared_with_the_base(
    evaluate: Command, owner: Caller, write: Callable[..., str]
) -> None:
    report = evaluate.ask("bot", "--set", write(*expecting(owner, "bot@1")))
    assert report["models"] == {"candidate": "bot@1", "against": "tiny", "base": "tiny"}
    other = evaluate.ask("bot", "--set", write(*expecting(owner, "bot@1")), "--against", "bot@2")
    assert other["models"]["against"] == "bot@2"


@pytest.mark.slow
def test_the_answers_of_a_finished_evaluation_are_reused_unless_forced(
    evaluate: Command, owner: Caller, write: Callable[..., str]
) -> None:
    golden_set = write(*expecting(owner, "bot@2"))
    report = evaluate.ask("bot@2", "--set", golden_set)
    assert evaluate.ask("bot@2", "--set", golden_set) == report
    assert num_batches(owner) == 1
    assert evaluate.ask("bot@2", "--set", golden_set, "--force") == report
    assert num_batches(owner) == 2
    changed = write(*expecting(owner, "bot@2")[:2])
    assert len(evaluate.ask("bot@2", "--set", changed)["cases"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["post_file", "post", "download"])
def test_an_interrupted_evaluation_goes_on_with_the_same_batch(
    evaluate: Command,
    owner: Caller,
    write: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    lost: str,
) -> None:
    golden_set = write(*expecting(owner, "bot@2"))
    true = getattr(ApiClient, lost)

    def interrupted(self: ApiClient, *args: Any, **kwargs: Any) -> Any:
        true(self, *args, **kwargs)  # it arrives, and its answer does not
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ApiClient, lost, interrupted)
        assert evaluate("bot@2", "--set", golden_set)[0] == ExitCode.INTERRUPTED
    assert len(evaluate.ask("bot@2", "--set", golden_set)["cases"]) == 3
    assert num_batches(owner) == 1


@pytest.mark.slow
def test_chats_follow_schemas_and_patterns(evaluate: Command, write: Callable[..., str]) -> None:
    messages = [{"role": "user", "content": "Is it?"}]
    choice = {"max_tokens": 8, "structured_outputs": {"choice": ["true", "false"]}}
    asked = {"messages": messages, "request": choice}
    report = evaluate.ask(
        "bot@2",
        "--set",
        write(
            {"id": "schema", **asked, "schema": {"type": "boolean"}},
            {"id": "none", **asked, "schema": {"type": "string"}},
            {"id": "pattern", **asked, "pattern": "^(true|false)$"},
            {"id": "words", **asked, "expected": "true or false", "scorer": "rouge_l"},
        ),
    )
    scores = {case["id"]: case["scores"]["bot@2"] for case in report["cases"]}
    assert scores == {"schema": 1, "none": 0, "pattern": 1, "words": pytest.approx(0.5)}


@pytest.mark.slow
def test_embeddings_are_those_of_the_base(
    evaluate: Command, owner: Caller, write: Callable[..., str]
) -> None:
    report = evaluate.ask("bot@2", "--set", write(*expecting(owner, "bot@2", scorer="embedding")))
    for case in report["cases"]:
        texts = [case["answers"]["bot@1"], case["answers"]["bot@2"]]  # the second as expected
        embedded = owner.openai.embeddings.create(model="tiny", input=texts)
        one, other = (np.array(each.embedding) for each in embedded.data)
        expected = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
        assert case["scores"]["bot@1"] == pytest.approx(max(expected, 0), abs=1e-4)
        assert case["scores"]["bot@2"] == pytest.approx(1)


@pytest.mark.slow
def test_a_judge_compares_answers_in_both_orders(
    evaluate: Command, owner: Caller, write: Callable[..., str], tmp_path: Path
) -> None:
    golden_set = write(*expecting(owner, "bot@2", scorer="judge"))
    code, _, err = evaluate("bot@2", "--set", golden_set)
    assert (code, "--judge MODEL" in err) == (ExitCode.USAGE, True)
    report = evaluate.ask("bot@2", "--set", golden_set, "--judge", "bot@1", "--tolerance", "1")
    for case in report["cases"]:
        assert case["scores"]["bot@1"] == 0.5
        assert case["scores"]["bot@2"] in (0, 0.25, 0.5, 0.75, 1)
    folder = tmp_path / "golden.eval" / "bot@2"
    asked = [json.loads(line) for line in (folder / "judge.jsonl").read_text().splitlines()]
    assert {line["body"]["model"] for line in asked} == {"bot@1"}
    said, turned = (line["body"]["messages"][0]["content"] for line in asked[:2])
    first, second = report["cases"][0]["answers"]["bot@2"], report["cases"][0]["answers"]["bot@1"]
    assert f"Answer A:\n{first}\n\nAnswer B:\n{second}" in said
    assert f"Answer A:\n{second}\n\nAnswer B:\n{first}" in turned


@pytest.mark.slow
def test_every_answer_is_charged_to_the_tenant(
    evaluate: Command,
    owner: Caller,
    server: ServerUnderTest,
    write: Callable[..., str],
    tmp_path: Path,
) -> None:
    evaluate.ask("bot@2", "--set", write(*expecting(owner, "bot@2")))
    results = (tmp_path / "golden.eval" / "bot@2" / "answers.out.jsonl").read_text().splitlines()
    assert len(results) == 9
    for response in (json.loads(line)["response"] for line in results):
        record = server.usage_of(response["request_id"], owner)
        assert record is not None
        assert record.completion_tokens == response["body"]["usage"]["completion_tokens"] > 0


@pytest.mark.slow
def test_a_case_without_an_answer_fails_the_evaluation(
    evaluate: Command, owner: Caller, write: Callable[..., str]
) -> None:
    cases = expecting(owner, "bot@2")
    cases[1]["request"] = {"max_tokens": 10**6}
    code, _, err = evaluate("bot@2", "--set", write(*cases))
    assert (code, "3 lines failed" in err) == (ExitCode.FAILED, True)
    code, _, err = evaluate("bot@2", "--set", write(*cases))
    assert (code, "3 lines failed" in err) == (ExitCode.FAILED, True), "and again"


def test_a_version_or_set_that_is_not_there_is_told(
    evaluate: Command, write: Callable[..., str]
) -> None:
    golden_set = write({"id": "a", "prompt": "p", "expected": "e"})
    assert evaluate("bot@nowhere", "--set", golden_set)[0] == ExitCode.NOT_FOUND
    code, _, err = evaluate("bot@2", "--set", write({"id": "a"}))
    assert (code, "line 1" in err) == (ExitCode.USAGE, True)
