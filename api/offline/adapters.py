"""The adapters of an offline engine, by the folders that the caller names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ...adapters.added_tokens import FIELD, AddedToken
from ...adapters.errors import AdapterRejected
from ...adapters.examination import IntakeReport
from ...adapters.identity import AdapterKey
from ...adapters.invocation import InvocationTokens
from ...adapters.layout import layout_to_json
from ...adapters.served_features import are_summable
from ...engine.errors import TokenizerUnusable
from ...engine.messages import EngineInfo
from ...engine.text.tokenizer import Tokenizer
from ..adapters.memory_room import check_fits
from ..local.adapter_folder import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterFolder,
    FolderUnusable,
    read_adapter_folder,
)
from ..local.examination import AdapterBase, examine_folder
from ..local.trained_tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from .errors import LLMError, raising_llm_errors

TENANT_ID = "offline"
"""All requests of an offline engine are of one tenant."""
MAX_TOKENIZERS = 16
"""Each holds the base's whole vocabulary again."""
_FILES = (CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG_FILE)

FolderState = tuple[Path, tuple[tuple[int, int, int] | None, ...]]
"""A folder, and the inode, the size and the time of change of each file."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that was examined, or a composition of such."""

    key: AdapterKey
    vocab_size: int | None = None
    """The number of its tokens, if it is not the base's."""
    added_tokens: tuple[AddedToken, ...] = ()
    invocation: InvocationTokens = ()
    """It acts from these tokens of a prompt on; empty: on all."""
    is_composable: bool = True
    """Whether its delta can be added to another adapter's."""


class Adapters:
    """Examines each folder once; one that was written again is examined again."""

    def __init__(
        self,
        info: EngineInfo,
        model_dir: Path,
        blocks: Path,
        *,
        num_base_tokens: int,
        max_full_matrix_bytes: int,
    ) -> None:
        """`blocks`: a folder for the blocks of the adapters."""
        self._info = info
        self._blocks = blocks
        self._base = AdapterBase(
            layout_to_json(info.layout), info.dtype, max_full_matrix_bytes, num_base_tokens
        )
        self._known: dict[FolderState, Adapter] = {}
        self._open_tokenizer = lru_cache(MAX_TOKENIZERS)(lambda added: Tokenizer(model_dir, added))

    def get(self, folder: Path, prove: Callable[[Adapter], None]) -> Adapter:
        """The adapter in this folder. `prove` is called with one that is new.

        Raises LLMError with the code of the server's rejection.
        """
        state = _state(folder)
        if state in self._known:
            return self._known[state]
        try:
            read = read_adapter_folder(folder)
        except FolderUnusable as exc:
            raise LLMError(exc.code, str(exc), param="adapter") from exc
        with raising_llm_errors(where=str(folder)):
            adapter = self._examine(read)
            prove(adapter)
        self._known[state] = adapter
        return adapter

    def tokenizer_of(self, adapter: Adapter) -> Tokenizer | None:
        """Its own tokenizer; None: the base's."""
        return self._open_tokenizer(adapter.added_tokens) if adapter.added_tokens else None

    def _examine(self, folder: AdapterFolder) -> Adapter:
        """Raises AdapterRejected or another AdapterError."""
        examined = self._blocks / "examined"
        report = examine_folder(folder, self._base, examined)
        check_fits(report, self._info)
        adapter = _adapter(report)
        try:
            self.tokenizer_of(adapter)
        except TokenizerUnusable as exc:
            raise AdapterRejected("resized_vocabulary", str(exc), pointer=f"/{FIELD}") from exc
        examined.replace(self.block_of(adapter.key))
        return adapter

    def block_of(self, key: AdapterKey) -> Path:
        """The file of an adapter's block."""
        return block_in(self._blocks, key)


def block_in(blocks: Path, key: AdapterKey) -> Path:
    """The file of an adapter's block in a folder of blocks."""
    return blocks / f"{key.digest.partition(':')[2]}.block"


def _adapter(report: IntakeReport) -> Adapter:
    return Adapter(
        AdapterKey(TENANT_ID, report.digest),
        report.vocab_size,
        report.added_tokens,
        report.invocation_token_ids,
        are_summable(report.features),
    )


def _state(folder: Path) -> FolderState:
    return folder.resolve(), tuple(_stamp(folder / name) for name in _FILES)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
