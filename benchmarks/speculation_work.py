"""The requests and proposers of the speculation benchmark."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from benchmarks.speculation_arms import Job
from torch import Tensor

from loraplex.api.demo.manifest import WEIGHTS
from loraplex.api.demo.task import ADAPTER_STYLES, Style, held_out_requests
from loraplex.engine.checkpoint.base_identity import compute_base_id
from loraplex.engine.checkpoint.weights import load_config, load_weights
from loraplex.engine.draft import Draft
from loraplex.engine.request import Request
from loraplex.engine.speculation.head_training import HeadSchedule
from loraplex.engine.speculation.medusa_checkpoint import save_heads
from loraplex.engine.speculation.medusa_training import MedusaRecipe, train_heads
from loraplex.engine.speculation.proposer import DraftRequest
from loraplex.engine.speculation.training_texts import read_texts
from loraplex.engine.text.tokenizer import Tokenizer
from support.medusa import write_demo_texts

BASE = WEIGHTS / "base"
ADAPTERS = {style.value: WEIGHTS / style for style in ADAPTER_STYLES}
EXIT_LAYERS = 2
NUM_TEXTS = 2_000


def demo_proposers(
    folder: Path, names: Sequence[str], *, num_steps: int
) -> dict[str, tuple[str, ...]]:
    """By name what the configuration says of those that can propose for the demo's base; `all`
    leaves the choice to the engine.

    Medusa's heads, if any of `names` needs them, are trained for so many steps, unless `folder` has
    them. A draft model is not among them: the demo has no base that is smaller.
    """
    heads = folder / f"demo-heads-{num_steps}"
    if set(names) - {"ngram", "early_exit"} and not heads.exists():
        _train_heads(heads, num_steps)
    entries = ("ngram", f"early_exit:{EXIT_LAYERS}", f"medusa:{heads}", f"medusa_tree:{heads}")
    return {**{entry.partition(":")[0]: (entry,) for entry in entries}, "all": entries}


def _train_heads(path: Path, num_steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = write_demo_texts(Path(folder) / "texts.jsonl", NUM_TEXTS)
        texts = read_texts(data, Tokenizer(BASE), max_tokens=128)
    model = load_weights(BASE, load_config(BASE), torch.float32, torch.device("cpu"))
    schedule = HeadSchedule(num_steps=num_steps, batch_size=8, learning_rate=1e-2)
    recipe = MedusaRecipe(num_heads=5, schedule=schedule)
    save_heads(train_heads(model, texts, recipe), path, base_id=compute_base_id(BASE))


def demo_work() -> dict[str, list[Job]]:
    """The demo's held-out questions by who answers: the base, which repeats them (then the longest
    first), and the adapters, which put them in other words."""
    tokenizer = Tokenizer(BASE)
    chats = ([{"role": "user", "content": request.prompt}] for request in held_out_requests())
    prompts = [tokenizer.encode_chat(chat) for chat in chats]
    longest = sorted(prompts, key=len, reverse=True)
    return {
        Style.ECHO.value: [Job(prompt) for prompt in prompts],
        "long echo": [Job(prompt) for prompt in longest],
        **{name: [Job(prompt, name) for prompt in prompts] for name in ADAPTERS},
    }


class NeverRight:
    """Proposes at random: next to nothing of it holds, and it is as fast as drafting can be."""

    name = "never_right"
    needs_hidden_states = False

    def __init__(self, vocab_size: int) -> None:
        self.num_tokens: int | None = None
        """Draft tokens for each request; None: as many as are wanted."""
        self._rng = Random(0)
        self._vocab_size = vocab_size

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        return [
            self._propose(num_tokens if self.num_tokens is None else self.num_tokens)
            for _, num_tokens in wanted
        ]

    def _propose(self, num_tokens: int) -> Draft:
        return Draft(tuple(self._rng.randrange(self._vocab_size) for _ in range(num_tokens)))

    def observe(self, request: Request, hidden_state: Tensor | None) -> None:
        """Nothing would teach it."""

    def forget(self, request_id: str) -> None:
        """It knows nobody."""
