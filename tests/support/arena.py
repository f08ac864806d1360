"""Loads adapters from disk into an arena as the engine does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loraplex.adapters.arena import Arena
from loraplex.adapters.block import BlockPlan, read_block_header
from loraplex.adapters.block_files import BlockFiles
from loraplex.adapters.examination import examine
from loraplex.adapters.host_cache import HostCache
from loraplex.adapters.identity import AdapterKey
from loraplex.engine.model.base_model import BaseModel
from loraplex.kernels.lora_batch import LoraBatchBuilder

MIB = 1 << 20


class _StageHost(HostCache):
    """Also for adapters that change nothing of a stage, whose extents other stages need."""

    def _size(self, files: BlockFiles, plan: BlockPlan) -> int:
        return max(1, super()._size(files, plan))


def load_adapters(
    base: BaseModel, folders: Sequence[Path], blocks: Path
) -> tuple[LoraBatchBuilder, list[tuple[int, int]]]:
    """Each adapter's (row, generation), and the builder of batches that knows them."""
    arena = Arena(base.part.layout, 16 * MIB, base.dtype, base.device)
    base.attach_arena(arena)
    host = _StageHost(base.layout, 16 * MIB, base.dtype, part=base.part)
    rows = []
    for index, folder in enumerate(folders):
        path = blocks / f"{index}.block"
        report = examine(
            folder / "adapter_config.json",
            folder / "adapter_model.safetensors",
            path,
            layout=base.layout,
            serving_dtype="float32",
        )
        assert read_block_header(path).digest == report.digest
        key = AdapterKey("acme", report.digest)
        block = host.read(key, path)
        assert block is not None
        placement = arena.place(key, block.num_elements, block.table)
        assert placement is not None
        arena.copy_into(placement, block)
        arena.publish(placement)
        rows.append((placement.row, placement.generation))
    return LoraBatchBuilder(arena, base.device), rows
