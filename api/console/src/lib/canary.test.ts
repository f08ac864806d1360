import assert from "node:assert/strict";
import { test } from "node:test";
import { DEFAULT_LIMITS, limitsText } from "./canary.ts";

test("limits are written in percent and in times", () => {
  assert.equal(
    limitsText(DEFAULT_LIMITS),
    "2 % more errors, 5 % more refusals, answers 1.5 times as long or short, 1.5 times the time per token, "
      + "after 100 requests of each version",
  );
});

test("a judge is named with the share that the canary must win", () => {
  const judged = { ...DEFAULT_LIMITS, refusals: null, length: null, latency: null, judge_model: "judge-bot@2" };
  assert.equal(
    limitsText({ ...judged, error_rate: null }),
    "fewer than 40 % of comparisons won, judged by judge-bot@2, after 100 requests of each version",
  );
  assert.equal(limitsText({ ...judged, error_rate: null, judge: null }), "no limit, after 100 requests of each version");
});

test("a limit that is turned off is left out", () => {
  const only = { ...DEFAULT_LIMITS, refusals: null, length: null, latency: null };
  assert.equal(limitsText({ ...only, error_rate: 0.07 }), "7 % more errors, after 100 requests of each version");
  assert.equal(limitsText({ ...only, error_rate: null }), "no limit, after 100 requests of each version");
});
