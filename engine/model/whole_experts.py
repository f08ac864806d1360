"""The experts of a base before they are packed, each with the values of its codes if quantized.

Rank 0 computes the reference of a divided base with them. As without quantization, a forward pass
reads the experts to which it routes tokens, one matrix at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from ..checkpoint.stored_experts import left_experts
from ..checkpoint.stored_weights import Values
from .experts import served_experts
from .load_quantization import LoadQuantization


@contextmanager
def whole_experts(model: nn.Module, quantization: LoadQuantization) -> Iterator[None]:
    """Within the context, the model computes with its experts as they are quantized.

    Experts that are in memory stay as they are: those are not quantized.
    """
    with ExitStack() as stack:
        for path, module in served_experts(model).items():
            left = left_experts(module)
            if left is None:
                continue

            def apply(name: str, values: Values, path: str = path) -> Values:
                return quantization.apply(f"{path}.{name}", values)

            stack.enter_context(left.applying(apply))
        yield
