"""The demo's results for the terminal, and suggested next steps."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .asking import Answer
from .recipe import BASE_NAME
from .scenario import SHARED_NAME, AdapterOutcome, Outcome, PushedAdapter
from .task import held_out_requests

NUM_SHOWN_SAMPLES = 2


def print_outcome(console: Console, outcome: Outcome) -> None:
    """Print sample answers, accuracies, tiers and waits, the namesakes, and the throughput."""
    console.print()
    console.print(_samples(outcome))
    console.print(_scores(outcome.adapters))
    console.print(_namesakes(outcome))
    console.print(
        f"{outcome.num_requests} requests in one mixed batch: "
        f"[bold]{outcome.output_tokens_per_second:,.0f}[/bold] output tokens/s"
    )


def print_next_steps(console: Console, namesakes: Sequence[PushedAdapter], url: str) -> None:
    """Print commands that work unchanged while the server runs."""
    mine, theirs = namesakes
    key = mine.tenant.api_key
    python = _python()
    console.print("\n[bold]Try next[/bold]")
    for line in (
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"  -H 'Authorization: Bearer {key}' \\\n  -d '{_chat_body(mine.name)}'",
        f"# {theirs.tenant.slug} means another adapter by the same name; its key:\n"
        f"# {theirs.tenant.api_key}",
        f'{python} -c "from openai import OpenAI; '
        f"print(OpenAI(base_url='{url}/v1', api_key='{key}').models.list())\"",
        f"LORAPLEX_URL={url} LORAPLEX_API_KEY={key} {python} -m loraplex adapters list",
    ):
        # Plain text without wrapping, so that it can be copied.
        console.print(Text(line), soft_wrap=True)


def _python() -> str:
    """This interpreter, as a shell in this folder finds it."""
    path, folder = Path(sys.executable), Path.cwd()
    return shlex.quote(str(path.relative_to(folder) if path.is_relative_to(folder) else path))


def _chat_body(model: str) -> str:
    prompt = held_out_requests(1)[0].prompt
    return json.dumps({"model": model, "messages": [{"role": "user", "content": prompt}]})


def _samples(outcome: Outcome) -> RenderableType:
    tables = []
    for index in range(NUM_SHOWN_SAMPLES):
        samples = [part.samples[index] for part in outcome.adapters]
        table = Table(title=escape(samples[0].prompt), title_justify="left", expand=False)
        table.add_column("model")
        table.add_column("answer", overflow="fold")
        table.add_row(BASE_NAME, escape(samples[0].base_answer))
        for sample in samples:
            table.add_row(escape(sample.version), escape(sample.answer))
        tables.append(table)
    return Group(*tables)


def _scores(parts: Sequence[AdapterOutcome]) -> RenderableType:
    table = Table(title="Exactly right on held-out requests", title_justify="left")
    for heading in ("tenant", "adapter", "adapter right", "base right", "tiers", "longest wait"):
        table.add_column(heading)
    for part in parts:
        table.add_row(
            part.score.tenant,
            escape(part.score.name),
            f"{part.score.accuracy:.0%}",
            f"{part.score.base_accuracy:.0%}",
            _tiers(part.answers),
            f"{max(answer.wait_ms or 0 for answer in part.answers)} ms",
        )
    return table


def _tiers(answers: Sequence[Answer]) -> str:
    """The tiers of the weights at arrival, as `tier × count`."""
    counts = Counter(answer.tier or "unknown" for answer in answers)
    return ", ".join(f"{tier} × {count}" for tier, count in counts.most_common())


def _namesakes(outcome: Outcome) -> RenderableType:
    table = Table(
        title=f"One name, two tenants: {SHARED_NAME!r} is whose key asks", title_justify="left"
    )
    table.add_column("tenant")
    table.add_column("answer", overflow="fold")
    for adapter, answer in outcome.namesakes:
        table.add_row(adapter.tenant.slug, escape(answer))
    return table
