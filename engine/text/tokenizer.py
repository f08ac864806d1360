"""The base model's tokenizer: text and chats to token ids.

`tokenizer.json` is used as it is, since it is the checkpoint's own definition; transformers adds
the chat template. Importing this module does not import torch: the API process tokenizes, the
engine process computes.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from ...adapters.added_tokens import AddedToken
from ..errors import ChatTemplateMissing, InvalidParameter, PromptTooLong, TokenizerUnusable
from .chat_form import ChatForm
from .token_coverage import most_bytes_per_token

TOKENIZER_FILE = "tokenizer.json"
MAX_REASON_CHARACTERS = 300
_OWN_VARIABLES = {"messages", "bos_token", "eos_token", "pad_token", "unk_token"}.union(
    inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters
)
"""Names that mean something to transformers: no request chooses them."""
_TOKEN_FLAGS = ("special", "single_word", "lstrip", "rstrip", "normalized")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_WORD_START = "\u2581"  # SentencePiece writes a space as this character


class Tokenizer:
    """Tokenizes for one base model, or for an adapter that adds tokens to it."""

    def __init__(self, model_dir: Path, added: Sequence[AddedToken] = ()) -> None:
        """`added`: by ascending ID. Raises TokenizerUnusable if the base has no usable tokenizer,
        or if an added token cannot have its ID."""
        self._chat = _load(model_dir)
        self.backend: tokenizers.Tokenizer = self._chat.backend_tokenizer
        # A tokenizer.json saved after training may cut or pad: a prompt is neither.
        self.backend.no_truncation()
        self.backend.no_padding()
        for token in added:
            _add_token(self.backend, token)
        self.own_eos_token_ids = frozenset(token.id for token in added if token.ends_output)
        """Those of `eos_token_ids` that are added."""
        declared = _eos_token_ids(model_dir, self._chat.eos_token_id)
        self.eos_token_ids = declared | self.own_eos_token_ids
        """Tokens that end an output: the tokenizer's and the generation config's."""
        self._decoded_bytes: dict[int, bytes] = {}
        self._whole_texts: dict[int, str | None] = {}
        """Both by token id, for the ids requested so far."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's own may be padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def end_token_id(self) -> int | None:
        """The token that ends an output where the text does not say which; None: there is none."""
        own: int | None = self._chat.eos_token_id
        return min(self.eos_token_ids, default=None) if own is None else own

    @property
    def has_chat_template(self) -> bool:
        return self._chat.chat_template is not None

    @property
    def chat_template_text(self) -> str:
        """The source of all chat templates; empty if there are none."""
        templates = self._chat.chat_template or ""
        return "\n".join(templates.values()) if isinstance(templates, dict) else templates

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that are never part of the text."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def special_token_ids_of(self, texts: Iterable[str]) -> dict[str, int]:
        """Those of these texts that are special tokens."""
        ids = {text: self.backend.token_to_id(text) for text in texts}
        return {text: i for text, i in ids.items() if i in self.special_token_ids}

    @cached_property
    def most_bytes_per_token(self) -> int | None:
        """See `token_coverage`."""
        return most_bytes_per_token(json.loads(self.backend.to_str()))

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the base model begins with.

        Raises PromptTooLong immediately for a text that certainly has more than `max_tokens`
        tokens.
        """
        self._check_length(text, max_tokens)
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_pair(
        self,
        first: str,
        second: str,
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        truncate: int | None = None,
        max_second_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of two texts, with the special tokens that the tokenizer puts around a pair.

        `truncate`: of a longer pair, the last tokens of `second` are left out until it has so many;
        `max_second_tokens`: until `second` has so many. Raises InvalidParameter if `second` has too
        few for this, and PromptTooLong as `encode`.
        """
        self._check_length(first + second, max_tokens)
        encoding = self.backend.encode(first, second, add_special_tokens=add_special_tokens)
        of_second = [place for place, text in enumerate(encoding.sequence_ids) if text == 1]
        surplus = max(
            0 if truncate is None else len(encoding.ids) - truncate,
            0 if max_second_tokens is None else len(of_second) - max_second_tokens,
        )
        if surplus <= 0:
            return encoding.ids
        if surplus > len(of_second):
            raise InvalidParameter(
                "truncate_prompt_tokens", "leaves too few tokens for the first text"
            )
        left_out = set(of_second[-surplus:])
        return [token for place, token in enumerate(encoding.ids) if place not in left_out]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        form: ChatForm = ChatForm(),
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation in the base model's own chat template.

        Raises ChatTemplateMissing if the base has none, InvalidParameter if it refuses the
        messages or does not read the form's variables, and PromptTooLong as `encode`. A template
        that does not know tools leaves them out.
        """
        text = self.render_chat(messages, tools=tools, form=form)
        self._check_length(text, max_tokens)
        return self.backend.encode(text, add_special_tokens=False).ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        form: ChatForm = ChatForm(),
    ) -> str:
        """The text that `encode_chat` tokenizes."""
        if not self.has_chat_template:
            raise ChatTemplateMissing
        if not messages:
            raise InvalidParameter("messages", "is empty")
        for name in form.variables:
            if not self._reads_variable(name):
                message = f"the chat template does not read `{name}`"
                raise InvalidParameter("chat_template_kwargs", message)
        try:
            text: str = self._chat.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=form.adds_generation_prompt,
                continue_final_message=form.continues_final_message,
                tokenize=False,
                **form.variables,
            )
        except (TemplateError, TypeError, KeyError, ValueError) as exc:
            raise InvalidParameter("messages", f"do not fit the chat template: {exc}") from exc
        return text

    def _reads_variable(self, name: str) -> bool:
        """What transformers itself passes to templates is no variable of a request."""
        if name in _OWN_VARIABLES:
            return False
        return re.search(rf"\b{re.escape(name)}\b", self.chat_template_text) is not None

    def _check_length(self, text: str, max_tokens: int | None) -> None:
        if max_tokens is None or self.most_bytes_per_token is None:
            return
        num_bytes = len(text.encode(errors="replace"))
        max_bytes = max_tokens * self.most_bytes_per_token
        if num_bytes > max_bytes:
            raise PromptTooLong(
                f"The prompt has {num_bytes} bytes; at most {max_bytes} can fit into the "
                f"model's {max_tokens} tokens."
            )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of these tokens."""
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def vocabulary_entry(self, token_id: int) -> str:
        """The token's text in the vocabulary; empty for an unknown id."""
        return self.backend.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of this token; a character may consist of several tokens' bytes."""
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added_token_ids:
            return token.encode()
        if self._is_byte_level:
            return bytes(map(_BYTE_OF_CHARACTER.__getitem__, token))
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(match[1])
        return token.replace(_WORD_START, " ").encode()

    @cached_property
    def decodes_bytes(self) -> bool:
        """Decoding is putting together the `decoded_bytes` of the tokens, and nothing else."""
        decoder = json.loads(self.backend.to_str())["decoder"] or {"type": None}
        return [part["type"] for part in decoder.get("decoders", [decoder])] == ["ByteLevel"]

    def decoded_bytes(self, token_id: int) -> bytes:
        """The decoded bytes of a token if it `decodes_bytes`; empty for a special token."""
        decoded = self._decoded_bytes.get(token_id)
        if decoded is None:
            decoded = self._decoded_bytes[token_id] = self._decode_bytes(token_id)
        return decoded

    def whole_text(self, token_id: int) -> str | None:
        """The text of a token's `decoded_bytes`; None if they are no whole characters."""
        if token_id in self._whole_texts:
            return self._whole_texts[token_id]
        try:
            text = self.decoded_bytes(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self._whole_texts[token_id] = text
        return text

    def _decode_bytes(self, token_id: int) -> bytes:
        if token_id in self.special_token_ids:
            return b""
        token = self.vocabulary_entry(token_id)
        try:
            return bytes(map(_BYTE_OF_CHARACTER.__getitem__, token))
        except KeyError:  # an added token is literal text
            return token.encode()

    def token_text(self, token_id: int) -> str:
        """The token's text; bytes that are no whole character show as U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    @cached_property
    def _added_token_ids(self) -> frozenset[int]:
        return frozenset(self.backend.get_added_tokens_decoder())

    @cached_property
    def _is_byte_level(self) -> bool:
        decoder = json.loads(self.backend.to_str())["decoder"] or {"type": None}
        return any(part["type"] == "ByteLevel" for part in decoder.get("decoders", [decoder]))


def _load(model_dir: Path) -> PreTrainedTokenizerFast:
    if not (model_dir / TOKENIZER_FILE).is_file():
        raise TokenizerUnusable(
            f"{model_dir} has no {TOKENIZER_FILE}: copy it from the original model, or save a fast "
            "tokenizer there"
        )
    try:
        return PreTrainedTokenizerFast.from_pretrained(model_dir, local_files_only=True)
    except Exception as exc:  # tokenizers raises bare Exception for a file it cannot read
        reason = " ".join(str(exc).split())[:MAX_REASON_CHARACTERS]
        raise TokenizerUnusable(
            f"{model_dir / TOKENIZER_FILE} or the files beside it cannot be read: {reason}; "
            "download the tokenizer again"
        ) from exc


def _add_token(backend: tokenizers.Tokenizer, token: AddedToken) -> None:
    """Raises TokenizerUnusable if the token gets another ID than its own."""
    flags = {name: getattr(token, name) for name in _TOKEN_FLAGS}
    known = backend.token_to_id(token.content)
    backend.add_tokens([tokenizers.AddedToken(token.content, **flags)])
    number = backend.token_to_id(token.content)
    if known is not None or number != token.id:
        raise TokenizerUnusable(
            f"the added token {token.content!a} has the ID {token.id}; after the base's "
            f"tokens it is {number}"
        )


def _eos_token_ids(model_dir: Path, tokenizer_eos: int | None) -> frozenset[int]:
    declared: set[int] = set() if tokenizer_eos is None else {tokenizer_eos}
    for name in ("generation_config.json", "config.json"):
        path = model_dir / name
        value = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        declared.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(declared)


def _byte_of_character() -> dict[str, int]:
    """The inverse of the printable character with which byte-level BPE writes each byte.

    Printable Latin-1 stands for itself; the other 68 bytes follow from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    characters = [*map(chr, printable), *(chr(0x100 + index) for index in range(len(others)))]
    return dict(zip(characters, [*printable, *others], strict=True))


_BYTE_OF_CHARACTER = _byte_of_character()
