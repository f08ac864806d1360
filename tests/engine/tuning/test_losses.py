"""Losses, compared with what transformers and PEFT compute of single examples."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.engine.config import EngineConfig
from loraplex.engine.tuning.base import TunableBase, load_tunable_base
from loraplex.engine.tuning.batches import make_batch
from loraplex.engine.tuning.errors import InvalidRecipe
from loraplex.engine.tuning.losses import dpo_loss, supervised_loss
from loraplex.engine.tuning.packing import check_packing
from loraplex.engine.tuning.tokens import TrainedTokens
from support.families import save_family
from support.models import ALL_LINEAR_TARGETS, make_tiny_llama, save_byte_tokenizer
from support.tuned import make_tuned

EXAMPLES = [
    TrainedTokens([5, 9, 200, 31, 77], [False, False, True, True, True]),
    TrainedTokens([12, 240, 8], [False, True, True]),
    TrainedTokens([90, 91, 92, 93, 94, 95, 96], [False] * 3 + [True, False, True, True]),
    TrainedTokens([7, 6], [False, True]),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TunableBase:
    folder = make_tiny_llama(tmp_path_factory.mktemp("base"))
    return load_tunable_base(EngineConfig(str(folder), device="cpu", dtype="float32"))


@pytest.fixture(scope="module")
def tuned(base: TunableBase) -> Any:
    """A model of its own, under a random adapter."""
    return make_tuned(copy.deepcopy(base.model), seed=1, target_modules=list(ALL_LINEAR_TARGETS))


def log_probs(model: Any, example: TrainedTokens) -> torch.Tensor:
    """Of each trained token, computed alone."""
    logits = model(input_ids=torch.tensor([example.token_ids])).logits[0].log_softmax(dim=-1)
    return torch.stack(
        [
            logits[place - 1, token]
            for place, (token, is_trained) in enumerate(zip(*example, strict=True))
            if is_trained
        ]
    )


@pytest.mark.parametrize(
    "rows", [[[e] for e in EXAMPLES], [EXAMPLES[:3], EXAMPLES[3:]], [EXAMPLES]]
)
def test_the_supervised_loss_is_the_mean_over_trained_tokens(
    tuned: Any, rows: list[list[TrainedTokens]]
) -> None:
    """Packed or not: packed examples do not attend to each other."""
    found = supervised_loss(tuned, make_batch(rows, is_packed=len(rows) < len(EXAMPLES)))
    expected = -torch.cat([log_probs(tuned, example) for example in EXAMPLES]).mean()
    torch.testing.assert_close(found.value, expected)
    assert found.num_counted == 9


def test_the_loss_of_dpo_is_that_of_its_paper(tuned: Any) -> None:
    preferred, other = EXAMPLES[:2], EXAMPLES[2:]
    batch = make_batch([[example] for example in (*preferred, *other)], is_packed=False)
    found = dpo_loss(tuned, batch, beta=0.3)
    losses, gains = [], []
    for first, second in zip(preferred, other, strict=True):
        policy = log_probs(tuned, first).sum() - log_probs(tuned, second).sum()
        with tuned.disable_adapter():
            reference = log_probs(tuned, first).sum() - log_probs(tuned, second).sum()
        gains.append(policy - reference)
        losses.append(-torch.log(torch.sigmoid(0.3 * (policy - reference))))
    torch.testing.assert_close(found.value, torch.stack(losses).mean())
    assert found.num_correct.item() == sum(gain > 0 for gain in gains)
    assert found.num_counted == 2
    found.value.backward()
    gradients = [each.grad for name, each in tuned.named_parameters() if "lora_" in name]
    assert all(gradient is not None and gradient.any() for gradient in gradients)


def test_attention_separates_packed_examples(base: TunableBase) -> None:
    check_packing(base)


def test_a_base_with_states_is_not_trained_on_packed_examples(tmp_path: Path) -> None:
    folder = save_family(tmp_path, "mamba", {})
    save_byte_tokenizer(folder)
    base = load_tunable_base(EngineConfig(str(folder), device="cpu", dtype="float32"))
    with pytest.raises(InvalidRecipe, match="without packing"):
        check_packing(base)
