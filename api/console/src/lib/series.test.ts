import assert from "node:assert/strict";
import { test } from "node:test";
import { alone, highest, latest, stacked } from "./series.ts";

test("stacked series add up, and a gap is no step", () => {
  assert.deepEqual(stacked([[1, 2, null], [10, null, 30], []]), [[1, 2, 0], [11, 2, 30], [11, 2, 30]]);
  assert.deepEqual(stacked([]), []);
});

test("latest and highest pass over what is unknown", () => {
  assert.deepEqual([latest([1, 3, null]), latest([null]), latest([])], [3, null, null]);
  assert.deepEqual([highest([1, 3, null]), highest([-2, -1]), highest([])], [3, -1, null]);
});

test("a figure without neighbours is alone", () => {
  assert.deepEqual(alone([1, null, 2, 3, null, 4, undefined]), [0, 5]);
  assert.deepEqual(alone([0]), [0]);
  assert.deepEqual(alone([null, 1, 2]), []);
});
