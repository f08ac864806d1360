import assert from "node:assert/strict";
import { test } from "node:test";

import { eventsOf } from "./sse.ts";

function bodyOf(...pieces: (string | Uint8Array)[]): ReadableStream<Uint8Array> {
  const encoder = new TextEncoder();
  return new ReadableStream({
    start(controller) {
      for (const piece of pieces) {
        controller.enqueue(typeof piece === "string" ? encoder.encode(piece) : piece);
      }
      controller.close();
    },
  });
}

async function all(body: ReadableStream<Uint8Array>): Promise<string[]> {
  const events = [];
  for await (const event of eventsOf(body)) events.push(event);
  return events;
}

test("each data line is an event, however the bytes are cut", async () => {
  const text = 'data: {"a":1}\n\ndata: [DONE]\n\n';
  for (let cut = 0; cut <= text.length; cut += 1) {
    const events = await all(bodyOf(text.slice(0, cut), text.slice(cut)));
    assert.deepEqual(events, ['{"a":1}', "[DONE]"]);
  }
});

test("a character that is cut in two comes whole", async () => {
  const bytes = new TextEncoder().encode("data: Grüße 🦜\n\n");
  for (let cut = 0; cut <= bytes.length; cut += 1) {
    assert.deepEqual(await all(bodyOf(bytes.slice(0, cut), bytes.slice(cut))), ["Grüße 🦜"]);
  }
});

test("comments are no events, and neither is a line that has not ended", async () => {
  assert.deepEqual(await all(bodyOf(": ping\n\ndata: x\r\n\r\ndata: half")), ["x"]);
});
