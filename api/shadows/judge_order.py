"""The request to a judge, and its verdict."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import replace
from typing import NamedTuple

from ...engine.grammars.spec import GrammarKind, GrammarSpec
from ...engine.sampling_params import SamplingParams
from ...engine.text.chat_form import ChatForm
from ...engine.text.text_form import TextForm
from ...platform.keys.principal import Principal
from ..evaluation.judge import Verdict, score_of_first
from ..inference.inference import Inference
from ..inference.order import Order
from ..tools.answer_part import Text
from ..tools.answer_plan import AnswerPlan
from ..tools.conversation import ChatMessage

_VERDICTS = GrammarSpec(GrammarKind.CHOICE, json.dumps(list(Verdict)))


class JudgeOrder(NamedTuple):
    """One order of two answers."""

    order: Order
    plan: AnswerPlan

    def score_of_first(self, text: str) -> float:
        """1 if the judge prefers the first answer, 0 if the second, 0.5 for a tie. Raises
        ValueError if it came to no verdict."""
        return score_of_first(answer_of(self.plan, text))


async def order_judge(
    inference: Inference, principal: Principal, judge: str, question: str
) -> JudgeOrder:
    """Ask the judge on behalf of the caller whose request is judged.

    A key's restriction to adapters does not hold for the judge: who may change the alias has chosen
    it, and the caller does not see its answer. Raises ApiError, an EngineError or a PlatformError.
    """
    request_id, prompts = f"judge-{secrets.token_hex(12)}", inference.prompts
    anyone = replace(principal, adapters=None)
    model = await inference.models.resolve(anyone, judge, request_id=request_id)
    messages, tokenizer = [ChatMessage("user", question)], model.own_tokenizer
    prompt = await prompts.encode_chat(principal, messages, tokenizer=tokenizer)
    reasoning = prompts.reasoning.of_prompt(prompt, messages, ChatForm(), tokenizer=tokenizer)
    plan = prompts.plan_answer(None, form_grammar=_VERDICTS, reasoning=reasoning)
    order = Order(
        request_id=request_id,
        arrived_at=time.monotonic(),
        principal=principal,
        model=model,
        prompts=[prompt],
        num_choices=1,
        sampling=SamplingParams(
            max_tokens=prompts.room_for_output(prompt), temperature=0, grammar=plan.grammar
        ),
        text=TextForm(visible_token_ids=plan.visible_token_ids),
        reasoning=plan.reasoning,
    )
    return JudgeOrder(order, plan)


def answer_of(plan: AnswerPlan, text: str) -> str:
    """What a caller sees of an output as its answer."""
    reader = plan.make_reader()
    parts = [*reader.push(text), *reader.finish()]
    return "".join(part.text for part in parts if isinstance(part, Text))
