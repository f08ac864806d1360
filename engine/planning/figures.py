"""A base of which only figures are known: a Llama of that size. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import InvalidParameter

_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_MLP_UNIT = 64
"""The MLP's width is a multiple of it, so that as many ranks can divide it."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The sizes that model cards tell."""

    num_parameters: int
    num_layers: int
    hidden_size: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    def config(self, max_model_len: int) -> dict[str, Any]:
        """The `config.json` of a Llama in bf16 with these sizes and ends of their own. Its MLP has
        what is left of the parameters. Raises InvalidParameter."""
        if self.hidden_size % self.head_dim:
            raise InvalidParameter("hidden", "must be a multiple of --head-dim")
        num_heads = self.hidden_size // self.head_dim
        if num_heads % self.num_kv_heads:
            raise InvalidParameter(
                "kv_heads", f"must divide the {num_heads} heads of --hidden and --head-dim"
            )
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self._mlp_width(),
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": max_model_len,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }

    def _mlp_width(self) -> int:
        ends = 2 * self.vocab_size * self.hidden_size
        attention = 2 * self.hidden_size * (self.hidden_size + self.num_kv_heads * self.head_dim)
        left = self.num_parameters - ends - self.num_layers * attention
        width = round(left / (3 * self.num_layers * self.hidden_size * _MLP_UNIT)) * _MLP_UNIT
        if width < _MLP_UNIT:
            raise InvalidParameter(
                "params",
                f"Embeddings and attention alone have {self.num_parameters - left:,} parameters",
            )
        return width


def parse_params(text: str) -> int:
    """A number of parameters such as 8b or 350m. Raises InvalidParameter."""
    unit = _UNITS.get(text[-1:].lower(), 1)
    try:
        number = int(float(text[:-1] if unit > 1 else text) * unit)
    except (ValueError, OverflowError):  # not a number, or an infinite one
        number = 0
    if number < 1:
        raise InvalidParameter("params", f"{text} is not a number such as 8b or 350m")
    return number
