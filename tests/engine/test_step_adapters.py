"""Which adapters of a step each part of the model sees."""

from __future__ import annotations

import pytest
import torch

from loraplex.adapters.layout import BaseLayout, Projection, Slice, SliceKind
from loraplex.engine.model.forward import StepAdapters, StepAdaptersBuilder
from loraplex.kernels.lora_batch import AdapterRun, LoraBatchBuilder, LoraNeeds, Segment
from support.lora_weights import PoisonedWeights

EMBEDDING, LAYER, EXPERTS, HEAD = range(4)
LAYOUT = BaseLayout(
    "base",
    (
        Projection((Slice("wte", 40, 16, SliceKind.EMBEDDING),)),
        Projection((Slice("layer", 16, 16),)),
        Projection((Slice("experts", 16, 16, SliceKind.EXPERTS, 5),)),
        Projection((Slice("head", 16, 40),)),
    ),
)
IN_LAYER, IN_HEAD, IN_EMBEDDING, IN_EXPERTS = range(4)


@pytest.fixture
def builder() -> StepAdaptersBuilder:
    weights = PoisonedWeights(LAYOUT, num_rows=4, dtype=torch.bfloat16)
    weights.put(IN_LAYER, {LAYER: 2})
    weights.put(IN_HEAD, {HEAD: 2})
    weights.put(IN_EMBEDDING, {EMBEDDING: 2})
    weights.put(IN_EXPERTS, {LAYER: 1, EXPERTS: 3})
    return StepAdaptersBuilder(LoraBatchBuilder(weights, torch.device("cpu")), LAYOUT, "head")


def build(builder: StepAdaptersBuilder, *rows: int) -> StepAdapters:
    """A step of one decoding sequence and one chunk of four tokens for each further row."""
    runs = [AdapterRun(4 if index else 1, row) for index, row in enumerate(rows)]
    return builder.build(runs, [AdapterRun(1, row) for row in rows], num_decodes=1)


def test_a_step_of_the_base_has_none(builder: StepAdaptersBuilder) -> None:
    assert build(builder, -1, -1) == StepAdapters()


def test_ends_that_no_adapter_touches_have_nothing_to_do(builder: StepAdaptersBuilder) -> None:
    step = build(builder, IN_LAYER, -1)
    assert step.lora is not None
    assert step.head is None
    assert step.embedding == ()


def test_the_head_sees_one_row_of_each_sequence(builder: StepAdaptersBuilder) -> None:
    step = build(builder, IN_LAYER, IN_HEAD, IN_EMBEDDING)
    assert step.lora is not None
    assert step.lora.token_rows.tolist() == [IN_LAYER, *[IN_HEAD] * 4, *[IN_EMBEDDING] * 4]
    assert step.head is not None
    assert step.head.token_rows.tolist() == [-1, IN_HEAD, -1]
    assert step.head.adapter_rows == {IN_HEAD}


def test_the_embedding_sees_every_token(builder: StepAdaptersBuilder) -> None:
    step = build(builder, IN_EMBEDDING, IN_HEAD, IN_EMBEDDING)
    assert step.embedding == (Segment(0, 1, IN_EMBEDDING), Segment(5, 9, IN_EMBEDDING))


def test_kernels_alone_serve_a_step_unless_an_adapter_changes_the_input_embedding(
    builder: StepAdaptersBuilder,
) -> None:
    def needs(*rows: int) -> LoraNeeds | None:
        return builder.needs([AdapterRun(1, row) for row in rows])

    assert needs(-1, -1) == (0, False, False)
    assert needs(-1, IN_LAYER) == (2, False, False)
    assert needs(IN_LAYER, IN_HEAD) == (2, False, False)
    assert needs(IN_LAYER, IN_EXPERTS) == (3, False, True), "the rank is that of each expert"
    assert needs(IN_EMBEDDING, IN_LAYER) is None
