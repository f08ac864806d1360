"""The functions that a request offers to the model, and `tool_choice`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from ..contract.request_model import RequestModel, invalid, unsupported
from ..tools.tool import NO_ARGUMENTS, Tool, ToolUse

MAX_TOOLS = 128

FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class ToolType(RequestModel):
    """Fields of every tool; only functions are supported."""

    type: str

    tolerated: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    @model_validator(mode="before")
    @classmethod
    def refuse_other_types(cls, tool: object) -> object:
        if isinstance(tool, dict) and tool.get("type") not in (None, "function"):
            raise unsupported("type")
        return tool


class Function(RequestModel):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; default: no arguments."""
    strict: bool | None = None

    tolerated: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    def as_tool(self) -> Tool:
        return Tool(
            self.name,
            self.description,
            NO_ARGUMENTS if self.parameters is None else self.parameters,
            is_strict=bool(self.strict),
        )


class ChatTool(ToolType):
    """As in `/v1/chat/completions`."""

    function: Function

    def as_tool(self) -> Tool:
        return self.function.as_tool()


class ResponsesTool(ToolType, Function):
    """As in `/v1/responses`: flat."""


class NamedFunction(RequestModel):
    """A function by its name, nested as in chats or flat as in responses."""

    type: Literal["function"] = "function"
    name: FunctionName | None = None
    function: NamedFunction | None = None

    @property
    def function_name(self) -> str | None:
        return self.function.function_name if self.function else self.name


class AllowedTools(RequestModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS)]


def _as_choice(value: object) -> object:
    return {"type": value} if isinstance(value, str) else value


class Choice(NamedTuple):
    """What a tool choice comes to."""

    is_required: bool
    names: Collection[str | None] | None
    """None: all."""


class ToolChoice(RequestModel):
    """`none`, `auto`, `required`, a function, or some of the tools."""

    type: Literal["none", "auto", "required", "function", "allowed_tools"]
    name: FunctionName | None = None
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[NamedFunction], Field(max_length=MAX_TOOLS)] | None = None

    @property
    def choice(self) -> Choice:
        match self.type:
            case "function":
                return Choice(True, [self.function.name if self.function else self.name])
            case "allowed_tools":
                allowed = self.allowed_tools
                mode = allowed.mode if allowed else self.mode
                tools = (allowed.tools if allowed else self.tools) or []
                return Choice(mode == "required", [tool.function_name for tool in tools])
            case kind:
                return Choice(kind == "required", None)


OptionalToolChoice = (
    Annotated[
        ToolChoice,
        BeforeValidator(
            _as_choice, json_schema_input_type=Literal["none", "auto", "required"] | ToolChoice
        ),
    ]
    | None
)


def tool_use(
    tools: Sequence[Tool], tool_choice: ToolChoice | None, *, is_parallel: bool
) -> ToolUse | None:
    """A request's tools and tool choice; None: the prompt contains no tools.

    Raises a validation error if the choice names another tool or none, or a name is there twice.
    """
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("tools", "contain a name twice")
    choice = tool_choice.choice if tool_choice else Choice(False, None)
    allowed = frozenset(names) if choice.names is None else frozenset(choice.names)
    if not allowed <= set(names) or (choice.is_required and not names):
        raise invalid("tool_choice", "names a function that is not in `tools`")
    if tools and not allowed:
        raise invalid("tool_choice", "allows none of `tools`; use `none` instead")
    if not tools or (tool_choice is not None and tool_choice.type == "none"):
        return None
    return ToolUse(
        tools=tools,
        callable_names=frozenset(name for name in allowed if name is not None),
        is_required=choice.is_required,
        is_parallel=is_parallel,
    )
