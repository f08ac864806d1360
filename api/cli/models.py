"""`loraplex models`: how a base model would be served, before it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...engine.config import GIB, EngineConfig, Quantization
from ...engine.errors import InvalidParameter, UnsupportedModel
from .engine_extra import need_engine
from .exit_codes import CommandFailed, ExitCode
from .numbers import check_finite
from .output import AsJson, print_json, print_rows
from .validate import Dtype

if TYPE_CHECKING:
    import torch

    from ...engine.checkpoint.quantization_error import QuantizationErrors
    from ...engine.memory.forecast import MemoryForecast
    from ...engine.model.expected_base import ExpectedBase
    from ..adapters.quantization_contract import Drift

app = typer.Typer(no_args_is_help=True, add_completion=False)

MIB = 1 << 20
PROMPTS = (
    "The quick brown fox jumps over the lazy dog. In the beginning",
    "Write a SQL query that lists each customer with the sum of all orders of the last year.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Water boils at 100 degrees Celsius at sea level. On a high mountain it boils at",
)


class Device(StrEnum):
    """What the base is served on."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@app.callback()
def _root() -> None:
    """Base models."""


@app.command()
def check(
    path: Annotated[
        str, typer.Argument(help="A model directory, a .gguf file or a Hugging Face model ID.")
    ],
    quantize: Annotated[
        Quantization,
        typer.Option(help="Quantization of the linear layers and experts while they are loaded."),
    ] = Quantization.NONE,
    quantize_group_size: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Inputs that share a scale of --quantize, a multiple of 16; 0: a scale per "
            "output.",
            show_default="the format's",
        ),
    ] = None,
    quantize_exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="Linear layers and experts that --quantize leaves as they are, such as "
            "'*.down_proj'. Repeatable.",
        ),
    ] = None,
    quantize_embeddings: Annotated[
        Quantization,
        typer.Option(
            help="Quantization of the input embedding and the output head while they are loaded."
        ),
    ] = Quantization.NONE,
    dtype: Annotated[Dtype, typer.Option(help="Serving dtype of the base.")] = Dtype.AUTO,
    device: Annotated[
        Device, typer.Option(help="With --memory-gib, cuda needs no GPU on this machine.")
    ] = Device.AUTO,
    memory_gib: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            callback=check_finite,
            help="Memory for weights, KV cache and adapters.",
            show_default="the free memory of this machine's device",
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="The unquantized model; reads both models' weights and compares them.",
        ),
    ] = None,
    kl: Annotated[
        bool,
        typer.Option("--kl", help="With --reference: load both models and compare their tokens."),
    ] = False,
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A prompt for --kl, in place of the built-in ones."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show whether and how a base model is served: its weights' format, bytes and kernels, and the
    KV cache and adapters that fit beside it. Without --reference no weight is read."""
    need_engine("the check")
    if kl and reference is None:
        raise CommandFailed("--kl compares with --reference: give it", ExitCode.USAGE)
    config = EngineConfig(
        path,
        quantization=quantize,
        quantization_group_size=quantize_group_size,
        quantization_exclude=tuple(quantize_exclude or ()),
        embedding_quantization=quantize_embeddings,
        dtype=dtype,
        device=device,
    )
    try:
        report = _Check(config, memory_gib).run()
        if reference is not None:
            report.compare(reference, prompts=(prompt or PROMPTS) if kl else ())
    except UnsupportedModel as exc:
        if not as_json:
            raise
        print_json({"served": False, "code": exc.code, "message": str(exc)})
        raise typer.Exit(ExitCode.USAGE) from exc
    if as_json:
        print_json(report.as_json())
    else:
        report.print()
    if report.forecast is not None and report.forecast.refusal:
        raise typer.Exit(ExitCode.USAGE)


class _Check:
    """The parts of a report, as far as they were asked for."""

    def __init__(self, config: EngineConfig, memory_gib: float | None) -> None:
        self._config = config
        self._memory_bytes = None if memory_gib is None else round(memory_gib * GIB)
        self.base: ExpectedBase
        self.forecast: MemoryForecast | None = None
        self.errors: QuantizationErrors | None = None
        self.drift: Drift | None = None

    def run(self) -> _Check:
        """Raises UnsupportedModel or InvalidParameter for what `serve` refuses."""
        from ...engine.memory.device_memory import available_bytes
        from ...engine.memory.forecast import forecast_memory
        from ...engine.model.expected_base import expect_base
        from ...engine.text.tokenizer import Tokenizer

        device = self._device()
        self.base = expect_base(self._config, device)
        Tokenizer(self.base.model_dir)  # without one no text is served
        if self.base.kv_shapes is not None:
            memory_bytes = self._memory_bytes or available_bytes(device)
            self.forecast = forecast_memory(self._config, self.base, memory_bytes)
        return self

    def compare(self, reference: str, *, prompts: Sequence[str]) -> None:
        """Measure what the quantization loses."""
        from ...engine.checkpoint.files import locate_base
        from ...engine.checkpoint.quantization_error import measure_errors

        if self.base.weight_formats == Quantization.NONE:
            raise InvalidParameter("reference", f"{self._config.model} is not quantized")
        folder = locate_base(reference)
        self.errors = measure_errors(self.base.model_dir, folder, self.base.quantized_at_load)
        if prompts:
            self.drift = self._measure_drift(folder, prompts)

    def _device(self) -> torch.device:
        import torch

        from ...engine.model.base_model import choose_device

        if self._config.device == Device.CUDA and self._memory_bytes is not None:
            return torch.device("cuda")
        return choose_device(self._config.device)

    def _measure_drift(self, reference: Path, prompts: Sequence[str]) -> Drift:
        """Over all positions of the prompts. One model is loaded after the other."""
        from ...engine.reports.prompt_logits import prompt_logits
        from ...engine.text.tokenizer import Tokenizer
        from ..adapters.quantization_contract import compare_with_reference

        tokenizer = Tokenizer(self.base.model_dir)
        tokens = [tokenizer.encode(text) for text in prompts]
        unquantized = EngineConfig(
            str(reference), dtype=_dtype_name(self.base), device=self._config.device
        )
        served, original = prompt_logits(self._config, tokens), prompt_logits(unquantized, tokens)
        if served[0].shape != original[0].shape:
            raise InvalidParameter("reference", "it has another vocabulary")
        return compare_with_reference(
            [row for each in original for row in each],
            [row for each in served for row in each],
            limit=None,
        )

    def as_json(self) -> dict[str, Any]:
        base = self.base
        return {
            "served": True,
            "model_type": base.model_type,
            "num_parameters": base.num_parameters,
            "quantization": base.quantization,
            "device": base.device_type,
            "dtype": _dtype_name(base),
            "file_bytes": base.file_bytes,
            "served_bytes": base.weight_bytes,
            "weights": {
                kind: {
                    "formats": dict(part.formats),
                    "num_quantized": part.num_quantized,
                    "num_unquantized": part.formats["none"],
                    "num_made_dense": part.num_made_dense,
                    "file_bytes": part.file_bytes,
                    "served_bytes": part.served_bytes,
                    "kernels": dict(part.kernels),
                }
                for kind, part in base.weights.items()
            },
            "max_model_len": base.max_model_len,
            "rotary_contexts": list(base.rotary_contexts.lengths),
            "memory": None if self.forecast is None else _memory_json(self.forecast),
            "errors": None if self.errors is None else _errors_json(self.errors),
            "drift": None if self.drift is None else self.drift.as_report(),
        }

    def print(self) -> None:
        for line in _base_lines(self.base):
            typer.echo(line)
        typer.echo()
        print_rows(
            list(_weight_rows(self.base)), ["weights", "stored as", "files", "served", "kernels"]
        )
        typer.echo()
        for line in self._lines():
            typer.echo(line)

    def _lines(self) -> Iterator[str]:
        yield from _made_dense_lines(self.base)
        yield f"The maximum model length is {self.base.max_model_len:,} tokens."
        if self.base.rotary_contexts.has_tables:
            yield str(self.base.rotary_contexts)
        if self.forecast is None:
            yield "The KV cache of this model type is only known once its weights are loaded."
        else:
            yield from _memory_lines(self.forecast)
        if self.errors is not None:
            yield from _error_lines(self.errors)
        if self.drift is not None:
            yield _drift_line(self.drift)


def _base_lines(base: ExpectedBase) -> Iterator[str]:
    yield (
        f"The model is served: {base.model_type}, {base.num_parameters:,} parameters. A start also "
        "tests it with its weights."
    )
    yield (
        f"The format of the weights is {base.weight_formats}. They take "
        f"{_size(base.file_bytes)} in files and {_size(base.weight_bytes)} served, on "
        f"{base.device_type} in {_dtype_name(base)}."
    )


def _weight_rows(base: ExpectedBase) -> Iterator[Mapping[str, str]]:
    for kind, part in base.weights.items():
        yield {
            "weights": kind,
            "stored as": _counts(part.formats) or "with the embedding",
            "files": _size(part.file_bytes),
            "served": _size(part.served_bytes),
            "kernels": _counts(part.kernels) or "-",
        }


def _made_dense_lines(base: ExpectedBase) -> Iterator[str]:
    for kind, part in base.weights.items():
        if count := part.num_made_dense:
            weights = (
                "1 quantized weight becomes" if count == 1 else f"{count} quantized weights become"
            )
            yield f"{kind.capitalize()}: {weights} {_dtype_name(base)} at load."


def _memory_lines(forecast: MemoryForecast) -> Iterator[str]:
    yield f"The KV cache takes {forecast.kv_bytes_per_token:,} bytes per token."
    if forecast.state_bytes:
        yield f"The states of a sequence of any length take {_size(forecast.state_bytes)}."
    memory = _size(forecast.memory_bytes)
    if forecast.refusal is not None:
        yield f"The model does not fit into {memory}. {forecast.refusal}"
        return
    yield (
        f"Of {memory}, {_size(forecast.reserve_bytes)} are the reserve"
        + (f" and {_size(host)} the host cache" if (host := forecast.host_cache_bytes) else "")
        + ". A start also subtracts the activations of a full step, which it measures."
    )
    states = f" and {forecast.num_states:,} states" if forecast.state_bytes else ""
    yield f"The KV cache holds {forecast.kv_tokens:,} tokens{states} in {_size(forecast.kv_bytes)}."
    yield f"The longest sequence that fits has {forecast.max_model_len:,} tokens."
    yield (
        f"The adapter arena holds {forecast.num_adapters:,} adapters of rank 16 on all linear "
        f"layers, {_size(forecast.adapter_bytes)} each, in {_size(forecast.arena_bytes)}."
    )


def _error_lines(errors: QuantizationErrors) -> Iterator[str]:
    for kind, found in errors.projections.items():
        yield (
            f"Error of {kind}: mean {found.mean:.2%}, worst {found.worst:.2%} "
            f"({found.worst_name}), {found.num_weights} weights."
        )
    if errors.num_not_compared:
        yield f"The reference does not have {errors.num_not_compared} of the quantized weights."


def _drift_line(drift: Drift) -> str:
    same = drift.num_probes - drift.top_token_changed
    return (
        f"KL to the reference: mean {drift.kl_mean:.3g}, max {drift.kl_max:.3g}. The top token is "
        f"the same at {same} of {drift.num_probes} positions."
    )


def _memory_json(forecast: MemoryForecast) -> dict[str, Any]:
    fields = asdict(forecast)
    refusal = fields.pop("refusal")
    return {
        "fits": refusal is None,
        "message": refusal,
        **fields,
        "num_rank_16_adapters": forecast.num_adapters,
    }


def _errors_json(errors: QuantizationErrors) -> dict[str, Any]:
    return {
        "projections": {kind: found._asdict() for kind, found in errors.projections.items()},
        "num_not_compared": errors.num_not_compared,
    }


def _counts(counts: Mapping[str, int]) -> str:
    labels = {"none": "unquantized"}
    return " + ".join(f"{count} {labels.get(name, name)}" for name, count in counts.items())


def _dtype_name(base: ExpectedBase) -> str:
    return str(base.dtype).removeprefix("torch.")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.2f} MiB"
