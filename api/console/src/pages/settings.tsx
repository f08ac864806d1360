/** How the server is set up, and where each value comes from. Nothing is changed here. */

import { useQuery } from "@tanstack/react-query";
import type { ReactNode } from "react";
import { api, type Answer } from "../api/client.ts";
import { DataTable, type Columns } from "../components/data-table.tsx";
import { Filter, Search } from "../components/form.tsx";
import { Page, Panel } from "../components/layout.tsx";
import { EmptyState } from "../components/states.tsx";
import { Badge } from "../components/values.tsx";
import { useParam } from "../lib/hooks.ts";

type Setting = Answer<"get", "/admin/settings">["data"][number];

const SOURCES = [
  ["", "All sources"], ["default", "Defaults"], ["environment", "Environment"], ["file", "Files"], ["flag", "Flags"],
] as const;

const COLUMNS: Columns<Setting> = [
  {
    header: "Setting",
    cell: ({ row: { original: setting } }) => (
      <><code>{setting.name}</code><span className="sub">{setting.description}</span></>
    ),
  },
  {
    header: "Value",
    cell: ({ row }) => row.original.value === null ? <span className="faint">not set</span> : <code>{row.original.value}</code>,
  },
  {
    header: "From",
    cell: ({ row: { original: { source } } }) => <Badge tone={source === "default" ? "" : "accent"}>{source}</Badge>,
  },
];

export default function SettingsPage(): ReactNode {
  const [search, setSearch] = useParam("search");
  const [source, setSource] = useParam("source");
  const query = useQuery({
    queryKey: ["settings"],
    queryFn: ({ signal }) => api("get", "/admin/settings", { signal }),
  });
  const wanted = search.toLowerCase();
  const rows = query.data?.data.filter(
    (setting) =>
      (source === "" || setting.source === source) &&
      `${setting.name} ${setting.description}`.toLowerCase().includes(wanted),
  );
  return (
    <Page title="Settings"
      lead="The effective configuration of this server. A flag overrides the environment; the environment overrides a file."
      actions={
        <div className="row filters">
          <Search label="Search settings" value={search} onChange={setSearch} />
          <Filter label="Source" value={source} onChange={setSource} options={SOURCES} />
        </div>
      }>
      <Panel title="Effective configuration" flush note="Secret values are hidden.">
        <DataTable caption="Settings" columns={COLUMNS} rowId={(setting) => setting.name}
          source={{ rows, error: query.error, isStale: false, refetch: query.refetch }}
          empty={<EmptyState title="No settings match" command="loraplex serve --help" />} />
      </Panel>
    </Page>
  );
}
