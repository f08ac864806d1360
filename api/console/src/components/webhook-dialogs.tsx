/** What is done to a tenant's webhooks. */

import { useQueryClient } from "@tanstack/react-query";
import { useState, type FormEvent, type ReactNode } from "react";
import { api, type Answer, type BodyOf } from "../api/client.ts";
import { OVERLAPS } from "../lib/keys.ts";
import { EVENTS, type EventType } from "../lib/webhooks.ts";
import { ConfirmDialog } from "./dialog.tsx";
import { FormDialog } from "./form-dialog.tsx";
import { SelectField, TextField } from "./form.tsx";
import { SecretDialog } from "./secret.tsx";
import { useToast } from "./toast.tsx";

export type Webhook = Answer<"get", "/v1/webhooks">["data"][number];
export type IssuedWebhook = Answer<"post", "/v1/webhooks">;

interface OfTenant {
  tenant: string;
  onClose: () => void;
}

interface OfWebhook extends OfTenant {
  webhook: Webhook;
}

function useRefresh(tenant: string): () => Promise<void> {
  const client = useQueryClient();
  return () => client.invalidateQueries({ queryKey: ["webhooks", tenant] });
}

/** The host of a webhook's URL, which is what people know it by. */
export function hostOf(webhook: Webhook): string {
  return new URL(webhook.url).host;
}

export function CreateWebhook({ tenant, onIssued, onClose }: OfTenant & { onIssued: (issued: IssuedWebhook) => void }): ReactNode {
  const refresh = useRefresh(tenant);
  const submit = async (event: FormEvent<HTMLFormElement>): Promise<void> => {
    onIssued(await api("post", "/v1/webhooks", { body: orderOf(new FormData(event.currentTarget)), tenant }));
    await refresh();
  };
  return (
    <FormDialog title="New webhook" action="Create webhook" onSubmit={submit} onClose={onClose}>
      <Fields />
    </FormDialog>
  );
}

export function EditWebhook({ tenant, webhook, etag, onClose }: OfWebhook & { etag: string | null }): ReactNode {
  const refresh = useRefresh(tenant);
  // Of what the fields show, also when the page has read the webhook anew behind them.
  const [ifMatch] = useState(etag);
  const submit = async (event: FormEvent<HTMLFormElement>): Promise<void> => {
    const { url, ...rest } = orderOf(new FormData(event.currentTarget));
    // A URL that stays is not checked again: its host may no longer be allowed.
    const body = url === webhook.url ? rest : { url, ...rest };
    await api("patch", "/v1/webhooks/{webhook_id}", { path: { webhook_id: webhook.id }, body, tenant, ifMatch });
    await refresh();
  };
  return (
    <FormDialog title={`Edit ${hostOf(webhook)}`} action="Save" onSubmit={submit} onClose={onClose}>
      <Fields webhook={webhook} />
    </FormDialog>
  );
}

function Fields({ webhook }: { webhook?: Webhook }): ReactNode {
  return (
    <>
      <TextField label="URL" name="url" type="url" required maxLength={2048} autoComplete="off" spellCheck={false} autoFocus
        defaultValue={webhook?.url} placeholder="https://hooks.example.com/loraplex" hint="HTTPS, of a host that the operator allows." />
      <TextField label="Description" name="description" maxLength={200} autoComplete="off" defaultValue={webhook?.description ?? ""} />
      <EventFields chosen={webhook?.events ?? null} />
    </>
  );
}

/** `chosen`: null means all events. */
function EventFields({ chosen }: { chosen: readonly string[] | null }): ReactNode {
  const [areAll, setAll] = useState(chosen === null);
  return (
    <fieldset className="form plain">
      <legend>Events</legend>
      <label className="check">
        <input type="checkbox" name="all" checked={areAll} onChange={(event) => setAll(event.target.checked)} />
        <span>All events, including future types</span>
      </label>
      {!areAll && EVENTS.map(([type, text]) => (
        <label key={type} className="check">
          <input type="checkbox" name="events" value={type} defaultChecked={chosen?.includes(type) ?? false} />
          <span>{text} <code className="soft">{type}</code></span>
        </label>
      ))}
    </fieldset>
  );
}

function orderOf(form: FormData): BodyOf<"post", "/v1/webhooks"> {
  return {
    url: String(form.get("url")).trim(),
    description: String(form.get("description")).trim() || null,
    events: form.has("all") ? null : (form.getAll("events") as EventType[]),
  };
}

export function RotateSecret({ tenant, webhook, onIssued, onClose }: OfWebhook & { onIssued: (issued: IssuedWebhook) => void }): ReactNode {
  const refresh = useRefresh(tenant);
  const submit = async (event: FormEvent<HTMLFormElement>): Promise<void> => {
    const overlap_seconds = Number(new FormData(event.currentTarget).get("overlap"));
    const path = { webhook_id: webhook.id };
    onIssued(await api("post", "/v1/webhooks/{webhook_id}/rotate", { path, body: { overlap_seconds }, tenant }));
    await refresh();
  };
  return (
    <FormDialog title={`Rotate the secret of ${hostOf(webhook)}`} action="Create new secret" onSubmit={submit} onClose={onClose}>
      <p>Until the overlap ends, each event has two signatures: one by each secret.</p>
      <SelectField label="The old secret also signs for" name="overlap" options={OVERLAPS}
        hint="Long enough to update the receiver." />
    </FormDialog>
  );
}

export function WebhookSecret({ issued, onClose }: { issued: IssuedWebhook; onClose: () => void }): ReactNode {
  return (
    <SecretDialog title={`Secret of ${hostOf(issued)}`} secret={issued.secret} copyLabel="Copy secret" onClose={onClose}>
      <p>The receiver verifies the signature of each event with it.</p>
    </SecretDialog>
  );
}

export function DisableWebhook({ tenant, webhook, onClose }: OfWebhook): ReactNode {
  const refresh = useRefresh(tenant);
  const disable = async (): Promise<void> => {
    await api("patch", "/v1/webhooks/{webhook_id}", { path: { webhook_id: webhook.id }, body: { disabled: true }, tenant });
    await refresh();
  };
  return (
    <ConfirmDialog title={`Disable ${hostOf(webhook)}?`} action="Disable" danger onConfirm={disable} onClose={onClose}>
      <p>It receives no new events. Pending ones that are younger than three days are sent when it is enabled again.</p>
    </ConfirmDialog>
  );
}

export function DeleteWebhook({ tenant, webhook, onClose, onDeleted }: OfWebhook & { onDeleted: () => void }): ReactNode {
  const refresh = useRefresh(tenant);
  const toast = useToast();
  const remove = async (): Promise<void> => {
    await api("delete", "/v1/webhooks/{webhook_id}", { path: { webhook_id: webhook.id }, tenant });
    onDeleted();
    toast(`The webhook of ${hostOf(webhook)} is deleted.`);
    await refresh();
  };
  return (
    <ConfirmDialog title={`Delete the webhook of ${hostOf(webhook)}?`} action="Delete webhook" danger onConfirm={remove} onClose={onClose}>
      <p>Its secret and all of its events are deleted, also those that are not delivered yet. This cannot be undone.</p>
    </ConfirmDialog>
  );
}
