"""Room for a waiting request: a place in the batch, and blocks for all its tokens. Torch-free.

Blocks are allocated chunk by chunk, but a request that cannot finish its prompt would be preempted.
So a request is admitted when its whole prompt fits, after those that are still being computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..kv.blocks import KvBlocks
from ..request import Request
from .batch import Step
from .groups import Groups
from .preemption import IsEnough, Preemption
from .running import Running
from .swap_costs import SwapCosts


class AdmissionPlanner:
    def __init__(
        self,
        *,
        kv: KvBlocks,
        running: Running,
        groups: Groups,
        preemption: Preemption,
        swap_costs: SwapCosts,
        chunk: int,
    ) -> None:
        """`chunk`: the most tokens of a prompt that one step computes."""
        self.num_forks = 0
        self._kv = kv
        self._running = running
        self._groups = groups
        self._preemption = preemption
        self._swap_costs = swap_costs
        self._chunk = chunk
        self._shortage: _Shortage | None = None
        self._fork: Request | None = None

    @property
    def is_short(self) -> bool:
        """Whether the request tried last found no blocks."""
        return self._shortage is not None

    def exceeds(self, request: Request, cap: float) -> bool:
        """Whether the tenant would hold more than this part of the batch's places or the blocks,
        even if its requests of lower priority gave way."""
        relief = self._relief(request, cap)
        return relief is not None and not self._preemption.may_displace(request, relief)

    def may_take_sequence(self, request: Request) -> bool:
        """Whether there is a place in the batch, or one of lower priority gives its own, or another
        tenant owes one."""
        if not self._running.is_full or self._preemption.may_displace(request, bool):
            return True
        return self._preemption.may_reclaim(
            request, self._running.sequence_share, self._running.share_of_one
        )

    def find(self, request: Request, cap: float, unfinished: Iterable[Request], step: Step) -> bool:
        """Find blocks and a place, be it those of lower priority or that another tenant owes.

        `cap`: see `exceeds`. `unfinished`: running requests whose prompts may be incomplete; their
        blocks are promised. If it succeeds, the request shares what of its tokens is computed
        already.
        """
        relief = self._relief(request, cap)
        if relief and not self._preemption.displace(request, relief, step):
            return False
        if not self._fits(request, unfinished):
            if not self._make_fit(request, unfinished, step):
                return False
            if not self._fits(request, unfinished):
                return False
        if not self._running.is_full or self._take_place(request, step):
            return True
        self._forget(request)
        return False

    def _relief(self, request: Request, cap: float) -> IsEnough | None:
        """What its tenant must give up before it holds no more than the cap; None: nothing."""
        if cap == math.inf:
            return None  # what the request would hold need not be worked out
        running, tenant_id = self._running, request.tenant_id
        num_over = running.sequence_share(tenant_id) + running.share_of_one - cap
        kv_over = running.kv_share(tenant_id) + self._share(request) - cap
        if num_over <= 0 and kv_over <= 0:
            return None

        def is_enough(victims: Sequence[Request]) -> bool:
            num_given = len(victims) * running.share_of_one
            return num_given >= num_over and running.kv_share_of(victims) >= kv_over

        return is_enough

    def _make_fit(self, request: Request, unfinished: Iterable[Request], step: Step) -> bool:
        """Take the blocks that it lacks from requests of lower priority or another tenant."""
        running, share = self._running, self._share(request)

        def is_enough(victims: Sequence[Request]) -> bool:
            return running.kv_share_of(victims) >= self._lack(request, unfinished)

        if self._preemption.displace(request, is_enough, step):
            return True
        return self._preemption.reclaim(request, running.kv_share, share, step)

    def _take_place(self, request: Request, step: Step) -> bool:
        """Take a place in the batch from a request of lower priority or another tenant."""
        running = self._running
        if self._preemption.displace(request, bool, step):
            return True
        return self._preemption.reclaim(request, running.sequence_share, running.share_of_one, step)

    def take(self, request: Request, num_tokens: int) -> None:
        """Make the request that `find` found room for run, with blocks for its first chunk."""
        self._shortage = None
        self.num_forks += request is self._fork
        self._running.start(request, self._kv.share(request.kv) + self._share(request))
        has_grown = self._kv.grow(request.kv, request.num_computed_tokens, num_tokens)
        assert has_grown, "room was found for all its tokens"

    def _fits(self, request: Request, unfinished: Iterable[Request]) -> bool:
        if not self._running.requests:
            self._reuse(request)
            return True
        available = self._available(request, unfinished)
        if self._shortage and self._shortage.lasts(request, available):
            return False
        self._reuse(request)
        left, missing = self._available(request, unfinished), self._missing(request)
        lacking = [max(need - free, 0) for need, free in zip(missing, left, strict=True)]
        if not any(lacking):
            return True
        enough = [free + lack for free, lack in zip(available, lacking, strict=True)]
        self._shortage = _Shortage(request, enough)
        self._forget(request)
        return False

    def _available(self, request: Request, unfinished: Iterable[Request]) -> list[int]:
        """Free blocks per group, less those that running prompts are still to take."""
        promised = [self._missing(other) for other in unfinished if other in self._running]
        return [
            self._kv.num_free(group) - sum(missing[group] for missing in promised)
            for group in range(len(request.kv.tables))
        ]

    def _lack(self, request: Request, unfinished: Iterable[Request]) -> float:
        """The part of the blocks that a request which found none still lacks."""
        assert self._shortage, "it was found not to fit"
        available = self._available(request, unfinished)
        return max(
            (enough - free) / self._kv.num_usable(group)
            for group, (enough, free) in enumerate(
                zip(self._shortage.enough, available, strict=True)
            )
        )

    def _share(self, request: Request) -> float:
        """The part of the blocks that the request lacks for its known tokens."""
        return max(
            count / self._kv.num_usable(group) for group, count in enumerate(self._missing(request))
        )

    def _missing(self, request: Request) -> Sequence[int]:
        return self._kv.num_missing(
            request.kv, request.num_computed_tokens, request.num_remaining_tokens, self._chunk
        )

    def _reuse(self, request: Request) -> None:
        """Share what of the request's tokens is computed already, unless it has its own in swap."""
        if request.kv.is_swapped:
            return
        parent = self._groups.parent(request)
        shared = request.num_prompt_tokens - 1
        may_fork = parent is not None and shared <= request.num_reusable_tokens
        if parent and may_fork and self._kv.fork(parent.kv, request.kv, shared):
            self._fork = request
            request.num_computed_tokens = shared
            return
        self._fork = None
        is_handed_over = request.submitted.awaits_prefix  # the router has compared what it costs
        request.num_computed_tokens = self._kv.match(
            request.kv,
            request.namespace,
            request.token_ids[: request.num_reusable_tokens + 1],
            _always if is_handed_over else self._swap_costs.pays_to_fetch,
        )

    def _forget(self, request: Request) -> None:
        """Undo `_reuse`."""
        if request.kv.num_to_fetch or not request.kv.is_swapped:
            self._kv.release(request.kv)
            request.num_computed_tokens = 0


def _always(num_tokens: int, num_blocks: Sequence[int]) -> bool:
    return True


class _Shortage(NamedTuple):
    """What a request lacked, so that it is not worked out again in every step."""

    request: Request
    enough: list[int]
    """Free blocks per group with which it is worth another try."""

    def lasts(self, request: Request, available: list[int]) -> bool:
        return request is self.request and any(
            free < enough for free, enough in zip(available, self.enough, strict=True)
        )
