import assert from "node:assert/strict";
import { test } from "node:test";

import { likelihoodOf, shownToken } from "./tokens.ts";

test("likelihoods begin at their bounds", () => {
  const of = (probability: number) => likelihoodOf({ logprob: Math.log(probability) });
  assert.deepEqual([1, 0.9001, 0.8999, 0.5001, 0.4999, 0.1001, 0.0999, 0].map(of), [
    "sure", "sure", "likely", "likely", "open", "open", "rare", "rare",
  ]);
});

test("a token shows its spaces and line breaks, and a part of a character its bytes", () => {
  assert.equal(shownToken({ token: " a\n", bytes: [32, 97, 10] }), '" a\\n"');
  assert.equal(shownToken({ token: "\ufffd", bytes: [0xe2, 0x08] }), "bytes e2 08");
});
