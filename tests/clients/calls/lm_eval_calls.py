"""The evaluation harness: multiple choice by log-probabilities, and generation."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
from asked import MAX_TOKENS, MODEL, report, server
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from lm_eval.tasks import TaskManager

URL, KEY, PROMPT = server()
BASE, ANSWER, OTHER = sys.argv[4:7]
os.environ["OPENAI_API_KEY"] = KEY


def task(folder: Path, name: str, **more: Any) -> None:
    """A task of one question in a file of this machine."""
    data = folder / "data.jsonl"
    data.write_text(json.dumps({"question": PROMPT, "choices": [OTHER, ANSWER], "answer": 1}))
    (folder / f"{name}.yaml").write_text(
        json.dumps(
            {
                "task": name,
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"test": str(data)}},
                "test_split": "test",
                "doc_to_text": "{{question}}",
                **more,
            }
        )
    )


def evaluate(model: Any, name: str, folder: Path, *, is_chat: bool) -> Any:
    return lm_eval.simple_evaluate(
        model=model,
        tasks=[name],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        apply_chat_template=is_chat,
        bootstrap_iters=0,
    )


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    task(
        folder,
        "choosing",
        output_type="multiple_choice",
        doc_to_choice="choices",
        doc_to_target="answer",
        target_delimiter="",
        metric_list=[{"metric": "acc"}],
    )
    task(
        folder,
        "generating",
        output_type="generate_until",
        doc_to_target=ANSWER,
        generation_kwargs={"until": ["\n\n"], "max_gen_toks": MAX_TOKENS, "temperature": 0},
        metric_list=[{"metric": "exact_match"}],
    )
    completions = LocalCompletionsAPI(base_url=f"{URL}/completions", model=MODEL, tokenizer=BASE)
    chat = LocalChatCompletion(base_url=f"{URL}/chat/completions", model=MODEL)
    chosen = evaluate(completions, "choosing", folder, is_chat=False)
    generated = evaluate(chat, "generating", folder, is_chat=True)
report(
    "lm-eval",
    loglikelihood=[part[0][0] for part in chosen["samples"]["choosing"][0]["resps"]],
    chat=generated["samples"]["generating"][0]["resps"][0][0],
)
