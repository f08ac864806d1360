/** Whom the platform serves: all tenants, and making one. */

import { useQueryClient } from "@tanstack/react-query";
import { useState, type FormEvent, type ReactNode } from "react";
import { Link, useNavigate } from "react-router";
import { api, type Answer } from "../api/client.ts";
import { Button } from "../components/button.tsx";
import { DataTable, type Columns } from "../components/data-table.tsx";
import { FormDialog } from "../components/form-dialog.tsx";
import { Filter, TextField } from "../components/form.tsx";
import { Page, Panel } from "../components/layout.tsx";
import { EmptyState } from "../components/states.tsx";
import { Badge, Time } from "../components/values.tsx";
import { number } from "../lib/format.ts";
import { useParam } from "../lib/hooks.ts";
import { usePages } from "../lib/pages.ts";
import { useScope } from "../session.tsx";

type Tenant = Answer<"get", "/admin/tenants">["data"][number];

const STATES = [["", "All tenants"], ["false", "Active"], ["true", "Suspended"]] as const;

const COLUMNS: Columns<Tenant> = [
  {
    header: "Tenant",
    cell: ({ row: { original: tenant } }) => (
      <>
        <Link to={`/tenants/${tenant.slug}`}>{tenant.slug}</Link>
        {tenant.name && <span className="sub">{tenant.name}</span>}
      </>
    ),
  },
  {
    header: "State",
    cell: ({ row: { original: tenant } }) =>
      tenant.suspended_at ? <Badge tone="warn">suspended</Badge> : <Badge tone="good">active</Badge>,
  },
  { header: "Weight", meta: { end: true }, cell: ({ row }) => number(row.original.weight) },
  { header: "Created", cell: ({ row }) => <Time at={row.original.created_at} /> },
];

export default function TenantsPage(): ReactNode {
  const { isAdmin } = useScope();
  const [suspended, setSuspended] = useParam("suspended");
  const [isMaking, setMaking] = useState(false);
  const tenants = usePages<Tenant>(["tenants", suspended], (after, signal) =>
    api("get", "/admin/tenants", {
      query: { after: after ?? null, suspended: suspended === "" ? null : suspended === "true" },
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
        actions={<Filter label="State" value={suspended} onChange={setSuspended} options={STATES} />}>
        <DataTable caption="Tenants" columns={COLUMNS} source={tenants} rowId={(tenant) => tenant.id}
          empty={<EmptyState title="No tenants" command="loraplex tenants create acme">
            A tenant is a customer or team. Create one here or with the CLI.
          </EmptyState>} />
      </Panel>
      {isMaking && <NewTenant onClose={() => setMaking(false)} />}
    </Page>
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
