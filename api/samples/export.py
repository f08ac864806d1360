"""Writes samples as files: training data, or golden sets.

The lines are those of docs/tuning.md and docs/evaluation.md.
"""

from __future__ import annotations

import msgspec

from ...platform.base import JsonObject
from ...platform.samples.models import ExportFormat, Sample
from ...platform.samples.sample_seal import SampleSeal


def line_of(sample: Sample, seal: SampleSeal, form: ExportFormat) -> bytes | None:
    """The sample as a line; None if it is no example: an empty completion cannot be trained, and a
    golden set expects a text. Raises SampleUnreadable."""
    content: JsonObject = msgspec.json.decode(seal.open(sample))
    line = _training(content) if form is ExportFormat.TRAINING else _golden(sample.id, content)
    return None if line is None else msgspec.json.encode(line) + b"\n"


def _training(content: JsonObject) -> JsonObject | None:
    if "prompt" in content:
        return content if content["completion"] else None
    tools = {"tools": content["tools"]} if "tools" in content else {}
    return {"messages": [*content["messages"], content["answer"]], **tools}


def _golden(sample_id: str, content: JsonObject) -> JsonObject | None:
    if "prompt" in content:
        prompt, expected = {"prompt": content["prompt"]}, content["completion"]
    else:
        answer = content["answer"]
        prompt = {"messages": content["messages"]}
        expected = None if "tool_calls" in answer else answer["content"]
        if "tools" in content:
            prompt["request"] = {"tools": content["tools"]}
    return None if expected is None else {"id": sample_id, **prompt, "expected": expected}
