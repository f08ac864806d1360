"""Classification heads of adapters: equal to transformers and PEFT, beside generation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor

from loraplex.adapters.export import export_adapter
from loraplex.adapters.identity import AdapterKey
from loraplex.engine.config import Quantization
from loraplex.engine.messages import DeleteAdapter, Pooling
from loraplex.engine.shards.rank_place import GroupShape
from loraplex.kernels.quantize import WeightFormat
from support.classifiers import class_logits, load_classifier, name_labels, save_classifier
from support.engine import LocalEngine
from support.families import SERVED, VOCAB_SIZE, save_family
from support.marks import marked_slow
from support.models import make_adapter
from support.quantized import load_rounded, logit_bound
from support.ranks import followers_as_threads

TOLERANCE = 1e-4
FAMILIES = ("llama", "gpt2-conv1d", "gemma2-softcap-window", "opt")
NUM_LABELS = (1, 2, 3, 7, 40)


def tokens(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist()


def outputs_of(engine: LocalEngine, request_id: str) -> Tensor:
    """The vector that a request asked for."""
    answer = engine.answers[request_id]
    assert answer.end.error is None
    (found,) = [read.embedding for read in answer.prompts if read.embedding is not None]
    return torch.from_numpy(np.frombuffer(found, np.float32).copy())


def classify(engine: LocalEngine, prompt: list[int], key: AdapterKey | None) -> str:
    return engine.submit(prompt, key, max_tokens=0, pooling=Pooling.CLASSIFY)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("base"), *SERVED["llama"])


@pytest.fixture(scope="module")
def classifier(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("classifier")
    save_classifier(base, path, num_labels=3, seed=3)
    return path


@pytest.fixture
def engine(base: Path, tmp_path: Path) -> Iterator[LocalEngine]:
    """Of small steps, so that prompts take several."""
    local = LocalEngine(base, tmp_path, max_num_batched_tokens=24, max_num_seqs=8)
    yield local
    local.close()


@pytest.mark.parametrize("family", marked_slow(FAMILIES, slow=FAMILIES[2:]))
def test_heads_of_several_label_counts_equal_peft_in_one_batch_with_generation(
    family: str, tmp_path: Path
) -> None:
    base = save_family(tmp_path / "base", *SERVED[family])
    is_turned = family == "gpt2-conv1d"  # its weights are `[in, out]`
    tuned = [
        save_classifier(
            base,
            tmp_path / str(count),
            num_labels=count,
            seed=count,
            r=2 + count % 5,
            fan_in_fan_out=is_turned,
        )
        for count in NUM_LABELS
    ]
    engine = LocalEngine(base, tmp_path, max_num_batched_tokens=64, max_num_seqs=16)
    keys = [engine.add_adapter(tmp_path / str(count)) for count in NUM_LABELS]
    prompts = [tokens(5 + 17 * number, seed=number) for number in range(len(keys))]
    alone = [engine.generate(prompt) for prompt in prompts]
    asked = [classify(engine, prompt, key) for prompt, key in zip(prompts, keys, strict=True)]
    generated = [engine.submit(prompt, max_tokens=len(alone[0])) for prompt in prompts]
    engine.run()
    for count, model, prompt, request_id in zip(NUM_LABELS, tuned, prompts, asked, strict=True):
        ours = outputs_of(engine, request_id)
        assert ours.shape == (count,)
        assert (ours - class_logits(model, prompt)).abs().max() < TOLERANCE
    assert engine.tokens(generated) == alone
    engine.close()


def test_the_last_token_is_classified_behind_a_cached_prefix(
    base: Path, classifier: Path, engine: LocalEngine
) -> None:
    key, prompt = engine.add_adapter(classifier), tokens(50, seed=1)
    expected = class_logits(PeftModel.from_pretrained(load_classifier(base, 3), classifier), prompt)
    for num_cached in (0, 48):
        request_id = classify(engine, prompt, key)
        engine.run()
        started = engine.answers[request_id].started
        assert started is not None
        assert started.num_cached_tokens == num_cached
        assert (outputs_of(engine, request_id) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    "form", marked_slow([WeightFormat.INT8, WeightFormat.INT4], slow=[WeightFormat.INT8])
)
def test_over_a_quantized_base_the_head_reads_the_states_of_its_rounded_weights(
    form: WeightFormat, base: Path, classifier: Path, tmp_path: Path
) -> None:
    engine = LocalEngine(base, tmp_path, quantization=Quantization(form.value))
    key, prompt = engine.add_adapter(classifier), tokens(40, seed=2)
    asked = classify(engine, prompt, key)
    state = engine.submit(prompt, key, max_tokens=0, pooling=Pooling.LAST)
    engine.run()
    ours = outputs_of(engine, asked)
    head = load_file(classifier / "adapter_model.safetensors")["base_model.model.score.weight"]
    assert (ours - head @ outputs_of(engine, state)).abs().max() < 1e-5

    rounded = load_classifier(base, 3)
    rounded.model.load_state_dict(load_rounded(base, form).model.state_dict())
    tuned = PeftModel.from_pretrained(rounded, classifier)
    expected = class_logits(tuned, prompt)
    bound = max(logit_bound(engine.core.parts.base), TOLERANCE)
    assert (ours - expected).abs().max() < bound * expected.abs().max()
    engine.close()


@pytest.mark.parametrize("has_adapter", [False, True])
def test_a_model_without_a_head_is_refused_and_its_neighbours_are_answered(
    base: Path, classifier: Path, engine: LocalEngine, tmp_path: Path, has_adapter: bool
) -> None:
    headless = None
    if has_adapter:
        headless = engine.add_adapter(make_adapter(base, tmp_path / "plain", seed=1))
    prompt = tokens(40, seed=5)
    refused = classify(engine, prompt, headless)
    served = classify(engine, prompt, engine.add_adapter(classifier))
    engine.run()
    error = engine.answers[refused].end.error
    assert error is not None
    assert error.code == "not_a_classifier"
    assert outputs_of(engine, served).isfinite().all()


def test_restored_files_are_an_adapter_of_the_same_digest_and_labels(
    classifier: Path, engine: LocalEngine, tmp_path: Path
) -> None:
    named = tmp_path / "named"
    named.mkdir()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (named / file).write_bytes((classifier / file).read_bytes())
    plain = engine.examine(classifier, tmp_path / "plain.block")
    name_labels(named, ["no", "yes", "maybe"], problem_type="multi_label_classification")
    report = engine.examine(named, tmp_path / "block")
    assert report.digest != plain.digest, "labels are part of the answer"
    restored = tmp_path / "restored"
    restored.mkdir()
    export_adapter(tmp_path / "block", restored)
    again = engine.examine(restored, tmp_path / "again")
    assert (again.digest, again.classification) == (report.digest, report.classification)
    assert json.loads((restored / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"


def test_a_deleted_classifier_leaves_nothing_in_the_arena(
    classifier: Path, engine: LocalEngine
) -> None:
    key = engine.add_adapter(classifier)
    asked = classify(engine, tokens(9, seed=1), key)
    engine.run()
    arena = engine.core.parts.tiers.arena
    (row,) = arena.row_heads
    head = arena.classification_head(row)
    assert head is not None
    assert outputs_of(engine, asked).shape == (len(head),)
    engine.core.handle(DeleteAdapter(key, drain_seconds=1.0))
    engine.run()
    assert key in engine.evicted
    assert not head.any()
    assert not arena.flat.any()
    assert arena.row_heads == {}


@pytest.mark.parametrize(
    ("kind", "settings", "shape"),
    [
        ("llama", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}, (3, 1)),
        (*SERVED["gemma2-softcap-window"], (1, 2)),
    ],
    ids=["three ranks", "two stages"],
)
def test_ranks_and_stages_equal_peft(
    kind: str, settings: dict[str, Any], shape: tuple[int, int], tmp_path: Path
) -> None:
    base = save_family(tmp_path / "base", kind, settings)
    group = GroupShape(*shape)
    tuned = [
        save_classifier(base, tmp_path / str(count), num_labels=count, seed=count)
        for count in NUM_LABELS
    ]
    with followers_as_threads():
        engine = LocalEngine(
            base,
            tmp_path,
            dtype="float32",
            num_threads=1,
            tensor_parallel_size=shape[0],
            pipeline_parallel_size=shape[1],
        )
        assert engine.core.parts.config.group_shape == group
        keys = [engine.add_adapter(tmp_path / str(count)) for count in NUM_LABELS]
        prompts = [tokens(5 + 7 * number, seed=number) for number in range(len(keys))]
        asked = [classify(engine, prompt, key) for prompt, key in zip(prompts, keys, strict=True)]
        generated = engine.submit(prompts[0], max_tokens=4, ignore_eos=True)
        engine.run()
        assert len(engine.answers[generated].token_ids) == 4
        for model, prompt, request_id in zip(tuned, prompts, asked, strict=True):
            ours = outputs_of(engine, request_id)
            assert (ours - class_logits(model, prompt)).abs().max() < TOLERANCE
        engine.close()
