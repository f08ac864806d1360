import assert from "node:assert/strict";
import { test } from "node:test";
import { waterfall } from "./waterfall.ts";

const phase = (name: string, ms: number) => ({ phase: name, ms, summary: "" });

test("each phase begins where the one before ended", () => {
  const bars = waterfall([phase("queue", 25), phase("prompt", 25), phase("output", 50)], 100);
  assert.deepEqual(bars.map(({ from, to }) => [from, to]), [[0, 0.25], [0.25, 0.5], [0.5, 1]]);
});

test("rounding never draws beside the scale, nor does a request without any time", () => {
  assert.equal(waterfall([phase("queue", 60), phase("output", 60)], 100).at(-1)?.to, 1);
  assert.deepEqual(waterfall([phase("refused", 0)], 0).map(({ from, to }) => [from, to]), [[0, 0]]);
});
