"""Admits base models by checks at load instead of a list of names.

A model family is served if its attention can be replaced completely with provably equal results.
Every layer must call the attention function exactly once, its layer types and rope must be known,
and a chunked, mixed, paged forward pass of the loaded weights must equal the model's own dense
forward pass. Effects beyond the self-test's few tokens are tested on a small copy
(`threshold_test`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..checkpoint.weights import transformers_quiet
from ..errors import DamagedBase, UnsupportedModel
from ..kv.cache import KvCache, KvFormat
from ..kv.groups import LayerKvShape, simple_groups
from ..kv.sequence_blocks import block_table
from .attention_windows import PROBE_NAME, LayerProbe
from .expected_logits import ExpectedLogits
from .expert_choices import MAX_REPLACED, LayerChoices, ReplacedChoices, choosing, recording
from .forward import ATTENTION_NAME, PagedForward, run_model
from .inputs import MAX_GROUPED_ROWS, SequenceChunk, make_inputs
from .own_attention import replace_own_attention
from .parity_bound import SELF_TEST_TOLERANCE, parity_bound
from .rope import full_context
from .rotary_tables import contexts_of
from .state_layers import replace_states
from .step_positions import give_positions

_MLP_LAYER_TYPES = frozenset({"mlp", "moe"})
SERVED_LAYER_TYPES = _MLP_LAYER_TYPES | {
    *("full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv"),
    *("hybrid", "hybrid_sliding"),
}
_TOLD_IN_EACH_CALL = -1
"""The index of an attention that does not know its layer."""
PROBE_LENGTH = 4
"""For one token only, some families build no mask."""
SELF_TEST_LENGTHS = (23, 9)


class DenseCase(NamedTuple):
    """One sequence, and what the dense forward pass computed."""

    token_ids: list[int]
    logits: ExpectedLogits
    choices: LayerChoices
    """Of each MoE layer."""


class Cuts(NamedTuple):
    """How a self-test cuts its sequences."""

    block_size: int
    chunks: tuple[int, ...]
    """The tokens of one step after another."""


SELF_TEST_CUTS = Cuts(4, (MAX_GROUPED_ROWS + 1, 1, 4))


def check_config(config: Any, *, max_model_len: int | None) -> int:
    """The longest sequence this configuration serves; raises UnsupportedModel if it serves none."""
    layer_types = set(getattr(config, "layer_types", None) or ())
    if foreign := layer_types - SERVED_LAYER_TYPES:
        raise UnsupportedModel(f"{config.model_type} has {', '.join(sorted(foreign))} layers")
    if getattr(config, "quantization_config", None):
        raise UnsupportedModel(
            "the checkpoint is already quantized: give the original one and --quantize"
        )
    trained = full_context(config)
    if max_model_len is not None and max_model_len > trained:
        raise UnsupportedModel(f"max_model_len {max_model_len} exceeds the model's {trained}")
    return max_model_len or trained


def probe_kv_shapes(
    model: PreTrainedModel, config: Any, *, max_model_len: int, layers: range | None = None
) -> list[LayerKvShape]:
    """Replace the model's attention and its layers with states, and run a few tokens to find what
    each layer caches and its attention window. `layers`: those that the model has; None: all. The
    others cache nothing.

    Raises UnsupportedModel unless each layer has known states or calls the attention function
    exactly once, with a causal mask or a window: any other model would silently be served
    incorrectly.
    """
    replace_states(model)
    replace_own_attention(model)
    give_positions(model)
    _number_attentions(model)
    probe = LayerProbe(max_model_len)
    with transformers_quiet():  # it remarks on families that compute attention themselves
        model.set_attn_implementation(PROBE_NAME)
        run_probe(model, probe)
        model.set_attn_implementation(ATTENTION_NAME)
    num_layers = config.num_hidden_layers
    expected = set(layers or range(num_layers))
    with_tokens_before = {*probe.calls, *probe.states.shapes, *_mlp_layers(config, expected)}
    if len(probe.calls) > len(set(probe.calls)) or with_tokens_before != expected:
        num_with_states = len(probe.states.shapes)
        others = f", and {num_with_states} have states" if num_with_states else ""
        raise UnsupportedModel(
            f"{config.model_type} calls the attention interface {len(probe.calls)} times "
            f"in {len(expected)} layers{others}"
        )
    return probe.shapes(num_layers)


def _number_attentions(model: nn.Module) -> None:
    """Let each attention know its layer: transformers tells those of Zamba2, whose layers share
    weights, in each call."""
    for path, module in model.named_modules():
        if getattr(module, "layer_idx", None) == _TOLD_IN_EACH_CALL:
            module.layer_idx = next(int(part) for part in path.split(".") if part.isdecimal())


def _mlp_layers(config: Any, layers: Set[int]) -> list[int]:
    """Those of these layers in which tokens do not meet."""
    layer_types = getattr(config, "layer_types", None) or ()
    return [
        layer
        for layer, kind in enumerate(layer_types)
        if kind in _MLP_LAYER_TYPES and layer in layers
    ]


def check_replaced(model: nn.Module, config: Any) -> None:
    """Run a few tokens through the model with replaced linear layers.

    Raises UnsupportedModel if the model uses anything but the output of such a layer.
    """
    try:
        run_probe(model, LayerProbe())
    except AttributeError as exc:
        raise UnsupportedModel(
            f"{config.model_type} uses its linear layers otherwise than by calling them: {exc}"
        ) from exc


def run_probe(model: nn.Module, probe: LayerProbe) -> None:
    """Run a few tokens through the model; it must have got Loraplex's attention."""
    device = next(model.parameters()).device
    tokens = torch.arange(PROBE_LENGTH, device=device)
    run_model(model, probe, tokens, tokens, tokens[:1])


def self_test_tokens(vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    """The fixed random sequences of a self-test."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]


def dense_reference(
    model: nn.Module, vocab_size: int, lengths: Sequence[int] = SELF_TEST_LENGTHS
) -> list[DenseCase]:
    """What the model itself computes of fixed random sequences, before anything in it is replaced.

    Raises DamagedBase if they are not finite.
    """
    device = next(model.parameters()).device
    cases = []
    for tokens in self_test_tokens(vocab_size, lengths):
        token_ids = torch.tensor(tokens)
        with torch.inference_mode(), transformers_quiet(), recording(model) as choices:
            logits = model(input_ids=token_ids[None].to(device), use_cache=False).logits[0]
        if not logits.isfinite().all():
            raise DamagedBase(
                "its own logits are not finite: a tensor in its files is damaged, or --dtype is "
                "too narrow for it"
            )
        cases.append(DenseCase(tokens, ExpectedLogits.of(logits), choices))
    return cases


class SelfTest(NamedTuple):
    """The sequences of a self-test, and how it cuts them."""

    lengths: tuple[int, ...] = SELF_TEST_LENGTHS
    cuts: Cuts = SELF_TEST_CUTS


class References(NamedTuple):
    """What the whole base computes of the self-tests' sequences; none of them on the followers."""

    plain: list[DenseCase]
    of_kv: list[DenseCase]
    """Of the self-test of a quantized KV cache."""

    @classmethod
    def of(cls, model: PreTrainedModel, vocab_size: int, kv_test: SelfTest) -> References:
        plain = dense_reference(model, vocab_size)
        if kv_test == SelfTest():
            return cls(plain, plain)
        return cls(plain, dense_reference(model, vocab_size, kv_test.lengths))


def kv_self_test(kv_format: KvFormat, block_size: int, *, max_model_len: int) -> SelfTest:
    """That of a quantized KV cache. If complete blocks are quantized, the sequences are some blocks
    of the served size long, because the error grows with the size."""
    if kv_format.bits is None:
        return SelfTest()
    lengths = tuple(min(num_halves * block_size // 2, max_model_len) for num_halves in (5, 3))
    return SelfTest(lengths, Cuts(block_size, (block_size + 1, 1, block_size // 2)))


def check_parity(
    model: nn.Module,
    shapes: list[LayerKvShape],
    cases: list[DenseCase],
    *,
    bound: float | None = None,
) -> float:
    """The error of the paged, chunked, mixed forward pass, with the KV cache in the model's own
    dtype.

    If layers round, a token goes to the experts that the dense forward pass chose. bound: as of
    `parity_bound`; None: that of a model without packed layers. Raises UnsupportedModel if the
    error exceeds it, or if more choices of experts differ than rounding explains.
    """
    if bound is None:
        bound = parity_bound(next(model.parameters()).dtype, ())
    parity = measure_parity(model, shapes, cases, bound)
    parity.check(bound)
    return parity.error


class Parity(NamedTuple):
    """How a paged forward pass differs from the dense one."""

    error: float
    """Of the logits, relative to the largest."""
    share: float
    """Of the choices of experts that were replaced."""

    def check(self, bound: float) -> None:
        """Raise UnsupportedModel as `check_parity`."""
        if self.share > MAX_REPLACED:
            raise UnsupportedModel(
                f"its paged forward chooses other experts for {self.share:.0%} of the tokens"
            )
        if not self.error <= bound:
            raise UnsupportedModel(
                f"its paged forward differs from its own dense forward by {self.error:.1e} of the "
                f"logits, and {bound:.0e} is the bound"
            )


def measure_parity(
    model: nn.Module, shapes: list[LayerKvShape], cases: list[DenseCase], bound: float
) -> Parity:
    """What `check_parity` compares with the bound."""
    replaces = replaces_choices(bound)
    choices = ReplacedChoices([case.choices for case in cases]) if replaces else None
    kv_format = KvFormat(next(model.parameters()).dtype)
    error = paged_error(model, shapes, cases, kv_format, choices=choices)
    return Parity(error, choices.share if choices else 0.0)


def replaces_choices(bound: float) -> bool:
    """Whether the layers of a model with this bound round so much that it may choose other experts
    than the dense forward pass: in the half types, and where inputs are rounded."""
    return bound > SELF_TEST_TOLERANCE[torch.float32]


def paged_error(
    model: nn.Module,
    shapes: list[LayerKvShape],
    cases: list[DenseCase],
    kv_format: KvFormat,
    cuts: Cuts = SELF_TEST_CUTS,
    *,
    choices: ReplacedChoices | None = None,
) -> float:
    """The difference of the paged forward pass's logits to `cases`, relative to the largest.

    choices: replaces the choices of experts that differ from those of `cases`.
    """
    sequences = [case.token_ids for case in cases]

    def error(part: PagedLogits) -> Tensor:
        return cases[part.sequence].logits.error(part.positions, part.logits)

    with choosing(model, choices.choose) if choices else nullcontext():
        # Nobody holds the logits of a step while the next one runs.
        steps = paged_logits(model, shapes, sequences, kv_format, cuts, choices=choices)
        errors = list(map(error, steps))
    return torch.stack(errors).max().item()


def run_paged(
    model: nn.Module,
    shapes: list[LayerKvShape],
    sequences: list[list[int]],
    kv_format: KvFormat,
) -> list[Tensor]:
    """Logits of all positions of each sequence, as `paged_logits` computes them."""
    logits: list[list[Tensor]] = [[] for _ in sequences]
    for part in paged_logits(model, shapes, sequences, kv_format):
        logits[part.sequence].append(part.logits)
    return [torch.cat(parts) for parts in logits]


class PagedLogits(NamedTuple):
    """What one step computes of one sequence."""

    sequence: int
    """Its index."""
    positions: slice
    logits: Tensor
    """`[positions, tokens]`."""


def paged_logits(
    model: nn.Module,
    shapes: list[LayerKvShape],
    sequences: list[list[int]],
    kv_format: KvFormat,
    cuts: Cuts = SELF_TEST_CUTS,
    *,
    choices: ReplacedChoices | None = None,
) -> Iterator[PagedLogits]:
    """Logits of all positions, in their order, computed in chunks, all sequences in a batch.

    choices: learns which positions each step has.
    """
    size = cuts.block_size
    per_sequence = -(-max(map(len, sequences)) // size)
    device = next(model.parameters()).device
    cache = KvCache(
        simple_groups(shapes, 1 + per_sequence * len(sequences)),
        shapes,
        block_size=size,
        kv_format=kv_format,
        device=device,
    )
    tables = [
        block_table(range(1 + per_sequence * index, 1 + per_sequence * (index + 1)))
        for index in range(len(sequences))
    ]
    contexts = contexts_of(model)
    rotary_starts = [contexts.start(len(tokens)) if contexts else 0 for tokens in sequences]
    done = [0] * len(sequences)
    step = 0
    while any(done[index] < len(tokens) for index, tokens in enumerate(sequences)):
        chunks = {}
        for index, tokens in enumerate(sequences):
            count = cuts.chunks[(step + index) % len(cuts.chunks)]
            if chunk := tokens[done[index] : done[index] + count]:
                own = [tables[index]] * len(cache.groups)
                chunks[index] = SequenceChunk(
                    chunk, done[index], own, rotary_start=rotary_starts[index]
                )
        order = sorted(chunks, key=lambda index: len(chunks[index].token_ids) > 1)
        inputs = make_inputs(
            [chunks[index] for index in order],
            groups=cache.groups,
            block_size=size,
            device=device,
        )
        positions = [
            slice(done[index], done[index] + len(chunks[index].token_ids)) for index in order
        ]
        if choices:
            choices.begin_step(list(zip(order, positions, strict=True)))
        rows = torch.arange(len(inputs.input_ids), device=device)
        logits = run_model(
            model, PagedForward.of(cache, inputs), inputs.input_ids, inputs.positions, rows
        )
        parts = logits.split([len(chunks[index].token_ids) for index in order])
        del logits
        yield from map(PagedLogits, order, positions, parts)
        del parts  # before the next step's
        for index in order:
            done[index] += len(chunks[index].token_ids)
        step += 1
