"""A budget that moves the border at every chance."""

from __future__ import annotations

from loraplex.engine.memory.border import Border
from loraplex.engine.memory.budget import Budget
from support.engine import LocalEngine


class Swinging(Budget):
    """Wants the border as far at one end as it goes, then at the other."""

    wants_more_for_adapters = True

    def is_due(self, now: float) -> bool:
        return True

    def _direction(self) -> int:
        bounds = self.bounds
        if self.adapter_bytes + bounds.step > bounds.most_adapters:
            self.wants_more_for_adapters = False
        if self.adapter_bytes - bounds.step < bounds.least_adapters:
            self.wants_more_for_adapters = True
        return 1 if self.wants_more_for_adapters else -1


def swing(engine: LocalEngine) -> Border:
    """Move this engine's border, which must not be fixed, at every chance."""
    parts = engine.core.parts
    border, bounds = parts.border, parts.plan.border
    assert border is not None
    assert bounds is not None
    border._budget = Swinging(bounds, parts.tiers.manager.arena_bytes, parts.clock())
    return border
