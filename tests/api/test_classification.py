"""Classifiers from the push to `/v1/classify`, `/v1/score` and `/v1/rerank`, against PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from loraplex.api.cli.exit_codes import ExitCode
from loraplex.api.client.errors import ApiRefused
from loraplex.api.schemas.classification import ClassifyBody
from loraplex.api.schemas.scores import RerankBody, ScoreBody
from loraplex.engine.text.tokenizer import Tokenizer
from support.classifiers import class_logits, save_classifier
from support.command import Command
from support.envelopes import check_envelope
from support.server import Caller, ServerUnderTest

TOLERANCE = 1e-4
TEXTS = ["Hello", "A much longer sentence, so that one chunk after the other is read." * 3, "ok"]
LABELS = ["billing", "outage", "other"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("classifiers")


@pytest.fixture(scope="module")
def tuned(tiny_base: Path, folder: Path) -> dict[str, PeftModel]:
    """PEFT's models: of three topics, of any of two tags, and of the relevance to a query."""
    counts = {"topics": 3, "tags": 2, "relevance": 1, "rating": 1}
    models = {
        name: save_classifier(tiny_base, folder / name, num_labels=count, seed=seed)
        for seed, (name, count) in enumerate(counts.items())
    }
    write_model_config(folder / "topics", id2label=dict(enumerate(LABELS)))
    write_model_config(folder / "tags", problem_type="multi_label_classification")
    write_model_config(folder / "rating", problem_type="regression", id2label={"0": "stars"})
    return models


def write_model_config(path: Path, **fields: Any) -> None:
    """As trainers save it beside the adapter."""
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **fields}))


@pytest.fixture(scope="module")
def caller(
    server: ServerUnderTest, folder: Path, tuned: dict[str, PeftModel], adapters: list[Path]
) -> Caller:
    """A tenant with the classifiers, and the plain adapter `bot`."""
    caller = server.make_caller("classifiers")
    for name in tuned:
        caller.push(folder / name, name)
    caller.push(adapters[0], "bot")
    return caller


def post(caller: Caller, path: str, **body: Any) -> dict[str, Any]:
    answer = caller.http.post(path, json=body)
    assert answer.is_success, answer.text
    content: dict[str, Any] = answer.json()
    return content


def expected(tuned: PeftModel, base: Path, *texts: str) -> torch.Tensor:
    return class_logits(tuned, Tokenizer(base).encode("".join(texts)))


def distance(found: list[float], wanted: torch.Tensor) -> float:
    return float((torch.tensor(found) - wanted).abs().max())


def test_texts_get_the_labels_and_probabilities_of_peft(
    server: ServerUnderTest, caller: Caller, tuned: dict[str, PeftModel], tiny_base: Path
) -> None:
    sent = caller.http.post("/v1/classify", json={"model": "topics", "input": TEXTS})
    answer = sent.json()
    num_tokens = sum(map(len, TEXTS))
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert (answer["object"], answer["model"]) == ("list", "classifiers/topics@1")
    for index, (text, entry) in enumerate(zip(TEXTS, answer["data"], strict=True)):
        probs = expected(tuned["topics"], tiny_base, text).softmax(-1)
        assert distance(entry["probs"], probs) < TOLERANCE
        assert entry["label"] == LABELS[int(probs.argmax())]
        assert (entry["index"], entry["num_classes"]) == (index, 3)
    row = server.usage_of(sent.headers["x-request-id"], caller)
    assert row is not None
    assert (row.prompt_tokens, row.completion_tokens) == (num_tokens, 0)
    assert row.adapter_name == "topics"


def test_each_kind_of_problem_has_its_own_activation(
    caller: Caller, tuned: dict[str, PeftModel], tiny_base: Path
) -> None:
    wanted = {
        "tags": expected(tuned["tags"], tiny_base, "x").sigmoid(),
        "relevance": expected(tuned["relevance"], tiny_base, "x").sigmoid(),
        "rating": expected(tuned["rating"], tiny_base, "x"),
    }
    for name, outputs in wanted.items():
        (entry,) = post(caller, "/v1/classify", model=name, input="x")["data"]
        assert distance(entry["probs"], outputs) < TOLERANCE
        raw = post(caller, "/v1/classify", model=name, input="x", use_activation=False)
        plain = expected(tuned[name], tiny_base, "x")
        assert distance(raw["data"][0]["probs"], plain) < TOLERANCE
    (rated,) = post(caller, "/v1/classify", model="rating", input="x")["data"]
    assert rated["label"] == "stars"


def test_pairs_are_scored_one_to_one_and_one_to_many(
    caller: Caller, tuned: dict[str, PeftModel], tiny_base: Path
) -> None:
    many = post(caller, "/v1/score", model="relevance", text_1="query: ", text_2=TEXTS)
    same = post(caller, "/v1/score", model="relevance", text_1=["query: "] * 3, text_2=TEXTS)
    for index, text in enumerate(TEXTS):
        score = expected(tuned["relevance"], tiny_base, "query: ", text).sigmoid()
        for entry in (many["data"][index], same["data"][index]):
            assert distance([entry["score"]], score) < TOLERANCE
            assert (entry["index"], entry["object"]) == (index, "score")
    assert many["usage"]["prompt_tokens"] == 3 * len("query: ") + sum(map(len, TEXTS))


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_ranked_by_their_scores(caller: Caller, path: str) -> None:
    body = {"model": "relevance", "query": "query: "}
    scores = post(caller, "/v1/score", model="relevance", text_1="query: ", text_2=TEXTS)["data"]
    answer = post(caller, path, **body, documents=[TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]])
    best_first = sorted(scores, key=lambda entry: -entry["score"])
    assert answer["results"] == [
        {
            "index": entry["index"],
            "relevance_score": pytest.approx(entry["score"], abs=1e-5),
            "document": {"text": TEXTS[entry["index"]]},
        }
        for entry in best_first
    ]
    few = post(caller, path, **body, documents=TEXTS, top_n=2, return_documents=False)
    assert [entry["index"] for entry in few["results"]] == [e["index"] for e in best_first[:2]]
    assert [entry["document"] for entry in few["results"]] == [None, None]


def test_the_paths_of_vllm_are_the_same_routes(caller: Caller) -> None:
    pair = {"model": "relevance", "text_1": "query: ", "text_2": TEXTS}
    scores = [post(caller, path, **pair)["data"] for path in ("/score", "/v1/score")]
    assert [e["score"] for e in scores[0]] == pytest.approx([e["score"] for e in scores[1]])
    labels = [
        post(caller, path, model="topics", input=TEXTS)["data"]
        for path in ("/classify", "/v1/classify")
    ]
    assert [e["label"] for e in labels[0]] == [e["label"] for e in labels[1]]


def test_long_documents_lose_their_ends_alone(caller: Caller) -> None:
    body = {"model": "relevance", "query": "query: ", "documents": ["short", "y" * 600]}
    refused = caller.http.post("/v1/rerank", json=body)
    check_envelope(refused, "context_length_exceeded")
    cut = post(caller, "/v1/rerank", **body, max_tokens_per_doc=20)
    alone = post(caller, "/v1/rerank", **{**body, "documents": ["short", "y" * 20]})
    assert cut["usage"] == alone["usage"]
    assert [e["index"] for e in cut["results"]] == [e["index"] for e in alone["results"]]
    scores = [[e["relevance_score"] for e in answer["results"]] for answer in (cut, alone)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)
    assert cut["results"][0]["document"]["text"] in body["documents"], "as it was sent"
    refused = caller.http.post("/v1/rerank", json={**body, "max_tokens_per_doc": 0})
    check_envelope(refused, "invalid_parameter", "max_tokens_per_doc")


def test_the_document_of_a_long_pair_loses_its_end(caller: Caller) -> None:
    score = {"model": "relevance", "text_1": "q" * 10}
    refused = caller.http.post("/v1/score", json={**score, "text_2": "y" * 600})
    check_envelope(refused, "context_length_exceeded")
    cut = post(caller, "/v1/score", **score, text_2="y" * 600, truncate_prompt_tokens=30)
    alone = post(caller, "/v1/score", **score, text_2="y" * 20)
    assert cut["usage"]["prompt_tokens"] == 30
    assert cut["data"][0]["score"] == pytest.approx(alone["data"][0]["score"], abs=1e-5)
    longest = post(caller, "/v1/score", **score, text_2="y" * 600, truncate_prompt_tokens=-1)
    assert longest["usage"]["prompt_tokens"] == 512
    refused = caller.http.post(
        "/v1/score", json={**score, "text_2": "y", "truncate_prompt_tokens": 5}
    )
    check_envelope(refused, "invalid_parameter", "truncate_prompt_tokens")


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("/v1/classify", {"model": "bot", "input": "x"}, "not_a_classifier", None),
        ("/v1/classify", {"model": "tiny", "input": "x"}, "not_a_classifier", None),
        ("/v1/classify", {"model": "topics", "input": ""}, "invalid_parameter", "input"),
        (
            "/v1/classify",
            {"model": "topics", "messages": []},
            "invalid_parameter",
            "input",
        ),
        ("/v1/classify", {"model": "nobody/topics", "input": "x"}, "model_not_found", None),
        (
            "/v1/score",
            {"model": "bot", "text_1": "x", "text_2": "y"},
            "not_a_classifier",
            None,
        ),
        ("/v1/score", {"model": "topics", "text_1": "x", "text_2": "y"}, "not_a_scorer", None),
        (
            "/v1/score",
            {"model": "relevance", "text_1": ["x", "y"], "text_2": "z"},
            "invalid_parameter",
            "text_2",
        ),
        ("/v1/rerank", {"model": "tags", "query": "x", "documents": ["y"]}, "not_a_scorer", None),
        (
            "/v1/rerank",
            {"model": "relevance", "query": "x", "documents": []},
            "invalid_parameter",
            "documents",
        ),
        (
            "/v1/rerank",
            {"model": "relevance", "query": "x", "documents": ["y"], "rank_fields": ["a"]},
            "unsupported_parameter",
            "rank_fields",
        ),
        ("/v1/completions", {"model": "topics", "prompt": "x"}, "classifier_only", None),
        (
            "/v1/completions",
            {"model": "topics", "prompt": "x", "max_tokens": 0, "prompt_logprobs": 1},
            "classifier_only",
            None,
        ),
        (
            "/v1/chat/completions",
            {"model": "topics", "messages": [{"role": "user", "content": "x"}]},
            "classifier_only",
            None,
        ),
        ("/v1/responses", {"model": "topics", "input": "x"}, "classifier_only", None),
    ],
)
def test_what_a_model_cannot_do_is_refused_by_name(
    caller: Caller, path: str, body: dict[str, Any], code: str, param: str | None
) -> None:
    check_envelope(caller.http.post(path, json=body), code, param)


def test_a_classifiers_states_can_be_embedded(caller: Caller) -> None:
    answer = post(caller, "/v1/embeddings", model="topics", input="x")
    assert len(answer["data"][0]["embedding"]) == 64


def test_versions_name_their_labels_and_are_attested_as_others(caller: Caller) -> None:
    (version,) = caller.http.get("/v1/adapters/topics").json()["versions"]
    assert "classification" in version["features"]
    assert version["report"]["classification"] == {"labels": LABELS, "problem_type": None}
    assert version["task"] == "classify"
    (plain,) = caller.http.get("/v1/adapters/bot").json()["versions"]
    assert plain["report"]["classification"] is None
    assert plain["task"] == "generate"
    assert version["attestation"].keys() == plain["attestation"].keys()


def test_lists_tell_classifiers_from_other_models(caller: Caller) -> None:
    classifiers = {"topics", "tags", "relevance", "rating"}
    cards = caller.http.get("/v1/models").json()["data"]
    assert {card["id"] for card in cards if card["task"] == "classify"} == classifiers
    assert {card["id"] for card in cards if card["task"] == "generate"} == {"bot", "tiny"}
    listed = caller.http.get("/v1/adapters").json()["data"]
    assert {row["name"] for row in listed if row["task"] == "classify"} == classifiers
    for name in ("topics", "bot"):
        card = caller.http.get(f"/v1/models/{name}").json()
        assert card["task"] == ("classify" if name in classifiers else "generate")


def test_push_says_how_to_call_a_classifier(
    server: ServerUnderTest,
    folder: Path,
    tuned: dict[str, PeftModel],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caller = server.make_caller("pushes-classifiers")
    command = Command(monkeypatch, capsys, caller)
    code, out, err = command("push", str(folder / "tags"), "tags")
    assert (code, out) == (ExitCode.OK, "pushes-classifiers/tags@1\n")
    assert f"curl {caller.url}/v1/classify" in err
    assert '"model": "pushes-classifiers/tags@1"' in err
    assert "chat" not in err


@pytest.mark.parametrize(
    ("name", "path", "field"), [("topics", "classify", "input"), ("relevance", "rerank", "query")]
)
def test_show_names_the_route_of_a_classifier(
    caller: Caller,
    name: str,
    path: str,
    field: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = Command(monkeypatch, capsys, caller)("show", name)
    assert code == ExitCode.OK
    assert "classify" in out
    assert f"curl {caller.url}/v1/{path}" in err
    sent = json.loads(err.partition("-d '")[2].partition("'")[0])
    assert field in sent
    answer = caller.http.post(f"/v1/{path}", json=sent)
    assert answer.status_code == 200, answer.text


def test_labels_that_are_not_those_of_the_head_are_refused(
    caller: Caller, folder: Path, tuned: dict[str, PeftModel], tmp_path: Path
) -> None:
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / file).write_bytes((folder / "topics" / file).read_bytes())
    write_model_config(tmp_path, id2label={"0": "no", "1": "yes"})
    with pytest.raises(ApiRefused, match="id2label has 2 labels; the head has 3") as refusal:
        caller.push(tmp_path, "mislabelled")
    assert refusal.value.code == "config_contradiction"


def test_every_field_is_described() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    section = page.partition("## Classification, scores and ranking")[2].partition("\n## ")[0]
    rows = "".join(line for line in section.splitlines() if line.startswith("|"))
    for body in (ClassifyBody, ScoreBody, RerankBody):
        for name in {*body.model_fields, *body.tolerated} - {"model"}:
            assert f"`{name}`" in rows
