"""The slots of the disk for the prefixes of one KV group.

Torch-free: it counts slots; `DiskStore` owns the files.
"""

from __future__ import annotations

from .host_slots import HostSlots
from .prefix_cache import Prefix


class DiskSlots(HostSlots):
    """Each slot stores one block of a prefix, as on the host: what was used longest ago goes first,
    and a tenant above its part displaces its own."""

    def touch(self, prefix: Prefix) -> None:
        """The prefix is used now, here or in another tier."""
        if (slot := self.find(prefix)) is not None:
            self.prefixes.touch(slot)

    def adopt(self, slot: int, prefix: Prefix) -> None:
        """Find a prefix that an earlier process has written. Call it in the order of age."""
        self.share([slot])
        self.prefixes.publish(prefix, slot)
        self.give_back([slot])
        if slot not in self.prefixes:
            self._pool.forget(slot)

    def discard(self, prefix: Prefix) -> None:
        """Do not find this prefix any more: its content is useless."""
        if (slot := self.find(prefix)) is not None:
            self.prefixes.forget(slot)
            self._pool.forget(slot)
