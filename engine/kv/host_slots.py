"""Host memory for the blocks of one KV group: those of preempted sequences, and cached prefixes
whose device blocks were given to others.

Torch-free: it counts slots; the runner owns the tensors.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Sequence, Set

from ...adapters.ghosts import Ghosts
from .block_pool import BlockPool
from .prefix_cache import CachedBlocks, Prefix


class HostSlots:
    """Each slot stores one block. It is held by sequences, or free.

    A free slot may store a prefix until it is needed for something else; the prefix that was used
    longest ago goes first. So prefixes never take the room of preempted sequences.
    """

    def __init__(self, num_slots: int, *, tenant_cap: float = 1.0) -> None:
        """`tenant_cap`: the part of the slots beyond which a tenant's prefixes displace its own and
        not those of others."""
        self._pool = BlockPool(num_slots, has_null_block=False)
        self.prefixes = HostPrefixes(self._pool)
        self.num_stored = 0
        """Prefixes copied from the device."""
        self._tenant_cap = tenant_cap
        self.ghosts: Ghosts[bytes] = Ghosts()
        """The prefixes that were evicted last, and are nowhere else; sizes in slots."""
        self.filling: dict[int, Prefix] = {}
        """Slots that are held until a prefix is copied into them, in the background."""
        self.filling_keys: set[bytes] = set()
        """The keys of these prefixes."""

    @property
    def num_slots(self) -> int:
        """Those in use now."""
        return self._pool.num_usable

    @property
    def num_withdrawn(self) -> int:
        """Slots whose memory others have."""
        return self._pool.num_withdrawn

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    def take(self, count: int) -> list[int]:
        slots = self._pool.allocate(count)
        assert slots is not None, "the caller asks num_free first"
        return slots

    def share(self, slots: Iterable[int]) -> None:
        """Add a holder to slots that store prefixes."""
        self._pool.share(slots)

    def give_back(self, slots: Sequence[int]) -> None:
        """Release one hold on each slot, in a sequence's order."""
        self._pool.free(slots)

    def withdraw(self, count: int) -> list[int]:
        """Take free slots out of use, those that would be reused first; there must be as many, and
        none may be filling."""
        return self._pool.withdraw(count)

    def restore(self, count: int) -> None:
        """Take withdrawn slots into use again; there must be as many."""
        self._pool.restore(count)

    def find(self, prefix: Prefix) -> int | None:
        """The slot that stores this prefix."""
        return self.prefixes.find(prefix)

    def store(self, prefix: Prefix) -> int | None:
        """The slot to which the block of this prefix is to be copied; None: it is stored already,
        or there is no room."""
        if (stored := self.find(prefix)) is not None:
            self.prefixes.touch(stored)
            return None
        if not self._make_room(prefix.namespace.tenant_id):
            return None
        (slot,) = self.take(1)
        self.prefixes.publish(prefix, slot)
        self.give_back([slot])
        self.num_stored += 1
        return slot

    def is_filling(self, prefix: Prefix) -> bool:
        return prefix.key in self.filling_keys

    def reserve(self, prefix: Prefix) -> int | None:
        """Hold a slot for a prefix that is copied in the background; None: there is no room.

        The prefix is found once it is `filled`."""
        if not self._make_room(prefix.namespace.tenant_id):
            return None
        (slot,) = self.take(1)
        self.filling[slot] = prefix
        self.filling_keys.add(prefix.key)
        return slot

    def filled(self, slot: int, *, is_right: bool) -> None:
        """The copy into this slot has ended. If it is right, the prefix is found from now on."""
        prefix = self.filling.pop(slot)
        self.filling_keys.remove(prefix.key)
        if is_right:
            self.prefixes.publish(prefix, slot)
        self.give_back([slot])
        if slot not in self.prefixes:
            self._pool.forget(slot)

    def _make_room(self, tenant_id: str) -> bool:
        """Choose the slot that is reused next; False: there is none for this tenant."""
        if not self.num_free:
            return False
        displaced = self.prefixes.prefix_of(self._pool.next_free)
        if displaced is None or displaced.namespace.tenant_id == tenant_id:
            return True
        own = self.prefixes.slots_of(tenant_id)
        if len(own) < max(int(self._tenant_cap * self.num_slots), 1):
            return True
        for slot in own:
            if not self._pool.ref_count(slot):
                self._pool.forget(slot)
                return True
        return False

    def check_integrity(self, held: Iterable[int]) -> None:
        """Assert that every slot is free or has exactly these holders."""
        self._pool.check_integrity()
        self.prefixes.check_integrity()
        holders = Counter((*held, *self.filling))
        for slot in range(self._pool.num_blocks):
            count = self._pool.ref_count(slot)
            assert count == holders[slot], (
                f"host slot {slot} counts {count} holders, has {holders[slot]}"
            )


class HostPrefixes(CachedBlocks):
    """The prefixes that the slots store, of each tenant in the order of their last use."""

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool)
        self._slots_of: defaultdict[str, OrderedDict[int, None]] = defaultdict(OrderedDict)

    def slots_of(self, tenant_id: str) -> Set[int]:
        """The slots with this tenant's prefixes, that used longest ago first."""
        own = self._slots_of.get(tenant_id)
        return own.keys() if own else set()

    def touch(self, slot: int) -> None:
        """The prefix in this slot is used now."""
        self._slots_of[self._prefixes[slot].namespace.tenant_id].move_to_end(slot)
        self._pool.touch(slot)

    def publish(self, prefix: Prefix, block_id: int) -> int:
        kept = super().publish(prefix, block_id)
        if block_id in self:
            self._slots_of[prefix.namespace.tenant_id][block_id] = None
        return kept

    def forget(self, block_id: int) -> bool:
        prefix = self.prefix_of(block_id)
        if prefix is not None:
            tenant_id = prefix.namespace.tenant_id
            del self._slots_of[tenant_id][block_id]
            if not self._slots_of[tenant_id]:
                del self._slots_of[tenant_id]
        return super().forget(block_id)

    def check_integrity(self) -> None:
        super().check_integrity()
        slots = {slot: tenant for tenant, own in self._slots_of.items() for slot in own}
        assert slots == {
            slot: prefix.namespace.tenant_id for slot, prefix in self._prefixes.items()
        }, "tenants and their slots disagree"
