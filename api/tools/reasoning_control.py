"""Whether and how a base reasons: its format, and the effort that requests ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...engine.text.chat_form import ChatForm, TemplateValue
from ...engine.text.tokenizer import Tokenizer
from .conversation import ChatMessage
from .reasoning import Reasoning
from .reasoning_effort import EffortVariables
from .reasoning_format import (
    DETECTABLE_FORMATS,
    REASONING_FORMATS,
    ReasoningFormat,
    ReasoningParser,
)

_NUM_END_TOKENS = 32
"""The end of a prompt that may hold the markers of reasoning, which may be several tokens each."""


class ReasoningControl:
    """For one base."""

    def __init__(self, tokenizer: Tokenizer, chosen: ReasoningParser | None = None) -> None:
        """`chosen` is how the base writes reasoning; None: as its chat template does."""
        self._tokenizer = tokenizer
        self.format = _find_format(tokenizer, chosen)
        """None: outputs are not searched for reasoning."""
        self._efforts = EffortVariables(tokenizer, may_reason=self.format is not None)

    def form_with_effort(self, form: ChatForm, effort: str | None, *, param: str) -> ChatForm:
        """The form with the variables for this effort; those of the request have precedence.

        Raises ApiError about `param` if the base does not follow this effort.
        """
        variables: Mapping[str, TemplateValue] = self._efforts.of(effort, param=param)
        return replace(form, variables={**variables, **form.variables}) if variables else form

    def of_prompt(
        self,
        prompt: Sequence[int],
        messages: Sequence[ChatMessage],
        form: ChatForm,
        *,
        tokenizer: Tokenizer | None = None,
        is_returned: bool = True,
    ) -> Reasoning | None:
        """The reasoning of outputs to this prompt, which `messages` were rendered to with `form`;
        None: they are not searched for it. `tokenizer`: the model's own; None: the base's."""
        if self.format is None:
            return None
        end = (tokenizer or self._tokenizer).decode(
            prompt[-_NUM_END_TOKENS:], skip_special_tokens=False
        )
        continued = messages[-1].text if form.continues_final_message else ""
        beginning = self.format.beginning_after(end, continued=continued)
        return Reasoning(self.format, beginning, is_returned)


def _find_format(tokenizer: Tokenizer, chosen: ReasoningParser | None) -> ReasoningFormat | None:
    if chosen is not None:
        return REASONING_FORMATS.get(chosen)
    template = tokenizer.chat_template_text
    found = [
        written
        for written in DETECTABLE_FORMATS
        if written.opening in template and written.closing in template
    ]
    return found[0] if len(found) == 1 else None
