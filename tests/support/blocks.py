"""Layouts and canonical block files of artificial adapters, with their values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from loraplex.adapters.block import BlockPlan, write_block_header
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.layout import BaseLayout, Projection, Slice

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def make_layout(base_id: str = "base") -> BaseLayout:
    """Two fused projections and a single one, of sizes that need padding."""
    return BaseLayout(
        base_id,
        (
            Projection((Slice("q", 20, 20), Slice("k", 20, 6), Slice("v", 20, 6))),
            Projection((Slice("gate", 20, 33), Slice("up", 20, 33))),
            Projection((Slice("down", 33, 20),)),
        ),
    )


def make_key(name: str, tenant_id: str = "tenant") -> AdapterKey:
    return AdapterKey(tenant_id, f"sha256:{name}")


@dataclass(frozen=True)
class StoredBlock:
    """A block's file and what is in it."""

    path: Path
    key: AdapterKey
    plan: BlockPlan
    scales: dict[int, float]
    payload: Tensor
    """`[num_elements]` in the file's type: the tenant's own values."""

    def matrices(self, index: int) -> tuple[Tensor, Tensor]:
        """A `[rank, in]` and B transposed `[rank, out]` of one slice, unscaled."""
        a_offset, b_offset, rank = self.plan.table[index].tolist()
        part = self.plan.layout.slices[index]
        a = self.payload[a_offset : a_offset + rank * part.in_features]
        b = self.payload[b_offset : b_offset + rank * part.out_features]
        return a.view(rank, -1), b.view(rank, -1)


def write_block(
    path: Path,
    key: AdapterKey,
    *,
    layout: BaseLayout | None = None,
    ranks: dict[int, int] | None = None,
    scale: float = 1.7,
    dtype: str = "F32",
    seed: int = 0,
) -> StoredBlock:
    """Write random matrices; by default q, v and down are touched, with different ranks."""
    plan = BlockPlan(layout or make_layout(), ranks or {0: 3, 2: 5, 5: 2})
    scales = {index: scale + index for index in plan.ranks}
    payload = torch.zeros(plan.num_elements)
    generator = torch.Generator().manual_seed(seed)
    for index, rank in plan.ranks.items():
        part = plan.layout.slices[index]
        for offset, width in zip(
            plan.table[index, :2].tolist(), (part.in_features, part.out_features), strict=True
        ):
            payload[offset : offset + rank * width] = torch.randn(rank * width, generator=generator)
    payload = payload.to(DTYPES[dtype])
    with path.open("wb") as file:
        write_block_header(
            file,
            base_id=plan.layout.base_id,
            digest=key.digest,
            dtype=dtype,
            scales=scales,
            plan=plan,
        )
        file.write(payload.view(torch.uint8).numpy().tobytes())
    return StoredBlock(path, key, plan, scales, payload)
