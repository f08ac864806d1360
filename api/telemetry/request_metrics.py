"""The metrics of requests: over HTTP, of their sequences, and metered tokens."""

from __future__ import annotations

from ...engine.messages import RequestStarted
from ...engine.scheduling.tenant_labels import TenantLabels
from .metric_registry import MetricRegistry

# From a GPU that answers at once to a CPU with a long prompt.
_LATENCY_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
_GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_TOKEN_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


class HttpMetrics:
    """Every request, generations or not."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._requests = registry.counter(
            "http_requests",
            "HTTP requests; `code` is the error code.",
            ("method", "route", "status", "code"),
        )
        self._seconds = registry.histogram(
            "http_request_seconds",
            "Time from arrival to the last byte of the response.",
            _LATENCY_BUCKETS,
            ("route",),
        )

    def observe(self, *, method: str, route: str, status: int, code: str, seconds: float) -> None:
        self._requests.labels(method, route, str(status), code).inc()
        self._seconds.labels(route).observe(seconds)


class BatchMetrics:
    """The lines of batches."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._lines = registry.counter(
            "batch_lines",
            "Lines of batches whose results this server has kept; `outcome` is `completed` or "
            "`failed`.",
            ("outcome",),
        )

    def note_line(self, *, is_success: bool) -> None:
        self._lines.labels("completed" if is_success else "failed").inc()


class TuningMetrics:
    """Fine-tuning jobs."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._jobs = registry.counter(
            "tuning_jobs",
            "Fine-tuning jobs that have ended on this server; `outcome` is `succeeded` or "
            "`failed`.",
            ("outcome",),
        )
        self._tokens = registry.counter(
            "tuning_tokens", "Tokens that this server has trained on, each step's once.", ()
        )

    def note_job(self, outcome: str) -> None:
        self._jobs.labels(outcome).inc()

    def note_tokens(self, num_tokens: int) -> None:
        self._tokens.inc(num_tokens)


class WebhookMetrics:
    """The attempts at deliveries."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._attempts = registry.counter(
            "webhook_attempts",
            "Attempts of this server to deliver an event to a webhook; `outcome` is `delivered`, "
            "`broken_off` if the egress process ended, or why it failed.",
            ("outcome",),
        )

    def note(self, outcome: str) -> None:
        self._attempts.labels(outcome).inc()


class SequenceMetrics:
    """The token rates and the ends of sequences."""

    def __init__(self, registry: MetricRegistry) -> None:
        self.first_token_seconds = registry.histogram(
            "time_to_first_token_seconds",
            "TTFT: time from arrival to a sequence's first token.",
            _LATENCY_BUCKETS,
        )
        self.token_gap_seconds = registry.loop_histogram(
            "inter_token_latency_seconds",
            "ITL: time between a sequence's token events; tokens accepted in one step are one "
            "event.",
            _GAP_BUCKETS,
        )
        self.output_token_seconds = registry.histogram(
            "time_per_output_token_seconds",
            "TPOT: mean time per token of a sequence after its first.",
            _GAP_BUCKETS,
        )
        self.end_to_end_seconds = registry.histogram(
            "end_to_end_seconds", "Time from arrival to the end of a sequence.", _LATENCY_BUCKETS
        )
        self.finished = registry.counter(
            "sequences", "Finished sequences: stop, length, aborted, error.", ("finish_reason",)
        )


class ObjectiveMetrics:
    """The sequences that met their service level objective, and those that did not."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._sequences = registry.counter(
            "slo_sequences",
            "Sequences by their service level objective, if they have one: `met`, the first target "
            "that was missed (`ttft`, or `itl` in the mean), `refused` because the server was "
            "full, or `failed` by an error of the server. `set_by` is who set the targets: "
            "`request`, `tenant` or `server`. Aborted sequences do not count, nor do those without "
            "a TTFT target: lines of batches, prompts without output, the further sequences of a "
            "call.",
            ("result", "set_by"),
        )

    def note(self, result: str, set_by: str) -> None:
        self._sequences.labels(result, set_by).inc()


class StartMetrics:
    """The waits of a request before its first step."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._queue_seconds = registry.histogram(
            "queue_seconds",
            "Time from arrival in the engine to the first step, including the adapter wait.",
            _LATENCY_BUCKETS,
        )
        self._adapter_wait_seconds = registry.histogram(
            "adapter_wait_seconds",
            "The part of the queue time in which only the adapter was missing.",
            _LATENCY_BUCKETS,
        )
        self._adapter_tier = registry.counter(
            "adapter_tier_hits",
            "Requests by the tier in which their adapter was: device, host, disk, store.",
            ("tier",),
        )

    def observe(self, started: RequestStarted) -> None:
        self._queue_seconds.observe(started.queue_seconds)
        if started.adapter_tier is not None:
            self._adapter_tier.labels(started.adapter_tier.value).inc()
            self._adapter_wait_seconds.observe(started.adapter_wait_seconds)


class UsageMetrics:
    """Metered tokens, and what requests have used of the engine."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._tenants = TenantLabels()
        self._tokens = registry.counter(
            "tokens",
            "Metered tokens, `prompt` and `completion`, by tenant slug.",
            ("tenant", "kind"),
        )
        self._step_seconds = registry.counter(
            "tenant_step_seconds",
            "Shares of the engine's steps, by the slug of the tenant whose requests have ended.",
            ("tenant",),
        )
        self._kv_byte_seconds = registry.counter(
            "tenant_kv_byte_seconds",
            "Bytes of KV blocks on the device × time, by the slug of the tenant whose requests "
            "have ended.",
            ("tenant",),
        )
        self._loaded_bytes = registry.counter(
            "tenant_loaded_bytes",
            "Bytes of adapters that were copied to the device for requests, by tenant slug.",
            ("tenant",),
        )
        self._prompt_tokens = registry.histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", _TOKEN_BUCKETS
        )
        self._completion_tokens = registry.histogram(
            "request_completion_tokens", "Output tokens of a request.", _TOKEN_BUCKETS
        )
        self._budget_alerts = registry.counter(
            "budget_alerts",
            "Alerts of budgets that this server announced; the audit log has each as "
            "`budget.alert`.",
        )

    def observe_budget_alert(self) -> None:
        self._budget_alerts.inc()

    def observe(self, tenant: str, *, prompt_tokens: int, completion_tokens: int) -> None:
        label = self._tenants[tenant]
        self._tokens.labels(label, "prompt").inc(prompt_tokens)
        self._tokens.labels(label, "completion").inc(completion_tokens)
        self._prompt_tokens.observe(prompt_tokens)
        self._completion_tokens.observe(completion_tokens)

    def observe_resources(
        self, tenant: str, *, step_seconds: float, kv_byte_seconds: int, loaded_bytes: int
    ) -> None:
        label = self._tenants[tenant]
        self._step_seconds.labels(label).inc(step_seconds)
        self._kv_byte_seconds.labels(label).inc(kv_byte_seconds)
        self._loaded_bytes.labels(label).inc(loaded_bytes)
