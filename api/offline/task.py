"""One prompt of an offline call, and its sequences in the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...adapters.invocation import adapter_start
from ...engine.errors import InvalidParameter, PromptTooLong
from ...engine.messages import EngineInfo, GenerationRequest, Pooling
from ...engine.sampling_params import SamplingParams as EngineSampling
from ...engine.text.text_form import TextForm
from ...engine.text.tokenizer import Tokenizer
from ..inference.engine_sampling import of_choice, with_tokens
from .adapters import TENANT_ID, Adapter
from .engine_thread import EngineThread, RequestEvent
from .sampling_params import SamplingParams
from .sequence import OpenSequence

_NO_OUTPUT = EngineSampling(max_tokens=0)
_CONTINUATION = TextForm(continues_prompt=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A prompt with everything that determines its outputs."""

    request_id: str
    position: int
    """In the call."""
    text: str | None
    """As the caller gave it; None: token IDs or a conversation."""
    token_ids: list[int]
    adapter: Adapter | None
    tokenizer: Tokenizer
    sampling: EngineSampling = _NO_OUTPUT
    """Of the first choice."""
    form: TextForm = _CONTINUATION
    num_choices: int = 1
    num_prompt_logprobs: int | None = None
    stop_token_ids: Sequence[int] = ()
    """Those that the caller gave."""
    pooling: Pooling | None = None

    def check(self, max_tokens: int, info: EngineInfo) -> None:
        """Raise InvalidParameter or PromptTooLong for a prompt that the engine would refuse."""
        vocab_size = (self.adapter and self.adapter.vocab_size) or info.vocab_size
        if not self.token_ids:
            raise InvalidParameter("prompts", "is empty")
        if not all(0 <= token < vocab_size for token in self.token_ids):
            raise InvalidParameter("prompts", f"has token ids outside [0, {vocab_size})")
        if len(self.token_ids) + max_tokens > info.max_model_len:
            raise PromptTooLong(
                f"The prompt has {len(self.token_ids)} tokens and the output up to {max_tokens}; "
                f"together they may have {info.max_model_len}."
            )

    def sampled(self, params: SamplingParams, max_tokens: int, *, continues_prompt: bool) -> Task:
        """The task with these sampling parameters."""
        sampling = params.engine_sampling(max_tokens)
        return replace(
            self,
            sampling=with_tokens(sampling, self.tokenizer, params.bad_words or ()),
            form=params.text_form(continues_prompt=continues_prompt),
            num_choices=params.n,
            num_prompt_logprobs=params.prompt_logprobs,
            stop_token_ids=params.stop_token_ids or (),
        )

    def embedded(self, pooling: Pooling, info: EngineInfo) -> Task:
        """The task of an embedding."""
        self.check(0, info)
        return replace(self, pooling=pooling)

    def sequences(self) -> Iterator[OpenSequence]:
        """One for each choice."""
        for choice in range(self.num_choices):
            yield OpenSequence(
                self._request(choice),
                position=self.position,
                choice=choice,
                tokenizer=self.tokenizer,
                form=self.form,
                stop_token_ids=self.stop_token_ids,
            )

    def _request(self, choice: int) -> GenerationRequest:
        adapter = self.adapter
        return GenerationRequest(
            request_id=f"{self.request_id}-{choice}",
            tenant_id=TENANT_ID,
            prompt_token_ids=self.token_ids,
            sampling=of_choice(self.sampling, choice),
            adapter=adapter.key if adapter else None,
            adapter_start=adapter_start(self.token_ids, adapter.invocation) if adapter else 0,
            vocab_size=adapter.vocab_size if adapter else None,
            own_end_token_ids=tuple(sorted(self.tokenizer.own_eos_token_ids)),
            group_id=self.request_id if self.num_choices > 1 else None,
            pooling=self.pooling,
            num_prompt_logprobs=self.num_prompt_logprobs if choice == 0 else None,
        )


def run_tasks(engine: EngineThread, tasks: Sequence[Task]) -> list[list[OpenSequence]]:
    """Run all tasks; the complete sequences of each.

    Raises LLMError for a request that is a mistake of the caller.
    """
    opened: dict[str, OpenSequence] = {}
    by_task: list[list[OpenSequence]] = [[] for _ in tasks]

    def requests() -> Iterator[GenerationRequest]:
        for task, sequences in zip(tasks, by_task, strict=True):
            for sequence in task.sequences():
                sequences.append(sequence)
                opened[sequence.request.request_id] = sequence
                yield sequence.request

    def take(event: RequestEvent) -> bool:
        return opened[event.request_id].take(event)

    engine.run(requests(), take)
    return by_task
