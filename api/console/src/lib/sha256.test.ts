import assert from "node:assert/strict";
import { createHash, randomBytes } from "node:crypto";
import { test } from "node:test";
import { Sha256 } from "./sha256.ts";

const reference = (data: Uint8Array): string => createHash("sha256").update(data).digest("hex");

test("every length around the block's bounds has the digest that OpenSSL gives", () => {
  for (let length = 0; length <= 260; length += 1) {
    const data = randomBytes(length);
    assert.equal(new Sha256().update(data).hex(), reference(data), `${length} bytes`);
  }
});

test("pieces of any size give the digest of the whole", () => {
  const data = randomBytes(100_000);
  for (const piece of [1, 7, 63, 64, 65, 4096, 99_999]) {
    const hash = new Sha256();
    for (let at = 0; at < data.length; at += piece) hash.update(data.subarray(at, at + piece));
    assert.equal(hash.hex(), reference(data), `pieces of ${piece}`);
  }
});
