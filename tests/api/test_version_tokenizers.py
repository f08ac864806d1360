"""The tokenizers of versions that add tokens are opened when needed, and shared."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from loraplex.adapters.added_tokens import AddedToken
from loraplex.api.inference.version_tokenizers import MAX_TOKENIZERS, VersionTokenizers
from loraplex.engine.errors import TokenizerUnusable
from loraplex.engine.text.tokenizer import Tokenizer


class Opener:
    """Opens stand-ins, and notes for which tokens."""

    def __init__(self) -> None:
        self.opened: list[Sequence[AddedToken]] = []
        self.is_broken = False

    def __call__(self, added: Sequence[AddedToken]) -> Tokenizer:
        self.opened.append(added)
        if self.is_broken:
            raise TokenizerUnusable("the folder is gone")
        return cast(Tokenizer, object())


def tokens(number: int) -> tuple[AddedToken, ...]:
    return (AddedToken(number, f"<{number}>"),)


def test_a_model_without_tokens_of_its_own_has_none() -> None:
    assert asyncio.run(VersionTokenizers(Opener()).get(())) is None


def test_versions_with_the_same_tokens_share_one_that_is_opened_once() -> None:
    opener = Opener()

    async def ask() -> list[Any]:
        tokenizers = VersionTokenizers(opener)
        return await asyncio.gather(*(tokenizers.get(tokens(1)) for _ in range(3)))

    first, *others = asyncio.run(ask())
    assert all(other is first for other in others)
    assert opener.opened == [tokens(1)]


def test_the_least_recently_used_is_opened_again() -> None:
    opener = Opener()

    async def ask() -> None:
        tokenizers = VersionTokenizers(opener)
        for number in (*range(MAX_TOKENIZERS), 0, MAX_TOKENIZERS, 0, 1):
            await tokenizers.get(tokens(number))

    asyncio.run(ask())
    assert opener.opened[MAX_TOKENIZERS:] == [tokens(MAX_TOKENIZERS), tokens(1)]


def test_one_that_could_not_be_opened_is_tried_again() -> None:
    opener = Opener()

    async def ask() -> None:
        tokenizers = VersionTokenizers(opener)
        opener.is_broken = True
        with pytest.raises(TokenizerUnusable):
            await tokenizers.get(tokens(1))
        opener.is_broken = False
        assert await tokenizers.get(tokens(1)) is not None

    asyncio.run(ask())
