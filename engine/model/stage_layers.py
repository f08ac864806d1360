"""The layers of one stage of a pipeline.

transformers' model keeps its own forward pass. Where another stage has a layer, a stand-in takes
its place: the one before the stage's own layers receives hidden states, the one behind them sends
them. So whatever the model computes around its layers, each stage computes for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...adapters.layout_part import LayoutPart
from ..errors import UnsupportedModel
from ..shards.shard_plan import Shard
from ..shards.stage_links import StageLinks
from ..shards.stage_plan import StagePlan
from .admission import run_probe
from .attention_windows import LayerProbe
from .embedding_and_head import ModelEnds

_EMBEDDINGS = "original_hidden_states"
"""transformers' name for what a layer of Zamba reads besides the hidden states before it."""
_PLAIN = (bool, int, float, str, type(None))


def plan_stages(model: PreTrainedModel, config: Any, num_stages: int) -> StagePlan:
    """Raises UnsupportedModel if there are fewer layers than stages or other layers than the
    decoder's, and with several stages if layers read more than hidden states."""
    lists = (each for each in model.named_modules() if isinstance(each[1], nn.ModuleList))
    path, layers = next(lists)
    assert isinstance(layers, nn.ModuleList)
    if len(layers) != config.num_hidden_layers:
        raise UnsupportedModel(f"{config.model_type} has other layers than its decoder's")
    if len(layers) < num_stages:
        raise UnsupportedModel(f"{len(layers)} layers cannot be divided among {num_stages} stages")
    if num_stages > 1 and any(_EMBEDDINGS in signature(each.forward).parameters for each in layers):
        raise UnsupportedModel(
            f"{config.model_type} cannot be divided among stages: "
            "its layers read the embeddings again"
        )
    return StagePlan(path, len(layers), num_stages)


def parts_of_stages(part: LayoutPart, plan: StagePlan) -> tuple[LayoutPart, ...]:
    """What a rank of each stage holds, given what it would hold if there were one stage. Raises
    UnsupportedModel if adapters can change anything else than layers and ends."""
    if plan.num_stages == 1:
        return (part,)
    layout = part.whole
    held: list[set[str]] = [set() for _ in range(plan.num_stages)]
    ends = {layout.embedding: 0, layout.output_head: plan.num_stages - 1}
    for index, name in enumerate(each.name for each in layout.slices):
        layer = plan.layer_of(name)
        if layer is None and index not in ends:
            raise UnsupportedModel(f"{name} belongs to no layer, so it has no stage")
        stage = ends[index] if layer is None else plan.stage_of_layer(layer)
        held[stage].add(name)
    return tuple(replace(part, held=frozenset(names)) for names in held)


def held_linears(
    shards: Mapping[str, Shard], plan: StagePlan, links: StageLinks | None
) -> dict[str, Shard]:
    """Those of the divided layers that this rank's stage has."""
    if links is None:
        return dict(shards)
    own = plan.layers(links.place.stage)
    return {path: shard for path, shard in shards.items() if plan.layer_of(path) in own}


@contextmanager
def without_layers(model: PreTrainedModel, plan: StagePlan) -> Iterator[StandIns]:
    """The model passes its embedding's result on to its head: what a few tokens show of the two
    does not depend on the layers. Yields what can stand for layers of this model."""
    layers = _layers(model, plan)
    held = list(layers)
    try:
        for stand_ins in (StandIns(False), StandIns(True)):
            for number, layer in enumerate(held):
                layers[number] = stand_ins.other(layer)
            if _runs(model):
                break
        yield stand_ins
    finally:
        for number, layer in enumerate(held):
            layers[number] = layer


def _runs(model: PreTrainedModel) -> bool:
    """Whether the model takes what its layers return."""
    try:
        run_probe(model, LayerProbe())
    except (IndexError, ValueError):
        return False
    return True


def _layers(model: PreTrainedModel, plan: StagePlan) -> nn.ModuleList:
    layers = model.get_submodule(plan.layers_path)
    assert isinstance(layers, nn.ModuleList)
    return layers


def cut_stage(
    model: PreTrainedModel, plan: StagePlan, links: StageLinks, stand_ins: StandIns
) -> None:
    """Leave this stage's layers, and the ends that it has."""
    layers, own = _layers(model, plan), plan.layers(links.place.stage)
    for number, layer in enumerate(layers):
        if number == own.start - 1:
            layers[number] = stand_ins.receiving(layer, links)
        elif number == own.stop:
            layers[number] = stand_ins.sending(layer, links)
        elif number not in own:
            layers[number] = stand_ins.other(layer)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not links.place.is_first:
        model.set_input_embeddings(_OtherEmbedding(table.embedding_dim, table.weight.dtype))
    if not links.place.is_last:
        model.set_output_embeddings(_OtherHead(head.in_features))


def ends_of_stage(ends: ModelEnds, links: StageLinks) -> ModelEnds:
    """The ends that this stage has."""
    return replace(
        ends,
        embedding=ends.embedding if links.place.is_first else None,
        head=ends.head if links.place.is_last else None,
        are_tied=False,  # no stage has both
    )


class StandIns(NamedTuple):
    """Makes what stands for layers of other stages."""

    return_tuples: bool
    """Whether the family's layers return their hidden states as the first of several things."""

    def other(self, layer: nn.Module) -> nn.Module:
        """Changes nothing."""
        return _StandIn(layer, self.return_tuples, lambda states: states)

    def receiving(self, layer: nn.Module, links: StageLinks) -> nn.Module:
        """The last layer of the stage before."""
        return _StandIn(layer, self.return_tuples, links.receive)

    def sending(self, layer: nn.Module, links: StageLinks) -> nn.Module:
        """The first layer of the next stage."""

        def send(states: Tensor) -> Tensor:
            links.send(states)
            return states

        return _StandIn(layer, self.return_tuples, send)


class _StandIn(nn.Module):
    """A layer of another stage."""

    def __init__(
        self, layer: nn.Module, returns_tuple: bool, pass_on: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        # The model asks layers for such facts as the kind of their attention.
        for name, value in vars(layer).items():
            if isinstance(value, _PLAIN) and not name.startswith("_"):
                setattr(self, name, value)
        self._returns_tuple = returns_tuple
        self._pass_on = pass_on

    def forward(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        """`hidden_states [1, num_tokens, hidden_size]`."""
        if hidden_states.ndim != 3:
            raise ValueError("the model takes the first of what a layer returns")
        states = self._pass_on(hidden_states)
        return (states, None) if self._returns_tuple else states


class _OtherEmbedding(nn.Module):
    """The input embedding of another stage: it gives hidden states of the right shape."""

    def __init__(self, embedding_dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        weight = torch.empty(0, embedding_dim, dtype=dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.weight.new_zeros(*token_ids.shape, self.weight.shape[1])


class _OtherHead(nn.Module):
    """The output head of another stage: nobody reads its logits."""

    def __init__(self, in_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.weight = torch.empty(0, in_features, dtype=torch.float32)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states[..., :1]
