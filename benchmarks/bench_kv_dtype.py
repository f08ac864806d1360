"""The accuracy cost of a quantized KV cache, and the number of additional blocks.

    python -m benchmarks.bench_kv_dtype [--model DIR] [--json FILE]

The text is the model's own: sequences sampled from it at temperature 1. Every position's
distribution is compared with that of a cache in the model's dtype. fp8 is emulated on devices that
do not support it, with the same codes. int4 and int2 quantize complete blocks of 64 tokens, so
sequences must be longer than that; a query reads its own block as it was computed. Needs torch and
transformers only.

Room is also counted for sequences of 32,768 tokens and heads of 128 elements, in tensors that are
allocated for them, with the unfinished blocks that a full batch may have.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from loraplex.engine.config import BLOCK_SIZE, QUANTIZED_BLOCK_SIZE, EngineConfig
from loraplex.engine.kv.cache import KvCache, KvFormat, kv_bytes_per_block
from loraplex.engine.kv.groups import LayerKvShape, one_group
from loraplex.engine.kv.open_slots import num_open_slots
from loraplex.engine.kv.sequence_blocks import block_table
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.forward import PagedForward, run_model
from loraplex.engine.model.inputs import SequenceChunk, make_inputs
from loraplex.engine.model.whole_base import load_base_model

CHUNK = 64
DEMO_BASE = Path(__file__).parents[1] / "api" / "demo" / "weights" / "base"
FORMATS: dict[str, tuple[torch.dtype, int | None]] = {
    "int8": (torch.int8, None),
    "fp8": (torch.float8_e4m3fn, None),
    "int4": (torch.uint8, 4),
    "int2": (torch.uint8, 2),
}
"""The dtype of codes, and their bits if complete blocks are quantized."""
LONG, HEAD_DIM = 32_768, 128
"""Tokens of a sequence and elements of a head in `room`."""


@dataclass(frozen=True)
class Result:
    """One format against the model's own dtype."""

    kv_dtype: str
    blocks_ratio: float
    """Tokens in the same memory, unfinished blocks not counted."""
    room: float
    """Tokens in the memory of bf16, in long sequences, unfinished blocks included."""
    mean_kl: float
    """Nats per token, of the plain distribution to this one."""
    p99_kl: float
    top1_agreement: float
    logits_error: float
    """Largest difference over largest logit."""


class Stepper:
    """Sequences that advance together, each in blocks of its own."""

    def __init__(self, base: BaseModel, kv_format: KvFormat, num_sequences: int, length: int):
        self._block_size = block_size_of(kv_format)
        per_sequence = -(-length // self._block_size)
        self._base = base
        self._tables = [
            block_table(range(1 + index * per_sequence, 1 + (index + 1) * per_sequence))
            for index in range(num_sequences)
        ]
        self._cache = KvCache(
            one_group(len(base.kv_shapes), 1 + num_sequences * per_sequence),
            base.kv_shapes,
            block_size=self._block_size,
            kv_format=kv_format,
            device=base.device,
        )
        self._done = 0

    def step(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Append equally many tokens to each sequence; returns their logits in fp32."""
        chunks = [
            SequenceChunk(part, self._done, [table])
            for part, table in zip(tokens, self._tables, strict=True)
        ]
        inputs = make_inputs(
            chunks,
            groups=self._cache.groups,
            block_size=self._block_size,
            device=self._base.device,
        )
        self._done = chunks[0].end
        rows = torch.arange(len(inputs.input_ids), device=self._base.device)
        forward = PagedForward.of(self._cache, inputs)
        logits = run_model(self._base.model, forward, inputs.input_ids, inputs.positions, rows)
        return logits.view(len(chunks), -1, logits.shape[-1])


def block_size_of(kv_format: KvFormat) -> int:
    """As an engine chooses it."""
    return BLOCK_SIZE if kv_format.bits is None else QUANTIZED_BLOCK_SIZE


def room(kv_format: KvFormat) -> float:
    """The tokens of a full batch of long sequences that fit into the memory of one in bf16.

    Counts allocated tensors, which take no memory on the CPU before they are written.
    """
    config = EngineConfig("")
    num_tokens = config.max_num_seqs * LONG
    plain, own = (
        allocated_bytes(each, num_tokens, config) for each in (KvFormat(torch.bfloat16), kv_format)
    )
    return plain / own


def allocated_bytes(kv_format: KvFormat, num_tokens: int, config: EngineConfig) -> int:
    """Bytes of the cache of one layer with a single head."""
    size = block_size_of(kv_format)
    slots = num_open_slots(config.max_num_seqs, config.max_num_batched_tokens, size, num_steps=1)
    cache = KvCache(
        one_group(1, 1 + num_tokens // size),
        [LayerKvShape(1, HEAD_DIM, HEAD_DIM)],
        block_size=size,
        kv_format=kv_format,
        device=torch.device("cpu"),
        num_open_slots=slots,
    )
    return cache.num_bytes


def sample_text(base: BaseModel, num_sequences: int, length: int, seed: int) -> list[list[int]]:
    """Sequences drawn from the model itself, each from a random first token."""
    generator = torch.Generator().manual_seed(seed)
    stepper = Stepper(base, base.kv_format, num_sequences, length)
    tokens = torch.randint(base.vocab_size, (num_sequences, 1), generator=generator)
    while tokens.shape[1] < length:
        logits = stepper.step(tokens[:, -1:].tolist())[:, -1].cpu()
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, drawn], 1)
    text: list[list[int]] = tokens.tolist()
    return text


def all_logits(base: BaseModel, kv_format: KvFormat, text: Sequence[Sequence[int]]) -> Tensor:
    """`[num_tokens, vocab_size]`: every position, in chunks, all through the cache."""
    length = len(text[0])
    stepper = Stepper(base, kv_format, len(text), length)
    parts = [
        stepper.step([tokens[start : start + CHUNK] for tokens in text])
        for start in range(0, length, CHUNK)
    ]
    return torch.cat(parts, 1).flatten(0, 1)


def measure(base: BaseModel, text: Sequence[Sequence[int]]) -> Iterator[Result]:
    plain_format = KvFormat(base.dtype)
    plain = all_logits(base, plain_format, text)
    (group,) = one_group(len(base.kv_shapes), 2)
    for name, (code_dtype, bits) in FORMATS.items():
        kv_format = KvFormat(base.dtype, code_dtype, bits)
        logits = all_logits(base, kv_format, text)
        expected, got = plain.log_softmax(-1), logits.log_softmax(-1)
        divergence = (expected.exp() * (expected - got)).sum(-1)
        block_size = block_size_of(kv_format)
        sizes = [
            kv_bytes_per_block(group, base.kv_shapes, block_size=block_size, kv_format=either)
            for either in (plain_format, kv_format)
        ]
        yield Result(
            kv_dtype=name,
            blocks_ratio=sizes[0] / sizes[1],
            room=room(kv_format._replace(dtype=torch.bfloat16)),
            mean_kl=divergence.mean().item(),
            p99_kl=divergence.quantile(0.99).item(),
            top1_agreement=(plain.argmax(-1) == logits.argmax(-1)).float().mean().item(),
            logits_error=((logits - plain).abs().max() / plain.abs().max()).item(),
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=str(DEMO_BASE), help="default: the demo's base model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    base = load_base_model(EngineConfig(options.model, dtype=options.dtype, device=options.device))
    length = min(options.length, base.max_model_len)
    text = sample_text(base, options.sequences, length, options.seed)
    dtype = str(base.dtype).removeprefix("torch.")
    name = Path(options.model).name
    print(f"{name}, {dtype} on {base.device}, {len(text)} x {length} tokens")
    print(
        f"{'KV':6}{'tokens':>8}{'at 32k':>8}{'mean KL':>11}{'p99 KL':>11}{'top-1':>9}{'logits':>9}"
    )
    results = list(measure(base, text))
    for result in results:
        print(
            f"{result.kv_dtype:6}{result.blocks_ratio:7.2f}x{result.room:7.2f}x"
            f"{result.mean_kl:11.2e}"
            f"{result.p99_kl:11.2e}{result.top1_agreement:9.2%}{result.logits_error:9.2%}"
        )
    if options.json:
        report = {"model": name, "dtype": dtype, "device": str(base.device)}
        rows = [asdict(result) for result in results]
        options.json.write_text(json.dumps({**report, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
