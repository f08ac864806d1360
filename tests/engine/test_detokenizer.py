from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from loraplex.engine.text.detokenizer import Detokenizer, Piece
from loraplex.engine.text.tokenizer import Tokenizer
from support.models import save_byte_tokenizer

EOS = 256
WORD_TOKENS = ["\u2581", "\u2581a", "a", "b", "\u2581ab", "lo", "<0x0A>"]


def save_word_tokenizer(path: Path) -> None:
    """Llama 2's kind: spaces as U+2581, unknown characters as byte tokens, one space stripped."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    names = list(dict.fromkeys(["<s>", "</s>", *byte_tokens, *WORD_TOKENS]))
    vocab = {token: index for index, token in enumerate(names)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(path)


@pytest.fixture(scope="module", params=["its bytes", "a window"])
def bytewise(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Tokenizer:
    """Decoded either way: by its bytes as it is, in a window as any other tokenizer."""
    path = tmp_path_factory.mktemp("bytewise")
    save_byte_tokenizer(path)
    tokenizer = Tokenizer(path)
    assert tokenizer.decodes_bytes
    tokenizer.decodes_bytes = request.param == "its bytes"
    return tokenizer


@pytest.fixture(scope="module")
def wordwise(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("wordwise")
    save_word_tokenizer(path)
    return Tokenizer(path)


def split(items: Sequence[int], cuts: Sequence[int]) -> Iterator[Sequence[int]]:
    """The items in parts, cut at these positions modulo the length."""
    borders = sorted({cut % (len(items) + 1) for cut in cuts} | {0, len(items)})
    for start, end in pairwise(borders):
        yield items[start:end]


def run(detokenizer: Detokenizer, parts: Iterator[Sequence[int]]) -> tuple[str, Piece | None]:
    """The whole text, and the piece that ended it early."""
    text = ""
    for part in parts:
        piece = detokenizer.push(part)
        text += piece.text
        if piece.stop is not None:
            return text, piece
    last = detokenizer.finish()
    return text + last.text, last if last.stop is not None else None


def text_before_stop(text: str, stop: tuple[str, ...]) -> str:
    """The reference: the shortest beginning that ends with a stop string, without that string."""
    for end in range(len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            return text[: end - max(map(len, found))]
    return text


cuts = st.lists(st.integers(min_value=0, max_value=1000), max_size=10)
texts = st.text(max_size=60)


@given(text=texts, cuts=cuts)
def test_pieces_of_any_text_join_to_it(bytewise: Tokenizer, text: str, cuts: list[int]) -> None:
    ids = bytewise.encode(text)
    assert run(Detokenizer(bytewise), split(ids, cuts)) == (text, None)


@given(ids=st.lists(st.integers(min_value=0, max_value=270), max_size=80), cuts=cuts)
def test_pieces_of_any_tokens_join_to_their_full_decoding(
    bytewise: Tokenizer, ids: list[int], cuts: list[int]
) -> None:
    """Broken UTF-8, special tokens and ids beyond the vocabulary included."""
    assert run(Detokenizer(bytewise), split(ids, cuts))[0] == bytewise.decode(ids)


@given(ids=st.lists(st.integers(min_value=0, max_value=270), max_size=80), is_whole=st.booleans())
def test_tokens_taken_one_by_one_join_to_their_full_decoding(
    bytewise: Tokenizer, ids: list[int], is_whole: bool
) -> None:
    """Of both kinds of texts: those that are whole characters, and parts of them."""
    prompt = bytewise.encode("ä")[: 1 + is_whole]
    detokenizer = Detokenizer(bytewise, prompt_token_ids=prompt)
    assert not detokenizer.has_stops
    text = "".join([detokenizer.push_one(token_id) for token_id in ids]) + detokenizer.finish().text
    before = bytewise.decode(prompt).rstrip("\ufffd")
    assert before + text == bytewise.decode(prompt + ids)
    assert [detokenizer.push_one(token_id) for token_id in ids] == [""] * len(ids)


@given(data=st.data(), cuts=cuts)
def test_pieces_join_where_words_carry_spaces_and_rare_characters_are_byte_tokens(
    wordwise: Tokenizer, data: st.DataObject, cuts: list[int]
) -> None:
    vocab = wordwise.backend.get_vocab()
    characters = [[vocab[token]] for token in (*WORD_TOKENS, "<s>", "</s>")]
    characters += [[vocab[f"<0x{byte:02X}>"] for byte in c.encode()] for c in "ä€🦙"]
    parts = data.draw(st.lists(st.sampled_from(characters), max_size=60))
    ids = [token_id for part in parts for token_id in part]
    assert run(Detokenizer(wordwise), split(ids, cuts))[0] == wordwise.decode(ids)


@given(
    text=st.text(alphabet="a ä€🦙", max_size=20),
    begin=st.integers(min_value=0, max_value=80),
    cuts=cuts,
)
def test_an_output_continues_its_prompts_bytes(
    bytewise: Tokenizer, text: str, begin: int, cuts: list[int]
) -> None:
    ids = bytewise.encode(text)
    begin = begin % (len(ids) + 1)
    detokenizer = Detokenizer(bytewise, prompt_token_ids=ids[:begin])
    whole_characters = bytewise.decode(ids[:begin]).rstrip("\ufffd")
    assert run(detokenizer, split(ids[begin:], cuts))[0] == text.removeprefix(whole_characters)


def test_added_tokens_are_text_as_the_tokenizer_decodes_them(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    tokenizer.backend.add_tokens(["two words", "é", "plain", "€"])
    ids = tokenizer.encode("x two words é plain € y")
    assert max(ids) > 260
    for cuts in ([], list(range(len(ids)))):
        text, _ = run(Detokenizer(tokenizer), split(ids, cuts))
        assert text == tokenizer.decode(ids)


def test_only_tokens_that_are_bytes_and_nothing_else_are_taken_for_bytes(
    wordwise: Tokenizer,
) -> None:
    assert not wordwise.decodes_bytes


@given(prompt=texts, text=texts, cuts=cuts)
def test_an_output_continues_its_prompts_text(
    wordwise: Tokenizer, prompt: str, text: str, cuts: list[int]
) -> None:
    prompt_ids, ids = wordwise.encode("a" + prompt + "a"), wordwise.encode(text)
    detokenizer = Detokenizer(wordwise, prompt_token_ids=prompt_ids)
    expected = wordwise.decode(prompt_ids + ids).removeprefix(wordwise.decode(prompt_ids))
    assert run(detokenizer, split(ids, cuts))[0] == expected


@given(
    text=st.text(alphabet="aab€", max_size=40),
    stop=st.lists(st.text(alphabet="aab€", min_size=1, max_size=6), max_size=4).map(tuple),
    cuts=cuts,
    include=st.booleans(),
)
def test_stop_strings_end_the_text_wherever_tokens_are_cut(
    bytewise: Tokenizer, text: str, stop: tuple[str, ...], cuts: list[int], include: bool
) -> None:
    ids = bytewise.encode(text)
    detokenizer = Detokenizer(bytewise, stop=stop, include_stop=include)
    result, last = run(detokenizer, split(ids, cuts))
    expected = text_before_stop(text, stop)
    if last is None:
        assert result == text == expected
    else:
        assert last.stop in stop
        assert result == expected + (last.stop if include else "")
        assert text.startswith(expected + last.stop)


def test_no_stop_string_begins_in_the_first_tokens(bytewise: Tokenizer) -> None:
    ids = bytewise.encode("abab")
    detokenizer = Detokenizer(bytewise, stop=("b",), num_unstopped_tokens=len(ids) - 2)
    assert detokenizer.push(ids) == Piece("aba", len(ids), "b")


def test_completes_a_character_that_the_prompt_began(bytewise: Tokenizer) -> None:
    first, *rest = bytewise.encode("€")
    detokenizer = Detokenizer(bytewise, prompt_token_ids=[*bytewise.encode("ab"), first])
    assert run(detokenizer, iter([rest])) == ("€", None)


def test_gives_a_character_once_its_last_byte_is_there(bytewise: Tokenizer) -> None:
    detokenizer = Detokenizer(bytewise)
    assert [detokenizer.push([i]).text for i in bytewise.encode("a🦙b")] == (
        ["a", "", "", "", "🦙", "b"]
    )


def test_flushes_an_incomplete_character_at_the_end(bytewise: Tokenizer) -> None:
    detokenizer = Detokenizer(bytewise)
    assert detokenizer.push(bytewise.encode("a€")[:-1]).text == "a"
    assert detokenizer.finish().text == "\ufffd"
    assert detokenizer.finish() == Piece("", 0)


def test_bytes_that_never_become_a_character_are_not_held_forever(bytewise: Tokenizer) -> None:
    broken = bytewise.encode("ÿ")[1]  # a continuation byte
    detokenizer = Detokenizer(bytewise)
    texts = [detokenizer.push([broken]).text for _ in range(200)]
    assert len("".join(texts)) >= 197
    assert max(map(len, texts)) == 1


def test_holds_back_only_what_can_begin_a_stop_string(bytewise: Tokenizer) -> None:
    detokenizer = Detokenizer(bytewise, stop=("END",))
    texts = [detokenizer.push(bytewise.encode(part)).text for part in ("a", "E", "N", "X", "EE")]
    assert texts == ["a", "", "", "ENX", "E"]
    assert detokenizer.finish() == Piece("E", 0)


@pytest.mark.parametrize(
    ("text", "stop"), [("aaab", "aab"), ("ababac", "abac"), ("aabaaabaaac", "aabaaac")]
)
def test_finds_a_stop_string_that_begins_inside_a_failed_match(
    bytewise: Tokenizer, text: str, stop: str
) -> None:
    result, last = run(Detokenizer(bytewise, stop=(stop,)), split(bytewise.encode(text), []))
    assert result == text_before_stop(text, (stop,)) != text
    assert last is not None


def test_counts_the_tokens_up_to_the_stop_string(bytewise: Tokenizer) -> None:
    detokenizer = Detokenizer(bytewise, stop=("cd",))
    assert detokenizer.push(bytewise.encode("abc")) == Piece("ab", 3)
    assert detokenizer.push(bytewise.encode("defg")) == Piece("", 1, "cd")
    assert detokenizer.push(bytewise.encode("h")) == Piece("", 0)
    assert detokenizer.finish() == Piece("", 0)


def test_special_tokens_are_not_text(bytewise: Tokenizer) -> None:
    detokenizer = Detokenizer(bytewise)
    assert detokenizer.push([EOS, *bytewise.encode("a"), EOS]) == Piece("a", 3)
