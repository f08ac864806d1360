import assert from "node:assert/strict";
import { test } from "node:test";

import { daysBetween, shifted, today } from "./calendar.ts";

test("a day is one of UTC, wherever the reader is", () => {
  assert.equal(today(Date.parse("2026-11-22T23:59:59Z")), "2026-11-22");
  assert.equal(today(Date.parse("2026-11-23T00:30:00+02:00")), "2026-11-22");
});

test("days go over the ends of months, leap days and years", () => {
  assert.equal(shifted("2028-02-28", 1), "2028-02-29");
  assert.equal(shifted("2027-03-01", -1), "2027-02-28");
  assert.deepEqual(daysBetween("2026-12-30", "2027-01-02"), ["2026-12-30", "2026-12-31", "2027-01-01"]);
});

test("no day is between a day and itself", () => {
  assert.deepEqual(daysBetween("2026-01-01", "2026-01-01"), []);
});
