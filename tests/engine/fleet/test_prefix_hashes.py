from __future__ import annotations

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.fleet.prefix_hashes import BLOCK_TOKENS, MAX_BLOCKS, prefix_hashes
from loraplex.engine.messages import GenerationRequest
from loraplex.engine.sampling_params import SamplingParams


def hashes(
    tokens: list[int],
    *,
    tenant: str = "acme",
    adapter: str | None = "x",
    namespace: str = "",
    start: int | None = 0,
) -> list[bytes]:
    key = None if adapter is None else AdapterKey(tenant, adapter)
    return prefix_hashes(
        GenerationRequest("r", tenant, tokens, SamplingParams(), key, namespace, start)
    )


def test_prompts_share_the_hashes_of_their_equal_first_blocks() -> None:
    shared = list(range(2 * BLOCK_TOKENS))
    one, two = hashes([*shared, *range(BLOCK_TOKENS)]), hashes([*shared, *[7] * BLOCK_TOKENS])
    assert one[:2] == two[:2]
    assert one[2] != two[2]


def test_a_block_depends_on_all_before_it() -> None:
    block = list(range(BLOCK_TOKENS))
    assert hashes([*block, *block])[1] != hashes([*reversed(block), *block])[1]


def test_only_full_blocks_and_no_more_than_the_first_count() -> None:
    assert hashes([1] * (BLOCK_TOKENS - 1)) == []
    assert len(hashes([1] * (2 * BLOCK_TOKENS - 1))) == 1
    assert len(hashes([1] * (BLOCK_TOKENS * (MAX_BLOCKS + 3)))) == MAX_BLOCKS


def test_other_tenants_adapters_and_namespaces_have_other_hashes() -> None:
    tokens = list(range(BLOCK_TOKENS))
    found = [
        hashes(tokens),
        hashes(tokens, tenant="bolt"),
        hashes(tokens, adapter="y"),
        hashes(tokens, adapter=None),
        hashes(tokens, namespace="probe"),
    ]
    assert len({each[0] for each in found}) == len(found)


def test_before_their_starts_adapters_have_the_hashes_of_the_base() -> None:
    tokens = list(range(3 * BLOCK_TOKENS))
    base, start = hashes(tokens, adapter=None), 2 * BLOCK_TOKENS
    one, two = (hashes(tokens, adapter=name, start=start) for name in "xy")
    assert one[:2] == two[:2] == base[:2]
    assert len({one[2], two[2], base[2]}) == 3
    assert hashes(tokens, start=start - 1)[1] != base[1]
    assert hashes(tokens, start=None) == base
