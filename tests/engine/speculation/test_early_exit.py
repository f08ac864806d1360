"""Self-speculation: the base's first layers draft, using its own keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from loraplex.adapters.manager import Lease
from loraplex.engine.config import Acceptance, EngineConfig, KvDtype, Quantization
from loraplex.engine.errors import InvalidParameter, UnsupportedModel
from loraplex.engine.execution.runner import ModelRunner, StepOutput
from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.kv.sequence_blocks import SequenceBlocks
from loraplex.engine.messages import GenerationRequest, SpeculationParams
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.inputs import SequenceChunk
from loraplex.engine.model.layer_subset import LayerSubset
from loraplex.engine.model.whole_base import load_base_model
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.speculation.drawing import make_drawing
from loraplex.engine.speculation.proposer import DraftRequest
from loraplex.engine.speculation.proposers import OPENERS
from loraplex.engine.speculation.self_draft import SelfDraftProposer
from loraplex.engine.speculation.self_draft_opening import open_self_draft
from support.engine import LocalEngine
from support.families import FOUR_LAYERS, SERVED, VOCAB_SIZE, save_family
from support.paged import paged_logits
from support.step_output import output_of

PROMPTS = [[7, 1, 12, 90], [3, 3, 5] * 6, [200, 41], list(range(40, 71)), [9] * 12, [66, 5, 4]]


def open_all_layers(
    _argument: str, config: EngineConfig, base: BaseModel, runner: ModelRunner
) -> SelfDraftProposer:
    every = range(base.config.num_hidden_layers)
    layers = LayerSubset("early_exit", base.model, base.config, every)
    return SelfDraftProposer("early_exit", layers, runner, make_drawing(config.acceptance))


def answer_all(
    engine: LocalEngine, adapter_folders: Sequence[Path], temperature: float
) -> tuple[list[list[int]], int, int]:
    """The answers of base and adapters in one mixed batch; how many tokens were drafted for them,
    and how many of these held."""
    keys = [None, *(engine.add_adapter(folder) for folder in adapter_folders)]
    ids = [
        engine.submit(
            prompt,
            keys[index % len(keys)],
            max_tokens=16,
            temperature=temperature,
            seed=index,
            ignore_eos=True,
            repetition_penalty=1.1 if index == 1 else 1.0,
            speculation=SpeculationParams(num_tokens=4),
        )
        for index, prompt in enumerate(PROMPTS)
    ]
    engine.run()
    engine.close()
    ends = [end for end in (engine.answers[name].finished for name in ids) if end]
    return (
        engine.tokens(ids),
        sum(end.num_draft_tokens for end in ends),
        sum(end.num_accepted_tokens for end in ends),
    )


@pytest.mark.parametrize(
    "config",
    [
        {"kv_dtype": KvDtype.INT8},
        {"quantization": Quantization.INT8},
        {"attention_window": 8, "attention_sinks": 2, "kv_block_size": 4},
    ],
    ids=["int8-kv", "int8-base", "window"],
)
def test_it_shares_whatever_cache_and_weights_the_target_has(
    tiny_base: Path, adapter_folders: list[Path], tmp_path: Path, config: dict[str, Any]
) -> None:
    plain, _, _ = answer_all(LocalEngine(tiny_base, tmp_path, **config), adapter_folders, 0.7)
    engine = LocalEngine(tiny_base, tmp_path, speculation=("early_exit:1",), **config)
    tokens, num_drafted, _ = answer_all(engine, adapter_folders, 0.7)
    assert tokens == plain
    assert num_drafted > 60


@pytest.mark.parametrize("acceptance", Acceptance)
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_of_what_all_layers_draft_everything_is_accepted(
    tiny_base: Path,
    adapter_folders: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    acceptance: Acceptance,
    temperature: float,
) -> None:
    monkeypatch.setitem(OPENERS, "early_exit", open_all_layers)
    engine = LocalEngine(tiny_base, tmp_path, speculation=("early_exit:1",), acceptance=acceptance)
    _, num_drafted, num_accepted = answer_all(engine, adapter_folders, temperature)
    assert num_accepted == num_drafted > 60


FAMILIES = (
    "deepseek_v3-mla",
    "gemma2-softcap-window",
    "gpt2-conv1d",
    "gpt_neox",
    "gpt_oss-sinks-window",
    "mixtral",
    "opt",
    "phi3-fused",
)


@pytest.mark.parametrize("case", FAMILIES)
def test_early_logits_are_those_of_the_model_cut_to_its_first_layers(
    case: str, tmp_path: Path
) -> None:
    model_type, differences = SERVED[case]
    path = save_family(tmp_path, model_type, {**differences, **FOUR_LAYERS})
    cut, whole = load_cut(path, 2), load_cut(path, 4)
    base = load_base_model(EngineConfig(str(path), device="cpu"))
    layers = LayerSubset("early_exit", base.model, base.config, range(2))
    sequence = torch.randint(VOCAB_SIZE, (21,), generator=torch.Generator().manual_seed(1))

    with layers.only():
        early = paged_logits(base, [sequence.tolist()])[0]
    late = paged_logits(base, [sequence.tolist()])[0]

    for ours, model in ((early, cut), (late, whole)):
        with torch.inference_mode():
            theirs = model(sequence[None], use_cache=False).logits[0]
        assert (ours - theirs).abs().max() < 1e-4
    assert (early - late).abs().max() > 0.01


def load_cut(path: Path, num_layers: int) -> Any:
    """The checkpoint as transformers loads it with so many layers."""
    config = AutoConfig.from_pretrained(path)
    layer_types = getattr(config, "layer_types", None)
    config.num_hidden_layers = num_layers
    if layer_types:
        config.layer_types = layer_types[:num_layers]
    model = AutoModelForCausalLM.from_pretrained(path, config=config, attn_implementation="eager")
    return model.eval()


class CountingModel(nn.Module):
    """It goes through its layers by their number, whatever list it has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def forward(self, **_inputs: Any) -> Any:
        hidden = torch.zeros(1, 1, 2)
        for index in range(3):
            hidden = self.layers[index](hidden)
        return SimpleNamespace(logits=hidden)


class RecordingModel(CountingModel):
    """One whose layers do not attend."""

    def forward(self, **_inputs: Any) -> Any:
        return SimpleNamespace(logits=torch.zeros(1, 1, 2))


@pytest.mark.parametrize("model", [CountingModel(), RecordingModel()])
def test_a_model_that_goes_another_way_through_its_layers_is_refused_by_name(
    model: nn.Module,
) -> None:
    config = SimpleNamespace(num_hidden_layers=3, model_type="winding")
    layers = model.layers
    with pytest.raises(UnsupportedModel, match="winding does not run without some layers"):
        LayerSubset("early_exit", model, config, range(2))
    assert model.layers is layers


@pytest.mark.parametrize("argument", ["", "0", "2", "-1", "1.5", "one"])
def test_another_number_of_layers_is_refused(tiny_base: Path, argument: str) -> None:
    base = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=2))
    config = EngineConfig(str(tiny_base), speculation=(f"early_exit:{argument}",))
    with pytest.raises(InvalidParameter, match="early_exit takes a number of layers from 1 to 1"):
        open_self_draft("early_exit", argument, config, base, None)  # type: ignore[arg-type]


Spoil = Callable[[ModelRunner, Sequence[SequenceChunk], StepOutput], StepOutput]


def spoil_drafts(engine: LocalEngine, spoil: Spoil, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let `spoil` change what every seventh forward of the proposer says; returns which.

    The verification behind it fails too: nobody writes again what was drafted.
    """
    runner = engine.core.parts.runner
    run_chunks, num_calls, spoiled, fails_next = runner.run_chunks, 0, [], False

    def run(
        chunks: Sequence[SequenceChunk], leases: Sequence[Lease | None], *_: Any, **_reads: Any
    ) -> StepOutput:
        nonlocal num_calls, fails_next
        left_out = engine.core.parts.base.model.model.layers[1]
        if not isinstance(left_out.forward, partial):  # it is computed
            fails, fails_next = fails_next, False
            if fails and len(chunks) > 1:  # who fails alone is ended
                raise RuntimeError("the device is out of memory")
            return run_chunks(chunks, leases)
        num_calls += 1
        if num_calls % 7:
            return run_chunks(chunks, leases)
        spoiled.append(num_calls)
        fails_next = True
        return spoil(runner, chunks, run_chunks(chunks, leases))

    monkeypatch.setattr(runner, "run_chunks", run)
    return spoiled


def raise_error(
    runner: ModelRunner, chunks: Sequence[SequenceChunk], output: StepOutput
) -> StepOutput:
    make_nan(runner, chunks, output)
    raise RuntimeError("the device is out of memory")


def make_nan(
    runner: ModelRunner, chunks: Sequence[SequenceChunk], output: StepOutput
) -> StepOutput:
    """As if the first layer had overflowed for every second request."""
    logits = output.logits.clone()
    logits[::2] = torch.nan
    cache = runner._cache
    for chunk in chunks[::2]:
        block, offset = divmod(chunk.start, cache.block_size)
        for pages in (cache.keys[0], cache.values[0]):
            pages.tensors[0][chunk.tables[0][block], offset] = torch.nan
    return output_of(logits, output.hidden_states)


@pytest.mark.parametrize("spoil", [make_nan, raise_error])
def test_a_draft_that_fails_midway_leaves_nothing_behind(
    tiny_base: Path,
    adapter_folders: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Spoil,
) -> None:
    plain, _, _ = answer_all(LocalEngine(tiny_base, tmp_path), adapter_folders, 0.7)
    engine = LocalEngine(tiny_base, tmp_path, speculation=("early_exit:1",))
    spoiled = spoil_drafts(engine, spoil, monkeypatch)
    tokens, num_drafted, _ = answer_all(engine, adapter_folders, 0.7)
    assert tokens == plain
    assert len(spoiled) > 3
    assert num_drafted > 0


class BreakingRunner:
    """Its numbers break down behind the first draft token."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.cleared: list[range] = []

    def graphs_within(self, *_: object) -> None:
        """It has none."""

    def run_drafting(
        self, _part: object, chunks: Sequence[SequenceChunk], _leases: object
    ) -> StepOutput:
        self.num_calls += 1
        value = torch.nan if self.num_calls > 1 else 0.0
        return output_of(torch.full((len(chunks), 4), value))

    def clear(self, request: Request, start: int, end: int) -> None:
        self.cleared.append(range(start, end))


def test_a_draft_whose_numbers_break_down_ends_and_leaves_none_of_them_behind() -> None:
    runner = BreakingRunner()
    layers = SimpleNamespace(name="early_exit", only=nullcontext)
    drawing = make_drawing(Acceptance.COUPLED)
    proposer = SelfDraftProposer("early_exit", cast(Any, layers), cast(Any, runner), drawing)
    submitted = GenerationRequest("r", "acme", [1, 2, 3], SamplingParams(max_tokens=8))
    request = Request(submitted, CacheNamespace("acme", "runtime", None), 0, 0.0, None)
    request.kv = SequenceBlocks.empty(1)
    (draft,) = proposer.propose([DraftRequest(request, 5)])
    assert (len(draft), runner.num_calls) == (1, 2)
    assert runner.cleared == [range(3, 4)]
