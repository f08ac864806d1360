"""The maximum bytes per token, compared with real tokenizers."""

from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from loraplex.engine.errors import PromptTooLong
from loraplex.engine.text import tokenizer as module
from loraplex.engine.text.token_coverage import most_bytes_per_token

MERGES = [("a", "b"), ("ab", "ab"), ("abab", "abab")]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(**added: bool) -> Tokenizer:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, MERGES), "Ã©"]
    vocab = {token: index for index, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[*MERGES, ("Ã", "©")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens([AddedToken("<|twelve..|>", normalized=False, **added)])
    return made


def with_nfc() -> Tokenizer:
    made = byte_level()
    made.normalizer = normalizers.NFC()
    return made


def sentencepiece_like() -> Tokenizer:
    tokens = ["<unk>", *BYTES, "▁", "a", "b", *map("".join, MERGES), "▁▁", "▁▁▁▁"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [*MERGES, ("▁", "▁"), ("▁▁", "▁▁")]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.add_tokens([AddedToken("<a longer added token>", normalized=False)])
    return made


def unigram() -> Tokenizer:
    pieces = [("<unk>", -9.0), *((token, -8.0) for token in BYTES), ("▁", -2.0), ("▁abcabc", -1.0)]
    made = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    return made


def unknown_by_character() -> Tokenizer:
    made = Tokenizer(models.BPE(vocab={"?": 0, "a": 1}, merges=[], unk_token="?", fuse_unk=False))
    made.pre_tokenizer = pre_tokenizers.Split("a", "isolated")
    return made


BOUNDED = {
    "byte level": (byte_level, "<|twelve..|>", 12),
    "byte level, NFC": (with_nfc, "<|twelve..|>", 48),
    "sentencepiece-like": (sentencepiece_like, "<a longer added token>", 22),
    "unigram": (unigram, "▁abcabc", 9),
    "unknown by character": (unknown_by_character, "\U0001f600", 4),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_no_token_stands_for_more_bytes_than_the_bound_and_one_reaches_it(name: str) -> None:
    make, longest, bound = BOUNDED[name]
    made = make()
    assert most_bytes_per_token(json.loads(made.to_str())) == bound
    rng = random.Random(name)
    parts = [*"ab \n\u212aé€\U0001f600▁", "abababab", "e\u0301", "▁▁▁▁", longest, "abcabc", " " * 9]
    for _ in range(300):
        text = "".join(rng.choices(parts, k=rng.randint(1, 40)))
        assert len(text.encode()) <= bound * len(made.encode(text, add_special_tokens=False).ids)
    text = longest * 10
    if not name.endswith("NFC"):
        assert len(text.encode()) == bound * 10
        assert len(made.encode(text, add_special_tokens=False).ids) <= 11  # a prefix of "▁" at most


@pytest.mark.parametrize(
    ("made", "text"),
    [
        pytest.param(byte_level(rstrip=True), "<|twelve..|>" + " " * 999, id="a token strips"),
        pytest.param(
            Tokenizer(models.BPE(vocab={"a": 0}, merges=[])), "b" * 999, id="unknown vanishes"
        ),
        pytest.param(
            Tokenizer(models.BPE(vocab={"?": 0}, merges=[], unk_token="?", fuse_unk=True)),
            "b" * 999,
            id="unknown is fused",
        ),
        pytest.param(
            Tokenizer(models.WordLevel(vocab={"?": 0}, unk_token="?")), "b" * 999, id="words"
        ),
        pytest.param(
            Tokenizer(models.Unigram([("?", -1.0)], unk_id=0)), "b" * 999, id="unigram, fused"
        ),
    ],
)
def test_where_a_token_may_stand_for_any_text_there_is_no_bound(made: Tokenizer, text: str) -> None:
    assert len(made.encode(text).ids) <= 1, "as is claimed"
    assert most_bytes_per_token(json.loads(made.to_str())) is None


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": normalizers.Strip()},
        {"normalizer": normalizers.Replace("aa", "a")},
        {"normalizer": normalizers.NFKC()},
        {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])},
        {"pre_tokenizer": pre_tokenizers.WhitespaceSplit()},
        {"pre_tokenizer": pre_tokenizers.Split(" ", "removed")},
    ],
)
def test_what_may_drop_text_has_no_bound(change: dict[str, object]) -> None:
    made = sentencepiece_like()
    for name, value in change.items():
        setattr(made, name, value)
    assert most_bytes_per_token(json.loads(made.to_str())) is None


def test_nfc_shortens_a_text_to_a_quarter_at_most() -> None:
    """The longest way to write each composed character: its parts, each as long as it can be."""
    longest: dict[str, int] = {}
    for character in map(chr, [*range(0xD800), *range(0xE000, 0x30000)]):
        if not unicodedata.is_normalized("NFD", character):
            form = unicodedata.normalize("NFC", character)
            longest[form] = max(longest.get(form, 0), len(character.encode()))
    worst = 0.0
    for form, size in longest.items():
        parts = unicodedata.normalize("NFD", form)
        apart = sum(longest.get(part, len(part.encode())) for part in parts)
        worst = max(worst, max(size, apart) / len(form.encode()))
    assert worst == 3.5


@pytest.fixture(params=[byte_level, sentencepiece_like])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> module.Tokenizer:
    fast = PreTrainedTokenizerFast(tokenizer_object=request.param())
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(tmp_path)
    return module.Tokenizer(tmp_path)


def test_a_text_is_refused_from_the_first_byte_beyond_the_bound_and_in_a_chat_too(
    saved: module.Tokenizer,
) -> None:
    assert saved.most_bytes_per_token is not None
    fits = "a" * (10 * saved.most_bytes_per_token)
    assert saved.encode(fits, max_tokens=10), "its tokens are counted after"
    assert saved.encode_chat([{"role": "user", "content": fits}], max_tokens=10)
    assert saved.encode(f"{fits}a"), "nothing is refused where no bound is asked for"
    with pytest.raises(PromptTooLong):
        saved.encode(f"{fits}a", max_tokens=10)
    with pytest.raises(PromptTooLong):
        saved.encode_chat([{"role": "user", "content": f"{fits}a"}], max_tokens=10)
