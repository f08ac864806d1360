from __future__ import annotations

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.kv.host_slots import HostSlots
from loraplex.engine.kv.prefix_cache import CacheNamespace, Prefix


def test_every_slot_has_one_holder_and_comes_back() -> None:
    slots = HostSlots(4)
    first, second = slots.take(3), slots.take(1)
    assert sorted([*first, *second]) == [0, 1, 2, 3]
    assert slots.num_free == 0
    slots.check_integrity([*first, *second])
    slots.give_back(first)
    assert slots.num_free == 3
    slots.check_integrity(second)


@pytest.mark.parametrize("held", [[], [0, 0], [0, 1]])
def test_a_leaked_or_doubly_held_slot_is_found(held: list[int]) -> None:
    slots = HostSlots(4)
    assert slots.take(1) == [0]
    with pytest.raises(AssertionError, match="holders"):
        slots.check_integrity(held)


def test_a_prefix_is_stored_once() -> None:
    slots = HostSlots(4)
    slot = slots.store(_prefix(1))
    assert slot is not None
    assert slots.store(_prefix(1)) is None
    assert slots.find(_prefix(1)) == slot
    assert slots.num_stored == 1


def test_the_prefix_used_longest_ago_goes_first() -> None:
    slots = HostSlots(3)
    for number in (1, 2, 3):
        slots.store(_prefix(number))
    slots.store(_prefix(1))
    slots.store(_prefix(4))
    assert _stored(slots, 1, 2, 3, 4) == [1, 3, 4]


def test_a_prefix_that_a_sequence_takes_stays() -> None:
    slots = HostSlots(2)
    taken = slots.store(_prefix(1))
    assert taken is not None
    slots.share([taken])
    for number in (2, 3, 4):
        slots.store(_prefix(number))
    assert _stored(slots, 1, 2, 3, 4) == [1, 4]
    slots.check_integrity([taken])
    slots.give_back([taken])
    slots.check_integrity([])


def test_preempted_sequences_take_the_room_of_prefixes() -> None:
    slots = HostSlots(3)
    for number in (1, 2, 3):
        slots.store(_prefix(number))
    assert slots.num_free == 3
    held = slots.take(2)
    assert _stored(slots, 1, 2, 3) == [3]
    held += slots.take(1)
    assert slots.store(_prefix(4)) is None
    slots.check_integrity(held)


def test_a_tenant_beyond_its_part_displaces_its_own_prefixes() -> None:
    slots = HostSlots(4, tenant_cap=0.5)
    for number in (1, 2):
        slots.store(_prefix(number, "globex"))
    for number in (3, 4, 5, 6, 7):
        slots.store(_prefix(number, "acme"))
    assert _stored(slots, 1, 2, tenant="globex") == [1, 2]
    assert _stored(slots, 3, 4, 5, 6, 7) == [6, 7]


def test_a_tenant_alone_uses_all_slots_until_others_come() -> None:
    slots = HostSlots(4, tenant_cap=0.5)
    for number in (1, 2, 3, 4):
        slots.store(_prefix(number, "acme"))
    assert _stored(slots, 1, 2, 3, 4) == [1, 2, 3, 4]
    slots.store(_prefix(5, "globex"))
    assert _stored(slots, 1, 2, 3, 4) == [2, 3, 4]


def test_a_tenant_whose_prefixes_are_all_taken_displaces_nobody() -> None:
    slots = HostSlots(2, tenant_cap=0.5)
    own = slots.store(_prefix(1, "acme"))
    assert own is not None
    slots.share([own])
    slots.store(_prefix(2, "globex"))
    assert slots.store(_prefix(3, "acme")) is None
    assert _stored(slots, 2, tenant="globex") == [2]


def test_deleting_an_adapter_drops_its_prefixes_alone() -> None:
    slots = HostSlots(4)
    deleted, kept = AdapterKey("acme", "sha256:aa"), AdapterKey("acme", "sha256:bb")
    slots.store(_prefix(1, adapter=deleted))
    slots.store(_prefix(2, adapter=kept))
    slots.store(_prefix(3))
    assert len(slots.prefixes.drop_adapter(deleted)) == 1
    assert slots.find(_prefix(1, adapter=deleted)) is None
    assert slots.find(_prefix(2, adapter=kept)) is not None
    assert _stored(slots, 3) == [3]
    slots.check_integrity([])


def _prefix(number: int, tenant: str = "acme", adapter: AdapterKey | None = None) -> Prefix:
    namespace = CacheNamespace(tenant, "runtime", adapter)
    return Prefix(b"%d" % number, b"", (number,), namespace)


def _stored(slots: HostSlots, *numbers: int, tenant: str = "acme") -> list[int]:
    return [number for number in numbers if slots.find(_prefix(number, tenant)) is not None]
