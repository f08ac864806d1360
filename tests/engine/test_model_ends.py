"""Where adapters may change the input embedding and the output head, and how this is detected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from loraplex.engine.checkpoint.weight_digests import NUM_PREFIXES, end_digests
from loraplex.engine.config import EngineConfig
from loraplex.engine.model.embedding_and_head import adapt_ends
from loraplex.engine.model.forward import ATTENTION_NAME
from loraplex.engine.model.whole_base import load_base_model
from support.families import SERVED, save_family
from support.layouts import row_digests


def load(tmp_path: Path, family: str, **differences: Any) -> PreTrainedModel:
    model_type, settings = SERVED[family]
    path = save_family(tmp_path, model_type, {**settings, **differences})
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path)
    model.set_attn_implementation(ATTENTION_NAME)
    return model.eval()


@pytest.mark.parametrize("family", SERVED)
def test_both_ends_of_every_served_family_can_be_adapted(family: str, tmp_path: Path) -> None:
    ends = adapt_ends(load(tmp_path, family))
    assert ends.refused == {}
    assert ends.embedding
    assert ends.head
    assert ends.embedding.projection.in_features == ends.head.projection.out_features
    assert bool(ends.fixed_vocabulary) == (family == "phi"), "its head has a bias"


def test_a_model_that_reads_token_ids_elsewhere_takes_no_added_tokens(tmp_path: Path) -> None:
    model = load(tmp_path, "llama")
    layer = model.model.layers[0]
    model.model.register_forward_pre_hook(
        lambda _module, _args, kwargs: layer.__dict__.update(seen=kwargs["input_ids"]),
        with_kwargs=True,
    )
    layer.register_forward_hook(lambda layer, _args, y: y * (1 + layer.seen[..., None]))
    assert "token ids elsewhere" in adapt_ends(model).fixed_vocabulary


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda logits: logits[..., :128], "cuts its logits"),
        (lambda logits: logits + torch.zeros(128), "computes with its vocabulary"),
    ],
)
def test_a_model_that_computes_with_its_vocabulary_takes_no_added_tokens(
    change: Callable[[Tensor], Tensor], reason: str, tmp_path: Path
) -> None:
    model = load(tmp_path, "llama")

    def changed(_module: nn.Module, _args: Any, output: Any) -> Any:
        output.logits = change(output.logits)
        return output

    model.register_forward_hook(changed)
    assert reason in adapt_ends(model).fixed_vocabulary


class OtherLinear(nn.Linear):
    """Another class than a plain linear layer."""


class ScaledByToken(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * (1 + input[..., None])


def test_ends_that_are_not_what_they_seem_carry_no_adapters(tmp_path: Path) -> None:
    model = load(tmp_path, "llama")
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    model.set_output_embeddings(OtherLinear(head.in_features, head.out_features, bias=False))
    model.set_input_embeddings(ScaledByToken(table.num_embeddings, table.embedding_dim))
    ends = adapt_ends(model)
    assert (ends.embedding, ends.head) == (None, None)
    assert "something else than the scaled rows" in ends.refused["model.embed_tokens"]
    assert "it is a OtherLinear" in ends.refused["lm_head"]


def test_an_end_that_the_model_calls_in_its_own_way_carries_no_adapters(tmp_path: Path) -> None:
    model = load(tmp_path, "llama")
    inner = model.forward

    def forward(*, logits_to_keep: Tensor, input_ids: Tensor, **others: Any) -> Any:
        model.get_input_embeddings()(input_ids)
        return inner(input_ids=input_ids, **others)  # the head sees every row

    model.__dict__["forward"] = forward
    ends = adapt_ends(model)
    assert "exactly once with the step's tokens" in ends.refused["model.embed_tokens"]
    assert "exactly once with the logits rows" in ends.refused["lm_head"]


@pytest.mark.parametrize(
    ("family", "differences", "is_tied"),
    [
        ("llama", {}, False),
        ("llama", {"tie_word_embeddings": True}, True),
        ("gpt2-conv1d", {}, True),
        ("gpt_neox", {}, False),
    ],
)
def test_the_layout_tells_tied_ends_and_the_digests_of_their_weights(
    family: str, differences: dict[str, Any], is_tied: bool, tmp_path: Path
) -> None:
    model = load(tmp_path, family, **differences)
    layout = load_base_model(EngineConfig(str(tmp_path), device="cpu")).layout
    assert layout.ties_embeddings is is_tied
    names = (layout.slices[0].name, layout.slices[-1].name)
    assert layout.digests == {
        name: row_digests(model.get_submodule(name).weight, layout.num_rows(name)) for name in names
    }
    assert len({digests[0] for digests in layout.digests.values()}) == (1 if is_tied else 2)


def test_digests_are_of_what_the_files_hold_and_not_of_what_is_served(tmp_path: Path) -> None:
    exact = load(tmp_path, "llama")
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert end_digests(rounded, tmp_path) == end_digests(exact, tmp_path)
    assert len(end_digests(exact, tmp_path)) == 2


def test_a_weight_that_no_file_holds_has_no_digest(tmp_path: Path) -> None:
    model = load(tmp_path / "model", "llama")
    (tmp_path / "other").mkdir()
    assert end_digests(model, tmp_path / "other") == {}


class Ends(nn.Module):
    """A table and a head of many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2500, 2)
        self.head = nn.Linear(2, 2500, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def get_output_embeddings(self) -> nn.Module:
        return self.head


@pytest.mark.parametrize("row", [0, 1023, 1024, 2499])
def test_a_stored_matrix_is_known_by_all_its_rows(row: int, tmp_path: Path) -> None:
    model = Ends()
    table, head = model.table.weight.detach(), model.head.weight.detach()
    almost = table.clone()
    almost[row] += 1
    other = torch.zeros(2, 2500)
    save_file({"almost": almost, "other": other}, tmp_path / "1.safetensors")
    save_file({"x": table, "y": head}, tmp_path / "2.safetensors")
    assert end_digests(cast(PreTrainedModel, model), tmp_path) == {
        "table": row_digests(table, NUM_PREFIXES),
        "head": row_digests(head, NUM_PREFIXES),
    }
    assert end_digests(cast(PreTrainedModel, model.to("meta")), tmp_path) == {}


def test_lora_between_the_decoder_and_the_output_head_is_refused(tmp_path: Path) -> None:
    """Those layers see the rows of the logits alone, an adapter the rows of all tokens."""
    path = save_family(tmp_path, "bert", {"is_decoder": True})
    layout = load_base_model(EngineConfig(str(path), device="cpu")).layout
    assert layout.refused["cls.predictions.transform.dense"] == "LoRA on Linear is not served"
    assert "bert.encoder.layer.0.output.dense" in layout.slice_index
