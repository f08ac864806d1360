/** A tenant's API keys: issuing, rotating with an overlap, and revoking them. */

import { useState, type ReactNode } from "react";
import { api } from "../api/client.ts";
import { BudgetDialog, budgetColumn, useBudgets } from "../components/budgets.tsx";
import { Button } from "../components/button.tsx";
import { DataTable, type Bulk, type Columns } from "../components/data-table.tsx";
import { Filter } from "../components/form.tsx";
import { IssueKey, RevokeKeys, RotateKey, type IssuedKey, type Key } from "../components/key-dialogs.tsx";
import { Page, Panel } from "../components/layout.tsx";
import { NeedsTenant } from "../components/needs-tenant.tsx";
import { SecretDialog } from "../components/secret.tsx";
import { EmptyState } from "../components/states.tsx";
import { Badge, Time } from "../components/values.tsx";
import { useParam } from "../lib/hooks.ts";
import { keyState } from "../lib/keys.ts";
import { usePages } from "../lib/pages.ts";
import { useScope } from "../session.tsx";

type Asked = { what: "rotate" | "budget"; of: Key } | { what: "revoke"; keys: Key[] } | { what: "issue" } | null;

const STATES = [["", "All keys"], ["true", "Usable"], ["false", "Expired or revoked"]] as const;
const TONES = { usable: "good", "ends soon": "warn", expired: "", revoked: "" } as const;

export default function KeysPage(): ReactNode {
  const { tenant, may } = useScope();
  const [asked, setAsked] = useState<Asked>(null);
  return (
    <Page title="Keys" lead="Bearer tokens for programs. The server stores only a hash of each key."
      actions={tenant && may("keys:manage") && (
        <Button tone="primary" onClick={() => setAsked({ what: "issue" })}>New key</Button>
      )}>
      <NeedsTenant what="Keys">
        {(slug) => <Keys key={slug} tenant={slug} asked={asked} onAsk={setAsked} />}
      </NeedsTenant>
    </Page>
  );
}

interface KeysProps {
  tenant: string;
  asked: Asked;
  onAsk: (asked: Asked) => void;
}

function Keys({ tenant, asked, onAsk }: KeysProps): ReactNode {
  const { may } = useScope();
  const [active, setActive] = useParam("active");
  const [issued, setIssued] = useState<IssuedKey | null>(null);
  const close = (): void => onAsk(null);
  const budgets = useBudgets(tenant, may("usage:read"));
  const keys = usePages<Key>(["keys", tenant, active], (after, signal) =>
    api("get", "/v1/keys", {
      query: { after: after ?? null, ...(active !== "" && { active: active === "true" }) }, tenant, signal,
    }),
  );
  return (
    <>
      <Panel title={`Keys of ${tenant}`} flush
        actions={<Filter label="State" value={active} onChange={setActive} options={STATES} />}>
        <DataTable caption="Keys" columns={columnsOf(may("keys:manage"), budgetColumn("key", budgets.data, (key) => key.name), onAsk)} source={keys} rowId={(key) => key.id}
          bulk={may("keys:manage") ? bulkOf(onAsk) : undefined}
          empty={<EmptyState title="No keys" command={`loraplex keys create --tenant ${tenant} --name ci`}>
            Programs need a key to call the API. Create one here or with the CLI.
          </EmptyState>} />
      </Panel>
      {asked?.what === "issue" && <IssueKey tenant={tenant} onIssued={setIssued} onClose={close} />}
      {asked?.what === "rotate" && <RotateKey tenant={tenant} of={asked.of} onIssued={setIssued} onClose={close} />}
      {asked?.what === "budget" && (
        <BudgetDialog tenant={tenant} holder={{ kind: "key", id: asked.of.id, name: asked.of.name }} onClose={close} />
      )}
      {asked?.what === "revoke" && <RevokeKeys tenant={tenant} keys={asked.keys} onClose={close} />}
      {asked === null && issued && (
        <SecretDialog title={`Key ${issued.name}`} secret={issued.key} copyLabel="Copy key"
          onClose={() => setIssued(null)}>
          <p>Send it as <code>Authorization: Bearer …</code>, or use it as the client's API key.</p>
        </SecretDialog>
      )}
    </>
  );
}

function bulkOf(onAsk: (asked: Asked) => void): Bulk<Key> {
  return {
    applies: isUsable,
    name: (key) => key.name,
    actions: (keys, clear) => (
      <Button small tone="danger" onClick={() => { clear(); onAsk({ what: "revoke", keys }); }}>Revoke</Button>
    ),
  };
}

function isUsable(key: Key): boolean {
  const state = keyState(key, Date.now());
  return state !== "revoked" && state !== "expired";
}

function columnsOf(mayChange: boolean, budgets: Columns<Key>, onAsk: (asked: Asked) => void): Columns<Key> {
  const columns: Columns<Key> = [
    {
      header: "Key",
      cell: ({ row: { original: key } }) => <>{key.name}<span className="sub mono">{key.id}</span></>,
    },
    {
      header: "State",
      cell: ({ row: { original: key } }) => {
        const state = keyState(key, Date.now());
        return <Badge tone={TONES[state]}>{state}</Badge>;
      },
    },
    { header: "May", cell: ({ row: { original: key } }) => <Grant of={key} /> },
    ...budgets,
    { header: "Last used", cell: ({ row }) => <Time at={row.original.last_used_at} /> },
    { header: "Expires", cell: ({ row }) => <Time at={row.original.revoked_at ?? row.original.expires_at} /> },
    { header: "Created", cell: ({ row }) => <Time at={row.original.created_at} /> },
  ];
  if (!mayChange) return columns;
  return [...columns, { id: "actions", header: "", meta: { end: true }, cell: ({ row }) => <Actions of={row.original} onAsk={onAsk} /> }];
}

/** What a key allows, and to what it is narrowed. */
function Grant({ of }: { of: Key }): ReactNode {
  return (
    <>
      {of.scopes.join(", ")}
      {of.adapters && <span className="sub">only {of.adapters.join(", ")}</span>}
      {of.networks && <span className="sub">from {of.networks.join(", ")}</span>}
    </>
  );
}

function Actions({ of, onAsk }: { of: Key; onAsk: (asked: Asked) => void }): ReactNode {
  if (!isUsable(of)) return null;
  return (
    <span className="nowrap">
      {of.successor === null && (
        <Button small tone="plain" aria-label={`Rotate ${of.name}`} onClick={() => onAsk({ what: "rotate", of })}>Rotate</Button>
      )}
      <Button small tone="plain" aria-label={`Budgets of ${of.name}`} onClick={() => onAsk({ what: "budget", of })}>Budgets</Button>
      <Button small tone="plain" aria-label={`Revoke ${of.name}`} onClick={() => onAsk({ what: "revoke", keys: [of] })}>Revoke</Button>
    </span>
  );
}
