import assert from "node:assert/strict";
import { afterEach, test } from "node:test";
import { hooks, send, tagged, urlOf } from "./client.ts";
import { ApiError } from "./errors.ts";

const realFetch = globalThis.fetch;
const realHooks = { ...hooks };
afterEach(() => {
  globalThis.fetch = realFetch;
  Object.assign(hooks, realHooks);
});

/** Answer requests in turn, and give back the list of what was sent. */
function answering(...answers: (Response | Error)[]): Request[] {
  const sent: Request[] = [];
  globalThis.fetch = (input, init) => {
    sent.push(new Request(new URL(String(input), "http://console.test"), init));
    const answer = answers.shift();
    return answer instanceof Response ? Promise.resolve(answer) : Promise.reject(answer);
  };
  return sent;
}

function refusal(status: number, code: string): Response {
  const body = JSON.stringify({ error: { message: "No.", code, param: null, request_id: "r1" } });
  return new Response(body, { status, headers: { "retry-after": "7" } });
}

test("path parts are encoded, so that a name cannot reach another path", () => {
  assert.equal(
    urlOf("/v1/adapters/{name}/aliases/{alias}", { name: "../keys?x=1", alias: "a/b" }),
    "/v1/adapters/..%2Fkeys%3Fx%3D1/aliases/a%2Fb",
  );
});

test("queries leave out what is not given, say what is empty, and repeat lists", () => {
  const query = { after: undefined, since: null, adapter: "", limit: 0, group_by: ["day", "adapter"], q: "a&b" };
  assert.equal(urlOf("/v1/usage", {}, query), "/v1/usage?adapter=&limit=0&group_by=day&group_by=adapter&q=a%26b");
});

test("changes carry the CSRF token, reads do not", async () => {
  Object.assign(hooks, { csrfToken: "t0ken" });
  const sent = answering(new Response(), new Response());
  await send("/v1/keys", { method: "get" });
  await send("/v1/keys", { method: "post" });
  assert.deepEqual(sent.map((one) => one.headers.get("x-csrf-token")), [null, "t0ken"]);
});

test("every request says which tenant is meant, so that no other is changed in its place", async () => {
  const sent = answering(new Response(), new Response());
  await send("/v1/keys", { method: "get", tenant: "acme" });
  await send("/admin/keys", { method: "get", tenant: null });
  assert.deepEqual(sent.map((one) => one.headers.get("x-loraplex-tenant")), ["acme", null]);
});

test("what was read can be changed on the condition that it is still that", async () => {
  const sent = answering(new Response('{"weight":1}', { headers: { etag: '"v1"' } }), new Response("{}"));
  const path = { slug: "acme" };
  const { data, etag } = await tagged("get", "/admin/tenants/{slug}", { path });
  assert.equal(data.weight, 1);
  await tagged("patch", "/admin/tenants/{slug}", { path, body: { weight: 2 }, ifMatch: etag });
  assert.deepEqual(sent.map((one) => one.headers.get("if-match")), [null, '"v1"']);
});

test("a refusal keeps its words, code, request and pause", async () => {
  answering(refusal(429, "rate_limited"));
  const error = await send("/v1/keys", { method: "get" }).catch((thrown: unknown) => thrown);
  assert.ok(error instanceof ApiError);
  assert.deepEqual(
    [error.status, error.code, error.message, error.requestId, error.retryAfter],
    [429, "rate_limited", "No.", "r1", 7],
  );
});

test("an answer that a proxy wrote is an error in words too", async () => {
  answering(new Response("<html>502</html>", { status: 502 }));
  await assert.rejects(send("/v1/keys", { method: "get" }), { code: "http_502", status: 502 });
});

test("a server that does not answer is said to", async () => {
  answering(new TypeError("fetch failed"));
  await assert.rejects(send("/v1/keys", { method: "get" }), { code: "unreachable", status: 0 });
});

test("an answer 401 ends the session, but not that to a sign-in", async () => {
  let ended = 0;
  hooks.onSignedOut = () => { ended += 1; };
  answering(refusal(401, "sign_in_failed"), refusal(401, "missing_api_key"));
  await assert.rejects(send("/v1/session", { method: "post" }));
  assert.equal(ended, 0);
  await assert.rejects(send("/v1/keys", { method: "get" }));
  assert.equal(ended, 1);
});

test("what needs the password asks for it and is sent again, once", async () => {
  let asked = 0;
  hooks.confirm = () => { asked += 1; return Promise.resolve(true); };
  const needed = () => refusal(403, "confirmation_required");
  const sent = answering(needed(), new Response("done"));
  assert.equal(await (await send("/v1/keys", { method: "post", body: "{}" })).text(), "done");
  assert.equal(sent.length, 2);
  answering(needed(), needed());
  await assert.rejects(send("/v1/keys", { method: "post" }), { code: "confirmation_required" });
  assert.equal(asked, 2);
});

test("whoever does not confirm gets the refusal", async () => {
  hooks.confirm = () => Promise.resolve(false);
  const sent = answering(refusal(403, "confirmation_required"));
  await assert.rejects(send("/v1/keys", { method: "post" }), { code: "confirmation_required" });
  assert.equal(sent.length, 1);
});

test("each request says how long ago the person did something", async () => {
  const sent = answering(new Response("{}"));
  hooks.idleSeconds = () => 61;
  await send("/v1/adapters", { method: "get" });
  assert.equal(sent[0]?.headers.get("x-loraplex-idle-seconds"), "61");
});
