import assert from "node:assert/strict";
import { test } from "node:test";
import { differenceText, intervalText, isOpen, otherOf, remedyOf, signed } from "./evaluations.ts";

test("an evaluation is open until it has ended", () => {
  const open = ["queued", "running", "succeeded", "failed", "cancelled"].filter((status) => isOpen({ status }));
  assert.deepEqual(open, ["queued", "running"]);
});

test("the candidate is compared with a version or the base", () => {
  assert.equal(otherOf({ against: 3, base: "tiny" }), "version 3");
  assert.equal(otherOf({ against: null, base: "tiny" }), "tiny");
});

test("figures have three digits, and differences a sign", () => {
  const interval = { mean: 0.84, low: 0.7831, high: 0.8849 };
  assert.equal(intervalText(interval), "0.840 [0.783, 0.885]");
  assert.equal(differenceText({ mean: 0.045, low: -0.01, high: 0.1 }), "+0.045 [−0.010, +0.100]");
  assert.equal(signed(-0.0001), "0.000");
});

test("every published reason has a remedy", () => {
  for (const code of ["requests_failed", "scoring_failed", "invalid_golden_set"]) {
    assert.match(remedyOf(code), /evaluation/);
  }
  assert.match(remedyOf("another"), /evaluation/);
});
