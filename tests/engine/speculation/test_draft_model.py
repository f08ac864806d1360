from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.config import Acceptance, EngineConfig
from loraplex.engine.errors import EngineError, InvalidParameter, UnsupportedModel
from loraplex.engine.execution.sampler import SamplingRow, row_after
from loraplex.engine.kv.groups import one_group
from loraplex.engine.messages import Abort, SpeculationParams
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.rope import RotaryContexts
from loraplex.engine.model.whole_base import load_base_model
from loraplex.engine.request import Request
from loraplex.engine.speculation import draft_model, drawing
from loraplex.engine.speculation.draft_cache import DraftCache
from loraplex.engine.speculation.draft_model import DraftModelProposer
from loraplex.engine.speculation.drawing import CoupledDrawing, DrawnTokens, IndependentDrawing
from loraplex.engine.speculation.fair_shares import fair_shares
from loraplex.engine.speculation.proposer import DraftRequest
from support.draft_models import BLOCK_SIZE, make_proposer, make_request, prompt_of
from support.engine import LocalEngine
from support.models import make_tiny_llama

EAGER = SpeculationParams(num_tokens=8)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def loaded(tiny_base: Path) -> BaseModel:
    return load_base_model(EngineConfig(str(tiny_base), device="cpu"))


@pytest.fixture(scope="module")
def dense(tiny_base: Path) -> PreTrainedModel:
    """The same model as transformers computes it."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)
    return model.eval()


class Recorder:
    """Draws like another, and keeps what it saw: known and draft tokens, and their logits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[list[int], Tensor]] = []
        self._known: list[list[int]] = []
        """Of the next rows."""
        monkeypatch.setattr(drawing, "row_after", self._row_after)

    def draw(self, rows: Sequence[SamplingRow], logits: Tensor) -> DrawnTokens:
        self.seen += zip(self._known, logits, strict=True)
        self._known = []
        return CoupledDrawing().draw(rows, logits)

    def _row_after(self, request: Request, draft_tokens: Sequence[int]) -> SamplingRow:
        self._known.append([*request.token_ids, *draft_tokens])
        return row_after(request, draft_tokens)


def dense_logits(dense: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> Tensor:
    """`[len(sequences), vocab_size]`: of the token behind the last of each."""
    padded = pad_sequence([torch.tensor(list(tokens)) for tokens in sequences], batch_first=True)
    with torch.inference_mode():
        logits: Tensor = dense(padded, use_cache=False).logits
    return logits[torch.arange(len(sequences)), [len(tokens) - 1 for tokens in sequences]]


def assert_as_dense(dense: PreTrainedModel, seen: Sequence[tuple[list[int], Tensor]]) -> None:
    expected = dense_logits(dense, [token_ids for token_ids, _ in seen])
    error = (torch.stack([logits for _, logits in seen]) - expected).abs().amax(-1)
    wrong = error / expected.abs().amax(-1) > TOLERANCE
    assert not wrong.any(), f"{wrong.sum()} of {len(seen)}"


def test_a_draft_model_has_rotary_contexts_of_its_own() -> None:
    """Whatever the base's are: its frequencies depend on the greatest length of the request."""
    (group,) = one_group(1, 40)
    contexts = RotaryContexts((20, 100))
    cache = DraftCache(group, 4, rotary_contexts=contexts, prefix_secret=b"secret")
    prompt = prompt_of(9)
    found: list[tuple[int, int]] = []
    for max_tokens in (11, 12, 11, 30):
        request = make_request(f"{max_tokens}-{len(found)}", prompt, max_tokens=max_tokens)
        request.namespace = replace(request.namespace, rotary_start=7)
        sequence = cache.settle(request)
        found.append((sequence.namespace.rotary_start, sequence.num_computed))
        assert cache.reserve(request.request_id, 8 - sequence.num_computed, ())
        cache.advance(request, 8 - sequence.num_computed)
    assert found == [(0, 0), (20, 0), (0, 8), (20, 8)]


# --- the whole engine -----------------------------------------------------------------------------


def answers(
    base: Path,
    tmp_path: Path,
    temperature: float,
    *,
    ignore_eos: bool = False,
    **config: Any,
) -> tuple[dict[str, list[int]], int, int]:
    """What seven requests are answered; how many tokens were drafted and were right."""
    engine = LocalEngine(base, tmp_path, **config)
    for index in range(7):
        engine.submit(
            prompt_of(5 + 9 * index, seed=index),
            request_id=str(index),
            max_tokens=30,
            temperature=temperature,
            seed=index,
            ignore_eos=ignore_eos,
            speculation=EAGER,
        )
    engine.run()
    engine.close()
    ends = [answer.finished for answer in engine.answers.values() if answer.finished]
    assert all(end.error is None for end in ends)
    return (
        {name: answer.token_ids for name, answer in engine.answers.items()},
        sum(end.num_draft_tokens for end in ends),
        sum(end.num_accepted_tokens for end in ends),
    )


@pytest.mark.parametrize("acceptance", Acceptance)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_a_draft_model_that_is_the_base_drafts_everything(
    tiny_base: Path, tmp_path: Path, temperature: float, acceptance: Acceptance
) -> None:
    _, num_drafted, num_right = answers(
        tiny_base,
        tmp_path,
        temperature,
        ignore_eos=True,
        speculation=(f"draft:{tiny_base}",),
        acceptance=acceptance,
    )
    assert num_drafted > 150
    assert num_right >= 0.99 * num_drafted, "all but near-ties"


def test_beyond_the_length_that_the_draft_model_knows_nothing_is_drafted(
    tiny_base: Path, tmp_path: Path
) -> None:
    short = make_tiny_llama(tmp_path / "short", max_position_embeddings=48)
    plain, _, _ = answers(tiny_base, tmp_path, 0.0, ignore_eos=True)
    speculation = (f"draft:{short}",)
    speculated, num_drafted, num_right = answers(
        tiny_base, tmp_path, 0.0, ignore_eos=True, speculation=speculation
    )
    assert speculated == plain
    # Prompts of 5, 14, 23, 32 and 41 tokens have room for draft tokens, the others do not.
    assert 0 < num_right <= num_drafted < 30 * 5


def test_under_pressure_nothing_changes_and_nothing_leaks(tiny_base: Path, tmp_path: Path) -> None:
    """Few blocks: preemptions in the base's cache, caches given up in the draft model's."""

    def run(*speculation: str) -> tuple[dict[str, list[int]], LocalEngine]:
        engine = LocalEngine(
            tiny_base,
            tmp_path,
            speculation=speculation,
            max_draft_tokens=3,
            kv_block_size=BLOCK_SIZE,
            kv_cache_bytes=120 * BLOCK_SIZE * 512,
        )
        for index in range(24):
            prompt = prompt_of(12, index % 5) + prompt_of(8, 100 + index)
            engine.submit(
                prompt,
                request_id=str(index),
                max_tokens=30,
                ignore_eos=True,
                speculation=EAGER,
            )
        for count in range(12):
            engine.step()
            if count % 4 == 0:
                engine.core.handle(Abort(str(count)))
        engine.run()
        engine.close()
        tokens = {
            name: answer.token_ids
            for name, answer in engine.answers.items()
            if name not in ("0", "4", "8")
        }
        return tokens, engine

    plain, _ = run()
    speculated, engine = run(f"draft:{tiny_base}")
    assert speculated == plain
    assert engine.core.stats().num_preemptions > 0
    (proposer,) = engine.core.parts.speculation._proposers.values()
    assert isinstance(proposer, DraftModelProposer)
    proposer.cache.check_integrity()
    assert proposer.cache.num_free_blocks == proposer.cache.num_blocks


def test_a_long_draft_is_progress(tiny_base: Path, small_draft: Path, tmp_path: Path) -> None:
    class Beats:
        count = 0

        def beat(self) -> None:
            self.count += 1

        def begin_step(self, request_ids: object) -> None:
            pass

    def num_beats(*speculation: str) -> int:
        beats = Beats()
        engine = LocalEngine(tiny_base, tmp_path, speculation=speculation)
        engine.core.report_progress_to(beats)  # type: ignore[arg-type]
        engine.submit(prompt_of(9), max_tokens=9, ignore_eos=True, speculation=EAGER)
        engine.run()
        engine.close()
        return beats.count

    assert num_beats(f"draft:{small_draft}") > 2 * num_beats()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 300}, "vocabulary has 300 tokens, the base's 260"),
        ({"model_type": "mamba"}, "draft model"),
    ],
)
def test_a_model_that_cannot_be_the_draft_is_refused(
    tiny_base: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    draft = make_tiny_llama(tmp_path / "draft")
    config = draft / "config.json"
    edit_json(config, lambda contents: contents.update(changes))
    with pytest.raises(UnsupportedModel, match=message):
        LocalEngine(tiny_base, tmp_path, speculation=(f"draft:{draft}",))


def test_a_draft_model_with_another_tokenizer_is_refused(tiny_base: Path, tmp_path: Path) -> None:
    draft = make_tiny_llama(tmp_path / "draft")

    def swap(contents: dict[str, Any]) -> None:
        vocab = contents["model"]["vocab"]
        vocab["A"], vocab["B"] = vocab["B"], vocab["A"]

    edit_json(draft / "tokenizer.json", swap)
    with pytest.raises(UnsupportedModel, match="they differ in the token 'A'"):
        LocalEngine(tiny_base, tmp_path, speculation=(f"draft:{draft}",))
    (draft / "tokenizer.json").write_text('{"model": 7}')
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json cannot be read"):
        LocalEngine(tiny_base, tmp_path, speculation=(f"draft:{draft}",))
    (draft / "tokenizer.json").unlink()
    LocalEngine(tiny_base, tmp_path, speculation=(f"draft:{draft}",)).close()


def test_tokenizers_that_list_their_pieces_are_compared_by_their_order(tmp_path: Path) -> None:
    base, draft = make_tiny_llama(tmp_path / "base"), make_tiny_llama(tmp_path / "draft")
    for folder in (base, draft):
        pieces = [["<unk>", 0.0], ["one", -1.0], ["two", -2.0]]
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": pieces}}))
    LocalEngine(base, tmp_path, speculation=(f"draft:{draft}",)).close()
    edit_json(draft / "tokenizer.json", lambda contents: contents["model"]["vocab"].reverse())
    with pytest.raises(UnsupportedModel, match="they differ in the token '<unk>'"):
        LocalEngine(base, tmp_path, speculation=(f"draft:{draft}",))


def test_a_draft_model_with_other_special_tokens_is_refused(tmp_path: Path) -> None:
    base, draft = make_tiny_llama(tmp_path / "base"), make_tiny_llama(tmp_path / "draft")
    for folder, token in ((base, "<end>"), (draft, "<stop>")):
        pieces, added = [["one", 0.0]], [{"content": token, "id": 1}]
        contents = {"model": {"vocab": pieces}, "added_tokens": added}
        (folder / "tokenizer.json").write_text(json.dumps(contents))
    with pytest.raises(UnsupportedModel, match="they differ in the token '<end>'"):
        LocalEngine(base, tmp_path, speculation=(f"draft:{draft}",))


@pytest.mark.parametrize(
    ("speculation", "error"),
    [
        (("draft",), InvalidParameter),
        (("draft:", "ngram"), InvalidParameter),
        (("draft:./no/such/folder",), UnsupportedModel),
        (("draft:./a", "draft:./b"), InvalidParameter),
    ],
)
def test_a_configuration_without_one_draft_model_is_refused(
    tiny_base: Path, tmp_path: Path, speculation: tuple[str, ...], error: type[EngineError]
) -> None:
    with pytest.raises(error, match="draft"):
        LocalEngine(tiny_base, tmp_path, speculation=speculation)


def edit_json(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    contents = json.loads(path.read_text())
    edit(contents)
    path.write_text(json.dumps(contents))


# --- the proposer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [pytest.param(400, marks=pytest.mark.slow), 24])
def test_its_cache_is_always_what_a_dense_forward_computes(
    loaded: BaseModel,
    dense: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
    num_blocks: int,
) -> None:
    """Requests come, have some of their drafts accepted, go on without and end, at random."""
    rng = random.Random(num_blocks)
    recorder = Recorder(monkeypatch)
    proposer = make_proposer(loaded, num_blocks=num_blocks, drawing=recorder)
    beginnings = [prompt_of(12, seed) for seed in range(2)]
    adapters = [None, AdapterKey("acme", "digest")]
    running: list[Request] = []
    for number in range(60):
        if len(running) < 6:
            prompt = rng.choice(beginnings) + prompt_of(rng.randrange(1, 30), number)
            request = make_request(str(number), prompt, adapter=rng.choice(adapters))
            running.append(request)
        wanted = [
            DraftRequest(request, rng.randrange(1, 6))
            for request in rng.sample(running, rng.randrange(1, len(running) + 1))
        ]
        for (request, num_tokens), draft in zip(wanted, proposer.propose(wanted), strict=True):
            assert len(draft) <= num_tokens
            num_right = rng.randrange(len(draft) + 1)
            new = rng.randrange(256)
            if num_right < len(draft) and rng.random() < 0.2:
                new = draft.token_ids[num_right]  # right, though not accepted as a draft token
            request.token_ids += [*draft.token_ids[:num_right], new]
        for request in running:  # nobody proposes for them, or their drafts come to nothing
            if rng.random() < 0.2:
                request.token_ids += prompt_of(rng.randrange(4), rng.randrange(99))
        proposer.cache.check_integrity()
        if rng.random() < 0.2:
            ended = running.pop(rng.randrange(len(running)))
            proposer.forget(ended.request_id)
    assert len(recorder.seen) > 100
    assert_as_dense(dense, recorder.seen)
    for request in running:
        proposer.forget(request.request_id)
    assert proposer.cache.num_free_blocks == num_blocks


def test_a_long_prompt_is_caught_up_with_in_pieces_while_others_are_drafted(
    loaded: BaseModel, dense: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "MAX_CATCH_UP_TOKENS", 32)
    recorder = Recorder(monkeypatch)
    proposer = make_proposer(loaded, drawing=recorder)
    chunks = record_spans(proposer, monkeypatch)
    long, longer = make_request("a", prompt_of(100, 1)), make_request("b", prompt_of(130, 2))
    short = make_request("c", prompt_of(6, 3))
    lengths = []
    for _ in range(8):
        chunks.clear()
        drafts = proposer.propose([DraftRequest(request, 3) for request in (long, longer, short)])
        lengths.append([len(draft) for draft in drafts])
        assert sum(chunks[0]) <= 32
        short.token_ids += drafts[2].token_ids
    # 13 tokens each beside the short prompt's 6, then 15 and more: 100 take 7 steps.
    assert lengths == [[0, 0, 3]] * 6 + [[3, 0, 3], [3, 3, 3]]
    assert_as_dense(dense, recorder.seen)


def record_spans(proposer: DraftModelProposer, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The number of tokens of each chunk, forward by forward."""
    lengths: list[list[int]] = []
    run = proposer._run

    def recorded(chunks: Any) -> Tensor:
        lengths.append([len(chunk.token_ids) for chunk in chunks])
        return run(chunks)

    monkeypatch.setattr(proposer, "_run", recorded)
    return lengths


def test_what_tenants_share_is_computed_once_and_nothing_between_tenants(
    loaded: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer = make_proposer(loaded)
    chunks = record_spans(proposer, monkeypatch)

    def num_computed(request: Request) -> int:
        chunks.clear()
        proposer.propose([DraftRequest(request, 1)])
        return sum(map(sum, chunks))

    prompt = prompt_of(21)
    first = make_request("first", prompt)
    first.token_ids += prompt_of(9, 1)
    assert num_computed(first) == 30
    other_adapter = make_request("second", prompt, adapter=AdapterKey("acme", "digest"))
    assert num_computed(other_adapter) == 1
    assert num_computed(make_request("other", prompt, tenant_id="other")) == 21
    answered = make_request("third", first.token_ids)
    assert num_computed(answered) == 30 - 20, "answers are not kept for others"


def test_the_least_recently_wanted_is_given_up_and_nobody_in_vain(
    loaded: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer = make_proposer(loaded, num_blocks=12, prefix_secret=None)
    requests = [make_request(name, prompt_of(16, index)) for index, name in enumerate("abc")]

    def lengths(*wanted: int) -> list[int]:
        drafts = proposer.propose([DraftRequest(requests[index], 4) for index in wanted])
        proposer.cache.check_integrity()
        return [len(draft) for draft in drafts]

    assert lengths(0) == [4]
    assert lengths(1) == [4]
    assert lengths(2) == [4]
    assert "a" not in proposer.cache
    assert "b" in proposer.cache
    assert lengths(0, 1, 2) == [4, 4, 0], "there is room for two: the first are served"
    assert lengths(0, 1, 2) == [4, 4, 0]
    too_long = make_request("long", prompt_of(60))
    assert [len(draft) for draft in proposer.propose([DraftRequest(too_long, 1)])] == [0]
    assert "a" in proposer.cache
    assert "b" in proposer.cache


def test_nothing_is_drafted_behind_what_ends_an_answer(loaded: BaseModel) -> None:
    prompt = prompt_of(12)
    (draft,) = make_proposer(loaded).propose([DraftRequest(make_request("a", prompt), 6)])
    end = draft.token_ids[3]
    num_expected = draft.token_ids.index(end) + 1
    proposer = make_proposer(loaded, ends=lambda request, token: token == end)
    (ended,) = proposer.propose([DraftRequest(make_request("b", prompt), 6)])
    assert ended.token_ids == draft.token_ids[:num_expected]


def test_for_rejection_sampling_a_draft_comes_with_what_it_was_drawn_from(
    loaded: BaseModel, dense: PreTrainedModel
) -> None:
    request = make_request("a", prompt_of(12), temperature=0.8, seed=5)
    proposer = make_proposer(loaded, drawing=IndependentDrawing())
    (draft,) = proposer.propose([DraftRequest(request, 8)])
    assert draft.probabilities is not None
    for index in range(8):
        known = [*request.token_ids, *draft.token_ids[:index]]
        expected = (dense_logits(dense, [known])[0] / 0.8).softmax(-1)
        torch.testing.assert_close(draft.probabilities[index], expected, atol=1e-4, rtol=1e-3)
    (coupled,) = make_proposer(loaded).propose([DraftRequest(request, 8)])
    assert coupled.probabilities is None
    assert coupled.token_ids != draft.token_ids, "the noise is its own"


def test_a_request_whose_numbers_break_down_costs_nobody_else_a_draft(
    loaded: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [make_request(name, prompt_of(10, index)) for index, name in enumerate("ab")]
    wanted = [DraftRequest(request, 3) for request in requests]
    expected = make_proposer(loaded).propose(wanted)
    proposer = make_proposer(loaded)
    run = proposer._run

    def broken(chunks: Any) -> Tensor:
        logits = run(chunks).clone()
        if len(chunks) == 2:
            logits[0, 7] = float("nan")
        return logits

    monkeypatch.setattr(proposer, "_run", broken)
    drafts = proposer.propose(wanted)
    assert [draft.token_ids for draft in drafts] == [(), expected[1].token_ids]
    assert "a" not in proposer.cache
    monkeypatch.setattr(proposer, "_run", run)
    again = proposer.propose(wanted)
    assert [draft.token_ids for draft in again] == [draft.token_ids for draft in expected]
    proposer.cache.check_integrity()


@pytest.mark.parametrize("when", [0, 2])
def test_after_a_failure_it_begins_anew(
    loaded: BaseModel, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    requests = [make_request(name, prompt_of(10, index)) for index, name in enumerate("ab")]
    wanted = [DraftRequest(request, 4) for request in requests]
    expected = make_proposer(loaded).propose(wanted)
    proposer = make_proposer(loaded)
    run = proposer._run
    calls = iter(range(99))

    def failing(chunks: Any) -> Tensor:
        if next(calls) == when:
            raise MemoryError
        return run(chunks)

    monkeypatch.setattr(proposer, "_run", failing)
    with pytest.raises(MemoryError):
        proposer.propose(wanted)
    assert proposer.cache.num_free_blocks == proposer.cache.num_blocks
    again = proposer.propose(wanted)
    assert [draft.token_ids for draft in again] == [draft.token_ids for draft in expected]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(0, 300))
def test_a_budget_is_shared_fairly(needs: list[int], budget: int) -> None:
    shares = fair_shares(needs, budget)
    assert all(0 <= share <= need for share, need in zip(shares, needs, strict=True))
    assert sum(shares) == min(budget, sum(needs))
    for share, need in zip(shares, needs, strict=True):
        assert share == need or share >= max(shares) - 1
