"""The adapters that operators or tenants have pinned to the device.

Pins may use at most a part of the arena, so that adapters without a pin have room. They take effect
in the order in which they were set, as long as their sizes fit. A pin that does not fit is skipped,
and its adapter is treated like any other. An adapter's size is known only once it has been in
memory; until then its pin is in effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .identity import AdapterKey

MAX_PINNED_PART = 0.5
"""The maximum part of the arena for active pins."""


class Pins:
    """All pins, and the active ones."""

    def __init__(self, capacity: int) -> None:
        """`capacity` of the arena, in elements."""
        self._capacity = capacity
        self._keys: list[AdapterKey] = []
        self._sizes: dict[AdapterKey, int] = {}
        self._in_force: dict[AdapterKey, None] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._in_force

    def __iter__(self) -> Iterator[AdapterKey]:
        return iter(list(self._in_force))

    def set(self, keys: Iterable[AdapterKey]) -> None:
        """Replace all pins; the most important first."""
        self._keys = list(dict.fromkeys(keys))
        self._sizes = {key: size for key, size in self._sizes.items() if key in set(self._keys)}
        self._choose()

    def resize(self, capacity: int) -> None:
        """The arena has another capacity."""
        self._capacity = capacity
        self._choose()

    def remove(self, key: AdapterKey) -> None:
        """The adapter was deleted."""
        if key in self._keys:
            self._keys.remove(key)
            self._sizes.pop(key, None)
            self._choose()

    def note_size(self, key: AdapterKey, num_elements: int) -> None:
        if key in self._in_force and self._sizes.get(key) != num_elements:
            self._sizes[key] = num_elements
            self._choose()

    def _choose(self) -> None:
        left = int(self._capacity * MAX_PINNED_PART)
        self._in_force = {}
        for key in self._keys:
            size = self._sizes.get(key, 0)
            if size <= left:
                left -= size
                self._in_force[key] = None
