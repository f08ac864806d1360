"""The engine in this process: prompts, outputs, adapters, mistakes and faults."""

from __future__ import annotations

import gc
import shutil
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from loraplex import LLM, LLMError, RequestOutput, SamplingParams
from loraplex.adapters.intake import run_intake
from loraplex.api.local import examination
from loraplex.api.offline import llm as llm_module
from loraplex.api.offline.prompts import Prompt
from loraplex.engine.core import EngineCore
from loraplex.engine.errors import EngineUnavailable
from support.broken_adapters import BROKEN
from support.models import make_adapter

from .conftest import SMALL

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def refused(call: Callable[[], object]) -> LLMError:
    with pytest.raises(LLMError) as caught:
        call()
    assert str(caught.value).endswith(f"({caught.value.code})")
    return caught.value


# --- prompts --------------------------------------------------------------------------------------


def test_a_prompt_is_text_or_token_ids_alone_or_in_a_dictionary(llm: LLM) -> None:
    (output,) = llm.generate("hello", GREEDY)
    ids = list(output.prompt_token_ids)
    forms: list[Prompt] = ["hello", ids, {"prompt": "hello"}, {"prompt_token_ids": ids}]
    others = llm.generate(forms, GREEDY)
    assert tokens(others) == tokens([output]) * 4
    assert [other.prompt for other in others] == ["hello", None, "hello", None]
    assert tokens(llm.generate(ids, GREEDY)) == tokens([output])


def test_several_conversations_are_answered_in_order(llm: LLM) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("a", "b")]
    both = llm.chat(chats, GREEDY)
    alone = [llm.chat(chat, GREEDY)[0] for chat in chats]
    assert tokens(both) == tokens(alone)
    assert tokens(both)[0] != tokens(both)[1]


def test_an_answer_may_continue_the_last_message(llm: LLM) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    plain, continued = (
        llm.chat(chat, GREEDY)[0],
        llm.chat(chat, GREEDY, continue_final_message=True)[0],
    )
    ids = list(continued.prompt_token_ids)
    assert list(plain.prompt_token_ids)[: len(ids)] == ids
    assert len(plain.prompt_token_ids) > len(ids)


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=number) for number in (1, 5)]
    assert [len(ids) for ids in tokens(llm.generate(["hello", "hello"], params))] == [1, 5]


def test_without_parameters_those_of_the_base_apply(tiny_base: Path, tmp_path: Path) -> None:
    base = shutil.copytree(tiny_base, tmp_path / "base")
    (base / "generation_config.json").write_text('{"temperature": 0.7, "top_k": 1}')
    with LLM(base, **SMALL) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.7, top_k=1)
        expected = llm.generate("hello", SamplingParams(temperature=0.0, max_tokens=16))
        assert tokens(llm.generate("hello")) == tokens(expected)


def test_more_prompts_than_the_engine_queues_are_all_answered_in_order(tiny_base: Path) -> None:
    with LLM(tiny_base, max_queued=3, max_num_seqs=2, **SMALL) as llm:
        prompts = [[index] for index in range(20)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=2))
        assert [output.prompt_token_ids for output in outputs] == prompts
        assert all(len(ids) == 2 for ids in tokens(outputs))


# --- outputs --------------------------------------------------------------------------------------


def test_the_stop_string_or_token_that_ended_an_output_is_its_stop_reason(llm: LLM) -> None:
    only: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}
    only["allowed_token_ids"] = list(range(65, 75))
    free = llm.generate("hello", SamplingParams(**only))[0].outputs[0]
    assert (free.finish_reason, free.stop_reason) == ("length", None)
    token, text = free.token_ids[-1], free.text[-1]
    end = free.text.index(text)
    by_text = llm.generate("hello", SamplingParams(**only, stop=text))[0].outputs[0]
    assert (by_text.finish_reason, by_text.stop_reason) == ("stop", text)
    assert by_text.text == free.text[:end]
    by_token = llm.generate("hello", SamplingParams(**only, stop_token_ids=[token]))[0].outputs[0]
    assert (by_token.finish_reason, by_token.stop_reason) == ("stop", token)
    assert by_token.text == free.text[:end]
    expected = list(free.token_ids[: end + 1])
    assert list(by_text.token_ids) == list(by_token.token_ids) == expected


def test_an_output_that_ends_itself_has_no_stop_reason_and_its_last_token(llm: LLM) -> None:
    end = llm.generate("x", SamplingParams(max_tokens=1))[0]  # any output
    assert end.finished
    biased = SamplingParams(temperature=0.0, max_tokens=5, logit_bias={256: 100.0}, logprobs=1)
    output = llm.generate("hello", biased)[0].outputs[0]
    assert (output.finish_reason, output.stop_reason, output.text) == ("stop", None, "")
    assert list(output.token_ids) == [256]
    assert output.logprobs is not None
    assert len(output.logprobs) == 1


def test_log_probabilities_hold_the_chosen_and_the_most_likely_tokens(llm: LLM) -> None:
    params = SamplingParams(seed=3, temperature=1.5, max_tokens=6, logprobs=2, ignore_eos=True)
    output = llm.generate("hello", params)[0].outputs[0]
    assert output.logprobs is not None
    total = 0.0
    for token, position in zip(output.token_ids, output.logprobs, strict=True):
        ranks = {each.rank: each.logprob for each in position.values() if each.rank}
        assert list(ranks) == [1, 2]
        assert ranks[1] >= ranks[2] >= position[token].logprob or position[token].rank
        total += position[token].logprob
    assert output.cumulative_logprob == pytest.approx(total)


def test_a_prompt_alone_may_be_scored(llm: LLM) -> None:
    scored = llm.generate("hello", SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
    assert scored.prompt_logprobs is not None
    assert [len(each or ()) for each in scored.prompt_logprobs] == [0, 1, 1, 1, 1]
    assert list(scored.outputs[0].token_ids) == []


def test_an_output_without_a_limit_ends_with_the_context(llm: LLM) -> None:
    unlimited = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    (output,) = llm.generate("x" * 480, unlimited)
    assert len(output.outputs[0].token_ids) == 512 - 480
    assert output.outputs[0].finish_reason == "length"


def test_a_prompts_beginning_is_computed_once(llm: LLM) -> None:
    prompt = "The same beginning of both prompts, a few blocks long. "
    first, second = (llm.generate(prompt + end, GREEDY)[0] for end in ("one", "two"))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens >= 48


def test_embeddings_have_length_one_unless_asked_otherwise(llm: LLM) -> None:
    (unit,) = llm.embed("hello")
    (raw,) = llm.embed("hello", normalize=False)
    length = sum(value**2 for value in raw.outputs.embedding) ** 0.5
    assert [value / length for value in raw.outputs.embedding] == pytest.approx(
        unit.outputs.embedding, abs=1e-6
    )
    assert length != pytest.approx(1.0)


# --- adapters -------------------------------------------------------------------------------------


def test_a_folder_is_examined_once_until_it_is_written_again(
    llm: LLM, adapters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examined: list[str] = []

    def counting(request: Any) -> Any:
        examined.append(request.weights_path)
        return run_intake(request)

    monkeypatch.setattr(examination, "run_intake", counting)
    expected = tokens(llm.generate(["hello"] * 2, GREEDY, adapter=list(adapters[:2])))
    assert expected[0] != expected[1]
    examined.clear()
    folder = shutil.copytree(adapters[0], tmp_path / "trained")
    for _ in range(2):
        assert tokens(llm.generate("hello", GREEDY, adapter=folder)) == expected[:1]
    assert len(examined) == 1
    shutil.copytree(adapters[1], folder, dirs_exist_ok=True)
    assert tokens(llm.generate("hello", GREEDY, adapter=str(folder))) == expected[1:]
    assert len(examined) == 2


@pytest.fixture(scope="module")
def large(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Adapters of 0.7 MiB."""
    folder = tmp_path_factory.mktemp("large")
    return [make_adapter(tiny_base, folder / str(seed), seed=seed, r=96) for seed in (1, 2, 3)]


TIGHT = {**SMALL, "arena_gib": 0.001, "host_cache_gib": 0.001}
"""Room for one of these adapters on the device, and for one in host memory."""


def test_adapters_that_do_not_fit_together_take_turns(
    llm: LLM, tiny_base: Path, large: list[Path]
) -> None:
    folders = [*large, None] * 3
    prompts = [f"prompt {index}" for index in range(len(folders))]
    with LLM(tiny_base, **TIGHT) as tight:
        actual = tokens(tight.generate(prompts, GREEDY, adapter=folders))
    assert actual == tokens(llm.generate(prompts, GREEDY, adapter=folders))


def test_an_adapter_that_cannot_be_loaded_fails_its_own_outputs_only(
    tiny_base: Path, large: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with LLM(tiny_base, **TIGHT) as llm:
        expected = [llm.generate("hello", GREEDY, adapter=each)[0] for each in large[:2]]
        for block in tmp_path.rglob("*.block"):  # the second adapter is on the device
            block.unlink()
        lost, kept, base = llm.generate(["hello"] * 3, GREEDY, adapter=[*large[:2], None])
        (failed,) = lost.outputs
        assert failed.finish_reason == "error"
        assert failed.error is not None
        assert failed.error.code == "adapter_load_failed"
        assert tokens([kept]) == tokens(expected[1:])
        assert base.outputs[0].error is None


@pytest.mark.parametrize(
    "name", ["more layers", "another hidden size", "untrained", "upper-case names"]
)
def test_an_adapter_is_rejected_with_the_servers_code(
    llm: LLM, tiny_base: Path, tmp_path: Path, name: str
) -> None:
    kind = BROKEN[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of some of what is to be shown here
        kind.make(tiny_base, tmp_path / "adapter")
    error = refused(lambda: llm.generate("hello", GREEDY, adapter=tmp_path / "adapter"))
    assert error.code == kind.expected
    assert (error.param or "").startswith(kind.pointer)
    assert str(tmp_path / "adapter") in str(error)


def test_folders_without_an_adapter_are_refused(
    llm: LLM, tiny_base: Path, adapters: list[Path], tmp_path: Path
) -> None:
    pickled = shutil.copytree(adapters[0], tmp_path / "pickled")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    damaged = shutil.copytree(adapters[0], tmp_path / "damaged")
    (damaged / "adapter_config.json").write_text("{")
    for folder, code, words in (
        (tmp_path / "nowhere", "invalid_parameter", "is not a folder"),
        (tiny_base, "invalid_parameter", "holds a whole model and no adapter"),
        (pickled, "pickle_refused", "is a pickle"),
        (damaged, "malformed_config", "is not JSON"),
    ):
        error = refused(lambda folder=folder: llm.generate("x", GREEDY, adapter=folder))  # type: ignore[misc]
        assert error.code == code
        assert words in str(error)


def test_full_matrices_are_refused_unless_they_are_allowed(
    llm: LLM, tiny_base: Path, tmp_path: Path
) -> None:
    kind = BROKEN["whole head"]
    kind.make(tiny_base, tmp_path / "adapter")
    error = refused(lambda: llm.generate("hello", GREEDY, adapter=tmp_path / "adapter"))
    assert error.code == "full_matrix_not_allowed"
    with LLM(tiny_base, max_full_matrix_mib=1, **SMALL) as allowing:
        (output,) = allowing.generate("hello", GREEDY, adapter=tmp_path / "adapter")
    assert output.outputs[0].finish_reason in {"stop", "length"}


def test_an_adapter_larger_than_the_memory_for_adapters_is_rejected(
    tiny_base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_adapter(tiny_base, tmp_path / "huge", seed=1, r=192)
    with LLM(tiny_base, **TIGHT) as tight:
        capfd.readouterr()
        error = refused(lambda: tight.generate("hello", GREEDY, adapter=folder))
        assert error.code == "adapter_too_large"
        assert capfd.readouterr().out == "", "a script's output is its own"


@pytest.mark.slow
def test_several_ranks_give_the_tokens_of_one(
    llm: LLM, tiny_base: Path, adapters: list[Path]
) -> None:
    folders = [None, *adapters]
    prompts = [f"prompt {index}" for index in range(len(folders))]
    with LLM(tiny_base, tensor_parallel_size=2, **SMALL) as group:
        actual = tokens(group.generate(prompts, GREEDY, adapter=folders))
    assert actual == tokens(llm.generate(prompts, GREEDY, adapter=folders))


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"best_of": 2}, "unsupported_parameter", "best_of"),
        ({"temperature": -1.0}, "invalid_parameter", "temperature"),
        ({"temperature": "hot"}, "invalid_parameter", "temperature"),
        ({"n": 0}, "invalid_parameter", "n"),
        ({"logprobs": 21}, "invalid_parameter", "logprobs"),
        ({"max_tokens": 0}, "invalid_parameter", "max_tokens"),
        ({"stop": ["x" * 300]}, "invalid_parameter", "stop.0"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "invalid_parameter", None),
    ],
)
def test_parameters_that_cannot_be_meant_are_refused_at_once(
    fields: dict[str, Any], code: str, param: str | None
) -> None:
    error = refused(lambda: SamplingParams(**fields))
    assert error.code == code
    assert param is None or error.param == param
    assert str(error).startswith("SamplingParams: ")


@pytest.mark.parametrize(
    ("call", "code", "words"),
    [
        (lambda llm: llm.generate("x" * 600), "context_length_exceeded", "prompt 0: "),
        (lambda llm: llm.generate(["a", "x" * 500]), "context_length_exceeded", "prompt 1: "),
        (lambda llm: llm.generate([]), "invalid_parameter", "prompts: is empty"),
        (lambda llm: llm.generate(["a", ""]), "invalid_parameter", "prompt 1: is empty"),
        (lambda llm: llm.generate([[1], [260]]), "invalid_parameter", "prompt 1: has token ids"),
        (lambda llm: llm.generate([{"text": "a"}]), "invalid_parameter", "must have prompt"),
        (lambda llm: llm.generate([["a"]]), "invalid_parameter", "must be text or token IDs"),
        (lambda llm: llm.generate("a", {"n": 1}), "invalid_parameter", "must be SamplingParams"),
        (lambda llm: llm.generate(["a"], [GREEDY] * 2), "invalid_parameter", "2 entries for 1"),
        (lambda llm: llm.generate("a", adapter=7), "invalid_parameter", "must be a folder"),
        (lambda llm: llm.generate("a", adapter={}), "invalid_parameter", "must be a folder"),
        (lambda llm: llm.generate("a", adapter={"b": "1"}), "invalid_parameter", "with weights"),
        (lambda llm: llm.generate("a", adapter={"b": 2.5}), "invalid_composition", "-2 to 2"),
        (
            lambda llm: llm.generate("a", SamplingParams(structured_outputs={"regex": "("})),
            "invalid_grammar",
            "prompt 0: ",
        ),
        (
            lambda llm: llm.generate("a", SamplingParams(min_tokens=20)),
            "invalid_parameter",
            "min_tokens",
        ),
        (
            lambda llm: llm.generate("a", SamplingParams(logit_bias={300: 1.0})),
            "invalid_parameter",
            "logit_bias",
        ),
        (lambda llm: llm.chat([]), "invalid_parameter", "messages: is empty"),
        (lambda llm: llm.chat([{"content": "a"}]), "invalid_parameter", "prompt 0: 0.role"),
        (
            lambda llm: llm.chat([{"role": "user", "content": "a"}], continue_final_message=True),
            "invalid_parameter",
            "continue_final_message",
        ),
        (lambda llm: llm.embed("a", pooling="max"), "invalid_parameter", "last, mean"),
    ],
)
def test_a_mistake_is_explained_and_leaves_the_engine_as_it_was(
    llm: LLM, call: Callable[[Any], object], code: str, words: str
) -> None:
    error = refused(lambda: call(llm))
    assert error.code == code
    assert words in str(error)
    assert len(tokens(llm.generate("hello", GREEDY))[0]) > 0


def test_what_does_not_add_up_is_refused(
    llm: LLM, tiny_base: Path, adapters: list[Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(adapters[0], tmp_path / "copy")
    dora = make_adapter(tiny_base, tmp_path / "dora", seed=1, use_dora=True)
    twice = refused(lambda: llm.generate("a", adapter={adapters[0]: 1.0, copy: 0.5}))
    assert twice.code == "invalid_composition"
    other = refused(lambda: llm.generate("a", adapter={adapters[0]: 1.0, dora: 1.0}))
    assert other.code == "adapter_not_composable"
    assert str(dora) in str(other)


# --- interruption and the end ---------------------------------------------------------------------


def test_an_interrupted_call_ends_its_requests_and_the_next_one_is_served(llm: LLM) -> None:
    expected = tokens(llm.generate("hello", GREEDY))
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    timer = threading.Timer(0.3, signal.pthread_kill, (main_thread, signal.SIGINT))
    # A shell starts its background jobs with the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # an interrupt within one of its callbacks, which Hypothesis has, is dropped
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["hello"] * 4000, ENDLESS)
        timer.join()
    finally:
        gc.enable()
        signal.signal(signal.SIGINT, before)
    assert tokens(llm.generate("hello", GREEDY)) == expected


def test_calls_from_several_threads_are_all_answered(llm: LLM) -> None:
    expected = tokens(llm.generate("hello", GREEDY))
    answers: list[list[list[int]]] = []

    def ask() -> None:
        answers.append(tokens(llm.generate("hello", GREEDY)))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [expected] * 4


def test_a_closed_model_serves_nothing_and_leaves_nothing(
    tiny_base: Path, adapters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(threading.enumerate())
    with LLM(tiny_base, **SMALL) as llm:
        llm.generate("hello", GREEDY, adapter=adapters[0])
        assert list(tmp_path.iterdir())
        assert set(threading.enumerate()) - before
    llm.close()
    assert list(tmp_path.iterdir()) == []
    assert set(threading.enumerate()) - before == set()
    assert refused(lambda: llm.generate("hello")).code == "engine_unavailable"


def test_a_failed_step_is_raised_and_the_engine_is_used_no_more(
    tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(core: EngineCore) -> None:
        raise RuntimeError("a defect")

    with LLM(tiny_base, **SMALL) as llm:
        with monkeypatch.context() as patched:
            patched.setattr(EngineCore, "step", fail)
            with pytest.raises(RuntimeError, match="a defect"):
                llm.generate("hello", GREEDY)
        assert refused(lambda: llm.generate("hello", GREEDY)).code == "engine_unavailable"


def test_bases_of_one_process_are_loaded_one_after_another(
    tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    could_load_another: list[bool] = []

    def load(*_args: object) -> None:
        could_load_another.append(llm_module._loading.acquire(blocking=False))
        raise EngineUnavailable("no room")

    monkeypatch.setattr(llm_module, "EngineThread", load)
    for _ in range(2):
        assert refused(lambda: LLM(tiny_base, **SMALL)).code == "engine_unavailable"
    assert could_load_another == [False, False]
