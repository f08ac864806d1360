"""The LoRA op of one projection, with the implementation that fits the device and the step."""

from __future__ import annotations

import torch
from torch import Tensor

from .lora_batch import LoraBatch
from .lora_segments import LoraSegments
from .lora_weights import AdapterWeights
from .lora_window import LoraWindow


class LoraProjection:
    """Adds the adapters' deltas to one projection's base result.

    On the CPU it owns the window that keeps the decoding adapters' matrices together.
    """

    def __init__(self, first_slice: int, in_features: int, slice_outs: tuple[int, ...]) -> None:
        """first_slice: the index of the projection's first slice in the base's layout.

        slice_outs: out_features of each of its slices, in order: column ranges of y.
        """
        self._first_slice = first_slice
        self._in_features = in_features
        self._slice_outs = slice_outs
        self._segments = LoraSegments(first_slice, in_features, slice_outs)
        self._window: LoraWindow | None = None

    def begin(self, x: Tensor, weights: AdapterWeights, batch: LoraBatch) -> Tensor | None:
        """Start the part that does not need the base's result, on the batch's side stream if there
        is one.

        Returns the argument for `add`; None: `add` does everything.
        """
        if batch.tiles is None or batch.side_stream is None:
            return None
        from .lora_triton import shrink_tiles

        batch.side_stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(batch.side_stream):
            return shrink_tiles(
                x,
                weights,
                batch.token_rows,
                batch.tiles,
                first_slice=self._first_slice,
                num_slices=len(self._slice_outs),
            )

    def add(
        self,
        x: Tensor,
        y: Tensor,
        weights: AdapterWeights,
        batch: LoraBatch,
        lora_hidden: Tensor | None = None,
    ) -> None:
        """Add each token's delta to y, in place; see `lora_reference` for the arithmetic.

        x `[num_tokens, in_features]` is the projection's input, y `[num_tokens, sum(slice_outs)]`
        the base's result; both in the dtype of `weights.flat`, rows dense. begun: what `begin`
        gave.
        Raises ValueError if shapes, dtypes or devices do not fit.
        """
        self._check(x, y, weights, batch)
        if lora_hidden is not None:
            self._finish(y, lora_hidden, weights, batch)
        elif batch.tiles is not None:
            self._add_on_gpu(x, y, weights, batch)
        else:
            self._add_on_cpu(x, y, weights, batch)

    def forget(self, row: int) -> None:
        """Zero every copy of the weights of this table row's adapter, and drop references to
        them."""
        self._segments.forget(row)
        if self._window is not None:
            self._window.forget(row)

    def _add_on_cpu(self, x: Tensor, y: Tensor, weights: AdapterWeights, batch: LoraBatch) -> None:
        if batch.decode_adapters:
            decodes = slice(batch.num_decodes)
            self._decode_window(weights).add(
                x[decodes], y[decodes], weights, batch.token_rows[decodes], batch.decode_adapters
            )
        if batch.segments:
            self._segments.add(x, y, weights, batch.segments)

    def _decode_window(self, weights: AdapterWeights) -> LoraWindow:
        if self._window is None:
            self._window = LoraWindow(
                self._first_slice,
                self._in_features,
                self._slice_outs,
                dtype=weights.flat.dtype,
                budget=weights.copy_budget,
            )
        return self._window

    def _add_on_gpu(self, x: Tensor, y: Tensor, weights: AdapterWeights, batch: LoraBatch) -> None:
        from .lora_triton import add_tiles  # Triton is not installed everywhere

        assert batch.tiles is not None
        add_tiles(
            x,
            y,
            weights,
            batch.token_rows,
            batch.tiles,
            first_slice=self._first_slice,
            slice_outs=self._slice_outs,
        )

    def _finish(self, y: Tensor, h: Tensor, weights: AdapterWeights, batch: LoraBatch) -> None:
        from .lora_triton import expand_tiles

        assert batch.tiles is not None
        assert batch.side_stream is not None
        torch.cuda.current_stream(y.device).wait_stream(batch.side_stream)
        expand_tiles(
            y,
            h,
            weights,
            batch.token_rows,
            batch.tiles,
            first_slice=self._first_slice,
            slice_outs=self._slice_outs,
        )

    def _check(self, x: Tensor, y: Tensor, weights: AdapterWeights, batch: LoraBatch) -> None:
        num_tokens = batch.token_rows.shape[0]
        if x.shape != (num_tokens, self._in_features):
            raise ValueError(f"x is {list(x.shape)}, not {[num_tokens, self._in_features]}")
        if y.shape != (num_tokens, sum(self._slice_outs)):
            raise ValueError(f"y is {list(y.shape)}, not {[num_tokens, sum(self._slice_outs)]}")
        if not x.dtype == y.dtype == weights.flat.dtype:
            raise ValueError(f"x is {x.dtype}, y {y.dtype}, the arena {weights.flat.dtype}")
        if not x.device == y.device == weights.flat.device:
            raise ValueError(f"x is on {x.device}, y on {y.device}, not on the arena's device")
        if x.stride(1) != 1 or y.stride(1) != 1:
            raise ValueError("the rows of x and y must be dense")
