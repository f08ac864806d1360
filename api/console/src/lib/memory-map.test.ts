import assert from "node:assert/strict";
import { test } from "node:test";
import { colorsByTenant, piecesOf, sideBySide } from "./memory-map.ts";

test("an extent goes on in the next line, and is written on where it has most room", () => {
  const pieces = piecesOf([{ offset: 80, bytes: 60 }], 400, 4);
  assert.deepEqual(pieces.map(({ line, from, to, isLargest }) => [line, from, Number(to.toFixed(6)), isLargest]), [
    [0, 0.8, 1, false],
    [1, 0, 0.4, true],
  ]);
});

test("every byte of every extent is drawn once, and none beside the arena", () => {
  const size = 1_000_003;
  for (let seed = 1; seed < 200; seed += 1) {
    const extents = [];
    for (let offset = (seed * 7919) % 1000; offset < size; ) {
      const bytes = Math.min(size - offset, 1 + ((offset * 31 + seed * 104_729) % 200_000));
      extents.push({ offset, bytes });
      offset += bytes + ((offset + seed) % 3 === 0 ? 5_000 : 0);
    }
    const lines = 1 + (seed % 9);
    const pieces = piecesOf(extents, size, lines);
    const drawn = pieces.reduce((sum, { from, to }) => sum + (to - from) * (size / lines), 0);
    const held = extents.reduce((sum, { bytes }) => sum + bytes, 0);
    assert.ok(Math.abs(drawn - held) < 0.5, `${drawn} of ${held}`);
    assert.ok(pieces.every(({ line, from, to }) => line < lines && from >= 0 && to <= 1));
  }
});

test("extents whose place is not told lie side by side", () => {
  assert.deepEqual(sideBySide([{ bytes: 5 }, { bytes: 7 }]), [{ bytes: 5, offset: 0 }, { bytes: 7, offset: 5 }]);
});

test("the eight largest tenants have eight colours, whoever is listed first", () => {
  const held = Array.from({ length: 20 }, (_, i) => ({ tenant: `t${i}`, bytes: i }));
  const colors = colorsByTenant([...held, { tenant: "t0", bytes: 1000 }]);
  const largest = ["t0", "t19", "t18", "t17", "t16", "t15", "t14", "t13"];
  assert.deepEqual(largest.map((name) => colors.get(name)), [1, 2, 3, 4, 5, 6, 7, 8]);
});
