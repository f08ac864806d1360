"""Training EAGLE heads: what is learned, and the gain with real weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from loraplex.api.demo.manifest import WEIGHTS
from loraplex.api.demo.task import held_out_requests
from loraplex.engine.checkpoint.base_identity import compute_base_id
from loraplex.engine.checkpoint.weights import load_config, load_weights
from loraplex.engine.messages import SpeculationParams
from loraplex.engine.speculation.eagle_checkpoint import save_head
from loraplex.engine.speculation.eagle_training import (
    EagleBatch,
    EagleRecipe,
    TrainedEagle,
    eagle_accuracies,
    eagle_losses,
    read_batch,
    train_eagle,
    unrolled,
    untrained_head,
)
from loraplex.engine.speculation.head_training import IGNORED, HeadSchedule
from loraplex.engine.speculation.training_texts import TrainingText, read_texts
from loraplex.engine.text.tokenizer import Tokenizer
from support.eagle import DenseEagle, make_head
from support.engine import LocalEngine
from support.medusa import write_demo_texts

BASE = WEIGHTS / "base"
SIZE, VOCAB, LENGTH = 64, 20, 7
DEPTH = 3
NUM_HELD_OUT = 64
NUM_STEPS = 400


def random_batch(labels: list[list[int]]) -> EagleBatch:
    generator = torch.Generator().manual_seed(0)
    rows = len(labels)
    return EagleBatch(
        embedded=torch.randn(rows, LENGTH, SIZE, generator=generator),
        states=torch.randn(rows, LENGTH, 3 * SIZE, generator=generator),
        logits=torch.randn(rows, LENGTH, VOCAB, generator=generator),
        labels=torch.tensor(labels),
    )


def test_a_head_is_unrolled_as_it_drafts() -> None:
    head = make_head(vocab_size=VOCAB, draft_vocab_size=VOCAB // 2)
    batch = random_batch([[IGNORED] * LENGTH] * 2)
    levels = [head.draft_logits(states) for states in unrolled(head, batch, DEPTH)]
    for row in range(2):
        dense = DenseEagle(head, batch.embedded[row])  # the token at p has the embedding p
        features = [dense.project(states) for states in batch.states[row]]
        for place in range(LENGTH - 1):
            state = dense.state(place + 1, features[place])
            for j in range(min(DEPTH, LENGTH - 1 - place)):
                expected = dense.logits(state)[head.token_ids].float()
                torch.testing.assert_close(levels[j][row, place], expected, rtol=1e-3, atol=1e-3)
                if place + j + 2 < LENGTH:
                    state = dense.state(place + j + 2, state)
            dense.back_to(place + 1)


def test_the_loss_is_the_cross_entropy_of_the_bases_distribution_where_tokens_are_learned() -> None:
    head = make_head(vocab_size=VOCAB, draft_vocab_size=VOCAB // 2)
    batch = random_batch([[IGNORED] * 4 + [5, 6, 7], [IGNORED, 3, 4, IGNORED, 5, 6, IGNORED]])
    levels = [head.draft_logits(states) for states in unrolled(head, batch, DEPTH)]
    for j, loss in enumerate(eagle_losses(head, batch, DEPTH)):
        expected = [
            -(
                batch.logits[row, place + j + 1, head.token_ids].softmax(-1)
                * levels[j][row, place].log_softmax(-1)
            ).sum()
            for row in range(2)
            for place in range(LENGTH - 2 - j)
            if batch.labels[row, place + j + 2] != IGNORED
        ]
        torch.testing.assert_close(loss, torch.stack(expected).mean())


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load_weights(BASE, load_config(BASE), torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[TrainingText]:
    path = write_demo_texts(tmp_path_factory.mktemp("texts") / "texts.jsonl", 4_000)
    return read_texts(path, Tokenizer(BASE), max_tokens=128)


def test_a_text_too_short_for_the_depth_has_no_loss_there(model: PreTrainedModel) -> None:
    head = untrained_head(model, torch.arange(2048), EagleRecipe())
    batch = read_batch(model, (1, 2, 4), [TrainingText([5, 6, 7], 0)])
    first, *others = eagle_losses(head, batch, DEPTH)
    assert first > 0
    assert [loss.item() for loss in others] == [0.0] * (DEPTH - 1)


def test_a_reduced_vocabulary_has_the_most_frequent_learned_tokens(model: PreTrainedModel) -> None:
    texts = [TrainingText([9, 9, 9, 9, 7, 7, 3, 5], 4), TrainingText([7, 3, 3, 3], 0)]
    recipe = EagleRecipe(draft_vocab_size=2, schedule=HeadSchedule(num_steps=1))
    assert train_eagle(model, texts, recipe).head.token_ids.tolist() == [3, 7]
    # The texts have too few tokens: others fill it up.
    recipe = EagleRecipe(draft_vocab_size=5, schedule=HeadSchedule(num_steps=1))
    assert train_eagle(model, texts, recipe).head.token_ids.tolist() == [0, 1, 3, 5, 7]


@dataclass(frozen=True)
class Trained:
    trained: TrainedEagle
    held_out: list[TrainingText]
    losses: list[float]


@pytest.fixture(scope="module")
def trained(model: PreTrainedModel, texts: list[TrainingText]) -> Trained:
    # So small a base learns at several times the rate that suits large ones.
    schedule = HeadSchedule(num_steps=NUM_STEPS, batch_size=8, learning_rate=4e-3)
    recipe, losses = EagleRecipe(schedule=schedule), list[float]()
    learned = texts[NUM_HELD_OUT:]
    head = train_eagle(model, learned, recipe, lambda _step, loss: losses.append(loss))
    return Trained(head, texts[:NUM_HELD_OUT], losses)


@pytest.mark.slow
def test_a_head_learns_and_the_base_stays_as_it_is(
    model: PreTrainedModel, trained: Trained
) -> None:
    head = untrained_head(model, torch.arange(2048), EagleRecipe())
    untrained = TrainedEagle(head.requires_grad_(False), trained.trained.layers)
    before = eagle_accuracies(model, untrained, trained.held_out, DEPTH)
    after = eagle_accuracies(model, trained.trained, trained.held_out, DEPTH)
    assert max(before) < 0.2
    assert min(after) > 0.5
    assert len(trained.losses) == NUM_STEPS
    assert sum(trained.losses[-5:]) < 0.7 * sum(trained.losses[:5])
    fresh = load_weights(BASE, load_config(BASE), torch.float32, torch.device("cpu"))
    for left, right in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_trained_head_drafts_what_is_generated_and_changes_none_of_it(
    trained: Trained, tmp_path: Path, temperature: float
) -> None:
    save_head(
        trained.trained.head,
        tmp_path / "head",
        layers=trained.trained.layers,
        base_id=compute_base_id(BASE),
    )
    tokenizer = Tokenizer(BASE)
    prompts = [
        tokenizer.encode_chat([{"role": "user", "content": request.prompt}])
        for request in held_out_requests(6)
    ]

    def generate(*speculation: str) -> tuple[list[list[int]], float]:
        engine = LocalEngine(BASE, tmp_path, dtype="float32", speculation=speculation)
        for index, prompt in enumerate(prompts):
            engine.submit(
                prompt,
                max_tokens=24,
                temperature=temperature,
                seed=index,
                speculation=SpeculationParams(num_tokens=DEPTH),
            )
        engine.run()
        engine.close()
        ends = [answer.finished for answer in engine.answers.values() if answer.finished]
        num_drafted = sum(end.num_draft_tokens for end in ends)
        share = sum(end.num_accepted_tokens for end in ends) / max(num_drafted, 1)
        return [answer.token_ids for answer in engine.answers.values()], share

    plain, _ = generate()
    drafted, share = generate(f"eagle:{tmp_path / 'head'}")
    assert drafted == plain
    assert share > 0.3
