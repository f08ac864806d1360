"""`loraplex medusa`: trains Medusa heads for speculative decoding."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from .engine_extra import need_engine
from .exit_codes import CommandFailed, ExitCode
from .numbers import check_finite

if TYPE_CHECKING:
    from ...engine.speculation.medusa_training import MedusaRecipe

app = typer.Typer(no_args_is_help=True, add_completion=False)

HELD_OUT_SHARE = 20
"""One in this number of texts is held out for evaluation."""
MAX_HELD_OUT = 64


@app.callback()
def _root() -> None:
    """Medusa heads for speculative decoding."""


@app.command()
def train(
    model: Annotated[
        str, typer.Option(help="The base: a model directory or Hugging Face model ID.")
    ],
    data: Annotated[
        Path,
        typer.Option(
            exists=True,
            dir_okay=False,
            help='JSON lines: {"text": "..."}, or {"messages": [...]} (learns the last).',
        ),
    ],
    out: Annotated[
        Path, typer.Option(file_okay=False, help="A new or empty folder to write the heads to.")
    ],
    heads: Annotated[
        int, typer.Option(min=1, max=16, help="Number of heads: draft tokens per step.")
    ] = 3,
    layers: Annotated[int, typer.Option(min=1, max=8, help="Residual blocks of each head.")] = 1,
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
    """Train Medusa heads for a base. The base is not changed. Serve them with `--speculation
    medusa:OUT`. Train on text that the base generated."""
    need_engine("training")
    from ...engine.speculation.medusa_training import MedusaRecipe

    recipe = MedusaRecipe(
        num_heads=heads,
        num_layers=layers,
        num_steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seed=seed,
    )
    accuracies = _train(model, data, out, recipe, max_tokens=max_tokens, device=device)
    for head, accuracy in enumerate(accuracies, start=1):
        typer.echo(f"head {head}: {accuracy:.1%} of the held-out tokens predicted correctly")
    typer.echo(f"Wrote {out}; serve with: --speculation medusa:{out}")


def _train(
    model: str, data: Path, out: Path, recipe: MedusaRecipe, *, max_tokens: int, device: str
) -> list[float]:
    """Train and write the heads; returns each head's accuracy on the held-out texts."""
    from ...engine.checkpoint.base_identity import compute_base_id
    from ...engine.checkpoint.files import locate_base
    from ...engine.checkpoint.weights import load_config, load_weights
    from ...engine.model.base_model import choose_device, choose_dtype
    from ...engine.speculation.medusa_checkpoint import save_heads
    from ...engine.speculation.medusa_training import head_accuracies, train_heads
    from ...engine.speculation.training_texts import read_texts
    from ...engine.text.tokenizer import Tokenizer

    model_dir = locate_base(model)
    texts = read_texts(data, Tokenizer(model_dir), max_tokens=max_tokens)
    _claim(out)
    Random(recipe.seed).shuffle(texts)
    num_held_out = min(len(texts) // HELD_OUT_SHARE, MAX_HELD_OUT)
    held_out, learned = texts[:num_held_out], texts[num_held_out:]
    config, target = load_config(model_dir), choose_device(device)
    dtype = choose_dtype("auto", checkpoint=config.dtype, device=target)
    base = load_weights(model_dir, config, dtype, target)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        training = bar.add_task("Training", total=recipe.num_steps)
        trained = train_heads(
            base,
            learned,
            recipe,
            lambda step, loss: bar.update(
                training, completed=step, description=f"Training, loss {loss:.3f}"
            ),
        )
    save_heads(trained, out, base_id=compute_base_id(model_dir))
    return head_accuracies(base, trained, held_out) if held_out else []


def _claim(out: Path) -> None:
    """Make the folder before the training is paid for. Raises CommandFailed if it is no new one."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        is_empty = not any(out.iterdir())
    except OSError as exc:
        raise CommandFailed(f"{out} cannot be written: {exc.strerror}", ExitCode.USAGE) from exc
    if not is_empty:
        raise CommandFailed(f"{out} is not empty: name a new folder", ExitCode.CONFLICT)
