"""Sequences for transformers' recurrences, and what transformers' own functions make of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.falcon_h1 import modeling_falcon_h1
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba import modeling_mamba
from transformers.models.qwen3_next import modeling_qwen3_next

from loraplex.engine.model.recurrences import RECURRENCES, StateChange
from loraplex.kernels.recurrence import Recurrence, plain_recurrence
from loraplex.kernels.selective_scan import plain_selective_scan
from loraplex.kernels.state_rows import StateRows

Arguments = dict[str, Any]
Advance = Callable[[Any, Tensor, StateRows, Tensor], Tensor]
TIME_DIMS = {
    "torch_chunk_gated_delta_rule": 1,
    "chunk_kimi_delta_attention": 1,
    "mamba2_chunk_scan": 1,
    "mamba_selective_scan": 2,
}
"""The dimension of the tokens, in the arguments that have one and in the output."""
PER_TOKEN = {"query", "key", "value", "g", "beta", "hidden_states", "dt", "B", "C", "z"}
OWN_OPTIONS: dict[str, Arguments] = {
    "torch_chunk_gated_delta_rule": {"chunk_size": 4, "output_final_state": True},
    "chunk_kimi_delta_attention": {"chunk_size": 4, "output_final_state": True},
    "mamba2_chunk_scan": {"chunk_size": 4, "return_final_states": True},
    "mamba_selective_scan": {"return_last_state": True},
}


@dataclass(frozen=True)
class RecurrenceCase:
    """One of transformers' functions, with arguments for some tokens."""

    name: str
    family: ModuleType
    arguments: Arguments

    def own(self, tokens: slice) -> tuple[Tensor, Tensor]:
        """transformers' output for these tokens as one sequence `[num_tokens, ...]`, and the state
        after it in our order."""
        function = inspect.unwrap(getattr(self.family, self.name))
        out, state = function(**self.part(tokens), **OWN_OPTIONS[self.name])
        if self.name == "mamba2_chunk_scan":
            state = state.transpose(2, 3)
        return out[0].movedim(TIME_DIMS[self.name] - 1, 0), state[0].float()

    def part(self, tokens: slice | Tensor) -> Arguments:
        """The arguments of these tokens alone."""
        dim = TIME_DIMS[self.name]
        index = torch.arange(self.num_tokens, device=self.device)[tokens]
        return {
            name: value.index_select(dim, index)
            if name in PER_TOKEN and value is not None
            else value
            for name, value in self.arguments.items()
        }

    def to(self, device: str) -> RecurrenceCase:
        moved = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in self.arguments.items()
        }
        return replace(self, arguments=moved)

    @property
    def device(self) -> torch.device:
        first: Tensor = next(iter(self.arguments.values()))
        return first.device

    @property
    def num_tokens(self) -> int:
        first: Tensor = next(iter(self.arguments.values()))
        return first.shape[TIME_DIMS[self.name]]


class Chunk(NamedTuple):
    """The rows of a sequence in a step, and the tokens before them."""

    num_before: int
    num_rows: int


def check_chunks(
    case: RecurrenceCase, chunks: Sequence[Chunk], advance: Advance, *, tolerance: float
) -> None:
    """Advance all chunks in one call; each must equal transformers' function of its whole sequence.

    The sequences are adjacent parts of the case's tokens. Their states lie in reverse order.
    """
    ends = accumulate(map(sum, chunks))
    wholes = [slice(end - sum(chunk), end) for end, chunk in zip(ends, chunks, strict=True)]
    rows = [
        slice(whole.stop - chunk.num_rows, whole.stop)
        for whole, chunk in zip(wholes, chunks, strict=True)
    ]
    change = read(case, torch.cat([torch.arange(part.start, part.stop) for part in rows]))
    states = torch.zeros(len(chunks) + 2, *change.state_size)
    for index, (whole, part) in enumerate(zip(wholes, rows, strict=True)):
        if part.start > whole.start:
            states[-1 - index] = case.own(slice(whole.start, part.start))[1]
    stored = states.clone()
    counts = torch.tensor([chunk.num_rows for chunk in chunks])
    state_rows = StateRows(
        F.pad(counts.cumsum(0), (1, 0)), len(states) - 1 - torch.arange(len(chunks))
    )
    after = torch.empty(len(chunks), *change.state_size)
    out = advance(change, states, state_rows, after)
    assert torch.equal(states, stored), "they are only read"
    for index, (whole, part) in enumerate(zip(wholes, rows, strict=True)):
        expected, state = case.own(whole)
        mine = out[state_rows.bounds[index] : state_rows.bounds[index + 1]]
        assert mine.dtype == expected.dtype
        assert_near(mine, expected[part.start - whole.start :], tolerance)
        assert_near(after[index], state, tolerance)


def read(case: RecurrenceCase, tokens: slice | Tensor) -> StateChange:
    """These tokens of the case, as the kernels take them."""
    return RECURRENCES[case.name].read(**case.part(tokens))


def plain_advance(change: Any, states: Tensor, rows: StateRows, after: Tensor) -> Tensor:
    """By the definition of the operation."""
    plain = plain_recurrence if isinstance(change, Recurrence) else plain_selective_scan
    return plain(change, states, rows, after)


def assert_near(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    """Within the tolerance, of the largest of their elements."""
    difference = (ours.float() - theirs.float()).abs().max()
    assert difference <= tolerance * theirs.float().abs().max()


def gated_delta_rule(
    num_tokens: int,
    dtype: torch.dtype = torch.float32,
    *,
    num_heads: int = 2,
    key_dim: int = 16,
    value_dim: int = 16,
    is_normalized: bool = True,
    decays_keys: bool = False,
) -> RecurrenceCase:
    """Qwen3-Next's, with two heads for each key; or Kimi's, whose key channels decay."""
    name = "chunk_kimi_delta_attention" if decays_keys else "torch_chunk_gated_delta_rule"
    num_key_heads = num_heads if decays_keys else num_heads // 2
    size = 1.0 if is_normalized else key_dim**-0.5
    decayed = (num_heads, key_dim) if decays_keys else (num_heads,)
    arguments = {
        "query": torch.randn(1, num_tokens, num_key_heads, key_dim).to(dtype),
        "key": (torch.randn(1, num_tokens, num_key_heads, key_dim) * size).to(dtype),
        "value": torch.randn(1, num_tokens, num_heads, value_dim).to(dtype),
        "g": -F.softplus(torch.randn(1, num_tokens, *decayed)),
        "beta": torch.randn(1, num_tokens, num_heads).sigmoid().to(dtype),
        "use_qk_l2norm_in_kernel": is_normalized,
    }
    family = modeling_kimi_linear if decays_keys else modeling_qwen3_next
    return RecurrenceCase(name, family, arguments)


def mamba2(
    num_tokens: int,
    dtype: torch.dtype = torch.float32,
    *,
    num_heads: int = 2,
    head_dim: int = 16,
    state_size: int = 16,
    num_groups: int = 1,
    is_plain: bool = False,
) -> RecurrenceCase:
    """`is_plain`: without what is optional."""
    arguments: Arguments = {
        "hidden_states": torch.randn(1, num_tokens, num_heads, head_dim).to(dtype),
        "dt": torch.randn(1, num_tokens, num_heads).abs().to(dtype),
        "A": -torch.randn(num_heads).exp(),
        "B": torch.randn(1, num_tokens, num_groups, state_size).to(dtype),
        "C": torch.randn(1, num_tokens, num_groups, state_size).to(dtype),
    }
    if not is_plain:
        arguments |= {
            "D": torch.randn(num_heads).to(dtype),
            "dt_bias": torch.randn(num_heads).to(dtype),
            "dt_softplus": True,
            "dt_limit": (0.1, 1.0),
        }
    return RecurrenceCase("mamba2_chunk_scan", modeling_falcon_h1, arguments)


def mamba(
    num_tokens: int,
    dtype: torch.dtype = torch.float32,
    *,
    channels: int = 24,
    size: int = 16,
    is_plain: bool = False,
) -> RecurrenceCase:
    """`is_plain`: without what is optional. Rows of tokens are adjacent, as in a served step."""
    arguments: Arguments = {
        "hidden_states": torch.randn(1, num_tokens, channels).to(dtype).transpose(1, 2),
        "dt": torch.randn(1, channels, num_tokens).abs().to(dtype),
        "A": -torch.randn(channels, size).exp(),
        "B": torch.randn(1, num_tokens, size).to(dtype).transpose(1, 2),
        "C": torch.randn(1, num_tokens, size).to(dtype).transpose(1, 2),
    }
    if not is_plain:
        arguments |= {
            "D": torch.randn(channels),
            "z": torch.randn(1, num_tokens, 2 * channels).to(dtype).chunk(2, 2)[1].transpose(1, 2),
            "delta_bias": torch.randn(channels),
            "delta_softplus": True,
        }
    return RecurrenceCase("mamba_selective_scan", modeling_mamba, arguments)
