"""The errors of a request for generation or pooling before its answer starts."""

from __future__ import annotations

MODEL_ERRORS = (
    "model_not_found",
    "adapter_not_ready",
    "base_mismatch",
    "invalid_composition",
    "adapter_not_composable",
)
GRAMMAR_ERRORS = ("invalid_grammar", "grammar_not_served", "grammar_failed")
"""Errors of output constraints."""
REQUEST_ERRORS = (
    *MODEL_ERRORS,
    "proposer_not_served",
    "kv_policy_not_served",
    "slo_too_strict",
    "endless_not_served",
    "context_length_exceeded",
    "tenant_queue_full",
    "rate_limited",
    "too_many_requests_at_once",
    "insufficient_quota",
    "budget_exhausted",
    "adapter_loading",
    "adapter_load_failed",
    "adapter_too_large",
    "adapter_deleted",
    "adapter_quarantined",
    "request_quarantined",
    "numerical_error",
    "store_unavailable",
    "store_denied",
    "stale_extent",
    "engine_error",
    "engine_restarted",
    "engine_unavailable",
    "overloaded",
    "deadline_exceeded",
    "request_cancelled",
)
"""Errors of anything that the engine computes."""
GENERATION_ERRORS = (*REQUEST_ERRORS, "classifier_only")
CLASSIFICATION_ERRORS = (*REQUEST_ERRORS, "not_a_classifier")
SCORE_ERRORS = (*CLASSIFICATION_ERRORS, "not_a_scorer")
