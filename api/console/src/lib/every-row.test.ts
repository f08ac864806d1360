import assert from "node:assert/strict";
import { test } from "node:test";
import { everyRow } from "./every-row.ts";

test("all pages are read, each from where the one before ended", async () => {
  const asked: (string | undefined)[] = [];
  const rows = await everyRow((after) => {
    asked.push(after);
    const from = Number(after ?? 0);
    const data = [from, from + 1];
    return Promise.resolve({ data, has_more: from < 4, next_after: from < 4 ? String(from + 2) : null });
  });
  assert.deepEqual(rows, [0, 1, 2, 3, 4, 5]);
  assert.deepEqual(asked, [undefined, "2", "4"]);
});
