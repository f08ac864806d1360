import { createColumnHelper } from "@tanstack/react-table";
import { useState, type ReactNode } from "react";
import { Link } from "react-router";
import { api, type QueryOf } from "../api/client.ts";
import type { AdapterSummary } from "../api/types.ts";
import { DeleteAdapters } from "../components/adapter/deletions.tsx";
import { UploadDialog } from "../components/adapter/upload.tsx";
import { Button } from "../components/button.tsx";
import { DataTable, type Bulk, type Columns } from "../components/data-table.tsx";
import { Filter, Search } from "../components/form.tsx";
import { Icon } from "../components/icons.tsx";
import { Page } from "../components/layout.tsx";
import { EmptyState } from "../components/states.tsx";
import { AliasTargets, State, Time } from "../components/values.tsx";
import { addressOf, tenantAddress } from "../lib/addresses.ts";
import { bytes, count, duration } from "../lib/format.ts";
import { useParam, useRested } from "../lib/hooks.ts";
import { usePages } from "../lib/pages.ts";
import { useScope } from "../session.tsx";

const PAGE_SIZE = 50;
const REFRESH_MS = 10_000;
const STATES = [
  ["", "Any state"], ["ready", "Ready"], ["attesting", "Attesting"], ["validated", "Validated"],
  ["rejected", "Rejected"], ["deleting", "Deleting"],
] as const;

type Wanted = QueryOf<"get", "/v1/adapters">;

export default function Adapters(): ReactNode {
  const { tenant, may } = useScope();
  const [search, setSearch] = useParam("search");
  const [state, setState] = useParam("state");
  const [sort, setSort] = useParam("sort", "name");
  const [isUploading, setUploading] = useState(false);
  const [deleted, setDeleted] = useState<AdapterSummary[] | null>(null);
  const wanted = { search: useRested(search) || null, state: state || null, sort, limit: PAGE_SIZE } as Wanted;
  const source = usePages(
    ["adapters", tenant, wanted],
    (after, signal) => {
      const query = { ...wanted, after } as Wanted;
      return tenant === null
        ? api("get", "/admin/adapters", { query, signal })
        : api("get", "/v1/adapters", { query, tenant, signal });
    },
    { refetchInterval: REFRESH_MS },
  );
  return (
    <Page title="Adapters"
      actions={
        <>
          <Search label="Search by name" value={search} onChange={setSearch} />
          <Filter label="State" value={state} onChange={setState} options={STATES} />
          {tenant !== null && may("adapters:write") && (
            <Button tone="primary" onClick={() => setUploading(true)}><Icon name="upload" />Upload</Button>
          )}
        </>
      }>
      <section className="panel">
        <DataTable caption="Adapters" columns={tenant === null ? COLUMNS : COLUMNS.slice(1)} source={source}
          rowId={(row) => row.id} sort={sort} onSort={setSort}
          bulk={may("adapters:write") ? bulkOf(setDeleted) : undefined}
          empty={<Nothing isNarrowed={Boolean(search || state)} />} />
      </section>
      {isUploading && tenant !== null && (
        <UploadDialog tenant={tenant} onClose={() => setUploading(false)} />
      )}
      {deleted && <DeleteAdapters adapters={deleted} onClose={() => setDeleted(null)} />}
    </Page>
  );
}

function bulkOf(onDelete: (adapters: AdapterSummary[]) => void): Bulk<AdapterSummary> {
  return {
    applies: () => true,
    name: ({ tenant, name }) => `${tenant}/${name}`,
    actions: (adapters, clear) => (
      <Button small tone="danger" onClick={() => { clear(); onDelete(adapters); }}>Delete</Button>
    ),
  };
}

function Nothing({ isNarrowed }: { isNarrowed: boolean }): ReactNode {
  if (isNarrowed) return <EmptyState title="No adapters match">Clear the search or the state filter.</EmptyState>;
  return (
    <EmptyState title="No adapters yet" command="loraplex adapters push ./my-adapter my-adapter --alias prod">
      Push a folder written by PEFT's save_pretrained. The server checks it and measures its effect; then it is ready.
    </EmptyState>
  );
}

/** Small effects keep their size in sight: 0.188, 3.1e-5. */
function effect(value: number | null): string {
  if (value === null) return "–";
  return value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(1) : value.toPrecision(3);
}

const column = createColumnHelper<AdapterSummary>();

const COLUMNS: Columns<AdapterSummary> = [
  column.accessor("tenant", {
    header: "Tenant",
    cell: ({ getValue }) => <Link to={tenantAddress(getValue())}>{getValue()}</Link>,
  }),
  column.accessor("name", {
    header: "Name",
    meta: { sort: { ascending: "name", descending: "-name" } },
    cell: ({ row: { original } }) => (
      <Link to={addressOf(original.tenant, original.name)}><b>{original.name}</b></Link>
    ),
  }),
  column.accessor("state", {
    header: "State",
    cell: ({ row: { original } }) => (
      <>
        <State state={original.state} />
        <span className="sub nowrap">
          version {original.latest_version}
          {original.num_versions > 1 && ` of ${original.num_versions}`}
        </span>
      </>
    ),
  }),
  column.accessor("task", { header: "Task" }),
  column.accessor("aliases", {
    header: "Aliases",
    cell: ({ row: { original } }) => <AliasTargets {...original} />,
  }),
  column.accessor("tier", { header: "Location", cell: ({ getValue }) => <State state={getValue()} /> }),
  column.accessor("rank", {
    header: "Rank", meta: { end: true }, cell: ({ getValue }) => getValue() ?? "–",
  }),
  column.accessor("bytes", {
    header: "Size", meta: { end: true, sort: { descending: "bytes" } }, cell: ({ getValue }) => bytes(getValue()),
  }),
  column.accessor("effect", {
    header: () => <span title="Maximum logit change against the base, measured at push">Effect</span>,
    meta: { end: true, label: "Effect" },
    cell: ({ getValue }) => effect(getValue()),
  }),
  column.accessor("requests", {
    header: () => <span title="In the last 30 days">Requests</span>, meta: { end: true, label: "Requests in 30 days", sort: { descending: "requests" } }, cell: ({ getValue }) => count(getValue()),
  }),
  column.accessor("p95_ms", {
    header: "p95", meta: { end: true, sort: { descending: "p95" } }, cell: ({ getValue }) => duration(getValue()),
  }),
  column.accessor("last_used", {
    header: "Last used", meta: { sort: { descending: "last_used" } }, cell: ({ getValue }) => <Time at={getValue()} />,
  }),
];
