"""Medusa heads compared with the paper's formula, and refused checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu

from loraplex.engine.errors import InvalidParameter
from loraplex.engine.speculation.medusa_checkpoint import WEIGHTS_NAME, load_heads, save_heads
from loraplex.engine.speculation.medusa_heads import MedusaHeads
from support.medusa import make_heads

HIDDEN, VOCAB, BASE_ID = 6, 11, "sha256:base"


def load(path: Path) -> MedusaHeads:
    return load_heads(
        path, hidden_size=HIDDEN, vocab_size=VOCAB, base_id=BASE_ID, dtype=torch.float32
    )


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "heads"
    save_heads(make_heads(HIDDEN, VOCAB, num_heads=3, num_layers=2), path, base_id=BASE_ID)
    return path


def change_config(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def change_tensors(path: Path, **changes: Tensor | None) -> None:
    tensors = load_file(path / WEIGHTS_NAME) | changes
    save_file({k: v for k, v in tensors.items() if v is not None}, path / WEIGHTS_NAME)


def test_heads_are_the_residual_blocks_and_projections_of_the_checkpoint(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / WEIGHTS_NAME)
    states = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    logits = load(checkpoint)(states)
    assert logits.shape == (3, 5, VOCAB)
    for head in range(3):
        x = states
        for layer in range(2):
            weight = tensors[f"{head}.{layer}.linear.weight"]
            x = x + silu(x @ weight.T + tensors[f"{head}.{layer}.linear.bias"])
        torch.testing.assert_close(logits[head], x @ tensors[f"{head}.2.weight"].T)
    torch.testing.assert_close(load(checkpoint)(states, 2), logits[:2])


def test_a_checkpoint_that_says_nothing_of_its_base_is_taken_by_its_shapes(
    checkpoint: Path,
) -> None:
    # As the original implementation writes it.
    config = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "some"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert load(checkpoint).num_heads == 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 8}, "hidden_size is 8, the base's 6"),
        ({"vocab_size": 12}, "vocab_size is 12, the base's 11"),
        ({"base_id": "sha256:other"}, "another base"),
        ({"medusa_num_heads": 4}, "3.0.linear.bias is missing"),
        ({"medusa_num_heads": 2}, "2.0.linear.bias is no tensor"),
        ({"medusa_num_heads": True}, "medusa_num_heads is True"),
        ({"medusa_num_layers": 0}, "medusa_num_layers is 0"),
        ({"medusa_num_layers": None}, "medusa_num_layers is None"),
    ],
)
def test_a_checkpoint_whose_config_does_not_fit_is_refused(
    checkpoint: Path, changes: dict[str, object], reason: str
) -> None:
    change_config(checkpoint, **changes)
    with pytest.raises(InvalidParameter, match=reason):
        load(checkpoint)


@pytest.mark.parametrize(
    "tensor", [torch.zeros(VOCAB, HIDDEN + 1), torch.zeros(VOCAB, HIDDEN, dtype=torch.int8)]
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(checkpoint: Path, tensor: Tensor) -> None:
    change_tensors(checkpoint, **{"1.2.weight": tensor})
    with pytest.raises(InvalidParameter, match=r"1\.2\.weight"):
        load(checkpoint)


def test_heads_may_lie_in_several_files(checkpoint: Path) -> None:
    states = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    whole = load(checkpoint)(states)
    tensors = load_file(checkpoint / WEIGHTS_NAME)
    (checkpoint / WEIGHTS_NAME).unlink()
    for head in "012":
        part = {name: tensor for name, tensor in tensors.items() if name.startswith(head)}
        save_file(part, checkpoint / f"part-{head}.safetensors")
    torch.testing.assert_close(load(checkpoint)(states), whole)


def test_a_pickle_is_refused_by_name(checkpoint: Path) -> None:
    (checkpoint / WEIGHTS_NAME).rename(checkpoint / "medusa_lm_head.pt")
    with pytest.raises(InvalidParameter, match=r"medusa_lm_head\.pt is a pickle"):
        load(checkpoint)


def test_a_broken_file_is_refused(checkpoint: Path) -> None:
    (checkpoint / WEIGHTS_NAME).write_bytes(b"nothing")
    with pytest.raises(InvalidParameter, match="cannot be read"):
        load(checkpoint)
    (checkpoint / "config.json").write_text("[]")
    with pytest.raises(InvalidParameter, match="is no object"):
        load(checkpoint)
    (checkpoint / "config.json").unlink()
    with pytest.raises(InvalidParameter, match=r"config\.json cannot be read"):
        load(checkpoint)
