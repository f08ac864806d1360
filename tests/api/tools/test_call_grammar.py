"""The answers that enforced calls allow, according to llguidance."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from loraplex.api.contract.errors import ApiError
from loraplex.api.tools.answer_part import ArgumentsText, Text
from loraplex.api.tools.answer_plan import AnswerPlan, plan_answer
from loraplex.api.tools.answer_reader import AnswerReader
from loraplex.api.tools.call_grammar import call_grammar, needs_grammar
from loraplex.api.tools.tool import NO_ARGUMENTS, Tool, ToolUse
from loraplex.api.tools.tool_format import (
    DEEPSEEK_V3,
    GLM45,
    HERMES,
    INTERNLM,
    KIMI_K2,
    LFM2,
    LLAMA,
    MINIMAX_M2,
    MISTRAL,
    PYTHONIC,
    QWEN3_CODER,
    SEED_OSS,
    STEP3,
    TOOL_FORMATS,
    XLAM,
    ToolFormat,
)
from loraplex.engine.errors import InvalidGrammar
from loraplex.engine.text.tokenizer import Tokenizer
from support.models import save_byte_tokenizer

llguidance = pytest.importorskip("llguidance", reason="grammars need llguidance")
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
Accepts = Callable[[str], bool]
FORMATS = pytest.mark.parametrize("written", TOOL_FORMATS.values(), ids=lambda f: str(f.name))


def use_of(
    *, is_required: bool = False, is_parallel: bool = True, is_strict: bool = True
) -> ToolUse:
    tools = [Tool(name, None, CITY, is_strict=is_strict) for name in ("f", "g", "h")]
    return ToolUse(tools, frozenset({"f", "g"}), is_required=is_required, is_parallel=is_parallel)


def test_a_function_without_parameters_takes_none_wherever_there_is_a_grammar(
    tokenizer: Tokenizer,
) -> None:
    use = ToolUse(
        [Tool("f", None, NO_ARGUMENTS, is_strict=False)],
        frozenset({"f"}),
        is_required=False,
        is_parallel=False,
    )
    accepts = accepting(tokenizer, use, HERMES)
    assert accepts(HERMES.write([("f", {})]))
    assert not accepts(HERMES.write([("f", {"a": 1})]))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(path)
    return Tokenizer(path)


def accepting(
    tokenizer: Tokenizer,
    use: ToolUse,
    written: ToolFormat,
    answer_schema: dict[str, Any] | None = None,
) -> Accepts:
    """Whether a whole answer follows the grammar of such requests."""
    spec = call_grammar(use, written, tokenizer, answer_schema=answer_schema)
    grammar = llguidance.LLMatcher.grammar_from_lark(spec.text)
    vocabulary = llguidance.LLTokenizer(tokenizer.backend.to_str())

    def accepts(answer: str) -> bool:
        matcher = llguidance.LLMatcher(vocabulary, grammar)
        assert not matcher.is_error(), matcher.get_error()
        ids = tokenizer.backend.encode(answer, add_special_tokens=False).ids
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    return accepts


@FORMATS
def test_required_calls_are_all_that_is_accepted(tokenizer: Tokenizer, written: ToolFormat) -> None:
    accepts = accepting(tokenizer, use_of(is_required=True, is_strict=False), written)
    assert accepts(written.write([("f", {"city": "Köln"})]))
    assert accepts(written.write([("f", {"city": ""}), ("g", {"city": "x"})]))
    assert not accepts(written.write([("f", {"town": "x"})]))
    assert not accepts(written.write([("h", {"city": "x"})])), "h may not be called"
    assert not accepts("Hello")
    assert not accepts("")


@FORMATS
def test_without_parallel_calls_there_is_one(tokenizer: Tokenizer, written: ToolFormat) -> None:
    for is_required in (True, False):
        use = use_of(is_required=is_required, is_parallel=False)
        accepts = accepting(tokenizer, use, written)
        assert accepts(written.write([("f", {"city": "x"})]))
        assert not accepts(written.write([("f", {"city": "x"}), ("g", {"city": "x"})]))


@FORMATS
def test_text_is_free_as_long_as_it_is_no_call(tokenizer: Tokenizer, written: ToolFormat) -> None:
    accepts = accepting(tokenizer, use_of(), written)
    for text in ("", "Hello <tool> there\n", "[1] 3 < 4 {x}\n\nyes"):
        assert accepts(text)
    assert accepts(written.write([("f", {"city": "x"})]))
    assert not accepts(written.write([("f", {"town": "x"})])), "f is strict"


@FORMATS
def test_a_tool_that_is_not_strict_may_be_called_with_anything(
    tokenizer: Tokenizer, written: ToolFormat
) -> None:
    accepts = accepting(tokenizer, use_of(is_parallel=False, is_strict=False), written)
    assert accepts(written.write([("f", {"town": [1, None]})]))


@pytest.mark.parametrize("written", [HERMES, MISTRAL], ids=lambda f: str(f.name))
def test_an_answer_with_a_form_is_that_or_calls(tokenizer: Tokenizer, written: ToolFormat) -> None:
    accepts = accepting(tokenizer, use_of(), written, answer_schema=NUMBER)
    assert accepts('{"n": 3}')
    assert accepts(written.write([("f", {"city": "x"})]))
    assert not accepts("Hello")
    assert not accepts('{"n": "x"}')


@pytest.mark.parametrize(
    "written",
    [HERMES, MISTRAL, DEEPSEEK_V3, INTERNLM, GLM45, KIMI_K2, STEP3, LFM2],
    ids=lambda f: str(f.name),
)
@pytest.mark.parametrize("is_required", [True, False])
def test_markers_that_are_special_tokens_are_asked_for_as_tokens(
    tmp_path: Path, written: ToolFormat, is_required: bool
) -> None:
    save_byte_tokenizer(tmp_path)
    base = Tokenizer(tmp_path)
    base.backend.add_special_tokens([AddedToken(m, special=True) for m in _marks(written)])
    base.backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    answer = written.write([("f", {"city": "x"})])
    assert written.opening in tokenizer.special_token_ids_of([written.opening])
    assert accepting(tokenizer, use_of(is_required=is_required), written)(answer)
    assert not accepting(base, use_of(is_required=is_required), written)("Hello") or not is_required


def _marks(written: ToolFormat) -> list[str]:
    return [marker for marker in written.markers if len(marker) > 3]


@pytest.mark.parametrize("written", [LLAMA, XLAM], ids=lambda f: str(f.name))
def test_json_cannot_be_told_from_calls_that_are_plain_json(
    tokenizer: Tokenizer, written: ToolFormat
) -> None:
    def plan(use: ToolUse) -> AnswerPlan:
        return plan_answer(use, lambda: written, tokenizer, form_grammar=None, answer_schema=NUMBER)

    with pytest.raises(ApiError, match="plain JSON") as refused:
        plan(use_of())
    assert refused.value.code == "unsupported_parameter"
    assert plan(use_of(is_required=True)).grammar is not None


def test_calls_that_are_numbered_may_have_any_number(tokenizer: Tokenizer) -> None:
    accepts = accepting(tokenizer, use_of(is_required=True), KIMI_K2)
    answer = KIMI_K2.write([("f", {"city": "x"})])
    assert accepts(answer.replace("f:0", "f:12"))
    assert not accepts(answer.replace("f:0", "f:"))
    assert not accepts(answer.replace("f:0", "f"))


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        ({"type": "boolean"}, ["True", "false"], ["None", "1", '"True"']),
        ({"type": ["string", "null"]}, ["None", "null", '"x"'], ["True", "x"]),
        ({"const": True, "type": "boolean"}, ["True"], ["False"]),
        ({"enum": ["a", None]}, ["None", '"a"'], ['"b"']),
        ({"type": ["string", "null"], "enum": ["a"]}, ['"a"'], ["None"]),
        ({"type": "array", "items": {"type": "integer"}}, ["[1, 2]"], ["[True]", "(1, 2)"]),
    ],
    ids=str,
)
def test_words_of_python_are_values_of_their_types(
    tokenizer: Tokenizer, schema: dict[str, Any], accepted: list[str], refused: list[str]
) -> None:
    parameters = {"type": "object", "properties": {"a": schema, "b": {"type": "integer"}}}
    tool = Tool("f", None, {**parameters, "required": ["b"]}, is_strict=True)
    use = ToolUse([tool], frozenset({"f"}), is_required=True, is_parallel=False)
    accepts = accepting(tokenizer, use, PYTHONIC)
    for word in accepted:
        assert accepts(f"[f(a={word}, b=1)]")
    for word in refused:
        assert not accepts(f"[f(a={word}, b=1)]")
    assert accepts("[f(b=1)]"), "a is optional"
    assert not accepts("[f(, b=1)]")
    assert not accepts("[f(a=1)]"), "b is required"


def test_a_list_in_python_is_told_from_one_in_json(tokenizer: Tokenizer) -> None:
    plan = plan_answer(
        use_of(), lambda: PYTHONIC, tokenizer, form_grammar=None, answer_schema={"type": "array"}
    )
    assert plan.grammar is not None
    reader = AnswerReader(PYTHONIC, {"f"})
    parts = [*reader.push('[{"f": 1}]'), *reader.finish()]
    assert "".join(part.text for part in parts if isinstance(part, Text)) == '[{"f": 1}]'


@pytest.mark.parametrize(
    ("use", "needed"),
    [
        (use_of(is_strict=False), False),
        (use_of(is_strict=True), True),
        (use_of(is_strict=False, is_required=True), True),
        (use_of(is_strict=False, is_parallel=False), True),
    ],
)
def test_a_model_that_may_do_as_it_likes_is_not_held_to_a_grammar(
    use: ToolUse, needed: bool
) -> None:
    assert needs_grammar(use) is needed


BY_ARGUMENT = [QWEN3_CODER, SEED_OSS, MINIMAX_M2, GLM45, STEP3, PYTHONIC]
"""Their grammars have a rule for each argument."""
TYPED: dict[str, Any] = {
    "type": "object",
    "$defs": {"Unit": {"type": "string", "enum": ["C", "F"]}, "Place": {"required": ["x"]}},
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"$ref": "#/$defs/Unit"},
        "near": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "at": {"type": "object", "properties": {"x": {"$ref": "#/$defs/Unit"}}, "required": ["x"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("written", BY_ARGUMENT, ids=lambda f: str(f.name))
def test_arguments_that_are_not_json_follow_the_types_of_the_schema(
    tokenizer: Tokenizer, written: ToolFormat
) -> None:
    use = ToolUse(
        [Tool("f", None, TYPED, is_strict=True)],
        frozenset({"f"}),
        is_required=True,
        is_parallel=False,
    )
    accepts = accepting(tokenizer, use, written)

    def is_accepted(arguments: dict[str, Any]) -> bool:
        return accepts(written.write([("f", arguments)]))

    assert is_accepted({"city": "1 < 2\nand", "unit": "C"})
    assert is_accepted({"city": "", "days": 3, "unit": "F", "near": None, "at": {"x": "C"}})
    assert not is_accepted({"city": "x", "unit": "K"})
    assert not is_accepted({"city": "x", "days": "three", "unit": "C"})
    assert not is_accepted({"city": "x"}), "unit is required"
    assert not is_accepted({"city": "x", "unit": "C", "more": 1})
    assert not is_accepted({"city": "x", "unit": "C", "at": {"x": "K"}})


@pytest.mark.parametrize("is_strict", [True, False])
def test_a_pattern_between_tags_is_refused_if_it_must_be_enforced(
    tokenizer: Tokenizer, is_strict: bool
) -> None:
    schema = {"type": "object", "properties": {"day": {"type": "string", "pattern": "x"}}}
    use = ToolUse(
        [Tool("f", None, schema, is_strict=is_strict)],
        frozenset({"f"}),
        is_required=True,
        is_parallel=False,
    )
    if is_strict:
        with pytest.raises(InvalidGrammar, match="`pattern` of the argument 'day'"):
            call_grammar(use, QWEN3_CODER, tokenizer)
    else:
        accepts = accepting(tokenizer, use, QWEN3_CODER)
        assert accepts(QWEN3_CODER.write([("f", {"day": "y"})]))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": 5},
        {"properties": ["city"]},
        {"properties": {"a": 5}},
        {"properties": {"a": {"type": 5}}},
        {"properties": {"a": {"type": ["string", 5]}}},
        {"properties": {"a": {"type": "string", "enum": 5}}},
        {"properties": {"a": {"type": "string", "enum": []}}},
        {"properties": {"a": {"enum": [[1], {}, None, "x"]}}},
        {"properties": {"a": {"const": {"x": 1}}}},
        {"properties": {"a": {"anyOf": "x", "oneOf": [5]}}},
        {"properties": {"a": {"$ref": "#/properties/a"}}},
        {"properties": {"a": {"$ref": 5}}},
        {"properties": {"a": {"$ref": "#/nowhere"}}},
        {"properties": {"a": {"type": "string"}}, "required": 5, "$defs": 5},
        {"properties": {"a": {"type": "string"}}, "required": [["a"]]},
    ],
    ids=str,
)
@pytest.mark.parametrize("written", [QWEN3_CODER, PYTHONIC], ids=lambda f: str(f.name))
def test_a_schema_that_is_none_harms_neither_grammar_nor_reader(
    tokenizer: Tokenizer, written: ToolFormat, schema: dict[str, Any]
) -> None:
    """Its grammar is valid, or the compiler refuses it."""
    tool = Tool("f", None, schema, is_strict=True)
    use = ToolUse([tool], frozenset({"f"}), is_required=True, is_parallel=False)
    spec = call_grammar(use, written, tokenizer)
    vocabulary = llguidance.LLTokenizer(tokenizer.backend.to_str())
    grammar = llguidance.LLMatcher.grammar_from_lark(spec.text)
    llguidance.LLMatcher(vocabulary, grammar, log_level=0)
    reader = AnswerReader(written, {"f"}, {"f": schema})
    parts = reader.push(written.write([("f", {"a": "x", "b": 1})]))
    given = "".join(part.text for part in parts if isinstance(part, ArgumentsText))
    assert json.loads(given)["a"] == "x"
