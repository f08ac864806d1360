"""Requests' texts and conversations as tokens, and tokens as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ...engine.grammars.spec import GrammarSpec
from ...engine.process.engine import Engine
from ...engine.text.chat_form import ChatForm
from ...engine.text.tokenizer import Tokenizer
from ...platform.keys.principal import Principal
from ..contract.errors import ApiError
from ..control_plane.tenant_threads import AsyncTenantThreads
from ..tools.answer_plan import AnswerPlan, plan_answer
from ..tools.chat_prompt import ChatPrompts
from ..tools.conversation import ChatMessage
from ..tools.reasoning import Reasoning
from ..tools.reasoning_control import ReasoningControl
from ..tools.reasoning_format import ReasoningParser
from ..tools.tool import Tool, ToolUse
from ..tools.tool_format import ToolFormatName
from .echo import Echo, echo_of

NUM_TOKENIZERS = 4
"""Threads. Two tenants whose prompts take long leave one to the others."""
MAX_TOKENIZER_CALLS = 1024
"""Of one tenant."""
SHORT_PROMPT = 512
"""Characters."""


class Prompts:
    """Renders chat templates and tokenizes, in threads that tenants share fairly."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        engine: Engine,
        tool_format: ToolFormatName | None = None,
        reasoning_parser: ReasoningParser | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._engine = engine
        self._chat_prompts = ChatPrompts(tokenizer, tool_format)
        self.reasoning = ReasoningControl(tokenizer, reasoning_parser)
        self._threads = AsyncTenantThreads(
            "tokenizer", NUM_TOKENIZERS, max_calls=MAX_TOKENIZER_CALLS
        )

    def close(self) -> None:
        self._threads.close()

    def plan_answer(
        self,
        use: ToolUse | None,
        *,
        form_grammar: GrammarSpec | None,
        answer_schema: Mapping[str, Any] | None = None,
        reasoning: Reasoning | None = None,
    ) -> AnswerPlan:
        """How an answer is kept to its request's tools and form; see `plan_answer`."""
        return plan_answer(
            use,
            lambda: self._chat_prompts.tool_format,
            self._tokenizer,
            form_grammar=form_grammar,
            answer_schema=answer_schema,
            reasoning=reasoning,
        )

    async def encode_chat(
        self,
        principal: Principal,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        *,
        tokenizer: Tokenizer | None = None,
        form: ChatForm = ChatForm(),
        is_bounded: bool = True,
    ) -> list[int]:
        """The prompt of a conversation. Raises an EngineError that says what does not fit.

        `tokenizer`: the model's own; None: the base's. `is_bounded`: what is certainly longer than
        the model's context is not tokenized.
        """
        return await self._threads.run(
            principal.tenant_id,
            self._chat_prompts.encode,
            messages,
            tools,
            tokenizer=tokenizer,
            form=form,
            max_tokens=self._capacity if is_bounded else None,
        )

    async def encode(
        self,
        principal: Principal,
        prompts: Sequence[str | list[int]],
        *,
        tokenizer: Tokenizer | None = None,
        add_special_tokens: bool = True,
        truncate: int | None = None,
        max_tokens: int = 0,
        is_bounded: bool = True,
    ) -> list[list[int]]:
        """Each prompt's token ids; those of the caller's are checked later and taken as they are.

        `truncate`: keep this many of the last tokens; -1: as many as fit beside `max_tokens`.
        `tokenizer`, `is_bounded`: as of `encode_chat`, the latter for prompts that are not cut.
        """
        encode_all = partial(
            _encode_all,
            tokenizer or self._tokenizer,
            prompts,
            add_special_tokens=add_special_tokens,
            max_tokens=self._capacity if is_bounded and truncate is None else None,
        )
        encoded = (
            encode_all()
            if _is_encoded_at_once(prompts)
            else await self._threads.run(principal.tenant_id, encode_all)
        )
        if truncate is None:
            return encoded
        room = max(self._capacity - max_tokens, 1)
        kept = room if truncate < 0 else truncate
        return [prompt[max(len(prompt) - kept, 0) :] for prompt in encoded]

    async def encode_pairs(
        self,
        principal: Principal,
        pairs: Sequence[tuple[str, str]],
        *,
        tokenizer: Tokenizer | None = None,
        add_special_tokens: bool = True,
        truncate: int | None = None,
        max_second_tokens: int | None = None,
    ) -> list[list[int]]:
        """Each pair's token ids; see `Tokenizer.encode_pair`.

        `truncate`: keep this many of its tokens; -1: as many as fit. `tokenizer`: as of
        `encode_chat`.
        """
        is_cut = truncate is not None or max_second_tokens is not None
        encode_pair = partial(
            (tokenizer or self._tokenizer).encode_pair,
            add_special_tokens=add_special_tokens,
            max_tokens=None if is_cut else self._capacity,
            truncate=self._capacity if truncate == -1 else truncate,
            max_second_tokens=max_second_tokens,
        )
        return await self._threads.run(
            principal.tenant_id, lambda: [encode_pair(*pair) for pair in pairs]
        )

    async def decode(
        self,
        principal: Principal,
        token_ids: Sequence[int],
        *,
        tokenizer: Tokenizer | None = None,
    ) -> str:
        """The text of these tokens, including special ones."""
        decode = (tokenizer or self._tokenizer).decode
        return await self._threads.run(
            principal.tenant_id, decode, token_ids, skip_special_tokens=False
        )

    async def echo(
        self,
        principal: Principal,
        prompts: Sequence[str | list[int]],
        encoded: Sequence[list[int]],
        *,
        tokenizer: Tokenizer | None = None,
        is_cut: bool,
    ) -> list[Echo]:
        """The prompts as answers repeat them. `is_cut`: `encoded` may lack their beginnings."""

        def echo_all() -> list[Echo]:
            return [
                echo_of(
                    tokenizer or self._tokenizer,
                    prompt if isinstance(prompt, str) and not is_cut else None,
                    token_ids,
                )
                for prompt, token_ids in zip(prompts, encoded, strict=True)
            ]

        return await self._threads.run(principal.tenant_id, echo_all)

    def room_for_output(self, prompt: Sequence[int]) -> int:
        """How many tokens may follow the prompt. Raises ApiError if none."""
        if len(prompt) >= self._capacity:
            raise ApiError(
                "context_length_exceeded",
                f"The prompt has {len(prompt)} tokens; "
                f"with the output it may have {self._capacity}.",
            )
        return self._capacity - len(prompt)

    @property
    def _capacity(self) -> int:
        return self._engine.info.max_model_len


def _encode_all(
    tokenizer: Tokenizer,
    prompts: Sequence[str | list[int]],
    *,
    add_special_tokens: bool,
    max_tokens: int | None,
) -> list[list[int]]:
    return [
        tokenizer.encode(prompt, add_special_tokens=add_special_tokens, max_tokens=max_tokens)
        if isinstance(prompt, str)
        else prompt
        for prompt in prompts
    ]


def _is_encoded_at_once(prompts: Sequence[str | list[int]]) -> bool:
    """It takes less than handing it to a thread does."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    return not texts or (len(texts) == 1 and len(texts[0]) <= SHORT_PROMPT)
