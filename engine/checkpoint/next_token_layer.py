"""The multi-token head in a base's files, seen as the model of one layer.

DeepSeek-V3 and GLM-4 MoE store it as a layer after the last: a decoder layer, two norms and a
projection for its input, a norm for its output, an embedding and an output head. The decoder layer
is one of the base's own class. The last two are often copies of the base's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from ..errors import UnsupportedModel

FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
"""The model types whose heads are served."""
INPUT_NAMES = ("enorm.weight", "hnorm.weight", "eh_proj.weight")
"""In the order of `InputWeights`."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_OWN_NAMES = {
    "embed_tokens.weight": _EMBEDDING,
    "shared_head.head.weight": _HEAD,
    "shared_head.norm.weight": "model.norm.weight",
}
"""What becomes another part of the model than the layer."""

Weight = TypeVar("Weight")


class InputWeights(NamedTuple, Generic[Weight]):
    """What makes the layer's input of a token and a hidden state."""

    embedding_norm: Weight
    """`[hidden_size]`, as the next."""
    state_norm: Weight
    projection: Weight
    """`[hidden_size, 2 * hidden_size]`: of the normed embedding and the normed hidden state."""


class EndWeights(NamedTuple, Generic[Weight]):
    """The weight of an embedding or output head; both are one weight where the layer has none."""

    own: Weight
    base: Weight


class NextTokenLayer(NamedTuple):
    """Where a base's files have the head, and of what form its layer is."""

    place: int
    """The number of the layer: that of the base's layers."""

    @classmethod
    def of(cls, config: Any) -> NextTokenLayer:
        """That of a base with this configuration. Raises UnsupportedModel if heads of its model
        type are not served."""
        if config.model_type not in FAMILIES:
            raise UnsupportedModel(
                f"no multi-token heads of {config.model_type} are served, only those of "
                f"{', '.join(FAMILIES)}"
            )
        return cls(int(config.num_hidden_layers))

    def config(self, config: Any) -> Any:
        """The configuration of a model of this layer alone, from the base's. Its experts are those
        of the base's last layer."""
        own = copy.deepcopy(config)
        own.num_hidden_layers = 1
        if hasattr(own, "first_k_dense_replace"):
            own.first_k_dense_replace = 0
        if hasattr(own, "mlp_layer_types"):
            own.mlp_layer_types = own.mlp_layer_types[-1:]
        return own

    def inputs(self, stored: Mapping[str, Weight]) -> InputWeights[Weight]:
        """Of the folder's weights those that make the layer's input. Raises UnsupportedModel if the
        files have no head."""
        names = [f"{self._prefix}{name}" for name in INPUT_NAMES]
        for name in names:
            if name not in stored:
                raise UnsupportedModel(
                    f"the base's files have no multi-token head: {name} is missing"
                )
        return InputWeights(*(stored[name] for name in names))

    def weights(self, stored: Mapping[str, Weight]) -> dict[str, Weight]:
        """Of the folder's weights those of the model of this layer, by its names; the base's
        embedding and output head where the layer has none."""
        found = {name: stored[name] for name in (_EMBEDDING, _HEAD) if name in stored}
        for name, weight in stored.items():
            part = name.removeprefix(self._prefix)
            if part != name and part not in INPUT_NAMES:
                found[_OWN_NAMES.get(part, f"model.layers.0.{part}")] = weight
        return found

    def ends(self, stored: Mapping[str, Weight]) -> tuple[EndWeights[Weight], EndWeights[Weight]]:
        """The layer's embedding and output head, each beside the base's."""
        of_layer = self.weights(stored)
        table = EndWeights(of_layer[_EMBEDDING], stored[_EMBEDDING])
        head = of_layer.get(_HEAD, table.own), stored.get(_HEAD, table.base)
        return table, EndWeights(*head)

    @property
    def _prefix(self) -> str:
        return f"model.layers.{self.place}."
