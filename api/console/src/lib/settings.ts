/** The server's settings in words: their groups, and their values in units of people. */

import { bytes, duration, plural } from "./format.ts";

export interface Setting {
  name: string;
  value: string | null;
  flag: string | null;
  variable: string | null;
  description: string;
  unset: string | null;
}

/** The groups in their order, with the settings of each; one that no group names belongs to the last. */
const GROUPS: readonly (readonly [string, readonly string[]])[] = [
  ["Base model", [
    "model", "served_model_name", "dtype", "device", "quantization", "quantization_group_size", "quantization_exclude",
    "embedding_quantization", "max_model_len", "generation_config", "tool_format", "reasoning_parser",
  ]],
  ["Memory and KV cache", [
    "memory_bytes", "arena_bytes", "kv_cache_bytes", "host_cache_bytes", "swap_bytes", "kv_dtype", "kv_policy", "kv_block_size",
    "prefix_caching", "attention_window", "attention_sinks",
  ]],
  ["Batches and speed", [
    "max_num_seqs", "max_num_batched_tokens", "target_itl_ms", "target_ttft_ms", "async_scheduling", "enforce_eager", "num_threads",
    "num_loader_threads", "loader_duty",
  ]],
  ["Speculative decoding", ["speculation", "max_draft_tokens", "adapter_draft_heads", "acceptance"]],
  ["Queues and fairness", ["max_queued", "max_queued_per_tenant", "tenant_cap", "adapter_wait_seconds", "max_pins"]],
  ["Adapters", ["max_full_matrix_mib", "require_confinement", "reference_base", "max_reference_kl"]],
  ["Ranks, stages and fleet", [
    "tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel", "num_local_ranks", "rank_address", "rank_secret",
    "fleet_certificates", "replica_addresses",
  ]],
  ["Storage", [
    "data_dir", "database", "store", "disk_cache_bytes", "disk_reserve_bytes", "staging_bytes", "staging_tenant_bytes",
    "stale_seconds",
  ]],
  ["Retention", ["request_log_days", "upload_days", "file_days", "response_days", "sample_days"]],
  ["Access and connections", [
    "secret", "secret_previous", "allowed_hosts", "trusted_proxies", "ssl_certfile", "ssl_keyfile", "reader_patience_seconds",
    "drain_seconds",
  ]],
  ["Sign-in through a provider", [
    "oidc_issuer", "oidc_client_id", "oidc_client_secret", "oidc_name", "oidc_scopes", "oidc_groups_claim", "oidc_roles",
  ]],
  ["Webhooks", ["webhook_hosts", "webhook_networks"]],
  ["Fine-tuning", ["tuning", "max_tuning_jobs"]],
  ["Logs, metrics and traces", ["log_level", "log_format", "metrics_token", "metrics_networks", "vllm_metrics", "otel"]],
];
const OTHERS = "Other settings";

/** The settings by group; groups without any are left out. */
export function grouped<T extends Setting>(settings: readonly T[]): [string, T[]][] {
  const places = new Map(GROUPS.flatMap(([title, fields], i) => fields.map((field, j) => [field, { title, place: i * 100 + j }] as const)));
  const found = new Map<string, T[]>([...GROUPS.map(([title]) => title), OTHERS].map((title) => [title, []]));
  const place = (setting: T): number => places.get(fieldOf(setting))?.place ?? Infinity;
  for (const setting of settings.toSorted((one, other) => compare(place(one), place(other)))) {
    found.get(places.get(fieldOf(setting))?.title ?? OTHERS)?.push(setting);
  }
  return [...found].filter(([, members]) => members.length > 0);
}

function compare(one: number, other: number): number {
  return one === other ? 0 : one - other;
}

/** Whether the setting is what `wanted` asks for, by any of its names or its meaning. */
export function isFound(setting: Setting, wanted: string): boolean {
  const { name, flag, variable, description } = setting;
  return `${titleOf(setting)} ${name} ${flag ?? ""} ${variable ?? ""} ${description}`.toLowerCase().includes(wanted.trim().toLowerCase());
}

/** The name in words, without its unit. */
export function titleOf(setting: Pick<Setting, "name">): string {
  const field = fieldOf(setting);
  const words = TITLES[field] ?? field.replace(/_(bytes|mib|seconds|ms|days)$/, "").split("_").map((word) => WORDS[word] ?? word).join(" ");
  return words.charAt(0).toUpperCase() + words.slice(1);
}

/** Of settings whose name alone says too little. */
const TITLES: Readonly<Record<string, string>> = {
  acceptance: "acceptance of drafts", adapter_wait_seconds: "maximum wait for an adapter", arena_bytes: "adapter arena",
  drain_seconds: "time to drain", enforce_eager: "without CUDA graphs", file_days: "files and batches", host_cache_bytes: "adapters in host memory",
  loader_duty: "CPU share of loading", max_full_matrix_mib: "largest full matrices", max_pins: "pins of a tenant", max_queued: "queued requests",
  max_queued_per_tenant: "queued requests of a tenant", memory_bytes: "memory limit", metrics_networks: "networks that read metrics",
  num_loader_threads: "loader threads", num_local_ranks: "ranks on this host", num_threads: "CPU threads", otel: "OpenTelemetry spans",
  reader_patience_seconds: "patience with slow readers", response_days: "stored responses", sample_days: "samples of requests",
  secret_previous: "previous secrets",
  staging_bytes: "space for uploads", staging_tenant_bytes: "space for uploads of a tenant", stale_seconds: "without the database",
  swap_bytes: "swap space", target_itl_ms: "target inter-token latency", target_ttft_ms: "target time to first token",
  tenant_cap: "largest share of a tenant", upload_days: "closed uploads", vllm_metrics: "metrics under vLLM's names",
};

const WORDS: Readonly<Record<string, string>> = {
  oidc: "OIDC", ssl: "TLS", certfile: "certificate", keyfile: "key", id: "ID",
  max: "maximum", num: "number of", len: "length", seqs: "sequences", dir: "folder", kv: "KV", kl: "KL divergence", dtype: "data type", config: "configuration",
};

/** The value in units of people; null: it is not set. */
export function valueOf({ name, value }: Pick<Setting, "name" | "value">): string | null {
  if (value === null) return null;
  if (value === "true") return "on";
  if (value === "false") return "off";
  const field = fieldOf({ name });
  const amount = Number(value);
  if (value.trim() === "" || !Number.isFinite(amount)) return value;
  if (field.endsWith("_bytes")) return bytes(amount);
  if (field.endsWith("_mib")) return bytes(amount * 2 ** 20);
  if (field.endsWith("_seconds")) return Number.isInteger(amount) && amount < 60 ? `${amount} s` : duration(amount * 1000);
  if (field.endsWith("_ms")) return duration(amount);
  if (field.endsWith("_days")) return plural(amount, "day");
  if (field === "tenant_cap" || field === "loader_duty") return `${Math.round(amount * 1000) / 10} %`;
  return Number.isInteger(amount) ? amount.toLocaleString("en") : value;
}

/** The field's own name, without what stands before it in the list. */
function fieldOf({ name }: Pick<Setting, "name">): string {
  return name.replace(/^(engine\.|LORAPLEX_)/, "").toLowerCase();
}
