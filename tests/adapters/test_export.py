"""Adapters restored from their blocks, compared with the files that PEFT wrote."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from loraplex.adapters import export
from loraplex.adapters.child import PYTHON
from loraplex.adapters.errors import ObjectCorrupt
from loraplex.adapters.export import export_adapter, run_export
from loraplex.adapters.formats import SERVED
from support.blocks import make_key, write_block
from support.feature_files import FeatureFiles
from support.models import make_adapter
from support.peft_features import TRAINED_TOKENS, tuned_model

FEATURES = [feature.name for feature in SERVED]
DTYPES: dict[str, Callable[[], Iterator[torch.dtype]]] = {
    "float32": lambda: itertools.repeat(torch.float32),
    "float16": lambda: itertools.repeat(torch.float16),
    "bfloat16": lambda: itertools.repeat(torch.bfloat16),
    "mixed": lambda: itertools.cycle([torch.bfloat16, torch.float32, torch.float16]),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> FeatureFiles:
    return FeatureFiles(tmp_path_factory.mktemp("features"))


def copy_in_types(adapter: Path, path: Path, dtypes: Iterator[torch.dtype]) -> dict[str, Tensor]:
    """The adapter with other element types, at `path`; its tensors."""
    shutil.copytree(adapter, path)
    original = load_file(path / "adapter_model.safetensors")
    tensors = {name: value.to(next(dtypes)) for name, value in original.items()}
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    return tensors


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("feature", FEATURES)
def test_exported_adapter_has_the_same_tensors_and_digest(
    feature: str,
    dtypes: Callable[[], Iterator[torch.dtype]],
    files: FeatureFiles,
    tmp_path: Path,
) -> None:
    original = copy_in_types(files.adapter(feature), tmp_path / "original", dtypes())
    first = files.examine(feature, tmp_path / "first", folder=tmp_path / "original")
    (tmp_path / "exported").mkdir()
    export_adapter(tmp_path / "first", tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "adapter_model.safetensors")
    assert exported.keys() == original.keys()
    for name, values in original.items():
        assert exported[name].dtype == values.dtype
        assert torch.equal(exported[name], values)
    second = files.examine(feature, tmp_path / "second", folder=tmp_path / "exported")
    assert second.digest == first.digest
    assert (tmp_path / "second").read_bytes() == (tmp_path / "first").read_bytes()


PROMPT = [5, *TRAINED_TOKENS, 44, 90]
"""With the invocation of activated LoRA."""


def logits_of(feature: str, base: Path, adapter: Path) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of tied embeddings
        model = tuned_model(feature, AutoModelForCausalLM.from_pretrained(base), adapter)
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        return model(input_ids=tokens).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("feature", sorted({*FEATURES} - {"added_tokens"}))
def test_peft_answers_alike_with_the_exported_adapter(
    feature: str, files: FeatureFiles, tmp_path: Path
) -> None:
    files.examine(feature, tmp_path / "block")
    (tmp_path / "exported").mkdir()
    export_adapter(tmp_path / "block", tmp_path / "exported")
    expected = logits_of(feature, files.base(feature), files.adapter(feature))
    actual = logits_of(feature, files.base(feature), tmp_path / "exported")
    assert torch.equal(actual, expected)
    base = AutoModelForCausalLM.from_pretrained(files.base(feature))
    with torch.no_grad():
        plain = base(input_ids=torch.tensor([PROMPT])).logits
    assert not torch.allclose(actual, plain, atol=1e-2), "the adapter has an effect"


COMBINED: dict[str, dict[str, Any]] = {
    "DoRA, biases, rows of tokens, head": {
        "use_dora": True,
        "use_rslora": True,
        "bias": "all",
        "target_modules": ["q_proj", "down_proj", "lm_head"],
        "trainable_token_indices": [9, 4],
        "rank_pattern": {"lm_head": 3, "down_proj": 2},
    },
    "bias of lora_B, whole embedding, rows of the head": {
        "lora_bias": True,
        "modules_to_save": ["embed_tokens"],
        "trainable_token_indices": {"lm_head": [8, 2]},
        "alpha_pattern": {"v_proj": 3},
    },
}


@pytest.mark.parametrize("lora", COMBINED.values(), ids=COMBINED.keys())
def test_features_go_together(lora: dict[str, Any], files: FeatureFiles, tmp_path: Path) -> None:
    base = files.base("bias")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT takes biases of lora_B for broken matrices
        adapter = make_adapter(base, tmp_path / "adapter", seed=3, **lora)
    first = files.examine("bias", tmp_path / "first", folder=adapter)
    (tmp_path / "exported").mkdir()
    export_adapter(tmp_path / "first", tmp_path / "exported")
    second = files.examine("bias", tmp_path / "second", folder=tmp_path / "exported")
    assert second.digest == first.digest
    assert torch.equal(
        logits_of("bias", base, tmp_path / "exported"), logits_of("bias", base, adapter)
    )


def test_export_replaces_what_was_there(files: FeatureFiles, tmp_path: Path) -> None:
    files.examine("lora", tmp_path / "block")
    folder = tmp_path / "exported"
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).write_text("an older version")
    export_adapter(tmp_path / "block", folder)
    assert files.examine("lora", tmp_path / "again", folder=folder).digest
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def copy_with_base_name(adapter: Path, path: Path, name: str) -> Path:
    shutil.copytree(adapter, path)
    config_path = path / "adapter_config.json"
    fields = json.loads(config_path.read_text())
    config_path.write_text(json.dumps({**fields, "base_model_name_or_path": name}))
    return path


def test_equal_digests_are_equal_blocks(files: FeatureFiles, tmp_path: Path) -> None:
    """The store has one object for a digest, and each version notes the SHA-256 of its own block:
    a second push must not put other bytes in the first one's place."""
    first = copy_with_base_name(files.adapter("lora"), tmp_path / "first", "owner/base")
    second = copy_with_base_name(files.adapter("lora"), tmp_path / "second", "/mnt/models/base")
    tensors = load_file(second / "adapter_model.safetensors")
    backwards = {name: tensors[name] for name in sorted(tensors, reverse=True)}
    save_file(backwards, second / "adapter_model.safetensors", metadata={"by": "another tool"})
    reports = [
        files.examine("lora", tmp_path / f"{at.name}-block", folder=at) for at in (first, second)
    ]
    assert reports[0].digest == reports[1].digest
    assert reports[0].file_sha256 == reports[1].file_sha256


def test_the_bases_name_is_in_the_report_and_returns_unless_it_is_long(
    files: FeatureFiles, tmp_path: Path
) -> None:
    (tmp_path / "exported").mkdir()
    for name, kept in (("owner/base", "owner/base"), ("x" * 300, None)):
        block = tmp_path / f"block-{len(name)}"
        folder = copy_with_base_name(files.adapter("lora"), tmp_path / f"at-{len(name)}", name)
        report = files.examine("lora", block, folder=folder)
        assert report.trained_on == kept
        export_adapter(block, tmp_path / "exported", base_model_name=report.trained_on)
        written = json.loads((tmp_path / "exported" / "adapter_config.json").read_text())
        assert written["base_model_name_or_path"] == kept


def test_a_block_that_does_not_say_what_it_was_made_from_is_not_exported(tmp_path: Path) -> None:
    write_block(tmp_path / "block", make_key("a"))
    with pytest.raises(ObjectCorrupt):
        export_adapter(tmp_path / "block", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["block"]


LIMITS = """
import resource, sys
from loraplex.adapters import export
from loraplex.adapters.errors import ObjectCorrupt

def say_limits(*arguments, **options):
    names = ("AS", "FSIZE", "CPU", "CORE")
    limits = [resource.getrlimit(getattr(resource, "RLIMIT_" + name))[1] for name in names]
    raise ObjectCorrupt(" ".join(map(str, limits)))

export.export_adapter = say_limits
export.main()
"""


def test_the_exporting_process_has_limits_by_the_size_of_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = tmp_path / "block"
    block.write_bytes(bytes(1 << 20))
    start = subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda command, **options: start([*PYTHON, "-c", LIMITS], **options)
    )
    with pytest.raises(ObjectCorrupt) as caught:
        run_export(block, tmp_path)
    memory, file, cpu, core = map(int, str(caught.value).split())
    assert memory == (1 << 30) + 16 * (1 << 20)
    assert file == (1 << 30) + 4 * (1 << 20)
    assert cpu == export._CPU_SECONDS + 1
    assert core == 0
