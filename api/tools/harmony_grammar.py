"""Grammars of outputs in harmony whose answer or calls are constrained."""

from __future__ import annotations

import re

from ...engine.grammars.spec import GrammarKind, GrammarSpec
from ...engine.text.tokenizer import Tokenizer
from .harmony import ANALYSIS, CHANNEL, END, FINAL, MESSAGE, START
from .reasoning_grammar import answer_rule, marker_symbol


def harmony_grammar(
    tokenizer: Tokenizer,
    *,
    answer: GrammarSpec | None,
    calls: str | None = None,
    rules: dict[str, str] | None = None,
    must_call: bool = False,
) -> GrammarSpec:
    """Any messages in the channels before the answer, then the answer, or calls.

    `answer`: that of the final channel; None: it is free. `calls`: the symbols of a call from its
    header on, with their `rules`; None: there are no calls. Raises InvalidGrammar for an answer's
    grammar that is malformed or too long.
    """
    symbols = {text: marker_symbol(text, tokenizer) for text in (CHANNEL, MESSAGE, START)}
    final = f'{symbols[CHANNEL]} "{FINAL}" {symbols[MESSAGE]} answer'
    ends = [final] * (not must_call) + ([calls] if calls is not None else [])
    all_rules = {
        "start": f"before* ({' | '.join(ends)})",
        "before": f'{symbols[CHANNEL]} ("{ANALYSIS}" | "commentary") {symbols[MESSAGE]} closed '
        f'{symbols[START]} "assistant"',
        **_closed_rules(marker_symbol(END, tokenizer)),
        **(rules or {}),
    }
    if not must_call:
        all_rules["answer"] = "FREE" if answer is None else answer_rule(answer)
    text = "\n".join(f"{name}: {rule}" for name, rule in all_rules.items())
    return GrammarSpec(GrammarKind.LARK, text + "\n")


def _closed_rules(end: str) -> dict[str, str]:
    """Free text up to the end of its message."""
    free = {"FREE": "/(.|\\n)*/"}
    if end.startswith("<["):
        return {"closed": f"FREE {end}", **free}
    return {"closed[lazy]": f"/(.|\\n)*{re.escape(END)}/", **free}
