import assert from "node:assert/strict";
import { test } from "node:test";

import { money, sumOfMoney } from "./money.ts";

test("amounts are added exactly, beyond what a number holds", () => {
  assert.equal(sumOfMoney(["0.1", "0.2"]), "0.30");
  assert.equal(sumOfMoney(["999999999.000000001", "999999999.000000001"]), "1999999998.000000002");
  assert.equal(sumOfMoney(["0.000000001"]), "0.000000001");
  assert.equal(sumOfMoney([]), "0.00");
});

test("an amount has its currency behind it", () => {
  assert.equal(money("12.50", "EUR"), "12.50 EUR");
  assert.equal(money("0.00", null), "0.00");
});
