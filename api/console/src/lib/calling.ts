/** How an adapter is called: its model names, and a request for its task. */

import type { Adapter, AdapterVersion } from "../api/types.ts";
import type { ApiRequest } from "./code.ts";

const MAX_TOKENS = 256;
const PROMPT = "Hello!";

export function latestVersion(adapter: Pick<Adapter, "versions">): AdapterVersion | undefined {
  return adapter.versions.toSorted((one, other) => one.version - other.version).at(-1);
}

/** The names that requests can use: the adapter's own, its aliases, its ready versions. */
export function modelNames({ name, aliases, versions }: Pick<Adapter, "name" | "aliases" | "versions">): string[] {
  const ready = versions.filter(({ state }) => state === "ready").map(({ version }) => version);
  return [name, ...Object.keys(aliases).map((alias) => `${name}@${alias}`), ...ready.map((version) => `${name}@${version}`)];
}

/** A first request: a classifier has a route of its own. */
export function firstRequest(origin: string, model: string, task: AdapterVersion["task"]): ApiRequest {
  if (task === "classify") return { origin, path: "/classify", body: { model, input: [PROMPT] } };
  const messages = [{ role: "user", content: PROMPT }];
  return { origin, path: "/chat/completions", body: { model, messages, max_tokens: MAX_TOKENS } };
}
