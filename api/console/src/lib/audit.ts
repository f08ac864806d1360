/** Entries of the audit log in words. */

import { bytes, dateTime, duration, shortDigest } from "./format.ts";

const DONE: Record<string, string> = {
  abandon: "abandoned", add: "added", alias: "given an alias", attest: "attested", cancel: "cancelled", change: "changed",
  confirm: "confirmed", create: "created", delete: "deleted", disable: "disabled", end: "ended", enrolment: "password set",
  erase: "erased", expire: "expired", export: "exported", invite: "invited", pause: "paused", pin: "pinned", refuse: "refused",
  remove: "removed", resume: "resumed", revoke: "revoked", rollback: "rolled back", rotate: "rotated", set: "set",
  suspend: "suspended", unpin: "unpinned", update: "changed", upload: "uploaded",
};

/** "operator.key.create" as "operator key created"; a verb without a word stands as it is. */
export function actionText(action: string): string {
  const parts = action.split(".");
  const verb = parts.pop() ?? action;
  return [...parts, DONE[verb] ?? verb].map((part) => part.replaceAll("_", " ")).join(" ");
}

interface Subject {
  name: string;
  /** The identifier, where the name is another. */
  id: string | null;
}

const NAMES = ["name", "email", "filename"] as const;

/** What was changed: by its name, if the entry has one. */
export function subjectOf(resource: string, details: Record<string, unknown>): Subject {
  const name = NAMES.map((each) => details[each]).find((value) => typeof value === "string" && value !== "");
  if (typeof name !== "string" || name === resource) return { name: resource, id: null };
  return { name, id: resource };
}

/** A detail's name and value: "stored bytes", "2 GiB". */
export function detailText(name: string, value: unknown): [string, string] {
  return [name.replace(/_(seconds|ms)$/, "").replaceAll("_", " "), valueText(name, value)];
}

const MOMENT = /^\d{4}-\d\d-\d\dT\d\d:\d\d/;

function valueText(name: string, value: unknown): string {
  if (value === null || value === undefined) return "none";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "number") {
    if (name.endsWith("bytes")) return bytes(value);
    if (name.endsWith("_seconds")) return duration(value * 1000);
    return name.endsWith("_ms") ? duration(value) : String(value);
  }
  if (typeof value === "string") {
    if (value.startsWith("sha256:")) return shortDigest(value);
    return MOMENT.test(value) ? dateTime(value) : value || "none";
  }
  if (Array.isArray(value)) return value.map((each) => valueText("", each)).join(", ") || "none";
  const entries = Object.entries(value as object);
  return entries.map(([key, each]) => detailText(key, each).join(": ")).join(", ");
}
