"""Failpoints: named places where a test can end the process, as a crash would.

They are inert unless the environment names one when the process starts. Each lies between two
effects that a crash can separate, such as storing bytes and acknowledging them, or writing an
object and the row that names it.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "LORAPLEX_FAILPOINT"

FAILPOINTS = (
    # an upload
    "uploads.opened",
    "uploads.written",
    "uploads.acknowledged",
    # a commit
    "pushes.validating",
    "pushes.examined",
    "pushes.stored",
    "pushes.created",
    "pushes.accepted",
    "attestation.begun",
    "attestation.measured",
    "attestation.settled",
    # a deletion
    "deletions.begun",
    "deletions.evicted",
    "deletions.forgotten",
    "deletions.removed",
    "deletions.finished",
    # a garbage collection
    "garbage.abandoned",
    "garbage.listed",
    "garbage.removed",
)
"""Every failpoint in the order in which an adapter's life passes them."""

BATCH_FAILPOINTS = (
    # a file
    "files.stored",
    "files.removed",
    # a batch
    "batches.checked",
    "batches.begun",
    "batches.answered",
    "batches.kept",
    "batches.closed",
    "batches.stored",
    "batches.ended",
)
"""The same of a file and a batch."""

TUNING_FAILPOINTS = ("tuning.begun", "tuning.trained", "tuning.published", "tuning.ended")
"""The same of a fine-tuning job."""
EVALUATION_FAILPOINTS = (
    "evaluations.begun",
    "evaluations.stored",
    "evaluations.asked",
    "evaluations.ended",
)
"""The same of an evaluation."""
TENANT_FAILPOINTS = (
    "tenants.hidden",
    "tenants.quiet",
    "tenants.emptied",
    "tenants.announced",
    "tenants.forgotten",
    "tenants.erased",
    "tenants.deleted",
)
"""The same of the deletion of a tenant."""

WEBHOOK_FAILPOINTS = ("webhooks.claimed", "webhooks.sent", "webhooks.recorded")
"""The same of the delivery of an event."""


def failpoint(name: str) -> None:
    """End the process immediately, like `kill -9`, if this failpoint is armed."""
    if name == os.environ.get(VARIABLE):
        os.kill(os.getpid(), signal.SIGKILL)
