"""Samples tokens from logits.

Every sample is a pure function of (seed, position, logits): noise comes from a counter-based
generator, never from a shared stream, so a request's tokens do not depend on the rest of its batch.
Sampling uses the Gumbel-max trick: argmax of log-probability plus Gumbel noise.

Nothing up to the sampled tokens waits for the device, so that they can be sampled while the host
goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels import cpu_library
from ..messages import TokenLogprob, TokenLogprobs
from ..request import Request
from ..sampling_params import SamplingParams
from ..token_counts import Counted, TokenCounts
from ..transfers import HostCopy, to_device

MIN_TEMPERATURE = 1e-5
"""Below this, sampling is greedy for any logits that fp32 can distinguish."""
MAX_DRAWN_CELLS = 1 << 24
"""Rows times vocabulary tokens that are sampled at once. Each needs some fifty bytes temporarily,
and a step that verifies draft tokens has many rows."""
MAX_DRAWN_CELLS_ON_CPU = 1 << 19
"""Its caches hold that many: 64 rows take a sixth of the time that they take at once."""
FORBIDDEN = -1e30
"""Added to a logit. At any temperature a difference of that many is finite and has no probability.
"""
MAX_SORTED = 1024
"""The most probabilities of a row that are sorted to find the limit of top-p on the CPU."""


class Stream(IntEnum):
    """The purpose of noise. At one seed and position, each purpose has separate noise."""

    TOKEN = 0
    """The target's own sample."""
    DRAFT = 1
    """A proposer's sample from its own distribution."""
    ACCEPTANCE = 2
    """Whether a draft token is accepted."""
    CORRECTION = 3
    """The sample that replaces a rejected draft token."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """The inputs of sampling one row's next token, besides its logits."""

    params: SamplingParams
    seed: int
    position: int
    """The number of tokens before the one to sample."""
    counts: TokenCounts | None
    """Of prompt and output so far, without draft tokens; None: `params` has no penalties."""
    draft_tokens: Sequence[int] = ()
    """Those before the one to sample."""
    forbidden_tokens: Sequence[int] | None = None
    """Not sampled, unless nothing else is allowed; None: `params` limits no tokens."""


def row_after(request: Request, draft_tokens: Sequence[int] = ()) -> SamplingRow:
    """The row of the token that follows these draft tokens if all of them are accepted."""
    return SamplingRow(
        params=request.submitted.sampling,
        seed=request.seed,
        position=len(request.token_ids) + len(draft_tokens),
        counts=request.current_counts() if request.has_penalties else None,
        draft_tokens=draft_tokens,
        forbidden_tokens=request.forbidden_tokens(draft_tokens) if request.limits_tokens else None,
    )


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """`sample_tokens` as a list; waits for the device."""
    tokens: list[int] = sample_tokens(logits, rows).tolist()
    return tokens


def sample_tokens(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Sample one token per row of `logits [num_rows, vocab_size]` (fp32): int64 `[num_rows]`.

    The token of a row that is not finite means nothing.
    """
    max_cells = MAX_DRAWN_CELLS if logits.is_cuda else MAX_DRAWN_CELLS_ON_CPU
    size = max(max_cells // logits.shape[-1], 1)
    parts = [slice(start, start + size) for start in range(0, len(rows), size)]
    tokens = [perturbed(logits[part], rows[part]).argmax(-1) for part in parts]
    if len(tokens) == 1:
        return tokens[0]
    return torch.cat([logits.new_empty(0, dtype=torch.int64), *tokens])


def perturbed(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """The values whose maximum `sample` takes: log-weights with noise; for a greedy row, the logits
    after penalties and biases."""
    adjusted = _adjust(logits, rows)
    drawn = [index for index, row in enumerate(rows) if row.params.temperature > 0.0]
    if drawn:
        drawn_rows = [rows[index] for index in drawn]
        noise = gumbel_noise(*_counters(drawn_rows, logits.device), logits.shape[-1])
        if len(drawn) == len(rows):
            out = None if adjusted is logits else adjusted
            return noise.add_(_log_weights(adjusted, drawn_rows, out=out))
        adjusted = adjusted.clone() if adjusted is logits else adjusted
        chosen = to_device(drawn, logits.device)
        noise.add_(_log_weights(adjusted[chosen], drawn_rows))
        adjusted.index_copy_(0, chosen, noise)
    return adjusted


def probabilities_of(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """The distribution of `sample`: fp32 `[num_rows, vocab_size]`; a greedy row has 1 at its
    token."""
    adjusted = _adjust(logits, rows)
    probabilities = F.one_hot(adjusted.argmax(-1), logits.shape[-1]).to(logits.dtype)
    drawn = [index for index, row in enumerate(rows) if row.params.temperature > 0.0]
    if drawn:
        log_weights = _log_weights(adjusted[drawn], [rows[index] for index in drawn])
        probabilities[drawn] = log_weights.softmax(-1)
    return probabilities


def draw_from(weights: Tensor, rows: Sequence[SamplingRow], stream: Stream) -> list[int]:
    """Sample one token per row of `weights [num_rows, vocab_size]`, in proportion to them.

    They are not negative and need not sum to 1; of the rows only seed and position matter.
    """
    noise = gumbel_noise(*_counters(rows, weights.device), weights.shape[-1], stream)
    tokens: list[int] = (weights.log() + noise).argmax(-1).tolist()
    return tokens


def uniforms(rows: Sequence[SamplingRow], stream: Stream, device: torch.device) -> Tensor:
    """A number per row, fp64 `[num_rows]`, uniform in (0, 1): a function of seed and position."""
    return uniform_noise(*_counters(rows, device), stream)


def logprobs_of(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities of `tokens` and of each row's `num_top` most likely tokens."""
    return LogprobsCopy(logits, to_device(tokens, logits.device, torch.int64), num_top).read()


class LogprobsCopy:
    """What `logprobs_of` gives, for tokens on the device, as a copy on the host."""

    def __init__(self, logits: Tensor, tokens: Tensor, num_top: int) -> None:
        """Start copying. tokens: int64 `[num_rows]`."""
        logprobs = logits.log_softmax(-1)
        chosen = logprobs.gather(-1, tokens[:, None])[:, 0]
        values, ids = logprobs.topk(min(num_top, logprobs.shape[-1]))
        self._copies = [HostCopy(each) for each in (tokens, chosen, ids, values)]

    def read(self) -> list[TokenLogprobs]:
        """Wait for the copy, and for no later work of the device."""
        rows = zip(*(copy.read().tolist() for copy in self._copies), strict=True)
        return [
            TokenLogprobs(
                chosen=TokenLogprob(token, logprob),
                top=[TokenLogprob(*pair) for pair in zip(top_ids, top_values, strict=True)],
            )
            for token, logprob, top_ids, top_values in rows
        ]


def finite_rows(logits: Tensor, *, out: Tensor | None = None) -> Tensor:
    """bool `[num_rows]`: whether all of a row's logits are numbers."""
    # Inf and NaN times zero are NaN. `isfinite` takes nine times as long on the CPU.
    return torch.eq((logits * 0.0).sum(-1), 0.0, out=out)


def ranks_of(logits: Tensor, tokens: Sequence[int]) -> list[int]:
    """The number of each row's tokens that are more likely than this one, plus 1."""
    chosen = logits.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks: list[int] = (1 + (logits > chosen).sum(-1)).tolist()
    return ranks


def _adjust(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Apply penalties, biases and limits; rows without any are left as they are."""
    adjusted = logits
    for index, row in enumerate(rows):
        params, forbidden = row.params, row.forbidden_tokens
        if row.counts is None and not params.logit_bias and forbidden is None:
            continue
        adjusted = adjusted.clone() if adjusted is logits else adjusted
        if row.counts is not None:
            _penalize(adjusted[index], params, row.counts.counted(row.draft_tokens))
        if params.logit_bias:
            tokens = to_device(list(params.logit_bias), logits.device)
            values = list(params.logit_bias.values())
            biases = to_device(values, logits.device, logits.dtype)
            adjusted[index].index_add_(0, tokens, biases)
        if forbidden is not None:
            penalties = _penalties_of_limits(params, forbidden, logits.shape[-1])
            adjusted[index] += to_device(penalties, logits.device)
    return adjusted


def _penalties_of_limits(
    params: SamplingParams, forbidden: Sequence[int], vocab_size: int
) -> Tensor:
    """fp32 `[vocab_size]`: `FORBIDDEN` of tokens that are forbidden or not allowed, of others 0.

    They are finite: what a grammar forbids stays less likely.
    """
    allowed = list(params.allowed_token_ids)
    penalties = torch.full((vocab_size,), FORBIDDEN if allowed else 0.0, dtype=torch.float32)
    penalties[allowed] = 0.0
    penalties[[token for token in forbidden if token < vocab_size]] = FORBIDDEN
    return penalties


def _penalize(logits: Tensor, params: SamplingParams, counted: Counted) -> None:
    """Penalties in place: repetition over prompt and output, the other two over the output."""
    function = cpu_library.function("penalize", logits.dtype)
    if function is not None and not logits.is_cuda and logits.is_contiguous():
        function(
            *(logits.data_ptr(), counted.token_ids.ctypes.data, len(counted.token_ids)),
            *(counted.output_ids.ctypes.data, counted.num_in_output.ctypes.data),
            *(len(counted.output_ids), params.repetition_penalty),
            *(params.presence_penalty, params.frequency_penalty),
        )
    else:
        _penalize_by_torch(logits, params, counted)


def _penalize_by_torch(logits: Tensor, params: SamplingParams, counted: Counted) -> None:
    penalty = params.repetition_penalty
    if penalty != 1.0:
        tokens = to_device(counted.token_ids, logits.device)
        penalized = logits.index_select(0, tokens)
        # What is positive is divided by the penalty, and what is negative multiplied with it.
        choose = torch.minimum if penalty > 1.0 else torch.maximum
        divided = penalized / penalty
        logits.scatter_(0, tokens, choose(divided, penalized.mul_(penalty)))
    if params.presence_penalty or params.frequency_penalty:
        tokens = to_device(counted.output_ids, logits.device)
        counts = to_device(counted.num_in_output, logits.device)
        penalized = logits.index_select(0, tokens)
        penalized -= params.presence_penalty
        penalized -= params.frequency_penalty * counts
        logits.scatter_(0, tokens, penalized)


def _log_weights(
    logits: Tensor, rows: Sequence[SamplingRow], *, out: Tensor | None = None
) -> Tensor:
    """Scale by temperature, cut to top-k, top-p and min-p: log-probabilities but for a constant; in
    `out`, if given, which may be the logits, unless a limit needs new memory."""
    params = [row.params for row in rows]
    temperatures = [max(p.temperature, MIN_TEMPERATURE) for p in params]
    # The most likely token is at 0, so it does not overflow at any temperature.
    scaled = torch.sub(logits, logits.amax(-1, keepdim=True), out=out)
    scaled /= to_device(temperatures, logits.device, logits.dtype)[:, None]
    for keep, limits in (
        (_keep_top_k, {i: p.top_k for i, p in enumerate(params) if 0 < p.top_k < logits.shape[-1]}),
        (_keep_top_p, {i: p.top_p for i, p in enumerate(params) if p.top_p < 1.0}),
        (_keep_min_p, {i: p.min_p for i, p in enumerate(params) if p.min_p}),
    ):
        if len(limits) == len(rows):
            scaled = keep(scaled, [*limits.values()])
        elif limits:
            limited = to_device([*limits], logits.device)
            scaled.index_copy_(0, limited, keep(scaled[limited], [*limits.values()]))
    return scaled


def _keep_top_k(logits: Tensor, top_k: Sequence[int]) -> Tensor:
    best = logits.topk(max(top_k)).values
    kth = best.gather(-1, to_device(top_k, logits.device)[:, None] - 1)
    return logits.masked_fill(logits < kth, float("-inf"))


def _keep_top_p(logits: Tensor, top_p: Sequence[float]) -> Tensor:
    """Keep the smallest set of most likely tokens whose probability reaches top_p, and tokens as
    likely as the last of them."""
    probabilities = logits.softmax(-1)
    if logits.is_cuda:
        limits = to_device(top_p, logits.device, torch.float64)
        least = _least_by_sort(probabilities, limits[:, None])
    else:
        pairs = zip(probabilities, top_p, strict=True)
        least = torch.stack([_least_by_pivots(row, limit) for row, limit in pairs])[:, None]
    return logits.masked_fill(probabilities < least, float("-inf"))


def _least_by_sort(probabilities: Tensor, top_p: Tensor | float) -> Tensor:
    """The lowest probability that top-p keeps, `[num_rows, 1]`. It always keeps the highest."""
    values = probabilities.sort(descending=True).values
    before = values.cumsum(-1, dtype=torch.float64) - values
    num_kept = (before < top_p).sum(-1, keepdim=True).clamp(min=1)
    return values.gather(-1, num_kept - 1)


def _least_by_pivots(probabilities: Tensor, top_p: float) -> Tensor:
    """The lowest probability that top-p keeps of one row `[vocab_size]`, as a scalar.

    Like quickselect, it continues with the values on one side of the mean only. On the CPU, a sort
    of 128,000 values takes several times as long. Each row is computed alone, because the rounding
    of a sum depends on the shape.
    """
    candidates, missing = probabilities, top_p
    while len(candidates) > MAX_SORTED:
        is_above = candidates > candidates.mean()
        above = candidates[is_above]
        if len(above) in (0, len(candidates)):
            break  # they are equal
        mass = float(above.sum(dtype=torch.float64))
        if mass >= missing:
            candidates = above
        else:
            candidates, missing = candidates[~is_above], missing - mass
    return _least_by_sort(candidates, missing)[0]


def _keep_min_p(logits: Tensor, min_p: Sequence[float]) -> Tensor:
    """Keep tokens with at least min_p times the probability of the most likely one."""
    limits = to_device(min_p, logits.device, logits.dtype)[:, None]
    threshold = logits.amax(-1, keepdim=True) + limits.log()
    return logits.masked_fill(logits < threshold, float("-inf"))


def _counters(rows: Sequence[SamplingRow], device: torch.device) -> tuple[Tensor, Tensor]:
    """Seeds and positions."""
    return (
        to_device([row.seed for row in rows], device, torch.int64),
        to_device([row.position for row in rows], device, torch.int64),
    )


def gumbel_noise(
    seeds: Tensor, positions: Tensor, vocab_size: int, stream: Stream = Stream.TOKEN
) -> Tensor:
    """Standard Gumbel noise fp32 `[num_rows, vocab_size]`, a function of (seed, position, token)
    and of its purpose."""
    function = cpu_library.function("gumbel_noise", torch.float32)
    if function is not None and not seeds.is_cuda:
        drawn = torch.empty(len(seeds), vocab_size, dtype=torch.float32)
        places = seeds.data_ptr(), positions.data_ptr(), stream, drawn.data_ptr()
        function(*places, len(seeds), vocab_size, torch.get_num_threads())
        return drawn
    tokens = torch.arange(1, vocab_size + 1, device=seeds.device)
    # fp32 holds these numbers exactly: odd multiples of 2**-24 between 0 and 1.
    noise = _bits(seeds, positions, stream, tokens).float()
    return noise.add_(0.5).mul_(2.0**-_NUM_BITS).log_().neg_().log_().neg_()


def uniform_noise(seeds: Tensor, positions: Tensor, stream: Stream) -> Tensor:
    """Noise fp64 `[num_rows]`, uniform in (0, 1), by the same generator."""
    bits = _bits(seeds, positions, stream, seeds.new_zeros(1))[:, 0]
    return (bits.double() + 0.5) * 2.0**-_NUM_BITS


_NUM_BITS = 23
_GOLDEN_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64


def _bits(seeds: Tensor, positions: Tensor, stream: Stream, numbers: Tensor) -> Tensor:
    """int64 `[num_rows, len(numbers)]` below 2**23: the numbers of each row's generator.

    The generator is counter-based: each int64 counter goes through the finalizer of SplitMix64
    (Steele, Lea, Flood 2014), seeded per row by a mix of seed and position.
    """
    # No sequence has 2**48 positions, so each stream has its own counters.
    keys = _mix(_mix(seeds.clone()) ^ _mix(positions + 1 + (stream << 48)))
    bits = _mix(keys[:, None] + numbers * _GOLDEN_GAMMA)
    return bits.bitwise_right_shift_(64 - _NUM_BITS).bitwise_and_((1 << _NUM_BITS) - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finalizer on int64, in place."""
    _shift_into(x, 30)
    x *= -4658895280553007687  # 0xBF58476D1CE4E5B9
    _shift_into(x, 27)
    x *= -7723592293110705685  # 0x94D049BB133111EB
    _shift_into(x, 31)
    return x


def _shift_into(x: Tensor, num_bits: int) -> None:
    """`x ^= x >> num_bits`, of unsigned numbers: a mask clears the copies of the sign."""
    x ^= (x >> num_bits).bitwise_and_((1 << (64 - num_bits)) - 1)
