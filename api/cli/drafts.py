"""`loraplex drafts`: heads and layers that draft for speculative decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import Progress

from .draft_layers import layers as choose_layers
from .engine_extra import need_engine
from .exit_codes import CommandFailed, ExitCode
from .numbers import check_finite

if TYPE_CHECKING:
    from ...engine.speculation.eagle_training import TrainedEagle
    from ...engine.speculation.head_training import HeadSchedule, OnStep
    from ...engine.speculation.training_texts import TrainingText

app = typer.Typer(no_args_is_help=True, add_completion=False)

HELD_OUT_SHARE = 20
"""One in this number of texts is held out for evaluation."""
MAX_HELD_OUT = 64


class Kind(StrEnum):
    """What is trained."""

    MEDUSA = "medusa"
    EAGLE = "eagle"


class Training(NamedTuple):
    """The base and the texts of a training, and where its result goes."""

    base: Any
    learned: Sequence[TrainingText]
    held_out: Sequence[TrainingText]
    schedule: HeadSchedule
    out: Path
    base_id: str


Train = Callable[[Training, "OnStep"], list[str]]
"""Trains and writes heads; returns what the held-out texts say of each draft token."""


@app.callback()
def _root() -> None:
    """Heads and layers that draft for speculative decoding."""


@app.command()
def train(
    model: Annotated[
        str, typer.Option(help="The base: a model directory or Hugging Face model ID.")
    ],
    kind: Annotated[Kind, typer.Option(help="The heads to train.")],
    data: Annotated[
        Path,
        typer.Option(
            exists=True,
            dir_okay=False,
            help='JSON lines: {"text": "..."}, {"messages": [...]} (learns the last) or '
            '{"prompt": "...", "completion": "..."}.',
        ),
    ],
    out: Annotated[
        Path, typer.Option(file_okay=False, help="A new or empty folder to write the heads to.")
    ],
    heads: Annotated[
        int | None,
        typer.Option(min=1, max=16, help="medusa: number of heads, 3 by default."),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(min=1, max=8, help="medusa: residual blocks of each head, 1 by default."),
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option(min=1, max=16, help="eagle: draft tokens that it learns, 4 by default."),
    ] = None,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(min=2, help="eagle: drafts the most frequent tokens only, all by default."),
    ] = None,
    start_from: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="eagle: a head of the base to train further, which keeps its draft tokens.",
        ),
    ] = None,
    adapter: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="A PEFT adapter of the base, under which the heads learn. They are best under it.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 600,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts of a step.")] = 16,
    max_tokens: Annotated[
        int, typer.Option(min=4, help="Maximum tokens of a text; longer texts are cut.")
    ] = 512,
    learning_rate: Annotated[
        float,
        typer.Option(min=0.0, callback=check_finite, help="Small bases learn faster at 0.01."),
    ] = 1e-3,
    seed: Annotated[int, typer.Option(help="Seed of the order of the texts.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Train heads that propose draft tokens for a base. The base is not changed. Serve them with
    `--speculation KIND:OUT`. Train on text that the base generated, with `--adapter` under this
    adapter."""
    need_engine("training")
    if adapter is not None and find_spec("peft") is None:
        raise CommandFailed("--adapter needs peft: pip install 'loraplex[engine,tune]'")
    from ...engine.speculation.head_training import HeadSchedule

    of_kind: dict[Kind, dict[str, object]] = {
        Kind.MEDUSA: {"--heads": heads, "--layers": layers},
        Kind.EAGLE: {
            "--depth": depth,
            "--draft-vocab-size": draft_vocab_size,
            "--start-from": start_from,
        },
    }
    _refuse_others(kind, of_kind)
    if start_from is not None and draft_vocab_size is not None:
        raise CommandFailed(
            "--draft-vocab-size is an option of a new head, not of one to --start-from",
            ExitCode.USAGE,
        )
    trains = (
        _medusa(heads, layers)
        if kind is Kind.MEDUSA
        else _eagle(depth, draft_vocab_size, start_from)
    )
    schedule = HeadSchedule(
        num_steps=steps, batch_size=batch_size, learning_rate=learning_rate, seed=seed
    )
    for line in _train(
        model, adapter, data, out, schedule, trains, max_tokens=max_tokens, device=device
    ):
        typer.echo(line)
    typer.echo(f"Wrote {out}; serve with: --speculation {kind}:{out}")


@app.command()
def attach(
    head: Annotated[
        Path,
        typer.Argument(exists=True, file_okay=False, help="An EAGLE head trained for the adapter."),
    ],
    adapter: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="The folder of the PEFT adapter.")
    ],
    model: Annotated[
        str, typer.Option(help="The base: a model directory or Hugging Face model ID.")
    ],
    out: Annotated[
        Path, typer.Option(file_okay=False, help="A new or empty folder for the adapter with it.")
    ],
) -> None:
    """Write a copy of an adapter that brings the draft head along. Push it as a version: a server
    with `--adapter-draft-heads` and the head of the base that this one was trained from drafts with
    it for the version's requests."""
    need_engine("attaching a head")
    from ...engine.checkpoint.base_identity import compute_base_id
    from ...engine.checkpoint.files import locate_base
    from ...engine.checkpoint.weights import load_config
    from ...engine.speculation.attached_head import attach_head
    from ...engine.speculation.eagle_checkpoint import load_head

    model_dir = locate_base(model)
    config = load_config(model_dir)
    loaded = load_head(
        head,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        base_id=compute_base_id(model_dir),
    )
    _claim(out)
    attach_head(loaded, adapter, out)
    typer.echo(f"Wrote {out}; push it with: loraplex adapters push {out}")


app.command("layers")(choose_layers)


def _refuse_others(kind: Kind, of_kind: dict[Kind, dict[str, object]]) -> None:
    """Raises CommandFailed for an option of another kind."""
    for other, options in of_kind.items():
        for name, value in options.items():
            if other is not kind and value is not None:
                raise CommandFailed(f"{name} is an option of --kind {other}", ExitCode.USAGE)


def _medusa(num_heads: int | None, num_layers: int | None) -> Train:
    from ...engine.speculation.medusa_checkpoint import save_heads
    from ...engine.speculation.medusa_training import MedusaRecipe, head_accuracies, train_heads

    def trains(training: Training, on_step: OnStep) -> list[str]:
        recipe = MedusaRecipe(num_heads or 3, num_layers or 1, training.schedule)
        trained = train_heads(training.base, training.learned, recipe, on_step)
        save_heads(trained, training.out, base_id=training.base_id)
        return [
            f"head {head}: {accuracy:.1%} of the held-out tokens predicted correctly"
            for head, accuracy in enumerate(
                head_accuracies(training.base, trained, training.held_out), start=1
            )
        ]

    return trains


def _eagle(depth: int | None, draft_vocab_size: int | None, start_from: Path | None) -> Train:
    from ...engine.speculation.eagle_checkpoint import save_head
    from ...engine.speculation.eagle_training import (
        DEFAULT_DEPTH,
        EagleRecipe,
        eagle_accuracies,
        train_eagle,
    )

    def trains(training: Training, on_step: OnStep) -> list[str]:
        recipe = EagleRecipe(depth or DEFAULT_DEPTH, draft_vocab_size, training.schedule)
        start = None if start_from is None else _read_eagle(start_from, training)
        trained = train_eagle(training.base, training.learned, recipe, on_step, start=start)
        save_head(trained.head, training.out, layers=trained.layers, base_id=training.base_id)
        return [
            f"draft token {place}: {accuracy:.1%} right in the held-out texts, "
            "where those before it are"
            for place, accuracy in enumerate(
                eagle_accuracies(training.base, trained, training.held_out, recipe.depth), start=1
            )
        ]

    return trains


def _read_eagle(path: Path, training: Training) -> TrainedEagle:
    from ...engine.speculation.eagle_checkpoint import load_head
    from ...engine.speculation.eagle_training import TrainedEagle

    config = training.base.config
    loaded = load_head(
        path,
        hidden_size=training.base.get_output_embeddings().in_features,
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        base_id=training.base_id,
    )
    if loaded.embedding is not None:
        raise CommandFailed(f"{path} has an embedding of its own: train a new head", ExitCode.USAGE)
    return TrainedEagle(loaded.head, loaded.layers)


def _train(
    model: str,
    adapter: Path | None,
    data: Path,
    out: Path,
    schedule: HeadSchedule,
    trains: Train,
    *,
    max_tokens: int,
    device: str,
) -> list[str]:
    """Train and write the heads; returns what the held-out texts, if any, say of them."""
    from ...engine.checkpoint.base_identity import compute_base_id
    from ...engine.checkpoint.files import locate_base
    from ...engine.checkpoint.weights import load_config, load_weights
    from ...engine.model.base_model import choose_device, choose_dtype
    from ...engine.speculation.training_texts import read_texts
    from ...engine.text.tokenizer import Tokenizer

    model_dir = locate_base(model)
    texts = read_texts(data, Tokenizer(model_dir), max_tokens=max_tokens)
    _claim(out)
    Random(schedule.seed).shuffle(texts)
    num_held_out = min(len(texts) // HELD_OUT_SHARE, MAX_HELD_OUT)
    config, target = load_config(model_dir), choose_device(device)
    dtype = choose_dtype("auto", checkpoint=config.dtype, device=target)
    base = load_weights(model_dir, config, dtype, target)
    if adapter is not None:
        from ...engine.speculation.adapted_base import with_adapter

        base = with_adapter(base, adapter)
    training = Training(
        base=base,
        learned=texts[num_held_out:],
        held_out=texts[:num_held_out],
        schedule=schedule,
        out=out,
        base_id=compute_base_id(model_dir),
    )
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("Training", total=schedule.num_steps)
        lines = trains(
            training,
            lambda step, loss: bar.update(
                task, completed=step, description=f"Training, loss {loss:.3f}"
            ),
        )
    return lines if num_held_out else []


def _claim(out: Path) -> None:
    """Make the folder before the training is paid for. Raises CommandFailed if it is no new one."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        is_empty = not any(out.iterdir())
    except OSError as exc:
        raise CommandFailed(f"{out} cannot be written: {exc.strerror}", ExitCode.USAGE) from exc
    if not is_empty:
        raise CommandFailed(f"{out} is not empty: name a new folder", ExitCode.CONFLICT)
