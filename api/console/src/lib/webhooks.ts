/** Webhooks in words: what they report, whether they work, and why an attempt failed. */

import type { components } from "../api/schema.ts";

export type EventType = components["schemas"]["EventType"];
type Webhook = Pick<components["schemas"]["WebhookView"], "disabled_at" | "disabled_by" | "failing_since">;
type Delivery = Pick<components["schemas"]["DeliveryView"], "last_failure" | "last_status">;

const EVENT_TEXTS: Record<EventType, string> = {
  "version.ready": "An adapter version is ready",
  "version.rejected": "An adapter version is rejected",
  "version.deleted": "An adapter version is deleted from every tier",
  "alias.changed": "An alias is set, split, rolled back or removed",
  "alias.rolled_back": "A canary exceeded a limit and was ended automatically",
  "batch.ended": "A batch has ended",
  "job.succeeded": "A fine-tuning job has published its version",
  "job.failed": "A fine-tuning job has failed",
  "job.paused": "A fine-tuning job is paused",
  "job.resumed": "A paused fine-tuning job waits for its turn again",
  "evaluation.finished": "An evaluation has ended",
  "budget.alert": "A percentage of a budget is spent",
  "tenant.deleted": "The tenant is deleted",
};

export const EVENTS = Object.entries(EVENT_TEXTS) as readonly (readonly [EventType, string])[];

export type WebhookState = "active" | "failing" | "disabled";

export function webhookState({ disabled_at, failing_since }: Webhook): WebhookState {
  if (disabled_at !== null) return "disabled";
  return failing_since === null ? "active" : "failing";
}

/** Why a webhook that somebody did not disable receives nothing; null: somebody did, or it does. */
export function disabledText({ disabled_by }: Webhook): string | null {
  if (disabled_by === "failures") return "No event could be delivered for two days.";
  return disabled_by === "receiver" ? "The receiver answered 410: it wants no more events." : null;
}

/** "status 503", "name not resolved"; empty if no attempt failed. */
export function failureText({ last_failure, last_status }: Delivery): string {
  const status = last_status === null ? "" : String(last_status);
  return [last_failure?.replaceAll("_", " ") ?? "", last_failure === null ? "" : status].filter(Boolean).join(" ");
}
