"""`reasoning_effort` as variables of the base's chat template."""

from __future__ import annotations

from collections.abc import Mapping

from ...engine.text.chat_form import TemplateValue
from ...engine.text.tokenizer import Tokenizer
from ..contract.errors import ApiError
from .conversation import ChatMessage
from .rendering import rendered

NO_EFFORT = "none"
OWN_EFFORT = "own"
"""The model reasons as much as it does without an effort. No route has this value."""
EFFORT_VARIABLE = "reasoning_effort"
SWITCHES = ("enable_thinking", "thinking")
"""The variables with which templates turn reasoning on and off."""


class EffortVariables:
    """What a base's template is told about an effort.

    A variable is used if the prompt depends on it: rendering it with two values shows this.
    """

    def __init__(self, tokenizer: Tokenizer, *, may_reason: bool) -> None:
        """`may_reason`: outputs of this base can begin with reasoning."""
        self._may_reason = may_reason
        self._switch = next(
            (name for name in SWITCHES if _matters(tokenizer, name, True, False)), None
        )
        self._has_effort = _matters(tokenizer, EFFORT_VARIABLE, "low", "high")

    def of(self, effort: str | None, *, param: str) -> Mapping[str, TemplateValue]:
        """Raises ApiError about `param` if the base does not follow this effort."""
        if effort is None or (effort == NO_EFFORT and not self._may_reason):
            return {}
        if effort == OWN_EFFORT:
            return self._own(param)
        variables: dict[str, TemplateValue] = {}
        if self._switch is not None:
            variables[self._switch] = effort != NO_EFFORT
        if self._has_effort and (effort != NO_EFFORT or self._switch is None):
            variables[EFFORT_VARIABLE] = effort
        if not variables:
            raise ApiError(
                "unsupported_parameter",
                f"{param}: the base's chat template has no variable for it",
                param=param,
            )
        return variables

    def _own(self, param: str) -> Mapping[str, TemplateValue]:
        if not self._may_reason:
            message = f"{param}: the base does not reason"
            raise ApiError("unsupported_parameter", message, param=param)
        return {} if self._switch is None else {self._switch: True}


def _matters(tokenizer: Tokenizer, name: str, first: TemplateValue, second: TemplateValue) -> bool:
    probe = [ChatMessage("user", "x")]
    prompts = {rendered(tokenizer, probe, variables={name: value}) for value in (first, second)}
    return len(prompts) == 2 and "" not in prompts
