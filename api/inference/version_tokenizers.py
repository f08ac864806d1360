"""The tokenizers of adapter versions that add tokens to the base's."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence

from ...adapters.added_tokens import AddedToken
from ...engine.text.tokenizer import Tokenizer

MAX_TOKENIZERS = 16
"""Each holds the base's whole vocabulary again."""


class VersionTokenizers:
    """Those used last; versions with the same added tokens share one."""

    def __init__(self, open_with: Callable[[Sequence[AddedToken]], Tokenizer]) -> None:
        """`open_with`: the base's tokenizer with these tokens."""
        self._open_with = open_with
        self._opened: OrderedDict[Sequence[AddedToken], asyncio.Task[Tokenizer]] = OrderedDict()

    async def get(self, added: tuple[AddedToken, ...]) -> Tokenizer | None:
        """The tokenizer with these tokens; None if there are none. Raises TokenizerUnusable."""
        if not added:
            return None
        task = self._opened.get(added)
        if task is None or (task.done() and task.exception() is not None):
            task = asyncio.create_task(asyncio.to_thread(self._open_with, added))
            self._opened[added] = task
        self._opened.move_to_end(added)
        while len(self._opened) > MAX_TOKENIZERS:
            self._opened.popitem(last=False)
        return await asyncio.shield(task)
