/** Days in UTC, as the ledger counts them. */

import type { components } from "../api/schema.ts";

export type DayRow = components["schemas"]["UsageView"];

const DAY_MS = 86_400_000;

/** The last `amount` days as YYYY-MM-DD, today last. */
export function days(amount: number, now: number = Date.now()): string[] {
  return Array.from({ length: amount }, (_, i) =>
    new Date(now - (amount - 1 - i) * DAY_MS).toISOString().slice(0, 10),
  );
}

/** A figure of `rows` for each day of `calendar`; a day without a row has none. */
export function sumByDay(
  rows: readonly DayRow[],
  calendar: readonly string[],
  name: "requests" | "prompt_tokens" | "completion_tokens" | "cold_loads",
): number[] {
  const sums = new Map<string, number>();
  for (const row of rows) {
    if (row.day) sums.set(row.day, (sums.get(row.day) ?? 0) + row[name]);
  }
  return calendar.map((day) => sums.get(day) ?? 0);
}
