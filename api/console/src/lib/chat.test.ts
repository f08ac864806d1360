import assert from "node:assert/strict";
import { test } from "node:test";

import { ApiError } from "../api/errors.ts";
import { NO_CHOICE, NO_REPLY, ask, extend, tokensPerSecond, type ChatRequest, type Choice, type Message, type Reply } from "./chat.ts";
import { requestOf, type Settings, type Turn } from "./conversation.ts";

const chunk = (content: string, finish_reason: string | null = null) => ({
  model: "acme/bot@2",
  choices: [{ delta: { content }, finish_reason }],
});
const REQUEST: ChatRequest = { model: "bot", messages: [{ role: "user", content: "Hi" }], max_tokens: 8 };

async function askAServerThatSays(lines: string[]): Promise<Reply[]> {
  const body = lines.map((line) => `data: ${line}\n\n`).join("");
  const headers = { "x-loraplex-tier": "host", "x-loraplex-load-ms": "12", "x-loraplex-adapter-version": "2" };
  globalThis.fetch = () => Promise.resolve(new Response(body, { headers }));
  const replies = [];
  for await (const reply of ask(REQUEST, null, new AbortController().signal)) replies.push(reply);
  return replies;
}

test("an answer grows chunk by chunk, and ends with what it used", async () => {
  const usage = { prompt_tokens: 5, completion_tokens: 2 };
  const replies = await askAServerThatSays([
    JSON.stringify(chunk("Hel")), JSON.stringify(chunk("lo", "stop")), JSON.stringify({ choices: [], usage }), "[DONE]",
  ]);
  assert.deepEqual(replies.map((reply) => reply.choices[0].text), ["", "Hel", "Hello", "Hello"]);
  const last = replies.at(-1)!;
  assert.equal(last.model, "acme/bot@2");
  assert.equal(last.choices[0].finishReason, "stop");
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
  assert.deepEqual([thinking.choices[0].reasoning, thinking.choices[0].text, thinking.firstTokenMs], ["Hmm.", "", 10]);
  const answered = extend(thinking, chunk("Yes", "stop"), 30);
  assert.deepEqual([answered.choices[0].reasoning, answered.choices[0].text, answered.firstTokenMs], ["Hmm.", "Yes", 10]);
});

test("speed is that of the tokens behind the first", () => {
  const reply = { ...NO_REPLY, outputTokens: 11, firstTokenMs: 100, totalMs: 600 };
  assert.equal(tokensPerSecond(reply), 20);
  assert.equal(tokensPerSecond({ ...reply, outputTokens: 1 }), null);
  assert.equal(tokensPerSecond(NO_REPLY), null);
});

test("several answers grow beside each other", () => {
  const part = (index: number, content: string) => ({ choices: [{ index, delta: { content }, finish_reason: null }] });
  const reply = [part(1, "b"), part(0, "a"), part(1, "B")].reduce((before, one) => extend(before, one, 1), NO_REPLY);
  assert.deepEqual(reply.choices.map(({ text }) => text), ["a", "bB"]);
});

test("the arguments of tool calls grow, each call its own", () => {
  const part = (...tool_calls: object[]) => ({ choices: [{ delta: { tool_calls }, finish_reason: null }] }) as Parameters<typeof extend>[1];
  const reply = [
    part({ index: 0, id: "call_1", function: { name: "weather", arguments: "" } }),
    part({ index: 0, function: { arguments: '{"city":' } }),
    part({ index: 0, function: { arguments: '"Oslo"}' } }, { index: 1, id: "call_2", function: { name: "time", arguments: "{}" } }),
  ].reduce((before, one) => extend(before, one, 5), NO_REPLY);
  assert.deepEqual(reply.choices[0].toolCalls, [
    { id: "call_1", name: "weather", arguments: '{"city":"Oslo"}' }, { id: "call_2", name: "time", arguments: "{}" },
  ]);
  assert.equal(reply.firstTokenMs, 5);
});

test("tokens come with their probabilities", () => {
  const token = { token: "a", logprob: -0.1, bytes: [97], top_logprobs: [] };
  const chunkOf = { choices: [{ delta: { content: "a" }, finish_reason: null, logprobs: { content: [token] } }] };
  assert.deepEqual(extend(extend(NO_REPLY, chunkOf, 1), chunkOf, 2).choices[0].tokens, [token, token]);
});

test("speed is that of the tokens behind the first", () => {
  const reply = { ...NO_REPLY, outputTokens: 11, firstTokenMs: 100, totalMs: 600 };
  assert.equal(tokensPerSecond(reply), 20);
  assert.equal(tokensPerSecond({ ...reply, outputTokens: 1 }), null);
  assert.equal(tokensPerSecond(NO_REPLY), null);
});

const SETTINGS: Settings = { model: "bot", system: " ", fields: {}, tenant: null };
const user = (content: string): Message => ({ role: "user", content });

function turn(asked: Message, ...choices: [Partial<Choice>, ...Partial<Choice>[]]): Turn {
  const whole = choices.map((choice) => ({ ...NO_CHOICE, ...choice })) as [Choice, ...Choice[]];
  return { asked: [asked], request: REQUEST, reply: { ...NO_REPLY, choices: whole }, chosen: 0, error: null, state: "ended" };
}

test("turns without an answer are not told to the model, and neither is reasoning", () => {
  const turns = [turn(user("a"), { text: "A", reasoning: "Hmm." }), { ...turn(user("b"), {}), error: new ApiError(500, { message: "", code: "x" }) }];
  const { messages } = requestOf(SETTINGS, turns, [user("c")]);
  assert.deepEqual(messages.map(({ role, content }) => `${role}: ${content}`), ["user: a", "assistant: A", "user: c"]);
});

test("a request has the system prompt and the fields", () => {
  const request = requestOf({ ...SETTINGS, system: "Be brief.", fields: { temperature: 0 } }, [], [user("c")]);
  assert.deepEqual(request, { model: "bot", messages: [{ role: "system", content: "Be brief." }, user("c")], temperature: 0 });
});

test("the conversation goes on with the choice that was picked", () => {
  const before = turn(user("a"), { text: "A" }, { text: "B" });
  const { messages } = requestOf(SETTINGS, [{ ...before, chosen: 1 }], [user("c")]);
  assert.equal(messages[1]?.content, "B");
});

test("tool calls are told with their results, and not without", () => {
  const called = turn(user("a"), { toolCalls: [{ id: "call_1", name: "f", arguments: "{}" }] });
  const result: Message = { role: "tool", tool_call_id: "call_1", content: "7" };
  const { messages } = requestOf(SETTINGS, [called], [result]);
  assert.deepEqual(messages, [
    user("a"),
    { role: "assistant", content: null, tool_calls: [{ id: "call_1", type: "function", function: { name: "f", arguments: "{}" } }] },
    result,
  ]);
  assert.deepEqual(requestOf(SETTINGS, [called], [user("b")]).messages, [user("b")]);
  const failed = turn(result, {});
  assert.deepEqual(requestOf(SETTINGS, [called, failed], [user("b")]).messages, [user("b")]);
});
