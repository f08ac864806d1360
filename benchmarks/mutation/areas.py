"""The areas in which a missed mistake harms tenants, and the tests that stand for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Area(NamedTuple):
    """Globs below the root of the repository."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


AREAS = {
    "auth": Area(
        (
            *("api/http/auth.py", "api/http/browser.py", "api/routes/sessions.py"),
            *("api/control_plane/auth_cache.py", "api/control_plane/sign_in.py"),
            *("platform/accounts/*.py", "platform/keys/*.py", "platform/operators/*.py"),
        ),
        (
            *("tests/platform/test_a[cu]*.py", "tests/platform/test_[gkosu]*.py"),
            *("tests/api/test_a[cu]*.py", "tests/api/test_re[fv]*.py", "tests/api/test_si*.py"),
            *("tests/api/test_database_watch.py", "tests/api/test_isolation*.py"),
            *("tests/api/test_identity.py", "tests/api/test_last_seen.py", "tests/console/*.py"),
        ),
    ),
    "tenancy": Area(
        (
            *("platform/tenants/*.py", "platform/users/*.py", "platform/pinned_statements.py"),
            *("platform/row_security.py", "platform/sessions.py", "platform/adapters/lookup.py"),
            *("engine/scheduling/tenant_*.py", "engine/scheduling/fairness.py"),
            *("engine/scheduling/shares.py", "api/control_plane/tenant_*.py"),
            *("api/inference/served_models.py", "adapters/tenant_*.py"),
        ),
        (
            *("tests/platform/*.py", "tests/engine/test_[fst]*.py", "tests/adapters/test_t*.py"),
            *("tests/api/test_[ist]*.py", "tests/api/test_access.py"),
        ),
    ),
    "quotas": Area(
        ("platform/quotas/*.py", "api/inference/admission.py", "api/http/limit_headers.py"),
        (
            *("tests/platform/test_[qru]*.py", "tests/api/test_admission.py"),
            *("tests/api/test_[qlu]*.py", "tests/api/test_metering.py"),
        ),
    ),
    "ledger": Area(
        (
            *("platform/usage/*.py", "platform/requests/*.py", "api/inference/metering.py"),
            *("api/inference/ledger_writer.py", "platform/writer_queue.py"),
            *("engine/token_journal.py",),
        ),
        (
            *("tests/platform/test_[dou]*.py", "tests/engine/test_token_journal.py"),
            *("tests/api/test_[mlru]*.py", "tests/api/test_exact_usage.py"),
        ),
    ),
    "leases": Area(
        (
            *("adapters/leases.py", "adapters/claims.py", "adapters/retirements.py"),
            *("engine/scheduling/adapter_leases.py", "engine/scheduling/drains.py"),
            *("api/control_plane/leases.py", "api/control_plane/jobs.py", "platform/jobs/*.py"),
            *("api/adapters/deletions.py", "platform/adapters/wishes.py"),
        ),
        (
            *("tests/adapters/test_manager*.py", "tests/engine/test_[ds]*.py"),
            *("tests/simulation/*.py", "tests/platform/test_[jw]*.py"),
            *("tests/api/test_[djpr]*.py", "tests/api/test_two_servers.py"),
        ),
    ),
    "digests": Area(
        (
            *("adapters/canonical.py", "adapters/identity.py", "adapters/reading.py"),
            *("adapters/safetensors_header.py", "adapters/disk_cache.py", "adapters/fetcher.py"),
            *("adapters/store/local.py", "engine/checkpoint/base_identity.py"),
            *("engine/checkpoint/weight_digests.py", "api/adapters/attestation.py"),
        ),
        (
            *("tests/adapters/*.py", "tests/engine/test_[cb]*.py", "tests/platform/test_c*.py"),
            *("tests/api/test_[apq]*.py", "tests/api/test_identity.py"),
        ),
    ),
    "masks": Area(
        (
            *("engine/execution/grammar_masks.py", "engine/execution/sampler.py"),
            *("engine/grammars/matcher.py", "engine/grammars/compiler.py"),
            *("engine/model/attention_windows.py", "engine/model/inputs.py"),
            *("engine/next_tokens.py", "kernels/attention.py", "kernels/lora_batch.py"),
        ),
        (
            *("tests/engine/*.py", "tests/engine/grammars/*.py", "tests/kernels/*.py"),
            *("tests/api/test_s*.py",),
        ),
    ),
    "preemption": Area(
        (
            *("engine/scheduling/preemption.py", "engine/scheduling/running.py"),
            *("engine/scheduling/scheduler.py", "engine/scheduling/batch.py"),
            *("engine/scheduling/swap_costs.py", "engine/kv/*.py", "engine/request_lifecycle.py"),
            *("engine/scheduling/admission_planner.py", "engine/scheduling/waiting.py"),
        ),
        ("tests/engine/test_*.py", "tests/simulation/*.py"),
    ),
    "drafts": Area(
        (
            *("engine/speculation/[!m]*.py", "engine/speculation/medusa.py"),
            *("engine/draft.py", "engine/model/layer_features.py"),
        ),
        (
            *("tests/engine/speculation/*.py", "tests/engine/test_[clsv]*.py"),
            *("tests/simulation/*.py", "tests/api/test_speculation.py"),
        ),
    ),
    "idempotency": Area(
        ("platform/idempotency/*.py", "api/http/idempotency.py"),
        (
            *("tests/platform/test_idempotency.py", "tests/api/test_idempotency.py"),
            *("tests/api/test_recovery.py", "tests/api/test_shared_upkeep.py"),
        ),
    ),
}


def matching(root: Path, globs: tuple[str, ...]) -> Iterator[Path]:
    """The files that match, once each, in a fixed order; none of an empty module."""
    found = {path for glob in globs for path in root.glob(glob)}
    for path in sorted(found):
        if path.suffix == ".py" and path.name not in {"__init__.py", "conftest.py"}:
            yield path
