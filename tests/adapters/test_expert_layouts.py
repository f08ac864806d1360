"""Adapters of experts in other layouts than PEFT's of today, compared with merged matrices."""

from __future__ import annotations

import json
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from loraplex.adapters.block import read_block_header
from loraplex.adapters.examination import IntakeReport, examine
from loraplex.adapters.export import export_adapter
from loraplex.adapters.layout import BaseLayout, Halves, Projection, Slice, SliceKind
from support.deltas import deltas_of_block
from support.expert_layouts import (
    LAYOUTS,
    PREFIX,
    expert_modules,
    merge_experts,
    write_expert_adapter,
)
from support.families import SERVED, STATES, save_family
from support.layouts import full_layout_of

FAMILIES = ["mixtral", "gpt_oss-sinks-window", "nemotron_h"]
"""Gate before up, interleaved and stored in the other order, and without a gate."""


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, BaseLayout]]:
    """Each family's model and layout."""
    folder = tmp_path_factory.mktemp("bases")
    paths = {name: save_family(folder / name, *{**SERVED, **STATES}[name]) for name in FAMILIES}
    return {
        name: (AutoModelForCausalLM.from_pretrained(path), full_layout_of(path))
        for name, path in paths.items()
    }


def examine_folder(folder: Path, block: Path, layout: BaseLayout, **settings: Any) -> IntakeReport:
    return examine(
        folder / "adapter_config.json",
        folder / "adapter_model.safetensors",
        block,
        layout=layout,
        **{"serving_dtype": "float32", **settings},
    )


def merged_deltas(model: Any, folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """What the adapter changes, `[experts, out, in]` by parameter."""
    deltas = {}
    tuned = dict(expert_modules(merge_experts(model, folder)))
    for path, experts in expert_modules(model):
        for name, parameter in experts.named_parameters(recurse=False):
            if parameter.ndim == 3:
                delta = (getattr(tuned[path], name) - parameter).detach().double()
                turned = delta.transpose(1, 2) if experts.is_transposed else delta
                deltas[f"{path}.{name}"] = turned.numpy()
    return {name: delta for name, delta in deltas.items() if delta.any()}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        (family, name)
        for family in FAMILIES
        for name in LAYOUTS
        # nemotron_h's experts were in a block of this name before, too
        if (family, name) != ("nemotron_h", "separate-of-transformers-4")
    ],
)
def test_block_holds_what_each_expert_has_and_the_files_come_back(
    family: str, name: str, bases: dict[str, tuple[Any, BaseLayout]], tmp_path: Path
) -> None:
    model, layout = bases[family]
    folder = write_expert_adapter(tmp_path / "adapter", LAYOUTS[name], model, seed=1)
    report = examine_folder(folder, tmp_path / "block", layout)
    expected = merged_deltas(model, folder)
    actual = deltas_of_block(tmp_path / "block", layout)
    assert actual.keys() == expected.keys()
    for path, delta in expected.items():
        np.testing.assert_allclose(actual[path], delta, atol=1e-5)
    norm = np.linalg.norm([np.linalg.norm(delta) for delta in expected.values()])
    assert report.delta_norm == pytest.approx(norm, rel=1e-5)
    assert not report.warnings or family == "nemotron_h"  # whose gate no pattern matches

    (tmp_path / "exported").mkdir()
    export_adapter(tmp_path / "block", tmp_path / "exported")
    original = load_file(folder / "adapter_model.safetensors")
    exported = load_file(tmp_path / "exported" / "adapter_model.safetensors")
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[key], value) for key, value in original.items())
    again = examine_folder(tmp_path / "exported", tmp_path / "again", layout)
    assert again.digest == report.digest
    assert (tmp_path / "again").read_bytes() == (tmp_path / "block").read_bytes()


def test_adapters_of_peft_before_0_19_have_inputs_and_outputs_exchanged(
    bases: dict[str, tuple[Any, BaseLayout]], tmp_path: Path
) -> None:
    """Its `get_delta_weight` of a parameter `[experts, i, o]` was `o r e, e r i -> e i o`, with the
    outputs as `i`."""
    model, layout = bases["mixtral"]
    generator = torch.Generator().manual_seed(1)
    tensors, expected, rank = {}, {}, 3
    for path, experts in expert_modules(model):
        for name, depth in (("gate_up_proj", ".base_layer"), ("down_proj", "")):
            count, outputs, inputs = getattr(experts, name).shape
            a = torch.randn(count * rank, outputs, generator=generator)
            b = torch.randn(inputs, rank * count, generator=generator)
            tensors[f"{PREFIX}{path}{depth}.lora_A.weight"] = a
            tensors[f"{PREFIX}{path}{depth}.lora_B.weight"] = b
            expected[f"{path}.{name}"] = 2 * torch.einsum(
                "ore,eri->eio", b.view(inputs, rank, count), a.view(count, rank, outputs)
            )
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "peft_version": "0.18.1", "r": rank, "lora_alpha": 2 * rank}
    fields["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    report = examine_folder(folder, tmp_path / "block", layout)
    actual = deltas_of_block(tmp_path / "block", layout)
    assert actual.keys() == expected.keys()
    for path, delta in expected.items():
        np.testing.assert_allclose(actual[path], delta, atol=1e-4)
    norm = torch.cat([delta.flatten() for delta in expected.values()]).norm().item()
    assert report.delta_norm == pytest.approx(norm, rel=1e-5)

    (tmp_path / "exported").mkdir()
    export_adapter(tmp_path / "block", tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "adapter_model.safetensors")
    assert all(torch.equal(exported[name], values) for name, values in tensors.items())


@pytest.mark.parametrize("name", ["shared-outer", "ranks-and-alphas"])
def test_tensors_of_several_types_come_back_with_their_types(
    name: str, bases: dict[str, tuple[Any, BaseLayout]], tmp_path: Path
) -> None:
    model, layout = bases["mixtral"]
    folder = write_expert_adapter(tmp_path / "adapter", LAYOUTS[name], model, seed=2)
    file = folder / "adapter_model.safetensors"
    dtypes = cycle([torch.bfloat16, torch.float32, torch.float16])
    original = {key: value.to(next(dtypes)) for key, value in load_file(file).items()}
    save_file(original, file)
    examine_folder(folder, tmp_path / "block", layout)
    (tmp_path / "exported").mkdir()
    export_adapter(tmp_path / "block", tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "adapter_model.safetensors")
    assert exported.keys() == original.keys()
    for key, value in original.items():
        assert exported[key].dtype == value.dtype
        assert torch.equal(exported[key], value)


def test_a_file_in_another_order_gives_an_equal_block(
    bases: dict[str, tuple[Any, BaseLayout]], tmp_path: Path
) -> None:
    """The store has one object for a digest."""
    model, layout = bases["mixtral"]
    folder = write_expert_adapter(tmp_path / "adapter", LAYOUTS["separate"], model, seed=3)
    first = examine_folder(folder, tmp_path / "first", layout)
    tensors = load_file(folder / "adapter_model.safetensors")
    order = sorted(tensors, key=lambda name: name[::-1], reverse=True)
    header: dict[str, Any] = {}
    begin = 0
    for name in order:
        end = begin + tensors[name].nbytes
        header[name] = {"dtype": "F32", "shape": list(tensors[name].shape)}
        header[name]["data_offsets"] = [begin, end]
        begin = end
    encoded = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(
        len(encoded).to_bytes(8, "little")
        + encoded
        + b"".join(tensors[name].numpy().tobytes() for name in order)
    )
    second = examine_folder(folder, tmp_path / "second", layout)
    assert (second.digest, second.file_sha256) == (first.digest, first.file_sha256)


def test_the_header_has_one_entry_for_the_experts_of_a_layer(
    bases: dict[str, tuple[Any, BaseLayout]], tmp_path: Path
) -> None:
    """The header of a block is read at each load."""
    model, layout = bases["mixtral"]
    folder = write_expert_adapter(tmp_path / "adapter", LAYOUTS["separate"], model, seed=4)
    examine_folder(folder, tmp_path / "block", layout)
    entries = read_block_header(tmp_path / "block").source["tensors"]
    assert len(entries) == 2 * 3 * model.config.num_hidden_layers
    assert len(load_file(folder / "adapter_model.safetensors")) == 4 * len(entries)


@pytest.mark.slow
def test_an_adapter_of_48_layers_with_128_separate_experts_is_within_the_limits(
    tmp_path: Path,
) -> None:
    wide, narrow, rank, count = 16, 8, 4, 128
    widths = {"gate_proj": (wide, narrow), "up_proj": (wide, narrow), "down_proj": (narrow, wide)}
    blocks = [f"model.layers.{number}.mlp.experts" for number in range(48)]
    slices = [
        part
        for block in blocks
        for part in (
            Slice(
                f"{block}.gate_up_proj",
                wide,
                2 * narrow,
                SliceKind.EXPERTS,
                count,
                halves=Halves.JOINED,
            ),
            Slice(f"{block}.down_proj", narrow, wide, SliceKind.EXPERTS, count),
        )
    ]
    tensors = {}
    for block, expert, (module, (inputs, outputs)) in product(blocks, range(count), widths.items()):
        name = f"{PREFIX}{block}.{expert}.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.ones(rank, inputs)
        tensors[f"{name}.lora_B.weight"] = torch.ones(outputs, rank)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*widths]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    layout = BaseLayout("base", tuple(Projection((part,)) for part in slices))
    report = examine_folder(tmp_path, tmp_path / "block", layout)
    assert report.num_modules == 2 * len(blocks)
    assert (report.min_rank, report.max_rank) == (rank, 2 * rank)
    assert report.num_parameters == sum(values.numel() for values in tensors.values())
