"""Drafts of the multi-token heads that bases ship: those of an independent head on their states."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.config import EngineConfig, Quantization
from loraplex.engine.draft import Draft
from loraplex.engine.errors import InvalidParameter, UnsupportedModel
from loraplex.engine.memory.kv_budget import MIB
from loraplex.engine.messages import SpeculationParams
from loraplex.engine.speculation.eagle import MAX_PENDING, EagleProposer
from loraplex.engine.speculation.mtp import MtpHead
from loraplex.engine.speculation.proposer import DraftRequest
from support.engine import LocalEngine
from support.families import SERVED, STATES, save_family
from support.models import make_adapter
from support.mtp import SHIPPING, Chain, DenseMtp, Ends, save_shipping, train_shipping
from support.quantized_checkpoints import FORMATS, write_checkpoint

FAMILIES = sorted(SHIPPING)
Made = list[tuple[list[int], Draft]]
"""Drafts, with their requests' tokens."""


@pytest.fixture(scope="module")
def shipping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base with a head."""
    return save_shipping(tmp_path_factory.mktemp("glm") / "base", "glm4_moe")


@contextmanager
def spied() -> Iterator[Made]:
    made: Made = []
    propose = EagleProposer.propose

    def spying(proposer: EagleProposer, wanted: Sequence[DraftRequest]) -> list[Draft]:
        drafts = propose(proposer, wanted)
        made.extend(
            (list(entry.request.token_ids), draft)
            for entry, draft in zip(wanted, drafts, strict=True)
        )
        return drafts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EagleProposer, "propose", spying)
        yield made


def assert_drafted(dense: DenseMtp, made: Made, token_ids: list[int]) -> None:
    """Each draft is that of the reference, which sees the whole context."""
    assert len(made) > 3
    features = dense.features(token_ids)
    for known, draft in made:
        assert len(draft) > 0
        tokens, read = known[1:], features[: len(known) - 1]
        for token in draft.token_ids:
            state = dense.states(tokens, read)[-1]
            logits = dense.logits(state)
            assert logits[token] > logits.max() - 1e-3
            tokens, read = [*tokens, token], torch.cat([read, state[None]])


@pytest.mark.parametrize(
    ("family", "num_prompt_tokens"),
    [
        pytest.param("glm4_moe", MAX_PENDING + 30, marks=pytest.mark.slow),
        *(
            pytest.param(family, 4, marks=() if family == "glm4_moe_lite" else pytest.mark.slow)
            for family in FAMILIES
        ),
    ],
)
def test_drafts_are_those_of_the_reference_on_the_states_of_the_base(
    family: str, num_prompt_tokens: int, tmp_path: Path
) -> None:
    base = save_shipping(
        tmp_path / "base", family, ends="own" if family == "glm4_moe_lite" else "copied"
    )
    rng = random.Random(num_prompt_tokens)
    prompt = [rng.randrange(3, 128) for _ in range(num_prompt_tokens)]
    with spied() as made:
        engine = LocalEngine(
            base, tmp_path, speculation=("mtp",), max_num_batched_tokens=48, max_num_seqs=4
        )
        engine.submit(
            prompt,
            max_tokens=16,
            ignore_eos=True,
            speculation=SpeculationParams(num_tokens=3),
        )
        engine.run()
        engine.close()
    assert_drafted(DenseMtp(base), made, [*prompt, *engine.answers["r0"].token_ids])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_are_those_of_plain_decoding(family: str, tmp_path: Path) -> None:
    """Greedy and sampled, base and adapter, behind a cached prefix and after preemptions."""
    base = save_shipping(tmp_path / "base", family, repeats=True)
    token_bytes = 2 * 2 * 2 * 16 * 4 if family == "glm4_moe" else 2 * (16 + 8) * 4  # of two layers
    folder = make_adapter(base, tmp_path / "adapter", seed=1, target_modules=["o_proj"])
    rng = random.Random(3)
    prefix = [rng.randrange(3, 128) for _ in range(16)]
    prompts = [[*prefix, *(rng.randrange(3, 128) for _ in range(4))] for _ in range(12)]

    def run(*speculation: str) -> tuple[list[list[int]], LocalEngine]:
        engine = LocalEngine(
            base,
            tmp_path,
            speculation=speculation,
            kv_block_size=8,
            kv_cache_bytes=20 * 8 * token_bytes,
        )
        keys = [None, engine.add_adapter(folder)]
        for index, prompt in enumerate(prompts):
            engine.submit(
                prompt,
                keys[index % 2],
                max_tokens=24,
                ignore_eos=True,
                temperature=0.0 if index % 4 < 2 else 0.8,
                seed=index,
                speculation=SpeculationParams(num_tokens=1 + index % 4) if speculation else None,
            )
        engine.run()
        engine.close()
        return [answer.token_ids for answer in engine.answers.values()], engine

    plain, _ = run()
    speculated, engine = run("mtp")
    assert speculated == plain
    ends = [answer.end for answer in engine.answers.values()]
    assert sum(end.num_accepted_tokens for end in ends) > 0
    assert engine.core.stats().num_preemptions > 0
    starts = [answer.started for answer in engine.answers.values()]
    assert any(start and start.num_cached_tokens for start in starts)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
def test_under_an_adapter_only_the_states_of_the_base_are_the_adapters(
    shipping: Path, tmp_path: Path
) -> None:
    targets = ["q_proj", "embed_tokens", "lm_head"]
    folder = make_adapter(shipping, tmp_path / "adapter", seed=1, target_modules=targets)

    with spied() as made:
        engine = LocalEngine(shipping, tmp_path, speculation=("mtp",))
        submit(engine, [9, 8, 7], engine.add_adapter(folder))
        engine.run()
        engine.close()
    dense = DenseMtp(shipping)
    PeftModel.from_pretrained(dense.base, folder).double()  # changes the base in place
    assert_drafted(dense, made, [9, 8, 7, *engine.answers["r0"].token_ids])


@pytest.mark.slow
def test_a_head_whose_file_is_quantized_drafts_by_the_values_of_its_codes(tmp_path: Path) -> None:
    dense = save_shipping(tmp_path / "dense", "deepseek_v3")
    ends = ("embed_tokens", "shared_head.head")
    base = write_checkpoint(dense, tmp_path / "packed", FORMATS["deepseek-fp8"], but=ends)
    with spied() as made:
        engine = LocalEngine(base, tmp_path, speculation=("mtp",))
        submit(engine, [9, 8, 7])
        engine.run()
        engine.close()
    assert_drafted(DenseMtp(dense), made, [9, 8, 7, *engine.answers["r0"].token_ids])
    assert head_of(engine).weight_bytes < 0.5 * num_own_bytes(dense)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"quantization": Quantization.INT8}, {"dtype": "bfloat16"}], ids=["int8", "bf16"]
)
def test_the_head_of_a_rounded_base_is_rounded_and_drafts(
    settings: dict[str, str], tmp_path: Path
) -> None:
    base = save_shipping(tmp_path / "base", "deepseek_v3", repeats=True)
    with spied() as made:
        engine = LocalEngine(base, tmp_path, speculation=("mtp",), **settings)
        submit(engine, [5, 80, 33, 7])
        engine.run()
        engine.close()
    assert head_of(engine).weight_bytes < 0.6 * num_own_bytes(base)
    # It says what the base said of the token before: the last token, but for near ties.
    right = [draft.token_ids[0] == known[-1] for known, draft in made]
    assert sum(right) >= 0.8 * len(right) > 0


def submit(engine: LocalEngine, prompt: list[int], adapter: AdapterKey | None = None) -> None:
    asked = SpeculationParams(num_tokens=3)
    engine.submit(prompt, adapter, max_tokens=12, ignore_eos=True, speculation=asked)


def head_of(engine: LocalEngine) -> MtpHead:
    proposer = engine.core.parts.speculation._proposers["mtp"]
    assert isinstance(proposer, EagleProposer)
    head = proposer._steps.head
    assert isinstance(head, MtpHead)
    return head


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raises", "nan"])
def test_a_head_that_fails_drafts_nothing_and_harms_nothing(
    fault: str, shipping: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [5, 80, 33, 7]
    plain = LocalEngine(shipping, tmp_path)
    plain.submit(prompt, max_tokens=12, ignore_eos=True)
    plain.run()
    plain.close()
    engine = LocalEngine(shipping, tmp_path, speculation=("mtp",))
    head = head_of(engine)
    if fault == "nan":
        for parameter in head._norm.parameters():
            parameter.fill_(torch.nan)
    else:
        # Between a projection's first slice and the others, whose results wait in the layer.
        monkeypatch.setattr(head._layer.get_submodule("self_attn.k_proj"), "forward", _fail)
    submit(engine, prompt)
    engine.run()
    engine.close()
    assert engine.answers["r0"].token_ids == plain.answers["r0"].token_ids
    assert engine.answers["r0"].end.num_draft_tokens == 0


def _fail(_x: object) -> None:
    raise RuntimeError("planted")


@pytest.mark.slow
@pytest.mark.parametrize(("ends", "num_kept"), [("own", 2), ("absent", 0)])
def test_a_head_keeps_no_ends_but_those_of_its_own(
    ends: Ends, num_kept: int, tmp_path: Path
) -> None:
    base = save_shipping(tmp_path / "base", "glm4_moe", ends=ends)
    with spied() as made:
        engine = LocalEngine(base, tmp_path, speculation=("mtp",))
        submit(engine, [9, 8, 7])
        engine.run()
        engine.close()
    assert_drafted(DenseMtp(base), made, [9, 8, 7, *engine.answers["r0"].token_ids])
    end_bytes = 128 * 64 * 4  # tokens, hidden size, fp32
    # The plan has the embedding too.
    assert head_of(engine).weight_bytes == num_own_bytes(base) + num_kept // 2 * end_bytes
    num_bytes = num_own_bytes(base) + num_kept * end_bytes
    said = f"multi-token head {num_bytes / MIB:.1f} MiB, "
    assert any(line.startswith(said) for line in engine.core.info.memory_plan)


def num_own_bytes(base: Path) -> int:
    """Of the head's tensors but embedding and output head, in fp32, without the router's buffer."""
    others = ("embed_tokens.weight", "shared_head.head.weight", "e_score_correction_bias")
    return sum(
        tensor.nbytes
        for name, tensor in load_file(base / "model.safetensors").items()
        if name.startswith("model.layers.2.") and not name.endswith(others)
    )


def test_the_head_shares_the_ends_and_is_part_of_the_memory_plan(
    shipping: Path, tmp_path: Path
) -> None:
    engine = LocalEngine(shipping, tmp_path, speculation=("mtp",), kv_block_size=16)
    engine.close()
    num_bytes = num_own_bytes(shipping)
    assert head_of(engine).weight_bytes == num_bytes
    block_bytes = 16 * 2 * 2 * 16 * 4  # tokens, keys and values, heads, their size, fp32
    said = f"multi-token head {num_bytes / MIB:.1f} MiB, its KV cache "
    (line,) = [line for line in engine.core.info.memory_plan if line.startswith(said)]
    assert f"blocks of 16 tokens, {block_bytes} bytes each" in line


def test_a_base_without_a_head_is_refused_by_its_reason(tmp_path: Path) -> None:
    other = save_family(tmp_path / "qwen3", *SERVED["qwen3"])
    with pytest.raises(InvalidParameter, match="mtp: no multi-token heads of qwen3 are served"):
        LocalEngine(other, tmp_path, speculation=("mtp",))
    bare = save_family(tmp_path / "glm", *SHIPPING["glm4_moe"])
    with pytest.raises(InvalidParameter, match=r"model\.layers\.2\.enorm\.weight is missing"):
        LocalEngine(bare, tmp_path, speculation=("mtp",))
    stateful = save_family(tmp_path / "next", *STATES["qwen3_next"])
    with pytest.raises(UnsupportedModel, match="a state cannot take back draft tokens"):
        LocalEngine(stateful, tmp_path, speculation=("mtp",))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("reshaped", "eh_proj"),
        pytest.param("without", "input_layernorm", marks=pytest.mark.slow),
        pytest.param("more", "does not use", marks=pytest.mark.slow),
    ],
)
def test_a_head_with_wrong_tensors_is_refused_by_name(
    change: str, reason: str, shipping: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(shipping, base)
    tensors = load_file(base / "model.safetensors")
    prefix = "model.layers.2."
    match change:
        case "without":
            del tensors[f"{prefix}input_layernorm.weight"]
        case "more":
            tensors[f"{prefix}mlp.spare.weight"] = torch.zeros(2, 2)
        case "reshaped":
            tensors[f"{prefix}eh_proj.weight"] = torch.zeros(64, 64)
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    LocalEngine(base, tmp_path).close()  # nothing reads it there
    with pytest.raises(InvalidParameter, match=f"mtp: .*{reason}"):
        LocalEngine(base, tmp_path, speculation=("mtp",))


def test_it_is_not_combined_with_what_it_cannot_serve_beside() -> None:
    for other in ("eagle", "eagle_tree"):
        with pytest.raises(InvalidParameter, match=f"mtp and {other} cannot be combined"):
            EngineConfig("m", speculation=("mtp", f"{other}:head"))
    with pytest.raises(InvalidParameter, match="mtp is not supported with"):
        EngineConfig("m", speculation=("mtp",), tensor_parallel_size=2)


@pytest.mark.slow
def test_a_head_that_was_trained_with_its_base_is_mostly_right(tmp_path: Path) -> None:
    chain = Chain()
    base = train_shipping(tmp_path / "base", chain, num_steps=300)
    engine = LocalEngine(base, tmp_path, speculation=("mtp",))
    for index, prompt in enumerate(chain.draw(16, 8).tolist()):
        engine.submit(
            prompt,
            max_tokens=24,
            ignore_eos=True,
            temperature=float(index % 2),
            seed=index,
            speculation=SpeculationParams(num_tokens=3),
        )
    engine.run()
    engine.close()
    ends = [answer.end for answer in engine.answers.values()]
    num_accepted = sum(end.num_accepted_tokens for end in ends)
    # A token that is drawn blindly is right once in 24 times.
    assert num_accepted > 0.5 * sum(end.num_draft_tokens for end in ends) > 0
