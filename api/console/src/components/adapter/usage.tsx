import { useQuery } from "@tanstack/react-query";
import type { ReactNode } from "react";
import { api } from "../../api/client.ts";
import { days, sumByDay, type DayRow } from "../../lib/days.ts";
import { everyRow } from "../../lib/every-row.ts";
import { bytes, count } from "../../lib/format.ts";
import { Chart } from "../chart.tsx";
import { Figures, Panel } from "../layout.tsx";
import { EmptyState, Loaded } from "../states.tsx";

const NUM_DAYS = 30;
const MAX_ROWS = 500;

/** What one adapter was used for in the last thirty days, by version. */
export function AdapterUsage({ tenant, adapter }: { tenant: string; adapter: string }): ReactNode {
  const calendar = days(NUM_DAYS);
  const query = useQuery({
    queryKey: ["adapter", tenant, adapter, "usage", calendar[0]],
    queryFn: ({ signal }) => everyRow<DayRow>((after) => api("get", "/v1/usage", {
      query: { adapter, since: calendar[0]!, group_by: ["day", "version"], limit: MAX_ROWS, after: after ?? null },
      tenant, signal,
    })),
  });
  return <Loaded query={query}>{(rows) => <Usage rows={rows} calendar={calendar} adapter={adapter} />}</Loaded>;
}

function Usage({ rows, calendar, adapter }: {
  rows: DayRow[];
  calendar: string[];
  adapter: string;
}): ReactNode {
  if (rows.length === 0) {
    return (
      <section className="panel">
        <EmptyState title="Not used in the last 30 days" command={`loraplex chat ${adapter}`} />
      </section>
    );
  }
  const total = (name: "requests" | "prompt_tokens" | "completion_tokens" | "cold_loads" | "residency_byte_seconds"): number =>
    rows.reduce((sum, row) => sum + row[name], 0);
  const versions = [...new Set(rows.map((row) => row.version))].sort((one, other) => (one ?? 0) - (other ?? 0));
  const series = versions.map((version) => ({
    label: `Version ${version}`,
    values: sumByDay(rows.filter((row) => row.version === version), calendar, "completion_tokens"),
  }));
  return (
    <>
      <Figures figures={[
        { label: "Requests", value: count(total("requests")) },
        { label: "Prompt tokens", value: count(total("prompt_tokens")) },
        { label: "Generated tokens", value: count(total("completion_tokens")) },
        { label: "Cold loads", value: count(total("cold_loads")) },
        { label: "On the device", value: `${bytes(total("residency_byte_seconds") / 3600)}·h` },
      ]} />
      <Panel title="Generated tokens by day" note="the last 30 days, in UTC">
        <Chart label="Generated tokens by day" kind="bars" times={calendar.map((day) => `${day}T12:00:00Z`)}
          series={series} format={count} height={220} />
      </Panel>
    </>
  );
}
