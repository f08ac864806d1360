"""EAGLE-3 heads: against an independent reference, and on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from loraplex.engine.errors import InvalidParameter
from loraplex.engine.speculation.eagle_checkpoint import (
    EagleCheckpoint,
    layers_read,
    load_head,
    save_head,
)
from support.eagle import DenseEagle, make_head

SIZE, VOCAB = 64, 260
Spoil = Callable[[Path], None]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_a_head_computes_what_the_reference_does(
    num_kv_heads: int, norm_before_residual: bool
) -> None:
    head = make_head(
        num_kv_heads=num_kv_heads, draft_vocab_size=90, norm_before_residual=norm_before_residual
    )
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(VOCAB, SIZE, generator=generator)
    tokens, features = torch.arange(9), torch.randn(9, SIZE, generator=generator)
    states = head(embedding[tokens][None], features[None], torch.arange(9)[None], causal)[0]
    dense = DenseEagle(head, embedding, norm_before_residual=norm_before_residual)
    for token, own, state, logits in zip(
        tokens.tolist(), features, states, head.draft_logits(states), strict=True
    ):
        expected = dense.state(token, own.double())
        torch.testing.assert_close(state.double(), expected, rtol=1e-4, atol=1e-4)
        of_drafted = dense.logits(expected) > -torch.inf
        assert of_drafted.nonzero()[:, 0].tolist() == list(range(0, 180, 2))
        torch.testing.assert_close(
            logits.double(), dense.logits(expected)[of_drafted], rtol=1e-4, atol=1e-4
        )


PARTLY_ROTATED = {
    "rope_type": "linear",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "partial_rotary_factor": 0.5,
}


def save(path: Path, **changes: object) -> None:
    head = make_head(draft_vocab_size=90)
    save_head(head, path, layers=(1, 2, 4), base_id="sha256:base")
    config = json.loads((path / "config.json").read_text()) | changes
    config = {name: value for name, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))


def load(path: Path, num_layers: int = 4) -> EagleCheckpoint:
    return load_head(
        path,
        hidden_size=SIZE,
        vocab_size=VOCAB,
        num_layers=num_layers,
        base_id="sha256:base",
        dtype=torch.float32,
    )


def test_a_saved_head_is_loaded_as_it_was(tmp_path: Path) -> None:
    save(tmp_path)
    loaded, head = load(tmp_path), make_head(draft_vocab_size=90)
    assert loaded.layers == (1, 2, 4)
    assert loaded.embedding is None
    own = loaded.head.state_dict()
    assert own.keys() == head.state_dict().keys()
    for name, tensor in head.state_dict().items():
        assert torch.equal(own[name], tensor)
    assert load_file(tmp_path / "model.safetensors")["t2d"].nonzero()[:, 0].tolist() == list(
        range(0, 180, 2)
    )


def test_a_published_head_reads_the_layers_of_the_original_implementation(tmp_path: Path) -> None:
    # It says nothing of its base or layers, and in the older form of its rotary embedding.
    published = {"base_id": None, "eagle_config": None, "rope_parameters": None}
    save(tmp_path, **published, rope_theta=500000.0)
    loaded = load(tmp_path, num_layers=32)
    assert loaded.layers == layers_read(32) == (2, 16, 29)
    assert loaded.head.config.rope_parameters["rope_theta"] == 500000.0


def test_a_head_may_bring_its_own_embedding_and_the_whole_vocabulary(tmp_path: Path) -> None:
    head = make_head()
    save_head(head, tmp_path, layers=(1, 2, 4), base_id="sha256:base")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["d2t"], tensors["t2d"]
    embedding = torch.randn(VOCAB, SIZE)
    save_file(tensors | {"embed_tokens.weight": embedding}, file)
    loaded = load(tmp_path)
    assert loaded.embedding is not None
    assert torch.equal(loaded.embedding.weight, embedding)
    assert loaded.head.token_ids.tolist() == list(range(VOCAB))


def changing(name: str, tensor: Tensor | None) -> Spoil:
    def spoil(path: Path) -> None:
        file = path / "model.safetensors"
        tensors = load_file(file)
        tensors.pop(name, None)
        save_file(tensors if tensor is None else tensors | {name: tensor}, file)

    return spoil


def without_weights(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: save(path, base_id="sha256:other"), "trained for another base"),
        (lambda path: save(path, vocab_size=300), "its vocab_size is 300, the base's 260"),
        (lambda path: save(path, num_hidden_layers=2), "more than one layer"),
        (lambda path: save(path, draft_vocab_size=261), "draft_vocab_size is 261, not a number"),
        (lambda path: save(path, draft_vocab_size=80), r"d2t is torch.int64 \[90\]"),
        (lambda path: save(path, hidden_size=128), "embed_tokens.weight is missing"),
        (lambda path: save(path, attention_bias=True), "with biases"),
        (lambda path: save(path, hidden_act="gelu"), "without SiLU"),
        (lambda path: save(path, num_attention_heads="x"), "describes no layer of Llama"),
        (lambda path: save(path, num_key_value_heads=3), "4 heads do not divide among 3 KV heads"),
        (lambda path: save(path, num_key_value_heads=0), "4 heads do not divide among 0 KV heads"),
        (lambda path: save(path, rope_parameters=PARTLY_ROTATED), "rotates 8 of 16 dimensions"),
        (
            lambda path: save(path, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}),
            r"reads the layers \[1, 2, 5\], not 3 of 1 to 4",
        ),
        (
            lambda path: save(path, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2]}),
            r"reads the layers \[1, 2\]",
        ),
        (changing("d2t", torch.full((90,), 200)), "d2t does not name 90 tokens of the base"),
        (changing("d2t", -torch.arange(90)), "d2t does not name 90 tokens of the base"),
        (changing("fc.weight", None), "fc.weight is missing"),
        (changing("fc.bias", torch.zeros(64)), "fc.bias is no tensor of such heads"),
        (changing("norm.weight", torch.zeros(32)), r"norm.weight is torch.float32 \[32\]"),
        (without_weights, "pytorch_model.bin is a pickle"),
        (lambda path: (path / "config.json").write_text("[]"), "config.json is no object"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_refused_by_reason(
    tmp_path: Path, spoil: Spoil, reason: str
) -> None:
    save(tmp_path)
    spoil(tmp_path)
    with pytest.raises(InvalidParameter, match=reason):
        load(tmp_path)
