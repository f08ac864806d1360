import assert from "node:assert/strict";
import { test } from "node:test";
import * as format from "./format.ts";

test("bytes keep three significant digits and change their unit before they show 1024", () => {
  const shown = [0, 1, 1023, 1024, 1536, 10_240, 104_857, 1_048_064, 5 * 2 ** 30, 3 * 2 ** 50];
  assert.deepEqual(shown.map(format.bytes), [
    "0 B", "1 B", "1023 B", "1.00 KiB", "1.50 KiB", "10.0 KiB", "102 KiB", "1.00 MiB",
    "5.00 GiB", "3072 TiB",
  ]);
});

test("durations use the units that people would", () => {
  const shown = [0, 0.44, 12.4, 999.4, 999.6, 59_949, 60_000, 200_000, 7_500_000, 273_600_000];
  assert.deepEqual(shown.map(format.duration), [
    "0 ms", "0.4 ms", "12 ms", "999 ms", "1.00 s", "59.9 s", "1 min", "3 min 20 s", "2 h 5 min",
    "3 d 4 h",
  ]);
});

test("unknown figures are a dash, and zero is not unknown", () => {
  for (const shown of [format.bytes, format.count, format.number, format.percent, format.duration]) {
    assert.equal(shown(null), "–");
    assert.notEqual(shown(0), "–");
  }
});

test("relative times look both ways", () => {
  const now = Date.parse("2026-03-01T12:00:00Z");
  assert.equal(format.relative("2026-03-01T11:59:58Z", now), "just now");
  assert.equal(format.relative("2026-03-01T11:56:00Z", now), "4 min ago");
  assert.equal(format.relative("2026-03-01T11:59:15.5Z", now), "44 s ago");
  assert.equal(format.relative("2026-03-01T14:05:00Z", now), "in 2 h");
  assert.equal(format.relative("2026-05-30T11:59:59Z", now), "in 90 d");
  assert.equal(format.relative("2026-03-01T12:00:45Z", now), "in 45 s");
  assert.equal(format.relative("nonsense", now), "–");
});

test("percentages show a digit where it matters", () => {
  assert.deepEqual([0, 0.004, 0.5, 1].map(format.percent), ["0 %", "0.4 %", "50 %", "100 %"]);
});

test("a field of date and time gives back the moment that it was filled with", () => {
  for (const iso of ["2026-05-04T12:00:00.000Z", "2026-12-31T23:59:59.000Z"]) {
    assert.equal(format.momentOf(format.localTime(iso)), iso);
  }
  assert.equal(format.momentOf(""), null);
});
