"""What `loraplex plan` is told: its argument and options."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from ...engine.config import MAX_RANKS, KvDtype, Quantization
from ...engine.tuning.methods import Method
from .validate import Dtype

DEFAULT_CONTEXT = 4096


class PlannedDevice(StrEnum):
    """What the base would be served on; it need not be here."""

    CPU = "cpu"
    CUDA = "cuda"


Model = Annotated[
    str | None,
    typer.Argument(
        help="A model directory, with or without weights, its config.json, a .gguf file or a "
        "Hugging Face model ID. Left out: a Llama of --params.",
        show_default="a Llama of --params",
    ),
]
Params = Annotated[
    str | None,
    typer.Option(metavar="NUMBER", help="Parameters, such as 8b.", show_default="MODEL's"),
]
Layers = Annotated[int, typer.Option(min=1, help="With --params.")]
Hidden = Annotated[int, typer.Option(min=1, help="Hidden size. With --params.")]
KvHeads = Annotated[int, typer.Option(min=1, help="With --params.")]
HeadDim = Annotated[int, typer.Option(min=1, help="With --params.")]
Vocab = Annotated[int, typer.Option(min=1, help="Tokens. With --params.")]
Sequences = Annotated[int, typer.Option(min=1, max=100_000, help="Sequences that run at once.")]
Context = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Tokens of each sequence, prompt and output together.",
        show_default=f"the sum of the next two, or {DEFAULT_CONTEXT}",
    ),
]
PromptTokens = Annotated[
    int | None, typer.Option(min=1, help="In place of --context.", show_default="0")
]
OutputTokens = Annotated[
    int | None, typer.Option(min=1, help="In place of --context.", show_default="0")
]
Adapters = Annotated[int, typer.Option(min=0, help="Adapters whose weights stay in host memory.")]
Active = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Adapters that sequences use at once.",
        show_default="one for each sequence, at most --adapters",
    ),
]
Rank = Annotated[int, typer.Option(min=1, max=1024, help="Of each adapter.")]
Targets = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Layers that adapters change, such as q_proj. Repeatable.",
        show_default="all linear layers",
    ),
]
Quantize = Annotated[
    Quantization, typer.Option(help="Quantization of the linear layers and experts.")
]
Proposers = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PROPOSER[:WHAT],...",
        help="Proposers of draft tokens, as of `loraplex serve`, but no mtp. The weights and KV "
        "caches of draft models and heads are counted. Repeatable.",
        show_default="ngram",
    ),
]
CacheDtype = Annotated[KvDtype, typer.Option(help="Data type of the KV cache.")]
BaseDtype = Annotated[Dtype, typer.Option(help="Serving dtype of the base.")]
OnDevice = Annotated[PlannedDevice, typer.Option(help="It need not be on this machine.")]
TensorParallelSize = Annotated[int, typer.Option(min=1, max=MAX_RANKS, help="Ranks of each stage.")]
PipelineParallelSize = Annotated[int, typer.Option(min=1, max=MAX_RANKS, help="Stages.")]
Tuning = Annotated[
    bool, typer.Option("--tuning", help="Count a trainer of fine-tuning jobs on the device.")
]
TuningBatchSize = Annotated[int, typer.Option(min=1, help="Of its jobs, at most. With --tuning.")]
TuningMaxTokens = Annotated[
    int, typer.Option(min=2, help="Of its examples, at most --context. With --tuning.")
]
TuningMethod = Annotated[
    Method,
    typer.Option(help="Of its jobs; dpo has two sequences a pair. With --tuning."),
]
MaxNumBatchedTokens = Annotated[int, typer.Option(min=1, help="Maximum tokens in a step.")]
MemoryGib = Annotated[
    float | None,
    typer.Option(
        min=0.1,
        help="Memory of each rank's device: says whether the load fits, and how many sequences do.",
        show_default="unknown",
    ),
]
