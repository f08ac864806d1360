"""`loraplex chat`: chats with an adapter or the base in the terminal."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from ..client.errors import ClientError
from .client import ApiClient, open_client
from .output import note

app = typer.Typer(add_completion=False)


@app.command()
def chat(
    model: Annotated[str, typer.Argument(help="Adapter name, as in requests, or the base's name.")],
    message: Annotated[
        str | None,
        typer.Argument(help="Send one message and exit; without it, chat until ^D."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum answer tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2)] = None,
    seed: Annotated[int | None, typer.Option()] = None,
) -> None:
    """Chat with a model; answers are streamed. Reasoning is printed on stderr, dimmed."""
    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    body = {"model": model, **{name: value for name, value in options.items() if value is not None}}
    messages = [] if system is None else [{"role": "system", "content": system}]
    with open_client() as client:
        if message is not None:
            _ask(client, body, [*messages, {"role": "user", "content": message}])
        else:
            _converse(client, body, messages)


def _converse(client: ApiClient, body: dict[str, Any], messages: list[dict[str, str]]) -> None:
    is_terminal = sys.stdin.isatty()
    while True:
        if is_terminal:
            typer.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            return
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.rstrip("\n")})
        try:
            answer = _ask(client, body, messages)
        except ClientError as exc:
            if not is_terminal:
                raise
            note(f"Error: {exc}")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})


def _ask(client: ApiClient, body: dict[str, Any], messages: list[dict[str, str]]) -> str:
    """Print the reasoning and the answer while they come; the answer. Raises ClientError."""
    pieces: list[str] = []
    is_reasoning = False
    with client.stream(
        "/chat/completions", {**body, "messages": messages, "stream": True}
    ) as events:
        for delta in (choice["delta"] for event in events for choice in event["choices"]):
            if reasoning := delta.get("reasoning_content"):
                is_reasoning = True
                _show_reasoning(reasoning)
            if piece := delta.get("content"):
                if is_reasoning:
                    is_reasoning = False
                    note("")
                pieces.append(piece)
                typer.echo(_printable(piece), nl=False)
    if is_reasoning:
        note("")
    typer.echo()
    return "".join(pieces)


def _show_reasoning(text: str) -> None:
    # On stderr: stdout holds the answers alone.
    typer.secho(_printable(text), dim=True, nl=False, err=True)


def _printable(text: str) -> str:
    # A model's text may hold anything: nothing in it may steer the terminal.
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
