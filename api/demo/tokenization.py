"""The demo base's tokenizer: byte-level BPE with one token per number, and a chat template.

Needs `tokenizers` and `transformers`, which only training has.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from .corpus import Example
from .task import NUMBERS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (END, USER, ASSISTANT)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train on the byte pairs of `texts`; raises ValueError if a number has several tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    split = [n for n in NUMBERS if len(tokenizer.encode(f" {n}").ids) != 1]
    if split:
        raise ValueError(f"numbers of more than one token: {split}")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Write the tokenizer with its chat template in the Hugging Face layout."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)


class Encoder:
    """Converts examples to token ids and marks the tokens to learn."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.end, self._user, self._assistant = (vocabulary[token] for token in SPECIAL_TOKENS)

    def encode(self, example: Example) -> tuple[list[int], list[int]]:
        """Return (token ids, labels): a label is its token's id, or -100 within the prompt.

        The prompt's ids are those of the chat template for one user message.
        """
        answer = [*self._tokenizer.encode(example.answer).ids, self.end]
        if example.prompt is None:
            return answer, answer
        words = self._tokenizer.encode(example.prompt).ids
        prompt = [self._user, *words, self.end, self._assistant]
        return [*prompt, *answer], [-100] * len(prompt) + answer
