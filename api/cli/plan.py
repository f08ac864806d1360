"""`loraplex plan`: the memory that a load needs, before hardware is bought."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from enum import StrEnum
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...engine.config import GIB, EngineConfig, Quantization
from ...engine.errors import UnsupportedModel
from .engine_extra import need_engine
from .output import AsJson, print_json, print_rows
from .validate import Dtype

if TYPE_CHECKING:
    from ...engine.memory.load_needs import Load, LoadNeeds

app = typer.Typer(add_completion=False)


class PlannedDevice(StrEnum):
    """What the base would be served on; it need not be here."""

    CPU = "cpu"
    CUDA = "cuda"


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(help="A model directory, a .gguf file or a Hugging Face model ID.")
    ],
    sequences: Annotated[
        int, typer.Option(min=1, max=100_000, help="Sequences that run at once.")
    ] = 16,
    context: Annotated[
        int, typer.Option(min=1, help="Tokens of each sequence, prompt and output together.")
    ] = 4096,
    adapters: Annotated[
        int, typer.Option(min=0, help="Adapters whose weights stay in host memory.")
    ] = 100,
    active: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Adapters that sequences use at once.",
            show_default="one for each sequence, at most --adapters",
        ),
    ] = None,
    rank: Annotated[int, typer.Option(min=1, max=1024, help="Of each adapter.")] = 16,
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Layers that adapters change, such as q_proj. Repeatable.",
            show_default="all linear layers",
        ),
    ] = None,
    quantize: Annotated[
        Quantization, typer.Option(help="Quantization of the linear layers and experts.")
    ] = Quantization.NONE,
    dtype: Annotated[Dtype, typer.Option(help="Serving dtype of the base.")] = Dtype.AUTO,
    device: Annotated[
        PlannedDevice, typer.Option(help="It need not be on this machine.")
    ] = PlannedDevice.CUDA,
    as_json: AsJson = False,
) -> None:
    """Compute the memory that a base model and a load need, and the options that reserve it. Reads
    the headers of the model's files, and no weights. A start also needs the activations of a full
    step, which it measures."""
    need_engine("planning")
    from ...engine.memory.load_needs import Load

    num_active = min(sequences, adapters) if active is None else active
    load = Load(sequences, context, num_active, max(adapters, num_active), rank, target or ())
    config = EngineConfig(model, quantization=quantize, dtype=dtype, device=device)
    needs = _needs(config, load)
    options = _options(config, load, needs)
    if as_json:
        print_json({**asdict(needs), "device_bytes": needs.device_bytes, "options": options})
        return
    print_rows(list(_rows(needs, load)), ["memory", "GiB", "for"])
    typer.echo()
    typer.echo("A start also needs the activations of a full step, which it measures.")
    typer.echo(f"Serve it with: loraplex serve {' '.join(options)}")


def _needs(config: EngineConfig, load: Load) -> LoadNeeds:
    """Raises UnsupportedModel or InvalidParameter."""
    import torch

    from ...engine.memory.load_needs import needs_of_load
    from ...engine.model.expected_base import expect_base

    base = expect_base(config, torch.device(config.device))
    if base.kv_shapes is None:
        raise UnsupportedModel(
            "The KV cache of this model type is only known once its weights are loaded"
        )
    return needs_of_load(config, base, load)


def _rows(needs: LoadNeeds, load: Load) -> Iterator[dict[str, Any]]:
    def row(memory: str, num_bytes: int, use: str) -> dict[str, Any]:
        return {"memory": memory, "GiB": f"{num_bytes / GIB:.3f}", "for": use}

    adapter = f"rank {load.rank}, {needs.adapter_bytes:,} bytes each"
    states = f", and {needs.state_bytes:,} of states each" if needs.state_bytes else ""
    yield row("weights", needs.weight_bytes, "the base")
    yield row(
        "KV cache",
        needs.kv_bytes,
        f"{load.num_sequences} sequences of {load.context:,} tokens, "
        f"{needs.kv_bytes_per_token:,} bytes a token{states}",
    )
    yield row("arena", needs.arena_bytes, f"{load.num_active} adapters in use, {adapter}")
    host = row("host cache", needs.host_cache_bytes, f"{load.num_known} adapters, {adapter}")
    if needs.is_host:
        yield host
    yield row("reserve", needs.reserve_bytes, "what a start cannot measure")
    yield row("device", needs.device_bytes, "all of the above")
    if not needs.is_host:
        yield host


def _options(config: EngineConfig, load: Load, needs: LoadNeeds) -> list[str]:
    """Those of `loraplex serve` that reserve the memory."""
    quantize = [] if config.quantization == "none" else ["--quantize", str(config.quantization)]
    dtype = [] if config.dtype == Dtype.AUTO else ["--dtype", str(config.dtype)]
    return [
        *(config.model, *quantize, *dtype, "--device", str(config.device)),
        *("--max-num-seqs", str(load.num_sequences), "--max-model-len", str(load.context)),
        *("--kv-cache-gib", _gib(needs.kv_bytes), "--arena-gib", _gib(needs.arena_bytes)),
        *("--host-cache-gib", _gib(needs.host_cache_bytes)),
    ]


def _gib(num_bytes: int) -> str:
    """Rounded up, in millionths of a GiB: about a KiB."""
    return f"{ceil(num_bytes / GIB * 1e6) / 1e6:.6f}"
