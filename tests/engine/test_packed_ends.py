"""Quantized embeddings and output heads, against PEFT and transformers over their dequantized
weights."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from loraplex.api.routes.adapter_views import base_view
from loraplex.engine.checkpoint.base_identity import compute_base_id
from loraplex.engine.config import EngineConfig, Quantization
from loraplex.engine.errors import InvalidParameter
from loraplex.engine.memory.model_cost import model_cost
from loraplex.engine.messages import SpeculationParams
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.expected_base import expect_base
from loraplex.engine.model.packed_ends import check_ends
from loraplex.engine.model.whole_base import load_base_model
from loraplex.engine.scheduling.step_costs import StepCosts
from loraplex.engine.speculation.medusa_checkpoint import save_heads
from loraplex.engine.speculation.medusa_heads import untrained_heads
from loraplex.kernels.linear import QuantizedLinear
from loraplex.kernels.quantize import WeightFormat
from loraplex.kernels.quantized_embedding import QuantizedEmbedding
from support.engine import LocalEngine
from support.families import LIKE_OTHERS, SERVED, save_family
from support.features import TOKENS, Feature, dense_logits, load_plain, make_world
from support.marks import marked_slow
from support.models import make_adapter, make_tiny_llama
from support.paged import paged_logits
from support.quantized import logit_bound, rounded_weight
from support.quantized_checkpoints import ENDS, FORMATS, WEIGHTS, write_checkpoint
from support.safetensors_files import make_entry, make_file

CPU = torch.device("cpu")
PROMPT = [3 * number for number in range(20)]
SEQUENCES = ([5, 6, 7, 8, 9, 10, 11], [1, 2, 3])
FEATURES: list[Feature] = [
    {"target_modules": ["embed_tokens", "lm_head", "up_proj"], "r": 9},
    {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True},
    {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    {"target_modules": ["v_proj"], "trainable_token_indices": TOKENS},
]
TIED: list[Feature] = [
    {"target_modules": ["lm_head"]},
    {"target_modules": ["embed_tokens"], "use_dora": True},
    {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
    {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    {"target_modules": ["q_proj"], "trainable_token_indices": TOKENS},
]
FAMILIES = {"llama": FEATURES, "gemma3-window": TIED}
CHECKPOINTS = [
    ("gemma3-window", "gptq-ordered"),
    ("llama", "nf4-nested"),
    ("gemma3-window", "ct-fp8-block"),
    ("llama", "ct-mxfp4"),
]
"""One of each kind of codes; `make quantization-matrix` has every format."""
FIRST_FAMILIES = ("gpt2-conv1d", "olmo")
"""The first has tied ends with other names, the second no parameters beside its matrices."""
ALL_FAMILIES = [each for each in SERVED if each in FIRST_FAMILIES or each not in LIKE_OTHERS]
AT_LOAD = [(family, form) for form in WeightFormat for family in FAMILIES]


@pytest.mark.slow
@pytest.mark.parametrize("case", CHECKPOINTS, ids="-".join)
def test_adapters_over_the_packed_ends_of_a_checkpoint_equal_peft_over_their_values(
    case: tuple[str, str], tmp_path: Path
) -> None:
    family, name = case
    assert_equal_to_peft(family, tmp_path, form=FORMATS[name], ends=ENDS)


@pytest.mark.parametrize(
    "case", marked_slow(AT_LOAD, slow=set(AT_LOAD) - {("llama", "int4")}), ids="-".join
)
def test_adapters_over_ends_that_are_quantized_at_load_equal_peft_over_their_values(
    case: tuple[str, WeightFormat], tmp_path: Path
) -> None:
    family, form = case
    assert_equal_to_peft(family, tmp_path, end_format=form)


def assert_equal_to_peft(family: str, tmp_path: Path, **how: Any) -> None:
    world = make_world(tmp_path, family, FAMILIES[family], **how)
    assert_are_packed(world.base)
    sequences = world.sequences()
    models = [world.plain, *world.tuned, world.plain]
    bound = max(logit_bound(world.base), 1e-4)
    for model, tokens, ours in zip(models, sequences, world.serve(sequences), strict=True):
        expected = dense_logits(model, tokens)
        assert (ours - expected).abs().max() < bound * expected.abs().max()


def assert_are_packed(base: BaseModel) -> None:
    table, head = base.packed_ends.table, base.packed_ends.head
    assert isinstance(table, QuantizedLinear)
    assert isinstance(head, QuantizedLinear)
    assert isinstance(base.model.get_input_embeddings(), QuantizedEmbedding)
    assert base.model.get_output_embeddings() is head
    assert (table is head) == base.ends.are_tied
    assert base.packed_ends.served_head.num_bytes == (0 if table is head else head.weight_bytes)


@pytest.mark.parametrize(
    "family", marked_slow(ALL_FAMILIES, slow=set(ALL_FAMILIES) - set(FIRST_FAMILIES))
)
def test_every_family_gives_the_logits_of_its_rounded_ends(family: str, tmp_path: Path) -> None:
    path = save_family(tmp_path, *SERVED[family])
    base = load_base_model(config_of(path, embeddings=Quantization.INT8))
    assert_are_packed(base)
    assert base.host_reads == load_base_model(config_of(path)).host_reads
    plain = load_plain(path)
    with torch.no_grad():
        for weight in {plain.get_input_embeddings().weight, plain.get_output_embeddings().weight}:
            weight.copy_(rounded_weight(weight, WeightFormat.INT8))
    for tokens, ours in zip(SEQUENCES, paged_logits(base, SEQUENCES), strict=True):
        expected = dense_logits(plain, tokens)
        assert (ours - expected).abs().max() < max(logit_bound(base), 1e-4) * expected.abs().max()


@pytest.mark.parametrize("end", marked_slow(ENDS, slow=ENDS[1:]))
def test_one_end_may_be_quantized_in_the_files_and_the_other_at_load(
    end: str, tmp_path: Path
) -> None:
    save_family(tmp_path / "dense", *SERVED["llama"])
    path = write_checkpoint(tmp_path / "dense", tmp_path / "packed", FORMATS["gptq"], ends=[end])
    ends = load_base_model(config_of(path)).packed_ends
    formats = {ENDS[0]: ends.served_table.format, ENDS[1]: ends.served_head.format}
    assert formats.pop(end) == "gptq-int4"
    assert set(formats.values()) == {"none"}
    base = load_base_model(config_of(path, embeddings=Quantization.INT8))
    assert_are_packed(base)
    formats = {
        ENDS[0]: base.packed_ends.served_table.format,
        ENDS[1]: base.packed_ends.served_head.format,
    }
    assert formats.pop(end) == "gptq-int4"
    assert set(formats.values()) == {"int8"}


def test_ends_that_are_quantized_already_are_not_quantized_again(tmp_path: Path) -> None:
    save_family(tmp_path / "dense", *SERVED["llama"])
    path = write_checkpoint(tmp_path / "dense", tmp_path / "packed", FORMATS["awq"], ends=ENDS)
    config = config_of(path, embeddings=Quantization.INT8)
    for fails in (load_base_model, lambda config: expect_base(config, CPU)):
        with pytest.raises(InvalidParameter, match="output head are quantized already: awq-int4"):
            fails(config)


def test_an_end_that_computes_more_than_its_weight_is_not_quantized() -> None:
    with pytest.raises(InvalidParameter, match="lm_head computes more than its weight"):
        check_ends(WeightFormat.INT8, [None, None], ["lm_head"])
    check_ends(None, [None, None], ["lm_head"])


def test_an_unchanged_copy_of_the_head_is_known_although_the_base_quantizes_it(
    tiny_base: Path,
) -> None:
    plain = load_base_model(config_of(tiny_base)).layout.digests
    assert load_base_model(config_of(tiny_base, embeddings=Quantization.INT4)).layout.digests == (
        plain
    )
    assert len(plain) == 2


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT warns of adapters of tied ends
@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [True, False])
def test_answers_do_not_depend_on_how_they_are_served(
    is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in a crowd that swaps, after prefix hits, with drafts of the first layer, whose
    logits are the same head's, and with those of Medusa."""
    monkeypatch.setattr(StepCosts, "swap_seconds", lambda *_: 0.0)  # whatever was measured
    path = make_tiny_llama(tmp_path / "base", tie_word_embeddings=is_tied)
    targets = ["embed_tokens", "lm_head", "q_proj"][is_tied:]
    adapters = [
        make_adapter(path, tmp_path / str(rank), seed=rank, r=rank, target_modules=targets)
        for rank in (2, 5)
    ]

    def serve(**config: Any) -> tuple[list[list[int]], LocalEngine]:
        how = {"embedding_quantization": Quantization.INT4, **config}
        engine = LocalEngine(path, tmp_path, **how)
        keys = [None, *map(engine.add_adapter, adapters)]
        engine.load_adapters()
        requests = [([*PROMPT, number % 7], keys[number % 3]) for number in range(9)]
        drafts = SpeculationParams(num_tokens=4)
        ids = [
            engine.submit(*each, speculation=drafts, max_tokens=16, ignore_eos=True)
            for each in requests
        ]
        engine.run()
        engine.close()
        return engine.tokens(ids), engine

    alone, engine = serve(max_num_seqs=1, prefix_caching=False)
    assert len(set(map(tuple, alone))) > 3
    assert "(embedding and output head int4)" in engine.core.info.memory_plan[0]
    told = base_view("base", engine.core.info, num_tokens=0, max_full_matrix_bytes=0)
    assert told.quantization == "none"
    assert told.embedding.quantization == told.output_head.quantization == "int4"
    ends_bytes = sum(end.weight_bytes for end in engine.core.parts.base.packed_ends.linears)
    assert told.embedding.bytes + told.output_head.bytes == ends_bytes
    assert (told.output_head.bytes == 0) == is_tied
    kv_bytes_per_token = 2 * 2 * 32 * 4
    crowded, engine = serve(
        kv_block_size=4,
        kv_cache_bytes=22 * 4 * kv_bytes_per_token,  # two whole requests, three at first
        swap_bytes=1 << 20,
        max_model_len=64,
    )
    assert crowded == alone
    assert engine.core.parts.scheduler.num_swaps > 0
    assert engine.core.stats().num_cached_tokens > 0
    heads = untrained_heads(load_plain(path).get_output_embeddings(), num_heads=3, num_layers=1)
    save_heads(heads, tmp_path / "heads", base_id=compute_base_id(path))
    for proposer in ("early_exit:1", f"medusa:{tmp_path / 'heads'}"):
        drafting, engine = serve(speculation=(proposer,))
        assert drafting == alone
        drafted = [engine.answers[name].end.num_draft_tokens for name in engine.answers]
        assert sum(drafted) > 20


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_step_reads_the_head_and_of_the_embedding_its_tokens_rows(
    is_tied: bool, tmp_path: Path
) -> None:
    make_tiny_llama(tmp_path, tie_word_embeddings=is_tied)
    base = load_base_model(config_of(tmp_path, embeddings=Quantization.INT8))
    dense = load_base_model(config_of(tmp_path))
    saved = model_cost(dense, ()).shared_bytes - model_cost(base, ()).shared_bytes
    rows, hidden = -(-base.vocab_size // 16) * 16, 64
    assert saved == rows * (4 * hidden - hidden - 4)
    num_tables = 1 if is_tied else 2
    ends = base.packed_ends
    assert ends.served_table.num_bytes + ends.served_head.num_bytes == num_tables * rows * (
        hidden + 4
    )


SMALL_LLAMAS = {
    # TinyLlama's sizes and Llama 3.2's, with the smallest format of the ends that suffices.
    "1.1b": (
        {
            "vocab_size": 32000,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 22,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
        },
        Quantization.INT8,
    ),
    "1.2b tied": (
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
        Quantization.INT4,
    ),
}


@pytest.mark.parametrize("device", marked_slow(["cpu", "cuda"], slow=["cuda"]))
@pytest.mark.parametrize("name", marked_slow(SMALL_LLAMAS, slow=["1.2b tied"]))
def test_a_small_base_in_int4_takes_three_tenths_of_its_bytes_in_bf16(
    name: str, device: str, tmp_path: Path
) -> None:
    sizes, form = SMALL_LLAMAS[name]
    write_header(tmp_path, LlamaConfig(**sizes, dtype="bfloat16"))
    config = config_of(tmp_path, embeddings=form, dtype="bfloat16")
    base = expect_base(replace(config, quantization=Quantization.INT4), torch.device(device))
    assert base.weight_bytes < 0.30 * 2 * base.num_parameters
    assert base.weight_formats == f"int4, embedding and output head {form}"


def write_header(path: Path, config: LlamaConfig) -> None:
    """A checkpoint in bf16 whose weights are a hole in its file."""
    config.save_pretrained(path)
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config).state_dict()
    header, end = {}, 0
    for name, weight in weights.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        header[name] = make_entry(list(weight.shape), begin=end, dtype="BF16")
        end = header[name]["data_offsets"][1]
    file = path / WEIGHTS
    file.write_bytes(make_file(header))
    os.truncate(file, file.stat().st_size + end)


def config_of(
    path: Path, *, embeddings: Quantization = Quantization.NONE, dtype: str = "auto"
) -> EngineConfig:
    return EngineConfig(str(path), device="cpu", embedding_quantization=embeddings, dtype=dtype)
