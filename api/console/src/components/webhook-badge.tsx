import type { ReactNode } from "react";
import { webhookState } from "../lib/webhooks.ts";
import { Badge } from "./values.tsx";
import type { Webhook } from "./webhook-dialogs.tsx";

const TONES = { active: "good", failing: "bad", disabled: "warn" } as const;

/** Whether a webhook receives events. */
export function WebhookBadge({ of }: { of: Webhook }): ReactNode {
  const state = webhookState(of);
  return <Badge tone={TONES[state]}>{state}</Badge>;
}
