/** How the server is set up, and where each value comes from. Nothing is changed here. */

import { useQuery } from "@tanstack/react-query";
import type { ReactNode } from "react";
import { api, type Answer } from "../api/client.ts";
import { Filter, Search } from "../components/form.tsx";
import { Page, Panel } from "../components/layout.tsx";
import { EmptyState, Loaded } from "../components/states.tsx";
import { Badge, Words } from "../components/values.tsx";
import { useParam } from "../lib/hooks.ts";
import { grouped, isFound, titleOf, valueOf } from "../lib/settings.ts";

type Setting = Answer<"get", "/admin/settings">["data"][number];

const SOURCES = [
  ["", "All sources"], ["default", "Defaults"], ["flag", "Flags"], ["environment", "Variables"], ["file", "Files"],
] as const;
const SOURCE_NAMES = { default: "default", flag: "flag", environment: "variable", file: "file" } as const;

export default function SettingsPage(): ReactNode {
  const [search, setSearch] = useParam("search");
  const [source, setSource] = useParam("source");
  const query = useQuery({
    queryKey: ["settings"],
    queryFn: ({ signal }) => api("get", "/admin/settings", { signal }),
  });
  return (
    <Page title="Settings"
      lead="The effective configuration of this server. A flag overrides the variable; the variable overrides a file. Secret values are hidden."
      actions={
        <div className="row filters">
          <Search label="Search settings" value={search} onChange={setSearch} />
          <Filter label="Source" value={source} onChange={setSource} options={SOURCES} />
        </div>
      }>
      <Loaded query={query}>
        {({ data }) => {
          const groups = grouped(data.filter((one) => (source === "" || one.source === source) && isFound(one, search)));
          return groups.length === 0
            ? <section className="panel"><EmptyState title="No settings match">Clear the search or the source filter.</EmptyState></section>
            : groups.map(([title, members]) => <Group key={title} title={title} members={members} />);
        }}
      </Loaded>
    </Page>
  );
}

function Group({ title, members }: { title: string; members: Setting[] }): ReactNode {
  return (
    <Panel title={title} flush>
      <dl className="settings">
        {members.map((setting) => (
          <div key={setting.name}>
            <dt>
              {titleOf(setting)}
              <span className="sub"><code>{setting.flag ?? setting.variable ?? setting.name}</code></span>
            </dt>
            <dd className="setting-value"><Value setting={setting} /></dd>
            <dd className="setting-source"><Source setting={setting} /></dd>
            <dd className="setting-about soft"><Words>{setting.description}</Words></dd>
          </div>
        ))}
      </dl>
    </Panel>
  );
}

function Value({ setting }: { setting: Setting }): ReactNode {
  const value = valueOf(setting);
  if (value === null) return <span className="soft">{setting.unset === null ? "not set" : <Words>{setting.unset}</Words>}</span>;
  return <b title={setting.value ?? undefined}>{value}</b>;
}

function Source({ setting: { source, origin, flag } }: { setting: Setting }): ReactNode {
  return (
    <>
      <Badge tone={source === "default" ? "" : "accent"}>{SOURCE_NAMES[source] ?? source}</Badge>
      {origin !== null && origin !== flag && <span className="sub"><code>{origin}</code></span>}
    </>
  );
}
