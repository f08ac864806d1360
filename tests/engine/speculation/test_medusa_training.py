"""Training Medusa heads: the training data, the result, and the gain with real weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from loraplex.api.demo.manifest import WEIGHTS
from loraplex.api.demo.task import held_out_requests
from loraplex.engine.checkpoint.base_identity import compute_base_id
from loraplex.engine.checkpoint.weights import load_config, load_weights
from loraplex.engine.errors import InvalidParameter
from loraplex.engine.speculation.head_training import HeadSchedule
from loraplex.engine.speculation.medusa_checkpoint import save_heads
from loraplex.engine.speculation.medusa_heads import MedusaHeads, untrained_heads
from loraplex.engine.speculation.medusa_training import (
    MedusaRecipe,
    head_accuracies,
    head_losses,
    train_heads,
)
from loraplex.engine.speculation.training_texts import TrainingText, read_texts
from loraplex.engine.text.tokenizer import Tokenizer
from support.engine import LocalEngine
from support.medusa import make_heads, write_demo_texts

pytestmark = pytest.mark.slow

BASE = WEIGHTS / "base"
NUM_HEADS = 3
NUM_HELD_OUT = 24


@dataclass(frozen=True)
class Trained:
    model: PreTrainedModel
    heads: MedusaHeads
    held_out: list[TrainingText]
    losses: list[float]

    @property
    def untrained(self) -> MedusaHeads:
        head = self.model.get_output_embeddings()
        return untrained_heads(head, num_heads=NUM_HEADS, num_layers=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Heads of the demo's base after a second or two of training."""
    path = write_demo_texts(tmp_path_factory.mktemp("texts") / "texts.jsonl", 480)
    texts = read_texts(path, Tokenizer(BASE), max_tokens=128)
    model = load_weights(BASE, load_config(BASE), torch.float32, torch.device("cpu"))
    # So small a base learns at ten times the rate that suits large ones.
    schedule = HeadSchedule(num_steps=60, batch_size=8, learning_rate=1e-2)
    recipe = MedusaRecipe(NUM_HEADS, schedule=schedule)
    losses: list[float] = []
    heads = train_heads(
        model, texts[NUM_HELD_OUT:], recipe, lambda _step, loss: losses.append(loss)
    )
    return Trained(model, heads, texts[:NUM_HELD_OUT], losses)


def test_every_head_learns_and_the_base_stays_as_it_is(trained: Trained) -> None:
    before = head_accuracies(trained.model, trained.untrained, trained.held_out)
    after = head_accuracies(trained.model, trained.heads, trained.held_out)
    assert max(before) < 0.1
    assert min(after) > 0.5
    assert len(trained.losses) == 60
    assert sum(trained.losses[-5:]) < 0.5 * sum(trained.losses[:5])
    fresh = load_weights(BASE, load_config(BASE), torch.float32, torch.device("cpu"))
    for left, right in zip(trained.model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_trained_heads_draft_far_more_of_what_is_generated_and_change_none_of_it(
    trained: Trained, tmp_path: Path, temperature: float
) -> None:
    base_id = compute_base_id(BASE)
    save_heads(trained.heads, tmp_path / "trained", base_id=base_id)
    save_heads(trained.untrained, tmp_path / "untrained", base_id=base_id)
    tokenizer = Tokenizer(BASE)
    prompts = [
        tokenizer.encode_chat([{"role": "user", "content": request.prompt}])
        for request in held_out_requests(6)
    ]

    def generate(*speculation: str) -> tuple[list[list[int]], float]:
        engine = LocalEngine(BASE, tmp_path, dtype="float32", speculation=speculation)
        for index, prompt in enumerate(prompts):
            engine.submit(prompt, max_tokens=24, temperature=temperature, seed=index)
        engine.run()
        engine.close()
        ends = [answer.finished for answer in engine.answers.values() if answer.finished]
        num_drafted = sum(end.num_draft_tokens for end in ends)
        share = sum(end.num_accepted_tokens for end in ends) / max(num_drafted, 1)
        return [answer.token_ids for answer in engine.answers.values()], share

    plain, _ = generate()
    untrained, low = generate(f"medusa:{tmp_path / 'untrained'}")
    chains, high = generate(f"medusa:{tmp_path / 'trained'}")
    trees, _ = generate(f"medusa_tree:{tmp_path / 'trained'}")
    assert untrained == chains == trees == plain
    assert high > 0.4 > 0.1 > low


def test_head_j_learns_the_token_two_and_j_places_behind_its_state() -> None:
    heads = make_heads(5, 7, num_heads=3)
    states = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, 2, 3, 4, 5, 6], [0, 6, 5, -100, -100, -100]])
    for j, loss in enumerate(head_losses(heads, states, labels)):
        pairs = [
            (heads(states[row, place][None])[j, 0], labels[row, place + 2 + j])
            for row in range(2)
            for place in range(6 - 2 - j)
            if labels[row, place + 2 + j] >= 0
        ]
        own = [cross_entropy(logits, label) for logits, label in pairs]
        torch.testing.assert_close(loss, torch.stack(own).mean())


def test_a_head_without_anything_to_learn_has_no_loss() -> None:
    states, labels = torch.randn(1, 4, 5), torch.tensor([[1, 2, -100, -100]])
    assert [loss.item() for loss in head_losses(make_heads(5, 7, num_heads=3), states, labels)] == [
        0.0
    ] * 3


def test_of_messages_only_the_last_is_learned_and_text_is_learned_whole(tmp_path: Path) -> None:
    tokenizer = Tokenizer(BASE)
    messages = [{"role": "user", "content": "list"}, {"role": "assistant", "content": "You asked"}]
    path = tmp_path / "texts.jsonl"
    lines = [{"messages": messages}, {"text": "You asked me to list"}, {"text": "x"}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    chat, text = read_texts(path, tokenizer, max_tokens=64)
    prompt = tokenizer.encode_chat(messages[:1])
    assert list(chat.token_ids[: chat.num_context_tokens]) == prompt
    assert tokenizer.decode(chat.token_ids[chat.num_context_tokens :]) == "You asked"
    assert text == TrainingText(tokenizer.encode("You asked me to list"), 0)
    (cut,) = read_texts(path, tokenizer, max_tokens=len(prompt))[:1]
    assert cut.num_context_tokens == 0, "of a prompt that fills all there is nothing to learn"


def test_training_data_of_fine_tuning_is_read_like_the_requests_it_came_from(
    tmp_path: Path,
) -> None:
    tokenizer = Tokenizer(BASE)
    messages = [{"role": "user", "content": "list"}, {"role": "assistant", "content": "You asked"}]
    tools = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
    path = tmp_path / "texts.jsonl"
    lines = [
        {"messages": messages, "tools": tools},
        {"prompt": "You asked me", "completion": " to list"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    chat, completion = read_texts(path, tokenizer, max_tokens=64)
    asked = tokenizer.encode_chat(messages[:1], tools=tools)
    assert list(chat.token_ids[: chat.num_context_tokens]) == asked
    assert tokenizer.decode(chat.token_ids[chat.num_context_tokens :]) == "You asked"
    asked = tokenizer.encode("You asked me")
    assert list(completion.token_ids[: completion.num_context_tokens]) == asked
    assert tokenizer.decode(completion.token_ids[len(asked) :]) == " to list"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[]", "line 1: has not exactly one"),
        ('{"text": "a", "messages": []}', "line 1: has not exactly one"),
        ('{"text": 7}', "line 1: "),
        ('{"prompt": "a"}', "line 1: "),
        ('{"messages": [{"content": "a"}]}', "line 1: "),
        ("{", "line 1: "),
        ("", "has no text"),
    ],
)
def test_a_line_that_is_no_text_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(InvalidParameter, match=reason):
        read_texts(path, Tokenizer(BASE), max_tokens=64)
