"""What each stage of a pipeline has of a base."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch

from ...adapters.layout_part import LayoutPart
from ...kernels.attention_window import AttentionWindow
from ..kv.groups import LayerKvShape, StateShape
from ..shards.rank_place import StagePlace
from ..shards.stage_links import StageLinks


@dataclass(frozen=True)
class BaseStages:
    """What each rank of each stage has."""

    place: StagePlace
    """This rank's stage."""
    rank: int
    """This rank in its stage."""
    parts: tuple[tuple[LayoutPart, ...], ...]
    """By stage and rank. Those of other ranks have the right sizes."""
    kv_shapes: tuple[list[LayerKvShape], ...]
    """By stage, what each layer of the base caches on one of its ranks; nothing if another stage
    has the layer."""

    @classmethod
    def one(cls, part: LayoutPart, kv_shapes: list[LayerKvShape]) -> BaseStages:
        """A base that is not divided among stages."""
        return cls(StagePlace(0, 1), 0, ((part,),), (kv_shapes,))

    @property
    def part(self) -> LayoutPart:
        """This rank's."""
        return self.parts[self.place.stage][self.rank]

    @property
    def all_kv_shapes(self) -> list[LayerKvShape]:
        """What each layer caches in the stage that has it."""
        return merge_shapes(self.kv_shapes)

    def bound_to(self, base_id: str) -> BaseStages:
        """The same stages of a base with this id."""
        parts = tuple(
            tuple(replace(part, whole=replace(part.whole, base_id=base_id)) for part in of_stage)
            for of_stage in self.parts
        )
        return replace(self, parts=parts)


def merge_shapes(of_stages: Sequence[Sequence[LayerKvShape]]) -> list[LayerKvShape]:
    """By layer, the shape of the stage that has the layer."""
    return [
        next((shape for shape in of_layer if shape.attends or shape.states), of_layer[0])
        for of_layer in zip(*of_stages, strict=True)
    ]


def tell_shapes(own: list[LayerKvShape], links: StageLinks) -> tuple[list[LayerKvShape], ...]:
    """The shapes of all stages. Every rank calls it at the same point."""
    message = json.dumps([_pack(shape) for shape in own]).encode()
    of_ranks = [json.loads(each) for each in links.tell_all(message)]
    return tuple([_unpack(layer) for layer in each] for each in links.of_stages(of_ranks))


def _pack(shape: LayerKvShape) -> dict[str, Any]:
    window = None if shape.window is None else astuple(shape.window)
    states = [[state.size, str(state.dtype).removeprefix("torch.")] for state in shape.states]
    return {**shape._asdict(), "window": window, "states": states}


def _unpack(packed: dict[str, Any]) -> LayerKvShape:
    window = None if packed["window"] is None else AttentionWindow(*packed["window"])
    states = [StateShape(tuple(size), getattr(torch, dtype)) for size, dtype in packed["states"]]
    return LayerKvShape(**{**packed, "window": window, "states": tuple(states)})
