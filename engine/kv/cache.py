"""The tensors of the KV blocks, on the device and in swap space."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, assert_never

import numpy as np
import torch
from torch import Tensor

from ...adapters.untouched import give_back_rows, use_small_pages
from ...kernels.kv_groups import SPARE_SLOT
from ...kernels.kv_pages import GatherBuffer, KeyPrefix, KvPages, stack_pages, vector_bytes
from ..config import KvDtype
from ..errors import UnsupportedModel
from ..transfers import HostCopy, to_device
from .block_memory import BlockMemory
from .disk_blocks import DiskBlocks
from .groups import LayerKvShape, StateShape
from .host_blocks import HostBlocks, SlotMemory
from .layout import (
    CopyBlock,
    EraseOnDisk,
    FromDisk,
    GiveBackBlocks,
    GiveUpSlots,
    KvGroup,
    KvOperation,
    RestoreBlocks,
    SwapIn,
    SwapOut,
    ToDisk,
    ZeroBlocks,
)
from .open_forms import OpenForms, grouped_bytes_per_block, make_grouped_layers
from .sequence_blocks import BlockTable

_MIN_FP8_CAPABILITY = (8, 9)


class KvFormat(NamedTuple):
    """The storage format of keys and values."""

    dtype: torch.dtype
    """The dtype that attention reads."""
    code_dtype: torch.dtype | None = None
    """The dtype of quantized values, with a scale per token and head; None: `dtype` without
    quantization."""
    bits: int | None = None
    """Bits of a code, if the tokens of a block are quantized together (`kernels/kv_groups.py`)."""


KV_BITS = {KvDtype.INT4: 4, KvDtype.INT2: 2}


def choose_kv_format(kv_dtype: KvDtype, *, dtype: torch.dtype, device: torch.device) -> KvFormat:
    """Raises UnsupportedModel if the device does not compute the format."""
    match kv_dtype:
        case KvDtype.AUTO:
            return KvFormat(dtype)
        case KvDtype.INT8:
            return KvFormat(dtype, torch.int8)
        case KvDtype.FP8:
            has_fp8 = device.type == "cuda" and (
                torch.cuda.get_device_capability(device) >= _MIN_FP8_CAPABILITY
            )
            if not has_fp8:
                raise UnsupportedModel(
                    f"--kv-dtype fp8 is not supported on this device ({device.type}); use int8"
                )
            return KvFormat(dtype, torch.float8_e4m3fn)
        case KvDtype.INT4 | KvDtype.INT2:
            return KvFormat(dtype, torch.uint8, KV_BITS[kv_dtype])
        case _:
            assert_never(kv_dtype)


def check_kv_format(kv_format: KvFormat, shapes: Sequence[LayerKvShape]) -> None:
    """Raises UnsupportedModel if the cache of these layers has no such format."""
    if kv_format.bits is not None and any(shape.states for shape in shapes):
        raise UnsupportedModel(
            f"--kv-dtype int{kv_format.bits} is not supported for a model with states (linear "
            "attention, state spaces); use int8"
        )
    if kv_format.bits is not None and any(shape.is_latent for shape in shapes):
        raise UnsupportedModel(
            f"--kv-dtype int{kv_format.bits} is not supported for multi-head latent attention: its "
            "cache holds latents, which take fewer bytes than codes of keys and values; use int8"
        )


class KvCache:
    """The pages of keys and of values, per layer. A layer has as many blocks as its group."""

    def __init__(
        self,
        groups: Sequence[KvGroup],
        shapes: Sequence[LayerKvShape],
        *,
        block_size: int,
        kv_format: KvFormat,
        device: torch.device,
        num_swap_slots: Sequence[int] = (),
        slot_memory: SlotMemory | None = None,
        block_memory: BlockMemory | None = None,
        has_spare_blocks: bool = False,
        num_open_slots: int | None = None,
    ) -> None:
        """`shapes`: nothing for the layers of other stages. `num_swap_slots`: blocks of host memory
        per group; empty: none. `slot_memory`: where those of one group are. `block_memory`: where
        the blocks of the group are that gives its end.
        `has_spare_blocks`: each group has one additional block, to which padding writes.
        `num_open_slots`: per group, if complete blocks are quantized; None: every block is open
        forever."""
        self.groups = tuple(groups)
        self.block_size = block_size
        self.group_of = {
            layer: index
            for index, group in enumerate(groups)
            if not group.holds_states
            for layer in group.layers
        }
        """By layer, of those that attend."""
        self.windows = [(shape.window, 0) for shape in shapes]
        """By layer: the window, and how many first positions its queries see beside it. It is the
        model's own, or the operator's for a layer that sees all."""
        for group in groups:
            if group.window is not None and not group.holds_states:
                for layer in group.layers:
                    self.windows[layer] = group.window, group.sinks
        self._device = device
        self._block_memory = block_memory
        self._num_spare = int(has_spare_blocks)
        self._tensors: list[list[Tensor]] = []
        """By group: `[layers, num_blocks, ...]` each, the keys or values of several layers."""
        self._open: list[OpenForms] = []
        """By group, if complete blocks are quantized."""
        pages: dict[_Part, KvPages] = {}
        self.states: dict[int, list[Tensor]] = {}
        """By layer, those of its states: `[num_blocks, *size]` each."""
        self.new_states: defaultdict[tuple[int, int], GatherBuffer] = defaultdict(GatherBuffer)
        """By layer and index among its states: memory for those after a step."""
        for group in groups:
            if group.holds_states:
                self._tensors.append(self._make_states(group, shapes, device))
                continue
            if kv_format.bits is not None:
                made = make_grouped_layers(
                    group,
                    shapes,
                    num_blocks=group.num_blocks + has_spare_blocks,
                    block_size=block_size,
                    dtype=kv_format.dtype,
                    bits=kv_format.bits,
                    num_open_slots=num_open_slots,
                    device=device,
                )
                pages.update({_Part(layer, True): own for layer, own in made.keys.items()})
                pages.update({_Part(layer, False): own for layer, own in made.values.items()})
                self._tensors.append(made.tensors)
                self._open.append(made.open)
                if has_spare_blocks and num_open_slots is not None:
                    made.open.blocks.open([group.num_blocks], [SPARE_SLOT])
                continue
            tensors: list[Tensor] = []
            memory = self._memory_of(group)
            num_blocks = memory.num_blocks if memory else group.num_reserved + self._num_spare
            for (num_heads, dim), parts in _parts_by_size(group, shapes).items():
                stack = stack_pages(
                    len(parts),
                    (num_blocks, block_size, num_heads, dim),
                    dtype=kv_format.dtype,
                    code_dtype=kv_format.code_dtype,
                    device=device,
                    allocate=memory.take if memory else None,
                )
                pages.update(zip(parts, stack.pages, strict=True))
                tensors += stack.tensors
            if group.may_move and not memory:
                for tensor in tensors:
                    use_small_pages(tensor)
            self._tensors.append(tensors)
        self.keys = {part.layer: own for part, own in pages.items() if part.is_key}
        """By layer, of those that attend."""
        self.values = {
            layer: KeyPrefix(keys, shapes[layer].value_dim)
            if shapes[layer].is_latent
            else pages[_Part(layer, is_key=False)]
            for layer, keys in self.keys.items()
        }
        self._host = [
            HostBlocks(
                tensors,
                slots,
                slot_memory.memory if slot_memory and slot_memory.group == index else None,
            )
            for index, (tensors, slots) in enumerate(
                zip(self._tensors, num_swap_slots, strict=bool(num_swap_slots))
            )
        ]
        self._num_usable = [group.num_usable for group in groups]
        self.num_given_back = 0
        """Blocks whose memory was given back, restored since or not."""
        self._on_the_way: deque[_OnTheWay] = deque()
        self.disk: DiskBlocks | None = None
        """Where prefixes are written and read; None: no operation names the disk."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the usable blocks, the null blocks and the spare ones."""
        tensors = [
            tensor[:, : 1 + self.num_usable(index) + self._num_spare]
            for index, own in enumerate(self._tensors)
            for tensor in own
        ]
        tensors += [tensor for opened in self._open for tensor in opened.tensors]
        return sum(tensor.nbytes for tensor in tensors)

    def num_usable(self, group: int) -> int:
        """The blocks of a group that sequences can hold, after the operations so far."""
        return self._num_usable[group]

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of a complete block, per group."""
        return tuple(sum(tensor[:, 0].nbytes for tensor in tensors) for tensors in self._tensors)

    @property
    def spare_blocks(self) -> list[int]:
        """The spare block of each group, if the cache has them."""
        memories = map(self._memory_of, self.groups)
        return [
            memory.num_blocks - 1 if memory else group.num_reserved
            for group, memory in zip(self.groups, memories, strict=True)
        ]

    def _memory_of(self, group: KvGroup) -> BlockMemory | None:
        """The memory that this group's blocks divide with others; None: they have their own."""
        return self._block_memory if group.gives_end else None

    def clear(self, tables: Sequence[BlockTable], start: int, end: int) -> None:
        """Zero places `[start, end)` of the sequence with these blocks, by group."""
        if self._open:
            self._clear_open(tables, start, end)
            return
        for group, table, tensors in zip(self.groups, tables, self._tensors, strict=True):
            if group.holds_states:
                continue  # a block is written as a whole before it is read
            for position in range(start, end):
                block, offset = divmod(position, self.block_size)
                for tensor in tensors:
                    tensor[:, table.item(block), offset] = 0

    def move(
        self, tables: Sequence[BlockTable], sources: Sequence[int], targets: Sequence[int]
    ) -> None:
        """Copy the entries of places `sources` to `targets` in the sequence with these blocks, as
        if all were read before any is written."""
        assert not self._open, "draft trees are not served over quantized blocks"
        for table, tensors in zip(tables, self._tensors, strict=True):
            read, written = (self._places(table, positions) for positions in (sources, targets))
            for tensor in tensors:
                tensor[:, *written] = tensor[:, *read]

    def execute(self, operations: Sequence[KvOperation]) -> None:
        """Execute the operations that the scheduler's bookkeeping has queued, strictly in order.

        The order matters: a block may be copied or swapped out and then zeroed for a new owner
        within one step.
        """
        for operation in operations:
            match operation:
                case ZeroBlocks(group, block_ids, open_slots):
                    self._zero(group, block_ids)
                    if self._open:
                        self._open[group].zero(block_ids, open_slots)
                case CopyBlock(group, source, target, open_slot):
                    for tensor in self._tensors[group]:
                        tensor[:, target] = tensor[:, source]
                    if self._open:
                        self._open[group].copy(source, target, open_slot)
                case SwapOut(group, block_ids, host_slots):
                    self._swap_out(group, block_ids, host_slots)
                case SwapIn(group, host_slots, block_ids):
                    self._swap_in(group, host_slots, block_ids)
                case ToDisk() | FromDisk() | EraseOnDisk():
                    if not isinstance(operation, ToDisk) or operation.is_on_host:
                        self._land()
                    assert self.disk is not None, "there is no disk to write or read"
                    self.disk.execute(operation, self._tensors, self._host)
                case GiveBackBlocks(group, block_ids):
                    self._give_back(group, block_ids)
                    self._num_usable[group] -= len(block_ids)
                    self.num_given_back += len(block_ids)
                case RestoreBlocks(group, block_ids):
                    self._num_usable[group] += len(block_ids)
                case GiveUpSlots(group, host_slots, first_place):
                    self._land()
                    self._host[group].give_up(host_slots, first_place)
                case _:
                    assert_never(operation)

    def execute_at_rest(self, operations: Sequence[KvOperation]) -> None:
        """Execute operations that no step follows, while none is in flight."""
        self.execute(operations)

    def read_blocks(self, group: int, block_ids: Sequence[int]) -> list[bytes]:
        """The contents of complete blocks, by tensor of the group: `[layers, blocks, ...]`."""
        index = self._index(block_ids)
        copied = (tensor.index_select(1, index).cpu() for tensor in self._tensors[group])
        return [values.view(torch.uint8).numpy().tobytes() for values in copied]

    def are_pages(self, group: int, num_blocks: int, pages: Sequence[bytes]) -> bool:
        """Whether these may be what `read_blocks` has read of so many blocks."""
        hosts = self._host[group].tensors
        sizes = [num_blocks * host[:, 0].numel() * host.itemsize for host in hosts]
        return sizes == [len(page) for page in pages]

    def write_host(self, group: int, slots: Sequence[int | None], pages: Sequence[bytes]) -> None:
        """Put what `read_blocks` has read into host slots; a block without a slot is left out.

        No operation on these slots may wait.
        """
        self._land()
        kept = [place for place, slot in enumerate(slots) if slot is not None]
        index = self._host[group].index([slot for slot in slots if slot is not None])
        for host, page in zip(self._host[group].tensors, pages, strict=True):
            if kept:
                values = torch.frombuffer(bytearray(page), dtype=host.dtype)
                values = values.view(len(host), len(slots), *host.shape[2:])
                host.index_copy_(1, index, values[:, kept])

    def _make_states(
        self, group: KvGroup, shapes: Sequence[LayerKvShape], device: torch.device
    ) -> list[Tensor]:
        """A tensor for all states of one shape."""
        parts: defaultdict[StateShape, list[int]] = defaultdict(list)
        for layer in group.layers:
            for shape in shapes[layer].states:
                parts[shape].append(layer)
        stacks = {
            shape: torch.zeros(
                len(layers), group.num_blocks, *shape.size, dtype=shape.dtype, device=device
            )
            for shape, layers in parts.items()
        }
        left = {shape: iter(stack) for shape, stack in stacks.items()}
        for layer in group.layers:
            self.states[layer] = [next(left[shape]) for shape in shapes[layer].states]
        return list(stacks.values())

    def _zero(self, group: int, block_ids: Sequence[int]) -> None:
        """Zero blocks that have a new owner.

        No sequence may read another tenant's values, and the unwritten rest of a block must be
        finite, because masked positions enter sums with weight zero.
        """
        index = self._index(block_ids)
        for tensor in self._tensors[group]:
            tensor.index_fill_(1, index, 0)

    def _give_back(self, group: int, block_ids: Sequence[int]) -> None:
        """Return the pages of these blocks to the system, neighbours together; or zero them, if
        adapters get the same addresses."""
        if self._memory_of(self.groups[group]):
            self._zero(group, block_ids)
            return
        runs = list(_runs(sorted(block_ids)))
        for tensor in self._tensors[group]:
            for layer in tensor:
                give_back_rows(layer, runs)

    def _clear_open(self, tables: Sequence[BlockTable], start: int, end: int) -> None:
        """Zero positions of open blocks, and the codes that were computed with them. The codes are
        computed again when the blocks are complete."""
        for index, (table, opened) in enumerate(zip(tables, self._open, strict=True)):
            for position in range(start, end):
                block, offset = divmod(position, self.block_size)
                opened.clear(table.item(block), offset)
            last = (end - 1) // self.block_size
            blocks = table[start // self.block_size : last + 1].tolist()
            for tensor in self._tensors[index]:
                tensor.index_fill_(1, self._index(blocks), 0)

    def _swap_out(self, group: int, block_ids: Sequence[int], host_slots: Sequence[int]) -> None:
        """Copy blocks to the host without waiting for the device."""
        self._land()
        index, slots = self._index(block_ids), self._host[group].index(host_slots)
        pairs = zip(self._tensors[group], self._host[group].tensors, strict=True)
        for tensor, host in pairs:
            copied = tensor.index_select(1, index)
            if copied.is_cuda:
                self._on_the_way.append(_OnTheWay(HostCopy(copied), host, slots))
            else:
                host.index_copy_(1, slots, copied)

    def _land(self) -> None:
        """Put what the device has copied to the host since into its slots, in order."""
        while self._on_the_way:
            copy, host, slots = self._on_the_way.popleft()
            host.index_copy_(1, slots, copy.read())

    def _swap_in(self, group: int, host_slots: Sequence[int], block_ids: Sequence[int]) -> None:
        self._land()
        index, slots = self._index(block_ids), self._host[group].index(host_slots)
        pairs = zip(self._tensors[group], self._host[group].tensors, strict=True)
        for tensor, host in pairs:
            tensor.index_copy_(1, index, to_device(host.index_select(1, slots), self._device))

    def _places(self, table: BlockTable, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The blocks of these positions, and their offsets in them."""
        blocks, offsets = np.divmod(positions, self.block_size)
        return to_device(table[blocks], self._device), to_device(offsets, self._device)

    def _index(self, block_ids: Sequence[int]) -> Tensor:
        return to_device(block_ids, self._device, torch.int64)


class _OnTheWay(NamedTuple):
    """Blocks that the device copies to the host."""

    copy: HostCopy
    host: Tensor
    slots: Tensor


class _Part(NamedTuple):
    """A layer's keys or values."""

    layer: int
    is_key: bool


def _parts_by_size(
    group: KvGroup, shapes: Sequence[LayerKvShape]
) -> dict[tuple[int, int], list[_Part]]:
    """The parts of the group's layers by their number of heads and dimension."""
    parts: defaultdict[tuple[int, int], list[_Part]] = defaultdict(list)
    for layer in group.layers:
        shape = shapes[layer]
        if not shape.attends:
            continue
        for is_key, dim in zip((True, False), shape.stored_dims, strict=False):
            parts[shape.num_heads, dim].append(_Part(layer, is_key))
    return parts


def _runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The half-open ranges of neighbours among these sorted block ids."""
    start = previous = block_ids[0]
    for block_id in block_ids[1:]:
        if block_id != previous + 1:
            yield start, previous + 1
            start = block_id
        previous = block_id
    yield start, previous + 1


def kv_bytes_per_block(
    group: KvGroup, shapes: Sequence[LayerKvShape], *, block_size: int, kv_format: KvFormat
) -> int:
    """Bytes of one block over the group's layers."""
    if group.holds_states:
        return sum(state.num_bytes for layer in group.layers for state in shapes[layer].states)
    dtype, code_dtype, bits = kv_format
    if bits is not None:
        return grouped_bytes_per_block(group, shapes, block_size=block_size, bits=bits)
    per_token = sum(
        shapes[layer].num_heads * vector_bytes(dim, dtype=dtype, code_dtype=code_dtype)
        for layer in group.layers
        for dim in shapes[layer].stored_dims
    )
    return per_token * block_size


def open_bytes_per_slot(
    group: KvGroup, shapes: Sequence[LayerKvShape], *, block_size: int, kv_format: KvFormat
) -> int:
    """Bytes of an open block over the group's layers; 0 if complete blocks are not quantized."""
    if kv_format.bits is None or group.holds_states:
        return 0
    plain = KvFormat(kv_format.dtype)
    return kv_bytes_per_block(group, shapes, block_size=block_size, kv_format=plain)
