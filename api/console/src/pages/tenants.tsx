/** Whom the platform serves: all tenants, and making one. */

import { useQueryClient } from "@tanstack/react-query";
import { useState, type FormEvent, type ReactNode } from "react";
import { Link, useNavigate } from "react-router";
import { api, type Answer } from "../api/client.ts";
import { Button } from "../components/button.tsx";
import { DataTable, type Bulk, type Columns } from "../components/data-table.tsx";
import { ConfirmDialog, NameList } from "../components/dialog.tsx";
import { FormDialog } from "../components/form-dialog.tsx";
import { Filter, Search, TextField } from "../components/form.tsx";
import { Page, Panel } from "../components/layout.tsx";
import { EmptyState } from "../components/states.tsx";
import { Badge, Meter, Time } from "../components/values.tsx";
import { count, number, plural } from "../lib/format.ts";
import { useParam, useRested } from "../lib/hooks.ts";
import { usePages } from "../lib/pages.ts";
import { useScope } from "../session.tsx";

type Tenant = Answer<"get", "/admin/tenants">["data"][number];

/** Which change to which tenants has to be confirmed. */
type Asked = { what: "suspend" | "resume"; tenants: Tenant[] } | null;

const STATES = [["", "All tenants"], ["false", "Active"], ["true", "Suspended"]] as const;

const COLUMNS: Columns<Tenant> = [
  {
    header: "Tenant",
    cell: ({ row: { original: tenant } }) => (
      <span className="row">
        <Link to={`/tenants/${tenant.slug}`}>{tenant.slug}</Link>
        {tenant.name && <span className="soft">{tenant.name}</span>}
      </span>
    ),
  },
  {
    header: "State",
    cell: ({ row: { original: tenant } }) =>
      tenant.suspended_at ? <Badge tone="warn">suspended</Badge> : <Badge tone="good">active</Badge>,
  },
  {
    header: () => <span title="In the last 30 days">Requests</span>,
    id: "requests", meta: { end: true, label: "Requests in 30 days" }, cell: ({ row }) => count(row.original.requests),
  },
  {
    header: () => <span title="Prompt and generated tokens of the last 30 days">Tokens</span>,
    id: "tokens", meta: { end: true, label: "Tokens in 30 days" }, cell: ({ row }) => count(row.original.tokens),
  },
  { header: "Token budget", cell: ({ row }) => <Budget of={row.original} /> },
  { header: "Weight", meta: { end: true }, cell: ({ row }) => number(row.original.weight) },
  { header: "Created", cell: ({ row }) => <Time at={row.original.created_at} /> },
];

/** What of a tenant's limit of tokens is used in this day or month. */
function Budget({ of: { slug, budget } }: { of: Tenant }): ReactNode {
  if (budget === null) return <span className="faint">none</span>;
  return (
    <>
      <span className="nowrap">{count(budget.used)} of {count(budget.tokens)} a {budget.period}</span>
      <Meter value={budget.used} max={budget.tokens} label={`Tokens of ${slug} in this ${budget.period}`} />
    </>
  );
}

export default function TenantsPage(): ReactNode {
  const { isAdmin } = useScope();
  const [suspended, setSuspended] = useParam("suspended");
  const [isMaking, setMaking] = useState(false);
  const [asked, setAsked] = useState<Asked>(null);
  const [search, setSearch] = useParam("search");
  const rested = useRested(search) || null;
  const tenants = usePages<Tenant>(["tenants", suspended, rested], (after, signal) =>
    api("get", "/admin/tenants", {
      query: { after: after ?? null, search: rested, suspended: suspended === "" ? null : suspended === "true" },
      signal,
    }),
  );
  return (
    <Page
      title="Tenants"
      lead="Each tenant has its own adapters, keys, users and limits. Its weight sets its share of the device when tenants compete."
      actions={isAdmin && <Button tone="primary" onClick={() => setMaking(true)}>New tenant</Button>}
    >
      <Panel title="All tenants" flush
        actions={
          <>
            <Search label="Search tenants" value={search} onChange={setSearch} />
            <Filter label="State" value={suspended} onChange={setSuspended} options={STATES} />
          </>
        }>
        <DataTable caption="Tenants" columns={COLUMNS} source={tenants} rowId={(tenant) => tenant.id}
          bulk={isAdmin ? bulkOf(setAsked) : undefined}
          empty={<Nothing isNarrowed={Boolean(rested ?? suspended)} />} />
      </Panel>
      {isMaking && <NewTenant onClose={() => setMaking(false)} />}
      {asked && <ChangeTenants {...asked} onClose={() => setAsked(null)} />}
    </Page>
  );
}

/** Each action applies to those of the selected tenants that it changes. */
function bulkOf(onAsk: (asked: Asked) => void): Bulk<Tenant> {
  return {
    applies: () => true,
    name: ({ slug }) => slug,
    actions: (tenants, clear) => {
      const [active, suspended] = [tenants.filter((one) => !one.suspended_at), tenants.filter((one) => one.suspended_at)];
      const ask = (what: "suspend" | "resume", tenants: Tenant[]) => () => { clear(); onAsk({ what, tenants }); };
      return (
        <>
          {active.length > 0 && <Button small tone="danger" onClick={ask("suspend", active)}>Suspend</Button>}
          {suspended.length > 0 && <Button small onClick={ask("resume", suspended)}>Resume</Button>}
        </>
      );
    },
  };
}

function ChangeTenants({ what, tenants, onClose }: NonNullable<Asked> & { onClose: () => void }): ReactNode {
  const client = useQueryClient();
  const change = async (): Promise<void> => {
    try {
      for (const { slug } of tenants) {
        await api("patch", "/admin/tenants/{slug}", { path: { slug }, body: { suspended: what === "suspend" } });
      }
    } finally {
      await client.invalidateQueries({ queryKey: ["tenants"] });
    }
  };
  const whom = plural(tenants.length, "tenant");
  const names = <NameList names={tenants.map(({ slug }) => slug)} />;
  if (what === "resume") {
    return (
      <ConfirmDialog title={`Resume ${whom}?`} action={`Resume ${whom}`} onConfirm={change} onClose={onClose}>
        {names}
        <p>Their keys work again and their users can sign in.</p>
      </ConfirmDialog>
    );
  }
  return (
    <ConfirmDialog title={`Suspend ${whom}?`} action={`Suspend ${whom}`} typed={whom} danger onConfirm={change} onClose={onClose}>
      {names}
      <p>
        Their keys are refused and their users are signed out, within five seconds on every server. Running requests
        finish and are charged. Nothing is deleted.
      </p>
    </ConfirmDialog>
  );
}

function Nothing({ isNarrowed }: { isNarrowed: boolean }): ReactNode {
  if (isNarrowed) return <EmptyState title="No tenants match">Clear the search or the state filter.</EmptyState>;
  return (
    <EmptyState title="No tenants" command="loraplex tenants create acme">
      A tenant is a customer or team. Create one here or with the CLI.
    </EmptyState>
  );
}

function NewTenant({ onClose }: { onClose: () => void }): ReactNode {
  const client = useQueryClient();
  const navigate = useNavigate();
  const submit = async (event: FormEvent<HTMLFormElement>): Promise<void> => {
    const form = new FormData(event.currentTarget);
    const slug = String(form.get("slug")).trim();
    const name = String(form.get("name")).trim();
    const weight = Number(form.get("weight"));
    await api("post", "/admin/tenants", { body: { slug, name: name || null, weight } });
    await client.invalidateQueries({ queryKey: ["tenants"] });
    await navigate(`/tenants/${slug}`);
  };
  return (
    <FormDialog title="New tenant" action="Create tenant" onSubmit={submit} onClose={onClose}>
      <TextField label="Slug" name="slug" required maxLength={63} autoComplete="off" spellCheck={false} autoFocus
        hint="1 to 63 of a–z, 0–9 and -. Adapters are called slug/adapter; it stays for good." />
      <TextField label="Name" name="name" maxLength={200} autoComplete="off" hint="Optional display name." />
      <TextField label="Weight" name="weight" type="number" required min={0.01} max={100} step="any" defaultValue={1}
        hint="2 gets twice the share of 1 while both have requests waiting." />
    </FormDialog>
  );
}
