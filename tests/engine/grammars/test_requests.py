"""Requests with grammars among others: waiting, failing, and without effect on others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import pytest

from loraplex.engine.draft import Draft
from loraplex.engine.errors import InvalidGrammar
from loraplex.engine.execution.grammars import Backend, Grammars
from loraplex.engine.grammars.matcher import Automaton, Matcher
from loraplex.engine.grammars.spec import GrammarKind, GrammarSpec
from loraplex.engine.messages import (
    Abort,
    DeleteAdapter,
    FinishReason,
    GenerationRequest,
    ListRequests,
    RequestList,
    Submit,
)
from loraplex.engine.sampling_params import SamplingParams
from support.engine import Answer, LocalEngine
from support.grammars import ScriptedAutomaton, SequentialExecutor
from support.models import SPECIAL_TOKENS, make_adapter

END = 256
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
PROMPT = [7, 8, 9]


class SettableClock:
    """The engine's clock: it stands until it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def only(*tokens: int) -> Callable[[Sequence[int]], Collection[int]]:
    """Outputs of these tokens alone, that end whenever they like."""
    return lambda _: {*tokens, END}


class ScriptedBackend:
    """A grammar's text names its automaton."""

    def __init__(self, automata: dict[str, ScriptedAutomaton]) -> None:
        self.compiled: list[str] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self._automata = automata

    def compile(self, spec: GrammarSpec) -> Automaton:
        assert self.may_go_on.wait(timeout=60)
        self.compiled.append(spec.text)
        if spec.text == "crash":
            raise RuntimeError("the library crashed")
        if spec.text not in self._automata:
            raise InvalidGrammar(f"{spec.text} is no grammar")
        return self._automata[spec.text]

    def grammars(self, **settings: int) -> Grammars:
        backend = Backend(self.compile, SequentialExecutor(), frozenset({END}), VOCAB_SIZE)
        return Grammars(backend, **settings)


@pytest.fixture
def backend() -> ScriptedBackend:
    odd = only(*range(1, 200, 2))
    return ScriptedBackend(
        {
            "odd": ScriptedAutomaton(odd),
            "breaks": ScriptedAutomaton(odd, breaks_behind=3),
            "raises": ScriptedAutomaton(odd, breaks_behind=3, raises=True),
            "dead end": ScriptedAutomaton(lambda taken: {5} if len(taken) < 2 else ()),
        }
    )


@pytest.fixture(scope="module")
def adapter_folder(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tiny_base, tmp_path_factory.mktemp("adapter"), seed=1)


@pytest.fixture
def engine(tiny_base: Path, tmp_path: Path, backend: ScriptedBackend) -> Iterator[LocalEngine]:
    engine = LocalEngine(tiny_base, tmp_path, grammars=backend.grammars())
    yield engine
    backend.may_go_on.set()
    engine.close()


def submit(engine: LocalEngine, text: str | None, **fields: object) -> str:
    grammar = None if text is None else GrammarSpec(GrammarKind.LARK, text)
    settings = {"max_tokens": 12, "temperature": 1.0, "seed": 3, "ignore_eos": True, **fields}
    return engine.submit(PROMPT, grammar=grammar, **settings)  # type: ignore[arg-type]


def error_code(engine: LocalEngine, request_id: str) -> str | None:
    error = engine.answers[request_id].end.error
    return error.code if error else None


def test_others_run_while_a_grammar_is_compiled(
    engine: LocalEngine, backend: ScriptedBackend
) -> None:
    backend.may_go_on.clear()
    waiting, other = submit(engine, "odd"), submit(engine, None)
    while engine.answers[other].finished is None:
        engine.step()
    assert engine.answers[waiting].started is None
    assert engine.core.has_work
    assert not engine.core.awaits_message
    backend.may_go_on.set()
    engine.run()
    assert len(engine.answers[waiting].token_ids) == 12
    assert all(token % 2 for token in engine.answers[waiting].token_ids)


def test_who_waits_for_a_grammar_is_listed_with_the_others(
    engine: LocalEngine, backend: ScriptedBackend
) -> None:
    backend.may_go_on.clear()
    waiting, _ = submit(engine, "odd"), submit(engine, "odd", tenant_id="other")
    engine.core.handle(ListRequests(1, "acme", 10))
    (listed,) = [it for it in engine.core.step() if isinstance(it, RequestList)]
    assert listed.num_requests == 1
    (state,) = listed.requests
    assert (state.request_id, state.state, state.waits_for) == (waiting, "waiting", "grammar")


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"max_queued_per_tenant": 2}, "tenant_queue_full"),
        ({"max_queued": 2, "max_queued_per_tenant": 2}, "tenant_queue_full"),
        ({"max_queued": 2, "max_queued_per_tenant": 9}, "overloaded"),
    ],
)
def test_who_waits_for_a_grammar_counts_as_queued(
    tiny_base: Path,
    tmp_path: Path,
    backend: ScriptedBackend,
    limits: dict[str, int],
    code: str,
) -> None:
    engine = LocalEngine(tiny_base, tmp_path, grammars=backend.grammars(), **limits)
    backend.may_go_on.clear()
    waiting = [submit(engine, "odd") for _ in range(2)]
    assert engine.core.stats().num_waiting == 2
    refused = [submit(engine, "breaks"), submit(engine, None)]
    engine.step()
    assert [error_code(engine, request_id) for request_id in refused] == [code, code]
    engine.abort(waiting[0])
    engine.step()
    assert engine.core.stats().num_waiting == 1
    last = submit(engine, "odd")
    backend.may_go_on.set()
    engine.run()
    assert [len(output) for output in engine.tokens([waiting[1], last])] == [12, 12]
    assert backend.compiled == ["odd"], "a refused request's grammar is not compiled"
    assert engine.core.stats().num_waiting == 0
    assert not engine.core.has_work
    engine.close()


def test_a_deadline_passes_while_a_grammar_is_compiled(
    tiny_base: Path, tmp_path: Path, backend: ScriptedBackend
) -> None:
    clock = SettableClock()
    engine = LocalEngine(tiny_base, tmp_path, clock=clock, grammars=backend.grammars())
    backend.may_go_on.clear()
    late, patient = "late", submit(engine, "odd")
    engine.answers[late] = Answer()
    sampling = SamplingParams(max_tokens=12, grammar=GrammarSpec(GrammarKind.LARK, "odd"))
    engine.core.handle(
        Submit(GenerationRequest(late, "acme", PROMPT, sampling, deadline_seconds=5.0))
    )
    clock.now += 4.9
    engine.step()
    assert engine.answers[late].finished is None
    clock.now += 0.2
    engine.step()
    assert error_code(engine, late) == "deadline_exceeded"
    backend.may_go_on.set()
    engine.run()
    assert len(engine.answers[patient].token_ids) == 12
    engine.close()


def test_a_request_can_be_aborted_while_its_grammar_is_compiled(
    engine: LocalEngine, backend: ScriptedBackend
) -> None:
    backend.may_go_on.clear()
    request_id = submit(engine, "odd")
    engine.step()
    engine.core.handle(Abort(request_id))
    engine.step()
    assert engine.answers[request_id].end.reason is FinishReason.ABORTED
    assert not engine.core.has_work


def test_an_adapter_deleted_meanwhile_ends_the_request(
    engine: LocalEngine, backend: ScriptedBackend, adapter_folder: Path
) -> None:
    key = engine.add_adapter(adapter_folder)
    running = engine.submit(PROMPT, key, max_tokens=200, ignore_eos=True)
    while engine.answers[running].started is None:
        engine.step()
    backend.may_go_on.clear()
    waiting = engine.submit(PROMPT, key, grammar=GrammarSpec(GrammarKind.LARK, "odd"))
    engine.core.handle(DeleteAdapter(key, drain_seconds=30.0))
    engine.step()
    assert error_code(engine, waiting) == "adapter_deleted", "it is not waited for"
    backend.may_go_on.set()
    engine.run()
    assert error_code(engine, running) is None


def test_requests_of_a_tenant_share_a_grammar_and_tenants_do_not(
    engine: LocalEngine, backend: ScriptedBackend
) -> None:
    backend.may_go_on.clear()
    for tenant_id in ("acme", "acme", "other", "acme"):
        submit(engine, "odd", tenant_id=tenant_id)
    backend.may_go_on.set()
    engine.run()
    submit(engine, "odd")
    engine.run()
    assert backend.compiled == ["odd", "odd"]


def test_a_tenants_many_grammars_do_not_hold_up_anothers_one(
    engine: LocalEngine, backend: ScriptedBackend
) -> None:
    backend.may_go_on.clear()
    many = [submit(engine, f"nonsense {number}") for number in range(8)]
    submit(engine, "odd", tenant_id="other")
    backend.may_go_on.set()
    engine.run()
    assert (
        backend.compiled.index("odd") <= 2
    )  # behind the one that ran and the one whose turn it is
    assert len(backend.compiled) == 9
    assert {error_code(engine, request_id) for request_id in many} == {"invalid_grammar"}


def test_what_nobody_waits_for_any_more_is_not_compiled(
    engine: LocalEngine, backend: ScriptedBackend
) -> None:
    backend.may_go_on.clear()
    submit(engine, "odd")
    gone = [submit(engine, "breaks") for _ in range(2)]
    stays = [submit(engine, "dead end") for _ in range(2)]
    for request_id in (*gone, stays[0]):
        engine.abort(request_id)
    backend.may_go_on.set()
    engine.run()
    assert backend.compiled == ["odd", "dead end"]
    assert error_code(engine, stays[1]) == "grammar_failed"
    again = submit(engine, "breaks")
    engine.run()
    assert error_code(engine, again) == "grammar_failed"
    assert backend.compiled[2:] == ["breaks"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("breaks", "grammar_failed"),
        ("raises", "engine_error"),
        ("dead end", "grammar_failed"),
        ("crash", "grammar_failed"),
        ("nonsense", "invalid_grammar"),
    ],
)
def test_a_grammar_that_fails_ends_its_request_alone(
    engine: LocalEngine, text: str, code: str
) -> None:
    alone = [submit(engine, it, request_id=f"alone-{it}") for it in (None, "odd")]
    engine.run()
    failing = submit(engine, text)
    others = [submit(engine, it, request_id=f"beside-{it}") for it in (None, "odd")]
    engine.run()
    assert error_code(engine, failing) == code
    assert engine.tokens(others) == engine.tokens(alone)
    assert [error_code(engine, other) for other in others] == [None, None]
    stats = engine.core.stats()
    assert stats.num_free_kv_blocks == engine.core.info.num_kv_blocks


def test_what_has_failed_is_compiled_anew(engine: LocalEngine, backend: ScriptedBackend) -> None:
    for text in ("breaks", "nonsense", "odd"):
        for _ in range(2):
            submit(engine, text)
            engine.run()
    assert backend.compiled == ["breaks", "breaks", "nonsense", "nonsense", "odd"]


def test_without_the_library_a_grammar_is_refused_by_name(tiny_base: Path, tmp_path: Path) -> None:
    engine = LocalEngine(tiny_base, tmp_path, grammars=Grammars(None))
    refused, other = submit(engine, "odd"), submit(engine, None)
    engine.run()
    assert error_code(engine, refused) == "grammar_not_served"
    assert error_code(engine, other) is None
    engine.close()


def test_the_choices_of_a_request_each_follow_the_grammar(engine: LocalEngine) -> None:
    ids = [submit(engine, "odd", group_id="g", seed=seed) for seed in range(4)]
    engine.run()
    outputs = engine.tokens(ids)
    assert all(token % 2 for output in outputs for token in output)
    assert len({tuple(output) for output in outputs}) == 4
    alone = [submit(engine, "odd", seed=seed) for seed in range(4)]
    engine.run()
    assert engine.tokens(alone) == outputs


@pytest.mark.parametrize("swap_bytes", [0, 1 << 20])
def test_a_preempted_output_goes_on_where_its_grammar_stood(
    tiny_base: Path, tmp_path: Path, swap_bytes: int
) -> None:
    counting = ScriptedAutomaton(
        lambda taken: {(7 * len(taken) + number) % 250 for number in (1, 2)}
    )
    outputs = []
    for num_blocks in (200, 12):
        engine = LocalEngine(
            tiny_base,
            tmp_path,
            kv_cache_bytes=num_blocks * 8192,
            max_model_len=64,
            swap_bytes=swap_bytes,
            grammars=ScriptedBackend({"count": counting}).grammars(),
        )
        ids = [submit(engine, "count", max_tokens=40, seed=seed) for seed in range(6)]
        engine.run()
        outputs.append(engine.tokens(ids))
        num_preemptions = engine.core.stats().num_preemptions
        engine.close()
    assert num_preemptions > 0
    assert outputs[0] == outputs[1]
    for output in outputs[1]:
        assert all((token - 7 * place) % 250 in (1, 2) for place, token in enumerate(output))


def test_each_end_token_of_a_base_ends_an_output_for_its_grammar() -> None:
    automaton, another_end = ScriptedAutomaton(only(1)), END + 1
    ends = frozenset({END, another_end})
    matcher = Matcher(automaton, end_token_ids=ends, ignores_end=False)
    assert len(matcher.cut(Draft((1, another_end)))) == 2
    matcher.accept([1, another_end])
    assert automaton.taken == [1, END]
