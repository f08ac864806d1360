/** What is done to a tenant's keys. */

import { useQueryClient } from "@tanstack/react-query";
import type { FormEvent, ReactNode } from "react";
import { api, type Answer, type BodyOf } from "../api/client.ts";
import { plural } from "../lib/format.ts";
import { OVERLAPS, SCOPES, SCOPES_AT_FIRST, listOf, type Scope } from "../lib/keys.ts";
import { useScope } from "../session.tsx";
import { ConfirmDialog, NameList } from "./dialog.tsx";
import { FormDialog } from "./form-dialog.tsx";
import { Field, SelectField, TextField } from "./form.tsx";

export type Key = Answer<"get", "/v1/keys">["data"][number];
export type IssuedKey = Answer<"post", "/v1/keys">;

const LIFETIMES = [["90", "90 days"], ["30", "30 days"], ["365", "a year"], ["", "no end"]] as const;

interface OfTenant {
  tenant: string;
  onClose: () => void;
}

function useRefresh(tenant: string): () => Promise<void> {
  const client = useQueryClient();
  return () => client.invalidateQueries({ queryKey: ["keys", tenant] });
}

export function IssueKey({ tenant, onIssued, onClose }: OfTenant & { onIssued: (key: IssuedKey) => void }): ReactNode {
  const { may } = useScope();
  const refresh = useRefresh(tenant);
  const submit = async (event: FormEvent<HTMLFormElement>): Promise<void> => {
    const body = orderOf(new FormData(event.currentTarget));
    onIssued(await api("post", "/v1/keys", { body, tenant }));
    await refresh();
  };
  return (
    <FormDialog title="New key" action="Create key" onSubmit={submit} onClose={onClose}>
      <TextField label="Name" name="name" required maxLength={200} autoComplete="off" autoFocus
        hint="The program or machine that uses the key." />
      <fieldset className="form plain">
        <legend>Permissions</legend>
        {SCOPES.filter(([scope]) => may(scope)).map(([scope, text]) => (
          <label key={scope} className="check">
            <input type="checkbox" name="scopes" value={scope} defaultChecked={SCOPES_AT_FIRST.includes(scope)} />
            <span>{text} <code className="soft">{scope}</code></span>
          </label>
        ))}
      </fieldset>
      <Lines label="Adapters" name="adapters"
        hint="One name per line. The key can use only these, not even the base. Empty: all." />
      <Lines label="Networks" name="networks" hint="One per line, such as 10.0.0.0/8. Empty: any network." />
      <SelectField label="Expires after" name="lifetime" options={LIFETIMES} />
    </FormDialog>
  );
}

function Lines({ label, name, hint }: { label: string; name: string; hint: string }): ReactNode {
  return (
    <Field label={label} hint={hint}>
      {(control) => <textarea {...control} name={name} rows={2} spellCheck={false} className="input mono" />}
    </Field>
  );
}

function orderOf(form: FormData): BodyOf<"post", "/v1/keys"> {
  const lifetime = String(form.get("lifetime"));
  return {
    name: String(form.get("name")).trim(),
    scopes: form.getAll("scopes") as Scope[],
    adapters: listOf(String(form.get("adapters"))),
    networks: listOf(String(form.get("networks"))),
    expires_in_days: lifetime === "" ? null : Number(lifetime),
    user: null,
  };
}

interface OfKey extends OfTenant {
  of: Key;
}

export function RotateKey({ tenant, of, onIssued, onClose }: OfKey & { onIssued: (key: IssuedKey) => void }): ReactNode {
  const refresh = useRefresh(tenant);
  const submit = async (event: FormEvent<HTMLFormElement>): Promise<void> => {
    const overlap_seconds = Number(new FormData(event.currentTarget).get("overlap"));
    onIssued(await api("post", "/v1/keys/{key_id}/rotate", { path: { key_id: of.id }, body: { overlap_seconds }, tenant }));
    await refresh();
  };
  return (
    <FormDialog title={`Rotate ${of.name}`} action="Create new key" onSubmit={submit} onClose={onClose}>
      <p>The new key has the same permissions and the same lifetime, starting now.</p>
      <SelectField label="The old key stays valid for" name="overlap" options={OVERLAPS}
        hint="Long enough to update every program that uses the old key." />
    </FormDialog>
  );
}

export function RevokeKeys({ tenant, keys, onClose }: OfTenant & { keys: Key[]; onClose: () => void }): ReactNode {
  const refresh = useRefresh(tenant);
  const revoke = async (): Promise<void> => {
    try {
      for (const { id } of keys) await api("delete", "/v1/keys/{key_id}", { path: { key_id: id }, tenant });
    } finally {
      await refresh();
    }
  };
  const [first] = keys;
  const what = keys.length === 1 && first ? first.name : plural(keys.length, "key");
  return (
    <ConfirmDialog title={`Revoke ${what}?`} action={keys.length === 1 ? "Revoke key" : `Revoke ${what}`} danger
      onConfirm={revoke} onClose={onClose}>
      {keys.length > 1 && <NameList names={keys.map(({ name }) => name)} />}
      <p>
        This server refuses {keys.length === 1 ? "the key" : "them"} immediately, every other server within five seconds.
        Running requests finish. This cannot be undone.
      </p>
    </ConfirmDialog>
  );
}
