"""Tokenizers of different kinds under the same grammars."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from loraplex.engine.execution.grammars import open_grammars
from loraplex.engine.grammars.matcher import Automaton
from loraplex.engine.grammars.spec import GrammarKind, GrammarSpec
from loraplex.engine.grammars.vocabulary import Vocabulary
from loraplex.engine.text.tokenizer import Tokenizer
from support.grammars import needs_llguidance

END, OTHER_END = "</s>", "<|eot|>"
ADDED = "[tool]"
WORDS = ("the", "name", "value", " name", '{"', '": "', "yes", "no")
NUM_PADDED = 7


def byte_level() -> Backend:
    """As Llama 3 and Qwen: every byte is a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _with_merges(alphabet, lambda word: word.replace(" ", "Ġ"), decoders.ByteLevel())


def sentencepiece() -> Backend:
    """As Llama 2 and Mistral: words begin with a space, also the first; rare ones are bytes."""
    alphabet = [*(f"<0x{value:02X}>" for value in range(256)), "▁", *map(chr, range(33, 127))]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend = _with_merges(
        alphabet, lambda word: word.replace(" ", "▁"), decoders.Sequence(steps), byte_fallback=True
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.pre_tokenizer = None
    return backend


def _with_merges(
    alphabet: Sequence[str], spell: Callable[[str], str], decoder: Any, **settings: Any
) -> Backend:
    vocab = {token: index for index, token in enumerate(alphabet)}
    merges = []
    for word in map(spell, WORDS):
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    backend = Backend(models.BPE(vocab=vocab, merges=merges, **settings))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoder
    return backend


@pytest.fixture(scope="module", params=[byte_level, sentencepiece], ids=lambda it: it.__name__)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    backend = request.param()
    backend.add_special_tokens([END, OTHER_END])
    backend.add_tokens([AddedToken(ADDED, normalized=False)])
    path: Path = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END).save_pretrained(path)
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def ends(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(tokenizer.backend.encode(END + OTHER_END, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer, ends: frozenset[int]) -> Vocabulary:
    return Vocabulary(tokenizer, vocab_size=tokenizer.vocab_size + NUM_PADDED, end_token_ids=ends)


def bytes_of(vocabulary: Vocabulary, token_ids: list[int]) -> bytes:
    return b"".join(vocabulary.tokens[token] for token in token_ids)


def test_forced_text_is_written_as_the_base_writes_it(
    vocabulary: Vocabulary, tokenizer: Tokenizer
) -> None:
    assert [tokenizer.backend.id_to_token(it) for it in vocabulary('{"name')] == ['{"', "name"]
    assert len(vocabulary("namevalue")) == 2


@pytest.mark.parametrize("text", [END, f"a{OTHER_END}b", "<0x41>", "\x02x"])
def test_text_that_reads_like_a_special_token_is_text(
    vocabulary: Vocabulary, ends: frozenset[int], text: str
) -> None:
    assert not ends.intersection(vocabulary(text))
    assert bytes_of(vocabulary, vocabulary(text)) == text.encode()


@settings(deadline=None)
@given(text=st.text(max_size=20))
def test_any_forced_text_becomes_tokens_of_the_same_bytes(
    vocabulary: Vocabulary, text: str
) -> None:
    assert bytes_of(vocabulary, vocabulary(text)) == text.encode()


CHOICES = ["yes", "no", "name", " name", "namely ▁x", f"the {END}", "ü🦙", ADDED, "{"]


def allowed_by(automaton: Automaton, vocab_size: int) -> set[int]:
    mask = automaton.compute_bitmask()  # type: ignore[attr-defined]
    return {token for token in range(vocab_size) if mask[token // 8] >> token % 8 & 1}


@needs_llguidance
def test_every_way_through_a_choice_ends_in_one_of_them(
    vocabulary: Vocabulary, ends: frozenset[int]
) -> None:
    from loraplex.engine.grammars.compiler import GrammarCompiler

    alternatives = "|".join(f'"{choice}"' for choice in CHOICES)
    spec = GrammarSpec(GrammarKind.LARK, f"start: {alternatives}")
    automaton = GrammarCompiler(vocabulary).compile(spec)
    reached = set()
    for seed in range(120):
        rng, copy, text = random.Random(seed), automaton.deep_copy(), b""
        while True:
            allowed = allowed_by(copy, len(vocabulary.tokens))
            # An independent answer: what goes on towards a choice, and nothing that is padding.
            possible = {
                token
                for token, data in enumerate(vocabulary.tokens)
                if data and any(it.encode().startswith(text + data) for it in CHOICES)
            }
            assert allowed
            assert allowed <= possible | ends
            token = rng.choice(sorted(allowed))
            if token in ends:
                break
            assert copy.consume_tokens([token])
            text += vocabulary.tokens[token]
        reached.add(text.decode())
    assert reached == set(CHOICES)


@needs_llguidance
def test_an_output_ends_with_any_end_token_that_the_base_has_logits_for(
    folder: Path, tokenizer: Tokenizer, ends: frozenset[int]
) -> None:
    size = tokenizer.vocab_size
    (of_tokenizer,) = tokenizer.eos_token_ids
    (of_config,) = ends - {of_tokenizer}
    grammars = open_grammars(folder, vocab_size=size, eos_token_ids=frozenset({of_config, size}))
    assert grammars._backend is not None
    assert grammars._backend.end_token_ids == ends
    grammars.close()
    without = open_grammars(folder, vocab_size=min(ends), eos_token_ids=ends)
    assert not without.is_served
    without.close()
