"""`loraplex plan`: the memory that a load needs, before hardware is bought."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from ...engine.config import GIB, EngineConfig, KvDtype, Quantization, source_of
from ...engine.errors import InvalidParameter
from ...engine.planning.figures import Figures, parse_params
from ...engine.proposer_list import DEFAULT_PROPOSERS, OFF
from ...engine.tuning.methods import Method
from ...engine.tuning.trainer_needs import RecipeLimits
from ..tuning.recipes import BATCH_SIZE, MAX_TOKENS
from . import plan_options as option
from .engine_extra import need_engine
from .output import AsJson, print_json, print_rows
from .plan_options import DEFAULT_CONTEXT, PlannedDevice
from .speculation import parse_speculation
from .validate import Dtype

if TYPE_CHECKING:
    from ...engine.planning.load_needs import Load, LoadNeeds, LoadPlanner

app = typer.Typer(add_completion=False)

COUNTED = ("ngram", "suffix", "early_exit", "skip", "quantized")
"""The sources without weights of their own, and the one whose weights follow from the base's."""


class _Answer(NamedTuple):
    """What is printed."""

    needs: LoadNeeds
    memory_bytes: int | None
    """Of each rank's device."""
    max_sequences: int | None
    """How many sequences fit into it."""

    @property
    def does_fit(self) -> bool | None:
        if self.memory_bytes is None:
            return None
        return self.needs.device_bytes <= self.memory_bytes


@app.command()
def plan(
    model: option.Model = None,
    params: option.Params = None,
    layers: option.Layers = 32,
    hidden: option.Hidden = 4096,
    kv_heads: option.KvHeads = 8,
    head_dim: option.HeadDim = 128,
    vocab: option.Vocab = 128_256,
    sequences: option.Sequences = 16,
    context: option.Context = None,
    prompt_tokens: option.PromptTokens = None,
    output_tokens: option.OutputTokens = None,
    adapters: option.Adapters = 100,
    active: option.Active = None,
    rank: option.Rank = 16,
    target: option.Targets = None,
    quantize: option.Quantize = Quantization.NONE,
    speculation: option.Proposers = None,
    kv_dtype: option.CacheDtype = KvDtype.AUTO,
    dtype: option.BaseDtype = Dtype.AUTO,
    device: option.OnDevice = PlannedDevice.CUDA,
    tensor_parallel_size: option.TensorParallelSize = 1,
    pipeline_parallel_size: option.PipelineParallelSize = 1,
    tuning: option.Tuning = False,
    tuning_batch_size: option.TuningBatchSize = BATCH_SIZE,
    tuning_max_tokens: option.TuningMaxTokens = MAX_TOKENS,
    tuning_method: option.TuningMethod = Method.SUPERVISED,
    max_num_batched_tokens: option.MaxNumBatchedTokens = EngineConfig("").max_num_batched_tokens,
    memory_gib: option.MemoryGib = None,
    as_json: AsJson = False,
) -> None:
    """Compute the memory that a base model and a load need, and the options that reserve it. Reads
    the headers of the model's files, and no weights: config.json alone, or a few figures, do as
    well. Activations and graphs are estimates; a start measures them."""
    need_engine("planning")
    from ...engine.planning.load_needs import Load, LoadPlanner

    num_tokens = _context(context, prompt_tokens, output_tokens)
    num_active = min(sequences, adapters) if active is None else active
    most_tokens = min(tuning_max_tokens, num_tokens)
    trainer = RecipeLimits(rank, tuning_batch_size, most_tokens, tuning_method)
    load = Load(
        sequences,
        num_tokens,
        num_active,
        max(adapters, num_active),
        rank,
        target or (),
        trainer if tuning else None,
    )
    figures = None
    if params is not None:
        figures = Figures(parse_params(params), layers, hidden, kv_heads, head_dim, vocab)
    with _folder(model, figures, num_tokens) as folder:
        config = EngineConfig(
            folder,
            quantization=quantize,
            speculation=_proposers(speculation or ()),
            kv_dtype=kv_dtype,
            dtype=dtype,
            device=device,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        answer = _answer(LoadPlanner(config), load, memory_gib)
    options = _options(model or "MODEL", config, load, answer.needs)
    if as_json:
        print_json(_json(answer, options))
    else:
        _print(answer, load, options)


def _context(context: int | None, prompt_tokens: int | None, output_tokens: int | None) -> int:
    """Raises InvalidParameter if the length is given twice."""
    parts = [tokens for tokens in (prompt_tokens, output_tokens) if tokens is not None]
    if context is not None and parts:
        raise InvalidParameter("context", "is the sum of --prompt-tokens and --output-tokens")
    return context or sum(parts) or DEFAULT_CONTEXT


def _proposers(values: Sequence[str]) -> tuple[str, ...]:
    """Raises BadParameter, and InvalidParameter for proposers whose weights are not known here."""
    proposers = parse_speculation(values) if values else DEFAULT_PROPOSERS
    for proposer in proposers:
        name, _, _ = proposer.partition(":")
        if source_of(name) not in COUNTED:
            raise InvalidParameter("speculation", f"The weights of {name} are not planned for")
    return proposers


def _folder(
    model: str | None, figures: Figures | None, num_tokens: int
) -> AbstractContextManager[str]:
    """Raises InvalidParameter unless exactly one is given, and UnsupportedModel."""
    from ...engine.planning.unwritten_base import planned_base, unwritten_base

    if model is None and figures is not None:
        return unwritten_base(figures.config(num_tokens))
    if model is not None and figures is None:
        return planned_base(model)
    raise InvalidParameter("model", "Give a model or --params, and not both")


def _answer(planner: LoadPlanner, load: Load, memory_gib: float | None) -> _Answer:
    needs = planner.needs(load)
    if memory_gib is None:
        return _Answer(needs, None, None)
    memory_bytes = int(memory_gib * GIB)
    return _Answer(needs, memory_bytes, planner.most_sequences(load, memory_bytes))


def _print(answer: _Answer, load: Load, options: list[str]) -> None:
    print_rows(list(_rows(answer.needs, load)), ["memory", "GiB", "for"])
    typer.echo()
    for line in _lines(answer, load):
        typer.echo(line)
    typer.echo(f"Serve it with: loraplex serve {' '.join(options)}")


def _json(answer: _Answer, options: list[str]) -> dict[str, Any]:
    return {
        **asdict(answer.needs),
        "device_bytes": answer.needs.device_bytes,
        "memory_bytes": answer.memory_bytes,
        "does_fit": answer.does_fit,
        "max_sequences": answer.max_sequences,
        "options": options,
    }


def _rows(needs: LoadNeeds, load: Load) -> Iterator[dict[str, Any]]:
    def row(memory: str, num_bytes: int, use: str) -> dict[str, Any]:
        return {"memory": memory, "GiB": f"{num_bytes / GIB:.3f}", "for": use}

    adapter = f"rank {load.rank}, {needs.adapter_bytes:,} bytes each"
    states = f", and {needs.state_bytes:,} of states each" if needs.state_bytes else ""
    yield row("weights", needs.weight_bytes, "the base")
    if needs.rounded_bytes:
        yield row("rounded weights", needs.rounded_bytes, "drafts")
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
    yield row("activations", needs.activation_bytes, "a full step, estimated")
    if not needs.is_host:
        yield row("graphs", needs.graph_bytes, "captured decode steps, estimated")
    yield row("reserve", needs.reserve_bytes, "what a start cannot measure")
    if load.trainer is not None:
        of = load.trainer
        jobs = f"{of.num_sequences} sequences of {of.max_tokens:,} tokens, rank {of.rank}"
        yield row("trainer", needs.trainer_bytes, f"its own base, and a step of {jobs}, estimated")
    yield row("device", needs.device_bytes, "all of the above")
    if not needs.is_host:
        yield host


def _lines(answer: _Answer, load: Load) -> Iterator[str]:
    needs = answer.needs
    num_stages = len(needs.stage_weight_bytes)
    if num_stages * needs.ranks_per_stage > 1:
        ranks = f"{num_stages * needs.ranks_per_stage} ranks"
        yield f"There are {ranks}; all sizes are of the rank that needs most."
    if num_stages > 1:
        weights = ", ".join(f"{num_bytes / GIB:.3f}" for num_bytes in needs.stage_weight_bytes)
        yield f"Weights of a rank of each stage, in GiB: {weights}."
    if answer.memory_bytes is None:
        return
    has = f"{answer.memory_bytes / GIB:.1f} GiB"
    verdict = "The load fits into" if answer.does_fit else "The load does not fit into"
    yield f"{verdict} {has}. {answer.max_sequences:,} sequences of {load.context:,} tokens do."


def _options(model: str, config: EngineConfig, load: Load, needs: LoadNeeds) -> list[str]:
    """Those of `loraplex serve` that reserve the memory."""
    given = {
        "--quantize": (config.quantization, Quantization.NONE),
        "--kv-dtype": (config.kv_dtype, KvDtype.AUTO),
        "--dtype": (config.dtype, Dtype.AUTO),
        "--speculation": (",".join(config.speculation) or OFF, ",".join(DEFAULT_PROPOSERS)),
        "--tensor-parallel-size": (config.tensor_parallel_size, 1),
        "--pipeline-parallel-size": (config.pipeline_parallel_size, 1),
        "--max-num-batched-tokens": (
            config.max_num_batched_tokens,
            EngineConfig("").max_num_batched_tokens,
        ),
    }
    changed = ((name, str(value)) for name, (value, usual) in given.items() if value != usual)
    return [
        *(model, *(word for option in changed for word in option)),
        *("--device", str(config.device)),
        *("--max-num-seqs", str(load.num_sequences), "--max-model-len", str(load.context)),
        *("--kv-cache-gib", _gib(needs.kv_bytes), "--arena-gib", _gib(needs.arena_bytes)),
        *("--host-cache-gib", _gib(needs.host_cache_bytes)),
        *(("--tuning", "--tuning-bytes", str(needs.trainer_bytes)) if load.trainer else ()),
    ]


def _gib(num_bytes: int) -> str:
    """Rounded up, in millionths of a GiB: about a KiB."""
    return f"{ceil(num_bytes / GIB * 1e6) / 1e6:.6f}"
