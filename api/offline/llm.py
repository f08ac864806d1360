"""A base model and its adapters in the caller's own process."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Literal, Self, TypeGuard

import numpy as np

from ...engine.checkpoint.files import check_drafts, locate_base
from ...engine.errors import EngineUnavailable, InvalidParameter
from ...engine.messages import Pooling
from ...engine.text.chat_form import TemplateValue
from ...engine.text.tokenizer import Tokenizer
from ..adapters.probes import PROBE_TEXT, probe_prompts
from ..schemas.chat_form import ChatFormBody
from ..tools.chat_prompt import ChatPrompts
from .adapters import Adapter, Adapters, block_in
from .composition import Member, check_weights, compose
from .effect import check_effect
from .engine_thread import EngineThread
from .errors import raising_llm_errors
from .options import engine_config
from .outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from .prompts import (
    Conversation,
    Prompt,
    as_conversations,
    as_prompts,
    encode,
    encode_chat,
    one_for_each,
    text_of,
)
from .sampling_params import SamplingParams
from .sequence import OpenSequence, as_logprobs
from .task import Task, run_tasks

MIB = 1 << 20
LEAST_NORM = 1e-12
"""Shorter embeddings are divided by this: one of zeros alone stays what it is."""

AdapterPath = str | Path
"""The folder that PEFT's `save_pretrained` wrote."""
Weights = Mapping[str, float] | Mapping[Path, float]
"""Folders, and the factors of their deltas, which are added up."""
AdapterChoice = AdapterPath | Weights | None
AdapterPaths = AdapterChoice | Sequence[AdapterChoice]
Params = SamplingParams | None | Sequence[SamplingParams]
Encode = Callable[[Tokenizer], list[int]]
"""Gives one prompt's token IDs, by the tokenizer of its adapter."""

_loading = Lock()
"""Held while a base is loaded: transformers' loader changes settings of the whole process, such as
PyTorch's default dtype, and puts back what it found."""


class LLM:
    """A base model with an engine in this process. No server and no database are involved.

    The engine has the options of `loraplex serve`, by their names with `_` for `-`, and by those of
    vLLM that mean the same: `LLM("./base", quantization="int8", max_model_len=4096)`. A batch mixes
    adapters as on the server, and the tokens are the server's.

    Close it with `close` or as a context manager; otherwise it closes when it is collected, and at
    the end of the process. Calls from several threads run one after another. All errors are
    LLMError.
    """

    def __init__(
        self, model: str | Path, *, max_full_matrix_mib: float = 0.0, **options: Any
    ) -> None:
        """Load a base: a folder, a Hugging Face model id or a .gguf file.

        `max_full_matrix_mib`: as of `loraplex serve`. `options`: see docs/offline.md.
        """
        with raising_llm_errors(), _loading:
            config = engine_config(model, options)
            model_dir = locate_base(config.model)
            check_drafts(config.speculation)
            self._tokenizer = Tokenizer(model_dir)
            self._chat_prompts = ChatPrompts(self._tokenizer)
            folder = tempfile.TemporaryDirectory(prefix="loraplex-")
            blocks = Path(folder.name)
            try:
                engine = EngineThread(config, lambda key: block_in(blocks, key))
            except BaseException:
                folder.cleanup()
                raise
        self._finalizer = weakref.finalize(self, _close, engine, folder)
        self._engine: EngineThread | None = engine
        self._adapters = Adapters(
            engine.info,
            model_dir,
            blocks,
            num_base_tokens=self._tokenizer.vocab_size,
            max_full_matrix_bytes=round(max_full_matrix_mib * MIB),
        )
        self._numbers = count()
        self._lock = Lock()

    def close(self) -> None:
        """End the engine and free its memory. Idempotent."""
        with self._lock:
            self._engine = None
            self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        adapter: AdapterPaths = None,
    ) -> list[RequestOutput]:
        """Continue prompts. The outputs are in their order.

        `prompts`: one or several; each is a text, token IDs, or a dictionary with `prompt` or
        `prompt_token_ids`. `sampling_params`, `adapter`: one for all prompts, or a list with one
        for each. None: `get_default_sampling_params`, and the base. An adapter is a folder, or a
        dictionary of folders and the weights of their sum.
        """
        with self._running() as engine:
            given = as_prompts(prompts)
            encoders = [
                partial(encode, prompt, max_tokens=engine.max_model_len) for prompt in given
            ]
            tasks = self._prepare(engine, encoders, adapter, [text_of(prompt) for prompt in given])
            return _generate(engine, tasks, sampling_params, continues_prompt=True)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        *,
        adapter: AdapterPaths = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, TemplateValue] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, one or several, in the base's chat template.

        `sampling_params`, `adapter`: as of `generate`. `add_generation_prompt`: the prompt ends
        where the answer begins; None: unless the final message is continued.
        """
        with self._running() as engine:
            form = ChatFormBody(
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=dict(chat_template_kwargs or {}),
            )
            encoders = [
                partial(
                    encode_chat,
                    conversation,
                    self._chat_prompts,
                    form=form,
                    max_tokens=engine.max_model_len,
                )
                for conversation in as_conversations(messages)
            ]
            tasks = self._prepare(engine, encoders, adapter, [None] * len(encoders))
            return _generate(engine, tasks, sampling_params, continues_prompt=False)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        adapter: AdapterPaths = None,
        pooling: Literal["last", "mean"] = "last",
        normalize: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt: the last hidden states with the adapter, pooled.

        `pooling`: the last token's, or the mean over all tokens. `normalize`: to length 1.
        """
        with self._running() as engine:
            if pooling not in list(Pooling):
                raise InvalidParameter("pooling", f"must be one of {', '.join(Pooling)}")
            given = as_prompts(prompts)
            encoders = [
                partial(encode, prompt, max_tokens=engine.max_model_len) for prompt in given
            ]
            texts = [text_of(prompt) for prompt in given]
            tasks = [
                task.embedded(Pooling(pooling), engine.info)
                for task in self._prepare(engine, encoders, adapter, texts)
            ]
            results = run_tasks(engine, tasks)
            return [
                _embedding(*result, normalize=normalize)
                for result in zip(tasks, results, strict=True)
            ]

    def get_default_sampling_params(self) -> SamplingParams:
        """Those of the base's `generation_config.json`, which calls without `sampling_params`
        have."""
        with self._running() as engine:
            return _default_params(engine)

    @contextmanager
    def _running(self) -> Iterator[EngineThread]:
        """The engine, for one call at a time. Errors of all layers are raised as LLMError."""
        with self._lock, raising_llm_errors():
            if self._engine is None:
                raise EngineUnavailable("This LLM is closed.")
            yield self._engine

    def _prepare(
        self,
        engine: EngineThread,
        encoders: Sequence[Encode],
        adapter: AdapterPaths,
        texts: Sequence[str | None],
    ) -> list[Task]:
        """The prompts with their adapters, without sampling."""
        choices = one_for_each("adapter", adapter, len(encoders))
        adapters = [None if each is None else self._adapter(engine, each) for each in choices]
        return [
            self._task(position, *parts)
            for position, parts in enumerate(zip(encoders, adapters, texts, strict=True))
        ]

    def _task(
        self, position: int, encode_one: Encode, adapter: Adapter | None, text: str | None
    ) -> Task:
        own = None if adapter is None else self._adapters.tokenizer_of(adapter)
        tokenizer = own or self._tokenizer
        with raising_llm_errors(where=f"prompt {position}"):
            token_ids = encode_one(tokenizer)
        return Task(
            request_id=str(next(self._numbers)),
            position=position,
            text=text,
            token_ids=token_ids,
            adapter=adapter,
            tokenizer=tokenizer,
        )

    def _adapter(self, engine: EngineThread, choice: object) -> Adapter:
        """The adapter of one prompt."""
        if isinstance(choice, (str, Path)):
            return self._examined(engine, choice)
        if not _are_weights(choice):
            raise InvalidParameter(
                "adapter",
                "must be a folder, folders with weights, or a list of one for each prompt",
            )
        check_weights({str(folder): weight for folder, weight in choice.items()})
        return compose(
            [
                Member(str(folder), self._examined(engine, folder), weight)
                for folder, weight in choice.items()
            ]
        )

    def _examined(self, engine: EngineThread, folder: AdapterPath) -> Adapter:
        """The adapter in this folder, examined and probed."""
        prompts = probe_prompts(self._tokenizer.encode(PROBE_TEXT), engine.info.vocab_size)
        return self._adapters.get(
            Path(folder), lambda adapter: check_effect(engine, adapter.key, prompts)
        )


def _are_weights(choice: object) -> TypeGuard[Mapping[AdapterPath, float]]:
    return (
        isinstance(choice, Mapping)
        and bool(choice)
        and all(isinstance(folder, (str, Path)) for folder in choice)
        and all(type(weight) in (int, float) for weight in choice.values())
    )


def _generate(
    engine: EngineThread,
    tasks: Sequence[Task],
    sampling_params: Params,
    *,
    continues_prompt: bool,
) -> list[RequestOutput]:
    given = _default_params(engine) if sampling_params is None else sampling_params
    params = one_for_each("sampling_params", given, len(tasks))
    sampled_tasks = [
        _sampled(engine, task, each, continues_prompt=continues_prompt)
        for task, each in zip(tasks, params, strict=True)
    ]
    results = run_tasks(engine, sampled_tasks)
    return [_output(*result) for result in zip(sampled_tasks, results, strict=True)]


def _sampled(
    engine: EngineThread, task: Task, params: SamplingParams, *, continues_prompt: bool
) -> Task:
    if not isinstance(params, SamplingParams):
        raise InvalidParameter("sampling_params", "must be SamplingParams, or a list of them")
    room = engine.max_model_len - len(task.token_ids)
    max_tokens = max(1, room) if params.max_tokens is None else params.max_tokens
    with raising_llm_errors(where=f"prompt {task.position}"):
        task.check(max_tokens, engine.info)
        return task.sampled(params, max_tokens, continues_prompt=continues_prompt)


def _default_params(engine: EngineThread) -> SamplingParams:
    return SamplingParams(**asdict(engine.info.generation_defaults))


def _output(task: Task, sequences: Sequence[OpenSequence]) -> RequestOutput:
    first = sequences[0]
    return RequestOutput(
        request_id=task.request_id,
        prompt=task.text,
        prompt_token_ids=task.token_ids,
        outputs=[sequence.output() for sequence in sequences],
        prompt_logprobs=(
            None
            if task.num_prompt_logprobs is None
            else [None, *(as_logprobs(each, task.tokenizer) for each in first.prompt_logprobs)]
        ),
        num_cached_tokens=first.num_cached_tokens,
    )


def _embedding(
    task: Task, sequences: Sequence[OpenSequence], *, normalize: bool
) -> EmbeddingRequestOutput:
    """Raises LLMError if the prompt's request failed."""
    (sequence,) = sequences
    if sequence.error is not None:
        raise sequence.error
    assert sequence.embedding is not None, "the engine sends it with the last part of the prompt"
    vector = np.frombuffer(sequence.embedding, "<f4")
    if normalize:
        vector = vector / max(float(np.linalg.norm(vector)), LEAST_NORM)
    return EmbeddingRequestOutput(task.request_id, task.token_ids, EmbeddingOutput(vector.tolist()))


def _close(engine: EngineThread, folder: tempfile.TemporaryDirectory[str]) -> None:
    engine.close()
    folder.cleanup()
