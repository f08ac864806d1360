"""Converts rows of golden sets, evaluations and gates to API views."""

from __future__ import annotations

import msgspec

from ...platform.evaluations.models import AliasGate, Evaluation, GoldenSetRow
from ..schemas.evaluations import (
    CaseView,
    EvaluationErrorView,
    EvaluationView,
    GateView,
    GoldenSetView,
    SliceView,
)


def golden_set_view(row: GoldenSetRow) -> GoldenSetView:
    return GoldenSetView(
        adapter=row.adapter_name,
        name=row.name,
        file=row.file_id,
        sha256=row.sha256,
        num_cases=row.num_cases,
        tolerance=row.tolerance,
        judge=row.judge,
        created_by=row.created_by,
        updated_at=row.updated_at,
    )


def gate_view(row: AliasGate) -> GateView:
    return GateView(
        adapter=row.adapter_name,
        alias=row.alias,
        golden_set=row.golden_set_name,
        tolerance=row.tolerance,
        created_by=row.created_by,
        updated_at=row.updated_at,
    )


def evaluation_view(row: Evaluation, *, with_cases: bool) -> EvaluationView:
    error = None
    if row.error_code is not None:
        error = EvaluationErrorView(row.error_code, row.error_message or "")
    return EvaluationView(
        id=row.id,
        adapter=row.adapter_name,
        golden_set=row.golden_set_name,
        sha256=row.sha256,
        num_cases=row.num_cases,
        tolerance=row.tolerance,
        judge=row.judge,
        version=row.version_number,
        against=row.against_number,
        base=row.base_name,
        status=row.state,
        is_regression=row.is_regression,
        slices=msgspec.convert(row.slices, list[SliceView] | None),
        batches=row.batches,
        error=error,
        created_by=row.created_by,
        created_at=row.created_at,
        started_at=row.started_at,
        ended_at=row.ended_at,
        cases=msgspec.convert(row.cases, list[CaseView] | None) if with_cases else msgspec.UNSET,
    )
