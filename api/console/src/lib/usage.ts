/** What was used, ready to be drawn and listed. */

import type { Answer } from "../api/client.ts";
import { sumOfMoney } from "./money.ts";

export type UsageSum = Answer<"get", "/admin/usage">["data"][number];
export type Group = "day" | "tenant" | "adapter" | "version";
export type Metric = "tokens" | "requests" | "cold_loads" | "byte_seconds";

export const METRICS: readonly (readonly [Metric, string])[] = [
  ["tokens", "Tokens"], ["requests", "Requests"], ["cold_loads", "Cold loads"], ["byte_seconds", "Byte-seconds"],
];

export interface DailyFigures {
  label: string;
  values: number[];
}

/** A metric's figures for each of `days`, 0 where nothing was used. */
export function daily(metric: Metric, days: string[], sums: UsageSum[]): DailyFigures[] {
  const byDay = new Map(sums.map((sum) => [sum.day ?? "", sum]));
  const figures = (label: string, read: (sum: UsageSum) => number): DailyFigures => ({
    label,
    values: days.map((day) => {
      const sum = byDay.get(day);
      return sum === undefined ? 0 : read(sum);
    }),
  });
  switch (metric) {
    case "tokens":
      return [
        figures("Generated", (sum) => sum.completion_tokens),
        figures("Prompt, computed", (sum) => sum.prompt_tokens - sum.cached_tokens),
        figures("Prompt, from the cache", (sum) => sum.cached_tokens),
      ];
    case "requests": return [figures("Requests", (sum) => sum.requests)];
    case "cold_loads": return [figures("Requests that waited for weights", (sum) => sum.cold_loads)];
    case "byte_seconds": return [figures("Bytes on the device × seconds", (sum) => sum.residency_byte_seconds)];
  }
}

/** All sums together. */
export function total(sums: UsageSum[]): UsageSum {
  const add = (read: (sum: UsageSum) => number): number => sums.reduce((most, sum) => most + read(sum), 0);
  return {
    requests: add((sum) => sum.requests),
    prompt_tokens: add((sum) => sum.prompt_tokens),
    cached_tokens: add((sum) => sum.cached_tokens),
    completion_tokens: add((sum) => sum.completion_tokens),
    cold_loads: add((sum) => sum.cold_loads),
    residency_byte_seconds: add((sum) => sum.residency_byte_seconds),
    trained_tokens: add((sum) => sum.trained_tokens),
    amount: sumOfMoney(sums.map((sum) => sum.amount)),
    currency: sums[0]?.currency ?? null,
    step_seconds: add((sum) => sum.step_seconds),
    kv_byte_seconds: add((sum) => sum.kv_byte_seconds),
    loaded_bytes: add((sum) => sum.loaded_bytes),
    fetched_bytes: add((sum) => sum.fetched_bytes),
    cost: sumOfMoney(sums.map((sum) => sum.cost ?? "0")),
    margin: sumOfMoney(sums.map((sum) => sum.margin ?? "0")),
  };
}
