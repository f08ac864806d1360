import assert from "node:assert/strict";
import { test } from "node:test";

import { ApiError } from "../api/errors.ts";
import { NO_REPLY, ask, extend, tokensPerSecond, type Question, type Reply } from "./chat.ts";
import { messagesOf, type Turn } from "./conversation.ts";

const chunk = (content: string, finish_reason: string | null = null) => ({
  model: "acme/bot@2",
  choices: [{ delta: { content }, finish_reason }],
});
const QUESTION: Question = {
  model: "bot", messages: [{ role: "user", content: "Hi" }], maxTokens: 8, temperature: 0, tenant: null,
};

async function askAServerThatSays(lines: string[]): Promise<Reply[]> {
  const body = lines.map((line) => `data: ${line}\n\n`).join("");
  const headers = { "x-loraplex-tier": "host", "x-loraplex-load-ms": "12", "x-loraplex-adapter-version": "2" };
  globalThis.fetch = () => Promise.resolve(new Response(body, { headers }));
  const replies = [];
  for await (const reply of ask(QUESTION, new AbortController().signal)) replies.push(reply);
  return replies;
}

test("an answer grows chunk by chunk, and ends with what it used", async () => {
  const usage = { prompt_tokens: 5, completion_tokens: 2 };
  const replies = await askAServerThatSays([
    JSON.stringify(chunk("Hel")), JSON.stringify(chunk("lo", "stop")), JSON.stringify({ choices: [], usage }), "[DONE]",
  ]);
  assert.deepEqual(replies.map((reply) => reply.text), ["", "Hel", "Hello", "Hello"]);
  const last = replies.at(-1)!;
  assert.equal(last.model, "acme/bot@2");
  assert.equal(last.finishReason, "stop");
  assert.equal(last.outputTokens, 2);
  assert.deepEqual([last.served?.tier, last.served?.loadMs, last.served?.version], ["host", 12, "2"]);
});

test("a stream that ends without its end is an error, and so is one that says so", async () => {
  await assert.rejects(askAServerThatSays([JSON.stringify(chunk("Hel"))]), { code: "stream_broken" });
  const error = { error: { message: "The engine restarted.", code: "engine_restarted" } };
  await assert.rejects(askAServerThatSays([JSON.stringify(error)]), { code: "engine_restarted" });
});

test("the first token is the first text, not the first chunk", () => {
  const role = extend(NO_REPLY, chunk(""), 10);
  assert.equal(role.firstTokenMs, null);
  assert.equal(extend(extend(role, chunk("a"), 20), chunk("b"), 30).firstTokenMs, 20);
});

test("reasoning is kept apart from the answer, and its first text is the first token", () => {
  const thought = (reasoning_content: string) => ({ choices: [{ delta: { reasoning_content }, finish_reason: null }] });
  const thinking = extend(extend(NO_REPLY, thought("Hm"), 10), thought("m."), 20);
  assert.deepEqual([thinking.reasoning, thinking.text, thinking.firstTokenMs], ["Hmm.", "", 10]);
  const answered = extend(thinking, chunk("Yes", "stop"), 30);
  assert.deepEqual([answered.reasoning, answered.text, answered.firstTokenMs], ["Hmm.", "Yes", 10]);
});

test("speed is that of the tokens behind the first", () => {
  const reply = { ...NO_REPLY, outputTokens: 11, firstTokenMs: 100, totalMs: 600 };
  assert.equal(tokensPerSecond(reply), 20);
  assert.equal(tokensPerSecond({ ...reply, outputTokens: 1 }), null);
  assert.equal(tokensPerSecond(NO_REPLY), null);
});

test("turns without an answer are not told to the model, and neither is reasoning", () => {
  const turn = (prompt: string, text: string): Turn => ({
    prompt, reply: { ...NO_REPLY, text, reasoning: "Hmm." }, error: text === "" ? new ApiError(500, { message: "", code: "x" }) : null,
    state: "ended",
  });
  const messages = messagesOf(" ", [turn("a", "A"), turn("b", "")], "c");
  assert.deepEqual(messages.map(({ role, content }) => `${role}: ${content}`), ["user: a", "assistant: A", "user: c"]);
  assert.equal(messagesOf("Be brief.", [], "c")[0]?.role, "system");
});
