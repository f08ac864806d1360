"""`loraplex quantize`: makes a calibrated quantized checkpoint from an unquantized one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from ...engine.calibration.method import CodeFormat, Method
from .engine_extra import need_engine
from .exit_codes import CommandFailed, ExitCode
from .output import note

if TYPE_CHECKING:
    from ...engine.calibration.quantization import Outcome
    from ...engine.calibration.recipe import Recipe

app = typer.Typer(add_completion=False)

MIB = 1 << 20


@app.command()
def quantize(
    model: Annotated[
        str,
        typer.Argument(help="An unquantized model directory or Hugging Face model ID."),
    ],
    out: Annotated[
        Path,
        typer.Argument(
            file_okay=False, help="A new folder, or that of an interrupted run to continue."
        ),
    ],
    text: Annotated[
        Path,
        typer.Option(
            exists=True, dir_okay=False, help="Calibration text, UTF-8, like what will be served."
        ),
    ],
    method: Annotated[
        Method, typer.Option(help="gptq, awq, or rtn: the nearest codes.")
    ] = Method.GPTQ,
    form: Annotated[CodeFormat, typer.Option("--format", help="Of the codes.")] = CodeFormat.INT4,
    group_size: Annotated[
        int,
        typer.Option(
            min=0, help="Inputs that share a scale; 0: a scale per output, as fp8 always has."
        ),
    ] = 128,
    act_order: Annotated[
        bool, typer.Option(help="gptq: round the inputs with the largest activations first.")
    ] = True,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="Linear layers and experts to leave as they are, such as '*.down_proj' or "
            "'*.experts.3.*'.",
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Calibration samples.")] = 128,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens of a sample.")] = 512,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Make a quantized checkpoint (compressed-tensors) from an unquantized one, calibrated with a
    text. Serve it with `--model OUT`. The same command continues an interrupted run. Routers, the
    embedding, the head, and experts that the files hold in one tensor stay as they are."""
    need_engine("quantizing")
    from ...engine.calibration.recipe import Recipe

    recipe = Recipe(
        method=method,
        code_format=form,
        group_size=group_size,
        act_order=act_order,
        exclude=tuple(exclude or ()),
        num_samples=samples,
        sequence_length=seq_len,
    )
    try:
        outcome = _quantize(model, out, text, recipe, device=device)
    except OSError as exc:
        raise CommandFailed(
            f"{out} cannot be written: {exc.strerror or exc}. The same command continues."
        ) from exc
    except KeyboardInterrupt as exc:
        raise CommandFailed(
            "Interrupted. The same command continues after the last finished layer.",
            ExitCode.INTERRUPTED,
        ) from exc
    _print(outcome, out)


def _quantize(model: str, out: Path, text: Path, recipe: Recipe, *, device: str) -> Outcome:
    from ...engine.calibration.quantization import quantize_model
    from ...engine.checkpoint.files import locate_base
    from ...engine.model.base_model import choose_device

    model_dir = locate_base(model)
    console = Console(stderr=True)
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("Loading", total=None)

        def show(num_finished: int, num_matrices: int) -> None:
            bar.update(task, description="Quantizing", completed=num_finished, total=num_matrices)

        def say(index: int, num_layers: int, _error: float | None) -> None:
            if not console.is_terminal:
                note(f"layer {index + 1} of {num_layers} is finished")

        return quantize_model(
            model_dir,
            out,
            text,
            recipe,
            device=choose_device(device),
            on_layer=say,
            on_matrices=show,
        )


def _print(outcome: Outcome, out: Path) -> None:
    quality = outcome.quality
    for index, error in sorted(outcome.errors.items()):
        typer.echo(f"layer {index + 1}: relative output error {error:.2%}")
    experts = f" and {outcome.num_in_experts} matrices of experts"
    typer.echo(
        f"{outcome.num_quantized - outcome.num_in_experts} linear layers"
        f"{experts if outcome.num_in_experts else ''} quantized; left as they are: "
        f"{', '.join(_without_numbers(outcome.ignored)) or 'none'}"
    )
    typer.echo(
        f"weights: {outcome.num_bytes / MIB:,.1f} MiB of {outcome.original_bytes / MIB:,.1f} MiB"
    )
    typer.echo(
        f"held-out text: perplexity {quality.perplexity:.3f}, unquantized "
        f"{quality.original_perplexity:.3f}; KL divergence {quality.divergence:.4f} nats"
    )
    typer.echo(f"Wrote {out}; serve with: loraplex serve --model {out}")


def _without_numbers(paths: Sequence[str]) -> list[str]:
    """One line's worth of paths: those that differ in numbers alone as one, with their count."""
    counts = Counter(
        ".".join("*" if part.isdecimal() else part for part in path.split(".")) for path in paths
    )
    return [path if count == 1 else f"{path} ({count})" for path, count in counts.items()]
