/** How an adapter is called: its model names, and a request for each of its uses. */

import type { Adapter, AdapterVersion } from "../api/types.ts";
import type { ApiRequest } from "./code.ts";

const MAX_TOKENS = 256;
const PROMPT = "Hello!";
const DOCUMENTS = ["Billing and invoices", "Accounts and passwords"];

export type Use = "chat" | "embeddings" | "classify" | "score" | "rerank";

export const USE_TEXTS: Record<Use, string> = {
  chat: "Chat", embeddings: "Embeddings", classify: "Classify", score: "Score", rerank: "Rerank",
};

export function latestVersion(adapter: Pick<Adapter, "versions">): AdapterVersion | undefined {
  return adapter.versions.toSorted((one, other) => one.version - other.version).at(-1);
}

/** The names that requests can use: the adapter's own, its aliases, its ready versions. */
export function modelNames({ name, aliases, versions }: Pick<Adapter, "name" | "aliases" | "versions">): string[] {
  const ready = versions.filter(({ state }) => state === "ready").map(({ version }) => version);
  return [name, ...Object.keys(aliases).map((alias) => `${name}@${alias}`), ...ready.map((version) => `${name}@${version}`)];
}

/** What a version answers: a head of one label scores pairs of texts, other heads classify, the rest generates or embeds. */
export function usesOf({ task, report }: Pick<AdapterVersion, "task" | "report">): readonly Use[] {
  if (task === "generate") return ["chat", "embeddings"];
  const { labels } = (report["classification"] ?? {}) as { labels?: readonly string[] };
  return labels?.length === 1 ? ["score", "rerank", "classify"] : ["classify"];
}

/** A first request for a use. */
export function firstRequest(origin: string, model: string, use: Use): ApiRequest {
  switch (use) {
    case "chat": {
      const messages = [{ role: "user", content: PROMPT }];
      return { origin, path: "/chat/completions", body: { model, messages, max_tokens: MAX_TOKENS } };
    }
    case "embeddings": return { origin, path: "/embeddings", body: { model, input: DOCUMENTS } };
    case "classify": return { origin, path: "/classify", body: { model, input: [PROMPT] } };
    case "score": return { origin, path: "/score", body: { model, text_1: "reset my password", text_2: DOCUMENTS } };
    case "rerank": return { origin, path: "/rerank", body: { model, query: "reset my password", documents: DOCUMENTS } };
  }
}
