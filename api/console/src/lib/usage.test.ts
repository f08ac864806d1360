import assert from "node:assert/strict";
import { test } from "node:test";

import { METRICS, daily, total, type UsageSum } from "./usage.ts";

const sum = (day: string, factor: number): UsageSum => ({
  day,
  requests: factor,
  prompt_tokens: 10 * factor,
  cached_tokens: 4 * factor,
  completion_tokens: 3 * factor,
  cold_loads: 2 * factor,
  residency_byte_seconds: 100 * factor,
  trained_tokens: 7 * factor,
  amount: `${factor}.50`,
  currency: "EUR",
  step_seconds: 2.5 * factor,
  kv_byte_seconds: 1000 * factor,
  loaded_bytes: 30 * factor,
  fetched_bytes: 20 * factor,
  cost: `${2 * factor}.00`,
  margin: `-${factor - 1}.50`,
});
const SUMS = [sum("2026-11-20", 1), sum("2026-11-22", 5)];
const DAYS = ["2026-11-20", "2026-11-21", "2026-11-22"];

test("the parts of a day's tokens add up to what was charged", () => {
  const parts = daily("tokens", DAYS, SUMS);
  const tokens = DAYS.map((_, day) => parts.reduce((all, part) => all + (part.values[day] ?? 0), 0));
  assert.deepEqual(tokens, [13, 0, 65]);
});

test("each metric has a figure for each day, and nothing where nothing was used", () => {
  for (const [metric] of METRICS) {
    for (const { values } of daily(metric, DAYS, SUMS)) {
      assert.equal(values.length, DAYS.length);
      assert.equal(values[1], 0);
    }
  }
});

test("the total adds every figure", () => {
  const { day: _, ...expected } = sum("", 6);
  assert.deepEqual(total(SUMS), { ...expected, amount: "7.00", margin: "-5.00" });
});
