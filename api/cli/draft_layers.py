"""`loraplex drafts layers`: chooses the layers that a base's drafts leave out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import Progress

from ...engine.layer_numbers import layers_text
from .engine_extra import need_engine
from .exit_codes import CommandFailed, ExitCode
from .models import Device
from .output import print_rows

if TYPE_CHECKING:
    from ...engine.speculation.draft_costs import DraftCosts
    from ...engine.speculation.layer_choice import Forecast

COLUMNS = ("left out", "accepted", "draft tokens", "predicted", "early exit")


def layers(
    model: Annotated[
        str, typer.Argument(help="The base: a model directory or Hugging Face model ID.")
    ],
    texts: Annotated[
        Path,
        typer.Option(
            exists=True,
            dir_okay=False,
            help='Two texts or more, like what is served. JSON lines: {"text": "..."}, '
            '{"messages": [...]} (measures in the last) or '
            '{"prompt": "...", "completion": "..."}.',
        ),
    ],
    max_draft_tokens: Annotated[
        int, typer.Option(min=1, max=16, help="Maximum draft tokens of a step, as served.")
    ] = 8,
    prefixes: Annotated[
        int,
        typer.Option(
            min=2, help="Places in the texts to measure at; half choose, half check the choice."
        ),
    ] = 256,
    beam: Annotated[
        int, typer.Option(min=1, help="Sets of each size that the search continues from.")
    ] = 2,
    max_tokens: Annotated[
        int, typer.Option(min=4, help="Maximum tokens of a text; longer texts are cut.")
    ] = 256,
    device: Annotated[Device, typer.Option(help="What the base is served on.")] = Device.AUTO,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results to this file, too.")
    ] = None,
) -> None:
    """Choose the layers that drafts of `--speculation skip:LAYERS` leave out, by measuring which
    draft tokens the base would accept and what a pass costs. The base is not changed."""
    need_engine("measuring")
    choice = choose(
        model,
        texts,
        max_draft_tokens=max_draft_tokens,
        prefixes=prefixes,
        beam=beam,
        max_tokens=max_tokens,
        device=device,
    )
    print_rows(list(map(_row, choice.rows)), COLUMNS)
    typer.echo(_verdict(choice))
    if json_file is not None:
        json_file.write_text(json.dumps(_as_json(model, choice), indent=2) + "\n")


class Row(NamedTuple):
    """The best set of a size, and that of early exit, in the checking half of the texts."""

    best: Forecast
    early_exit: Forecast


class Choice(NamedTuple):
    """What was measured."""

    costs: DraftCosts
    rows: Sequence[Row]
    best: Forecast
    """The set that was best in the choosing half, as the other half has it."""
    num_checked: int
    """The prefixes of the checking half."""

    @property
    def option(self) -> str | None:
        """The entry of `--speculation`; None if drafts of no set pay."""
        if self.best.ratio <= 1.0:
            return None
        kept = self.costs.num_layers - len(self.best.left_out)
        if self.best.left_out == frozenset(range(kept, self.costs.num_layers)):
            return f"early_exit:{kept}"
        return f"skip:{layers_text(self.best.left_out)}"


def choose(
    model: str,
    texts: Path,
    *,
    max_draft_tokens: int,
    prefixes: int,
    beam: int,
    max_tokens: int,
    device: str,
) -> Choice:
    """Measures. Raises CommandFailed for one text only, or a base of one layer."""
    from ...engine.checkpoint.files import locate_base
    from ...engine.config import EngineConfig
    from ...engine.model.whole_base import load_base_model
    from ...engine.speculation.draft_costs import measure_costs
    from ...engine.speculation.draft_trial import DraftTrial, prefixes_of
    from ...engine.speculation.layer_choice import forecast, last_layers, search
    from ...engine.speculation.training_texts import read_texts
    from ...engine.text.tokenizer import Tokenizer

    folder = locate_base(model)
    read = read_texts(texts, Tokenizer(folder), max_tokens=max_tokens, param="texts")
    if len(read) < 2:
        raise CommandFailed("--texts has one text; give two or more", ExitCode.USAGE)
    Random(0).shuffle(read)
    # With a proposer, the load refuses a base with states, which cannot take back draft tokens.
    base = load_base_model(EngineConfig(str(folder), device=device, speculation=("skip:0",)))
    longest = base.max_model_len - max_draft_tokens
    choosing, checking = (
        DraftTrial(
            base,
            prefixes_of(half, prefixes // 2, max_tokens=longest),
            num_tokens=max_draft_tokens,
        )
        for half in (read[::2], read[1::2])
    )
    costs = measure_costs(base, choosing)
    if costs.num_layers == 1:
        raise CommandFailed("The base has one layer, which a draft needs", ExitCode.USAGE)
    measure = partial(forecast, base, choosing, costs)
    check = partial(forecast, base, checking, costs)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        found = list(
            bar.track(
                search(costs.num_layers, beam, measure),
                total=costs.num_layers - 1,
                description="Searching",
            )
        )
    rows = [
        Row(check(each.left_out), check(last_layers(costs.num_layers, size)))
        for size, each in enumerate(found, start=1)
    ]
    best = max(range(len(found)), key=lambda index: found[index].ratio)
    return Choice(costs, rows, rows[best].best, checking.num_prefixes)


def _row(row: Row) -> Mapping[str, Any]:
    best = row.best
    return {
        "left out": layers_text(best.left_out),
        "accepted": " ".join(f"{share:.2f}" for share in best.accepted),
        "draft tokens": best.num_tokens,
        "predicted": f"{best.ratio:.2f}",
        "early exit": f"{row.early_exit.ratio:.2f}",
    }


def _verdict(choice: Choice) -> str:
    if choice.option is None:
        return (
            f"No set of layers pays on these texts: predicted {choice.best.ratio:.2f} times the "
            "tokens per second of plain decoding."
        )
    return (
        f"Predicted {choice.best.ratio:.2f} times the tokens per second of plain decoding. "
        f"Serve with: --speculation {choice.option}"
    )


def _as_json(model: str, choice: Choice) -> dict[str, Any]:
    return {
        "model": model,
        "option": choice.option,
        "num_prefixes": choice.num_checked,
        "costs": {
            "outside_layers": choice.costs.outside,
            "verification": list(choice.costs.verification),
        },
        "sizes": [
            {"best": _forecast_json(row.best), "early_exit": _forecast_json(row.early_exit)}
            for row in choice.rows
        ],
    }


def _forecast_json(forecast: Forecast) -> dict[str, Any]:
    return {
        "left_out": sorted(forecast.left_out),
        "accepted": list(forecast.accepted),
        "draft_tokens": forecast.num_tokens,
        "predicted": forecast.ratio,
    }
