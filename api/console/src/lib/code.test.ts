import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { test } from "node:test";

import { codeOf, KEY, LANGUAGES, type ApiRequest } from "./code.ts";

const TEXT = "It's \"quoted\" $HOME `id` \\n\n\u2028 end \ud83d\ude00";
const BODY = {
  model: "bot@prod", messages: [{ role: "user", content: TEXT }], temperature: 0, top_k: 5, stop: ["\n", "'"],
  logit_bias: { 7: -100 }, tools: [{ type: "function", function: { name: "f", parameters: { a: [true, false, null] } } }],
};
const REQUEST: ApiRequest = { origin: "http://localhost:8000", path: "/chat/completions", body: BODY };

test("curl sends the body as it is", () => {
  const script = codeOf("curl", REQUEST).replace(/^curl /, "printf '%s\\0' ");
  const words = execFileSync("sh", ["-c", script], { encoding: "utf8" }).split("\0");
  assert.deepEqual(words.slice(0, -2), [
    "http://localhost:8000/v1/chat/completions", "-H", `Authorization: Bearer ${KEY}`,
    "-H", "Content-Type: application/json", "-d",
  ]);
  assert.deepEqual(JSON.parse(words.at(-2) ?? ""), BODY);
});

test("JavaScript calls the client with the body", () => {
  const lines = codeOf("javascript", REQUEST);
  const call = lines.slice(lines.indexOf("create(") + "create(".length, lines.indexOf(");\nconsole"));
  assert.deepEqual(JSON.parse(call), BODY);
  assert.match(lines, /baseURL: "http:\/\/localhost:8000\/v1"/);
});

test("Python passes what the client has no argument for in extra_body", () => {
  const code = codeOf("python", REQUEST);
  assert.match(code, /\n {4}extra_body=\{"top_k": 5\},\n\)/);
  assert.match(code, /\n {4}temperature=0,\n/);
  assert.match(code, /"a": \[True, False, None\]/);
  assert.doesNotMatch(code, /\n {4}top_k=/);
});

test("a route without a method of the client is posted to", () => {
  const request = { ...REQUEST, path: "/classify", body: { model: "topics", input: ["one"] } };
  assert.match(codeOf("python", request), /client\.post\("\/classify", body=\{"model": "topics", "input": \["one"\]\}, cast_to=object\)/);
  assert.match(codeOf("javascript", request), /client\.post\("\/classify", \{ body: \{/);
  assert.match(codeOf("curl", request), /^curl http:\/\/localhost:8000\/v1\/classify /);
});

test("embeddings are asked for with the client's own method", () => {
  const request = { ...REQUEST, path: "/embeddings", body: { model: "bot", input: ["one", "two"] } };
  assert.match(codeOf("python", request), /client\.embeddings\.create\(\n {4}model="bot",\n {4}input=\["one", "two"\],\n\)/);
  const script = codeOf("javascript", request);
  const call = script.slice(script.indexOf("create(") + "create(".length, script.indexOf(");\nfor"));
  assert.deepEqual(JSON.parse(call), request.body);
});

test("only the placeholder stands for a key", () => {
  for (const [language] of LANGUAGES) assert.equal(codeOf(language, REQUEST).split(KEY).length, 2);
});
