"""Creates the benchmark's base and adapters: random weights with realistic shapes.

Every token's text is plain ASCII, so a streamed token is never held back as an incomplete
character, and the gaps between chunks are those between tokens. Needs the `engine` extra.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaConfig

END = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' ' + message['content'] }}{% endfor %}"
)
WEIGHT_STD = 0.02
"""For the base's weights and for A and B: adapters change the logits without overflow."""


@dataclass(frozen=True, slots=True)
class BaseShape:
    """A Llama's shape; the default has 125 million parameters."""

    vocab_size: int = 32_000
    hidden_size: int = 768
    intermediate_size: int = 2_048
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int = 4
    max_model_len: int = 1_024
    seed: int = 1


def make_base(path: Path, shape: BaseShape) -> None:
    """Write a random Llama in bfloat16 with its tokenizer, unless `path` has just this one."""
    if _is_made(path, asdict(shape)):
        return
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(shape.seed)
    model = LlamaForCausalLM(llama_config(shape)).to(torch.bfloat16)
    with torch.no_grad():
        # The end and the lone bytes are never the best token: see the module's docstring.
        model.lm_head.weight[list(_silent_ids())] = 0
    model.save_pretrained(path)
    _save_tokenizer(path, shape.vocab_size)
    _mark_made(path, asdict(shape))


def make_adapter(
    path: Path,
    shape: BaseShape,
    *,
    rank: int,
    seed: int,
    changes_head: bool = False,
    uses_dora: bool = False,
) -> None:
    """Write a random adapter on every linear layer as PEFT does, unless `path` has just this.

    `changes_head`: on the output head too. `uses_dora`: with magnitudes.
    """
    options = {"changes_head": changes_head, "uses_dora": uses_dora}
    recipe = {**asdict(shape), "rank": rank, "adapter_seed": seed, **options}
    if _is_made(path, recipe):
        return
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank}
    modules = list(_adapted_modules(shape, changes_head=changes_head))
    targets = sorted({name.rpartition(".")[2] for name, _, _ in modules})
    config |= {"target_modules": targets, "use_dora": uses_dora}
    (path / "adapter_config.json").write_text(json.dumps(config))
    tensors = _adapter_tensors(modules, rank, seed)
    if uses_dora:
        tensors |= _magnitudes(modules)
    save_file(tensors, path / "adapter_model.safetensors")
    _mark_made(path, recipe)


def llama_config(shape: BaseShape) -> LlamaConfig:
    """The configuration of a base of this shape."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_model_len,
        initializer_range=WEIGHT_STD,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )


def text_token_ids(shape: BaseShape) -> range:
    """The ids of ASCII text, from which prompts are sampled."""
    return range(max(_silent_ids()) + 1, shape.vocab_size)


def _adapted_modules(shape: BaseShape, *, changes_head: bool) -> Iterator[tuple[str, int, int]]:
    """Each linear layer's path in the model, its inputs and its outputs."""
    for layer, (name, inputs, outputs) in product(range(shape.num_layers), _linears(shape)):
        yield f"model.layers.{layer}.{name}", inputs, outputs
    if changes_head:
        yield "lm_head", shape.hidden_size, shape.vocab_size


def _adapter_tensors(
    modules: Sequence[tuple[str, int, int]], rank: int, seed: int
) -> dict[str, Tensor]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for path, inputs, outputs in modules:
        for name, size in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
            values = torch.randn(size, generator=generator) * WEIGHT_STD
            tensors[f"base_model.model.{path}.{name}.weight"] = values.to(torch.bfloat16)
    return tensors


def _magnitudes(modules: Sequence[tuple[str, int, int]]) -> dict[str, Tensor]:
    """Near the norms of the base's rows, as those of a trained adapter."""
    import torch

    return {
        f"base_model.model.{path}.lora_magnitude_vector": torch.full(
            (outputs,), WEIGHT_STD * inputs**0.5, dtype=torch.bfloat16
        )
        for path, inputs, outputs in modules
    }


def _linears(shape: BaseShape) -> list[tuple[str, int, int]]:
    """Each linear layer's name within a decoder layer, its inputs and its outputs."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    kv = hidden // shape.num_heads * shape.num_kv_heads
    return [
        ("self_attn.q_proj", hidden, hidden),
        ("self_attn.k_proj", hidden, kv),
        ("self_attn.v_proj", hidden, kv),
        ("self_attn.o_proj", hidden, hidden),
        ("mlp.gate_proj", hidden, inner),
        ("mlp.up_proj", hidden, inner),
        ("mlp.down_proj", inner, hidden),
    ]


def _silent_ids() -> range:
    """The end token and the 256 single bytes, half of which are not valid text alone."""
    return range(257)


def _save_tokenizer(path: Path, vocab_size: int) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    byte_tokens = [END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = list(islice(_letter_merges(), vocab_size - len(byte_tokens)))
    words = [left + right for left, right in merges]
    vocab = {token: index for index, token in enumerate([*byte_tokens, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)


def _letter_merges() -> Iterator[tuple[str, str]]:
    """All words of two letters, then of three, then of four, each as (a shorter word, a letter)."""
    return chain.from_iterable(
        (("".join(word[:-1]), word[-1]) for word in product(ascii_lowercase, repeat=length))
        for length in (2, 3, 4)
    )


def _is_made(path: Path, recipe: dict[str, int]) -> bool:
    """Whether `path` was completed with the same recipe: the mark is written last, next to it."""
    mark = _mark(path)
    return mark.is_file() and json.loads(mark.read_text(encoding="utf-8")) == recipe


def _mark_made(path: Path, recipe: dict[str, int]) -> None:
    _mark(path).write_text(json.dumps(recipe) + "\n", encoding="utf-8")


def _mark(path: Path) -> Path:
    return path.with_name(f"{path.name}.made.json")
