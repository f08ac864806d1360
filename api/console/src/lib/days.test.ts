import assert from "node:assert/strict";
import { test } from "node:test";

import { days, sumByDay, type DayRow } from "./days.ts";

test("the last days end today, and are those of UTC wherever the reader is", () => {
  assert.deepEqual(days(2, Date.parse("2026-11-22T23:59:59Z")), ["2026-11-21", "2026-11-22"]);
  assert.deepEqual(days(1, Date.parse("2026-11-23T00:30:00+02:00")), ["2026-11-22"]);
});

test("days go over the ends of months, leap days and years", () => {
  assert.deepEqual(days(3, Date.parse("2028-03-01T00:00:00Z")), ["2028-02-28", "2028-02-29", "2028-03-01"]);
  assert.deepEqual(days(2, Date.parse("2027-01-01T12:00:00Z")), ["2026-12-31", "2027-01-01"]);
});

test("rows of one day are added, and a day without a row has nothing", () => {
  const row = (day: string, requests: number) => ({ day, requests }) as DayRow;
  const rows = [row("2026-11-20", 1), row("2026-11-22", 2), row("2026-11-22", 3)];
  assert.deepEqual(sumByDay(rows, ["2026-11-20", "2026-11-21", "2026-11-22"], "requests"), [1, 0, 5]);
});
