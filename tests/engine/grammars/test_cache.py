from __future__ import annotations

from loraplex.engine.grammars.cache import BASE_BYTES, BYTES_PER_CHARACTER, GrammarCache, GrammarKey
from loraplex.engine.grammars.spec import GrammarKind, GrammarSpec


def key(text: str, tenant_id: str = "acme") -> GrammarKey:
    return GrammarKey(tenant_id, GrammarSpec(GrammarKind.REGEX, text))


def test_a_grammar_is_found_by_its_tenant_and_what_it_says() -> None:
    cache: GrammarCache[int] = GrammarCache(1 << 30)
    cache.put(key("a"), 1)
    assert cache.get(key("a")) == 1
    assert cache.get(key("a", "other")) is None
    assert cache.get(GrammarKey("acme", GrammarSpec(GrammarKind.LARK, "a"))) is None
    cache.drop(key("a"))
    cache.drop(key("a"))
    assert cache.get(key("a")) is None


def test_the_least_recently_used_go_when_the_bytes_are_spent() -> None:
    each = BASE_BYTES + BYTES_PER_CHARACTER
    cache: GrammarCache[int] = GrammarCache(3 * each)
    for number, text in enumerate("abc"):
        cache.put(key(text), number)
    assert cache.get(key("a")) == 0
    cache.put(key("d"), 3)
    assert [cache.get(key(text)) for text in "abcd"] == [0, None, 2, 3]
    cache.put(key("d"), 4)
    assert len(cache) == 3
    cache.put(key("x" * (1 + each // BYTES_PER_CHARACTER)), 5)
    assert len(cache) < 3
    assert cache.get(key("a")) is None


def test_what_is_larger_than_the_cache_is_not_kept() -> None:
    cache: GrammarCache[int] = GrammarCache(BASE_BYTES)
    cache.put(key("a"), 1)
    assert len(cache) == 0
    cache.put(key("b"), 1)
    assert len(cache) == 0
