"""The vectors of adapters, one value per output of a linear layer: DoRA's magnitude and biases.

They change the base's result before the LoRA delta is added. On CUDA one Triton launch applies
those of all tokens to all slices of a projection. `plain_apply_vectors` defines the operation, and
`change_rows` its arithmetic.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from torch import Tensor

from .lora_batch import BASE_ROW
from .lora_weights import AdapterWeights


def apply_vectors(
    y: Tensor,
    weights: AdapterWeights,
    token_rows: Tensor,
    base_bias: Tensor | None,
    *,
    first_slice: int,
    slice_outs: tuple[int, ...],
) -> None:
    """Change y, the base's result of one projection, by the vectors of each token's adapter.

    y `[num_tokens, sum(slice_outs)]` in the dtype of `weights.flat`, rows dense, in place.
    token_rows int32 `[num_tokens]`: each token's table row, -1 for the base model.
    base_bias `[sum(slice_outs)]`, in any dtype: the bias that y includes.
    On CUDA nothing waits for the device, and no other token changes a bit of a token's result.
    Raises ValueError if shapes or dtypes do not fit.
    """
    if y.shape != (len(token_rows), sum(slice_outs)) or y.stride(1) != 1:
        raise ValueError(f"y is {list(y.shape)} for {len(token_rows)} tokens of {slice_outs}")
    if y.dtype != weights.flat.dtype:
        raise ValueError(f"y is {y.dtype}, the arena {weights.flat.dtype}")
    apply = plain_apply_vectors
    if y.is_cuda:
        from . import lora_vectors_triton  # Triton is not installed everywhere

        apply = lora_vectors_triton.apply_vectors
    apply(y, weights, token_rows, base_bias, first_slice=first_slice, slice_outs=slice_outs)


def plain_apply_vectors(
    y: Tensor,
    weights: AdapterWeights,
    token_rows: Tensor,
    base_bias: Tensor | None,
    *,
    first_slice: int,
    slice_outs: tuple[int, ...],
) -> None:
    """The definition of `apply_vectors`."""
    columns = [slice(*ends) for ends in pairwise(accumulate(slice_outs, initial=0))]
    for row in set(token_rows.tolist()) - {BASE_ROW}:
        tokens = (token_rows == row).nonzero().flatten()
        for index, part in enumerate(columns, start=first_slice):
            own = y[tokens, part]
            change_rows(
                own,
                None if base_bias is None else base_bias[part],
                *(
                    None if offset < 0 else weights.flat[offset : offset + own.shape[1]]
                    for offset in weights.vectors[row, index].tolist()
                ),
            )
            y[tokens, part] = own


def change_rows(
    y: Tensor,
    base_bias: Tensor | None,
    magnitude: Tensor | None,
    bias: Tensor | None,
    lora_bias: Tensor | None,
) -> None:
    """Change y `[n, out]`, rows of one adapter and one slice, in place; each step rounds to y's
    dtype.

    base_bias `[out]`, in any dtype: the bias that y includes. The vectors `[out]`: the factor of
    each output less 1, the difference to the base's bias, and the bias of B times its scale.
    """
    if magnitude is not None:
        # PEFT scales the product and not the bias.
        y.addcmul_(y if base_bias is None else y - base_bias.to(y.dtype), magnitude)
    for added in (bias, lora_bias):
        if added is not None:
            y += added
