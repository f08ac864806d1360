/** Who changed what: a tenant's log or the platform's, and whether its chain is as it was written. */

import { useEffect, useRef, useState, type ReactNode } from "react";
import { api, type Answer } from "../api/client.ts";
import { Button } from "../components/button.tsx";
import { DataTable, type Columns } from "../components/data-table.tsx";
import { DateField, Search } from "../components/form.tsx";
import { Page, Panel, Segments } from "../components/layout.tsx";
import { EmptyState, ErrorNotice } from "../components/states.tsx";
import { Digest, Time } from "../components/values.tsx";
import { actionText, detailText, subjectOf } from "../lib/audit.ts";
import { count, plural } from "../lib/format.ts";
import { useParam, useRested } from "../lib/hooks.ts";
import { usePages } from "../lib/pages.ts";
import { useScope } from "../session.tsx";

type Entry = Answer<"get", "/v1/audit">["data"][number];
type Verification = Answer<"get", "/admin/audit/verification">;

const ORDERS = [["", "Newest first"], ["oldest", "Oldest first"]] as const;

const COLUMNS: Columns<Entry> = [
  { header: "No.", meta: { end: true }, cell: ({ row }) => row.original.number },
  { header: "When", cell: ({ row }) => <Time at={row.original.at} exact /> },
  {
    header: "Who",
    cell: ({ row: { original: { actor, address } } }) => (
      <>{actor.name}<span className="sub">{actor.kind}{address && ` from ${address}`}</span></>
    ),
  },
  {
    header: "What",
    cell: ({ row: { original: { action } } }) => <>{actionText(action)}<code className="sub">{action}</code></>,
  },
  { header: "To what", cell: ({ row }) => <Subject of={row.original} /> },
  { header: "Details", cell: ({ row }) => <Details of={row.original} /> },
  { header: "Hash", cell: ({ row }) => <Digest digest={row.original.hash} /> },
];

export default function AuditPage(): ReactNode {
  const { tenant, isOperator } = useScope();
  const [action, setAction] = useParam("action");
  const [actor, setActor] = useParam("actor");
  const [resource, setResource] = useParam("resource");
  const [order, setOrder] = useParam("order");
  const [from, setFrom] = useParam("from");
  const [to, setTo] = useParam("to");
  const rested = useRested(JSON.stringify({ action, actor, resource, from, to }));
  const entries = usePages<Entry>(["audit", tenant, rested, order], (after, signal) => {
    const wanted = JSON.parse(rested) as Record<"action" | "actor" | "resource" | "from" | "to", string>;
    const query = {
      since: startOf(wanted.from), until: startOf(wanted.to, 1),
      action: wanted.action || null, actor: wanted.actor || null, resource: wanted.resource || null,
      oldest_first: order === "oldest", after: after ?? null,
    };
    if (tenant === null) return api("get", "/admin/audit", { query, signal });
    return api("get", "/v1/audit", { query, tenant, signal });
  });
  const chain = tenant ?? "the platform";
  return (
    <Page title="Audit log"
      lead="Every change, written in its own transaction and chained to the one before. Nothing removes entries."
      actions={isOperator && <Verify key={chain} tenant={tenant} />}>
      <Panel title={`Changes of ${chain}`} flush
        actions={
          <div className="row filters">
            <Search label="Action" value={action} onChange={setAction} />
            <Search label="Actor" value={actor} onChange={setActor} />
            <Search label="Resource" value={resource} onChange={setResource} />
            <DateField label="From" value={from} onChange={setFrom} />
            <DateField label="To" value={to} onChange={setTo} />
            <Segments label="Order" options={ORDERS} value={order === "oldest" ? "oldest" : ""} onChange={setOrder} />
          </div>
        }>
        <DataTable caption="Audit log" columns={COLUMNS} source={entries} rowId={(entry) => String(entry.number)}
          empty={<EmptyState title="No such change" command={`loraplex audit list${tenant ? ` --tenant ${tenant}` : ""}`}>
            Nothing in this log fits. A noun alone, such as <code>key</code>, means all that is done to keys.
          </EmptyState>} />
      </Panel>
    </Page>
  );
}

/** Midnight UTC at which the day begins, or so many days later; null without a day. */
function startOf(day: string, later = 0): string | null {
  const begin = Date.parse(`${day}T00:00:00Z`);
  return Number.isNaN(begin) ? null : new Date(begin + later * 86_400_000).toISOString();
}

function Subject({ of }: { of: Entry }): ReactNode {
  const { name, id } = subjectOf(of.resource, of.details);
  return <span className="breakable">{name}{id && <span className="sub mono">{id}</span>}</span>;
}

function Details({ of }: { of: Entry }): ReactNode {
  const details = Object.entries(of.details);
  return (
    <div className="details">
      {details.map(([name, value]) => (
        <span key={name} className="sub">{detailText(name, value).join(": ")}</span>
      ))}
      {of.request_id && <span className="sub mono">{of.request_id}</span>}
    </div>
  );
}

/** Verifies a whole chain, piece by piece, and says how far it is. */
function Verify({ tenant }: { tenant: string | null }): ReactNode {
  const [state, setState] = useState<Verification | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [busy, setBusy] = useState(false);
  const running = useRef<AbortController | null>(null);
  useEffect(() => () => running.current?.abort(), []);
  const verify = async (): Promise<void> => {
    const { signal } = (running.current = new AbortController());
    setBusy(true);
    setError(null);
    try {
      let after = 0;
      for (;;) {
        const piece = await api("get", "/admin/audit/verification", { query: { tenant, after }, signal });
        setState(piece);
        if (piece.is_finished || !piece.is_intact) break;
        after = piece.last_number;
      }
    } catch (thrown) {
      setError(thrown);
    }
    setBusy(false);
  };
  return (
    <>
      {error !== null && <ErrorNotice error={error} />}
      <span role="status">{state && <Found state={state} />}</span>
      <Button busy={busy} onClick={() => void verify()}>Verify the chain</Button>
    </>
  );
}

function Found({ state }: { state: Verification }): ReactNode {
  if (state.breach) {
    return <span className="badge bad">broken at entry {count(state.breach.number)}: {state.breach.reason}</span>;
  }
  if (!state.is_finished) return <span className="soft">verified up to entry {count(state.last_number)} …</span>;
  return <span className="badge good">intact: {plural(state.last_number, "entry", "entries")}</span>;
}
