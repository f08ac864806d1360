"""Which stage of a pipeline holds which layers, and with them which adapters. Torch-free."""

from __future__ import annotations

import re
from typing import NamedTuple


class StagePlan(NamedTuple):
    """How the layers of a base are divided among stages.

    Each stage has adjacent layers. The first one has the input embedding too, the last one the
    output head. If the layers cannot be divided equally, the first stages have one more.
    """

    layers_path: str
    """The path of the list of layers in the model."""
    num_layers: int
    num_stages: int

    def layers(self, stage: int) -> range:
        """The numbers of the layers of a stage."""
        size, num_larger = divmod(self.num_layers, self.num_stages)
        start = stage * size + min(stage, num_larger)
        return range(start, start + size + (stage < num_larger))

    def layer_of(self, path: str) -> int | None:
        """The number of the layer to which a module belongs; None: it is outside of them."""
        found = re.match(rf"{re.escape(self.layers_path)}\.(\d+)\.", f"{path}.")
        return int(found[1]) if found else None

    def stage_of_layer(self, layer: int) -> int:
        """The stage that holds a layer."""
        return next(each for each in range(self.num_stages) if layer in self.layers(each))
