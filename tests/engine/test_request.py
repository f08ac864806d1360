"""What a request is derived from."""

from __future__ import annotations

import pytest

from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.messages import GenerationRequest
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams


@pytest.mark.parametrize(("ignore_eos", "ends"), [(False, {2, 5, 9}), (True, {5, 9})])
def test_its_stop_tokens_end_it_beside_those_of_the_base(ignore_eos: bool, ends: set[int]) -> None:
    sampling = SamplingParams(stop_token_ids=(5, 9), ignore_eos=ignore_eos)
    submitted = GenerationRequest("r", "acme", [1], sampling)
    namespace = CacheNamespace("acme", "runtime", None)
    request = Request(submitted, namespace, 0, 0.0, None, eos_token_ids=frozenset({2}))
    assert request.end_token_ids == ends
