/** Keys: what state one is in, and which scopes there are, in words. */

import type { components } from "../api/schema.ts";

export type Scope = components["schemas"]["Scope"];

export const SCOPES: readonly (readonly [Scope, string])[] = [
  ["infer", "Generate, list models"],
  ["adapters:read", "View adapters, versions and reports"],
  ["adapters:write", "Push and delete adapters, move aliases"],
  ["usage:read", "View usage, limits and requests"],
  ["audit:read", "View the audit log"],
  ["adapters:compose", "Combine adapters in a request"],
  ["keys:manage", "Create, rotate and revoke keys"],
  ["users:manage", "Add, change and disable users"],
  ["webhooks:read", "View webhooks and their deliveries"],
  ["webhooks:write", "Create, change and delete webhooks"],
  ["samples:read", "Read samples of requests, and files of them"],
  ["samples:write", "Turn sampling on and off, delete samples"],
];

export const SCOPES_AT_FIRST: readonly Scope[] = ["infer", "adapters:read"];

/** For how long a secret that was replaced stays valid: in seconds, and in words. */
export const OVERLAPS = [
  ["86400", "a day"], ["3600", "an hour"], ["604800", "a week"], ["2592000", "30 days"], ["0", "none: it ends at once"],
] as const;

const SOON_MS = 7 * 86_400_000;

interface Ending {
  expires_at: string | null;
  revoked_at: string | null;
}

export type KeyState = "usable" | "ends soon" | "expired" | "revoked";

/** A key ends soon if it has less than a week; one that was rotated ends with its overlap. */
export function keyState(key: Ending, now: number): KeyState {
  if (key.revoked_at !== null && Date.parse(key.revoked_at) <= now) return "revoked";
  const ends = Math.min(...[key.revoked_at, key.expires_at].map((at) => (at === null ? Infinity : Date.parse(at))));
  if (ends <= now) return "expired";
  return ends - now < SOON_MS ? "ends soon" : "usable";
}

/** The entries of a field, one a line or separated by commas; null if there is none. */
export function listOf(text: string): string[] | null {
  const entries = text.split(/[\s,]+/).filter((entry) => entry !== "");
  return entries.length === 0 ? null : entries;
}
