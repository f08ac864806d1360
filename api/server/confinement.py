"""The confinement of adapter examinations on this machine, as reported to operators."""

from __future__ import annotations

import asyncio
from functools import cache

import structlog

from ...adapters.confinement_probe import ConfinementReport, measure_confinement

log = structlog.get_logger(__name__)


@cache
def confinement_here() -> ConfinementReport:
    """The confinement of this process's children, measured once because the kernel determines
    it."""
    return measure_confinement()


async def check_confinement(*, is_required: bool) -> ConfinementReport:
    """Measure and log it. Raises ConfinementMissing if it is required and incomplete."""
    report = await asyncio.to_thread(confinement_here)
    if is_required:
        report.check()
    _log(report)
    return report


def _log(report: ConfinementReport) -> None:
    tell = log.warning if report.missing else log.info
    tell(
        "confinement",
        **{state.name: state.is_in_force for state in report.mechanisms},
        missing={state.name: state.detail for state in report.missing},
        possible=[act.act for act in report.possible],
    )
