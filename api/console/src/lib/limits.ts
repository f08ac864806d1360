/** A tenant's limits in words: each its name, what it counts, and how its figures are written. */

import type { components } from "../api/schema.ts";
import { bytes, count } from "./format.ts";

export type Limits = components["schemas"]["LimitsBody"];
export type LimitName = Exclude<keyof Limits, "period">;

export interface LimitText {
  name: LimitName;
  label: string;
  format: (value: number | null | undefined) => string;
}

export const LIMITS: readonly LimitText[] = [
  { name: "requests_per_minute", label: "Requests a minute", format: count },
  { name: "input_tokens_per_minute", label: "Prompt tokens a minute", format: count },
  { name: "output_tokens_per_minute", label: "Output tokens a minute", format: count },
  { name: "concurrent_requests", label: "Requests at once", format: count },
  { name: "tokens_per_period", label: "Tokens a period", format: count },
  { name: "trained_tokens_per_period", label: "Trained tokens a period", format: count },
  { name: "adapters", label: "Adapters", format: count },
  { name: "versions_per_adapter", label: "Versions of one adapter", format: count },
  { name: "stored_bytes", label: "Stored bytes", format: bytes },
  { name: "keys", label: "Keys", format: count },
  { name: "users", label: "Users", format: count },
];

/** The limits that a form's fields say; an empty field is no limit. */
export function limitsOf(form: FormData): Limits {
  const entries = LIMITS.map(({ name }) => {
    const text = String(form.get(name) ?? "").trim();
    return [name, text === "" ? null : Number(text)] as const;
  });
  return { ...Object.fromEntries(entries), period: form.get("period") === "day" ? "day" : "month" } as Limits;
}
