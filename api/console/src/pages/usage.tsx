/** What was used and is charged: by day as a chart, by whom and what as a table, all of it as CSV. */

import { useQuery } from "@tanstack/react-query";
import type { ReactNode } from "react";
import { api, urlOf, type PathOf } from "../api/client.ts";
import { BudgetsInUse } from "../components/budgets-in-use.tsx";
import { Chart } from "../components/chart.tsx";
import { DataTable, type Columns } from "../components/data-table.tsx";
import { Filter, Search } from "../components/form.tsx";
import { Figures, Page, Panel, Segments } from "../components/layout.tsx";
import { LimitsInUse } from "../components/limits-in-use.tsx";
import { EmptyState, Loaded } from "../components/states.tsx";
import { days } from "../lib/days.ts";
import { bytes, count, duration, percent } from "../lib/format.ts";
import { useParam, useRested } from "../lib/hooks.ts";
import { money, sumOfMoney } from "../lib/money.ts";
import { usePages } from "../lib/pages.ts";
import { METRICS, daily, total, type Group, type Metric, type UsageSum } from "../lib/usage.ts";
import { useScope } from "../session.tsx";

const RANGES = [["7", "7 days"], ["14", "14 days"], ["30", "30 days"], ["90", "90 days"]] as const;
const GROUPS = {
  tenant: "By tenant", adapter: "By adapter", version: "By version", day: "By day",
} as const satisfies Record<Group, string>;
const MODELS = [["", "All models"], ["base", "The base model"]] as const;
const CSV_GROUPS: readonly Group[] = ["day", "adapter", "version"];

/** What both routes of sums take; an operator who looks at all tenants asks the platform's. */
interface UsageQuery {
  since: string;
  adapter: string | null;
  group_by: Group[];
  after?: string | null;
  limit?: number;
  format?: "csv";
}

interface Asked {
  tenant: string | null;
  isOperator: boolean;
  /** The days that are looked at, today last. */
  calendar: string[];
  /** Empty: the base model; null: whatever was asked. */
  adapter: string | null;
}

function pathOf(asked: Asked): PathOf<"get"> {
  return asked.isOperator ? "/admin/usage" : "/v1/usage";
}

function queryOf(asked: Asked, more: Pick<UsageQuery, "group_by" | "after" | "limit" | "format">): object {
  const { calendar, adapter, tenant, isOperator } = asked;
  return { since: calendar[0], adapter, ...(isOperator && { tenant }), ...more };
}

function sumsOf(asked: Asked, more: Pick<UsageQuery, "group_by" | "after" | "limit">, signal: AbortSignal) {
  if (asked.isOperator) return api("get", "/admin/usage", { query: queryOf(asked, more), signal });
  return api("get", "/v1/usage", { query: queryOf(asked, more), signal });
}

export default function UsagePage(): ReactNode {
  const { tenant, isOperator } = useScope();
  const [range, setRange] = useParam("days", "14");
  const [typed, setTyped] = useParam("adapter");
  const [model, setModel] = useParam("model");
  const rested = useRested(typed) || null;
  const adapter = model === "base" ? "" : rested;
  const asked: Asked = { tenant, isOperator, calendar: days(daysOf(range)), adapter };
  return (
    <Page title="Usage" lead="Sums of the ledger. Days are in UTC."
      actions={
        <div className="row filters">
          {model !== "base" && <Search label="Adapter" value={typed} onChange={setTyped} />}
          <Filter label="Model" value={model} onChange={setModel} options={MODELS} />
          <Filter label="Range" value={range} onChange={setRange} options={RANGES} />
          <CsvLink asked={asked} />
        </div>
      }>
      <Days asked={asked} />
      <Sums asked={asked} />
      {tenant !== null && <Panel title="Limits" flush><LimitsInUse tenant={tenant} /></Panel>}
      {tenant !== null && <Panel title="Budgets" flush><BudgetsInUse tenant={tenant} /></Panel>}
    </Page>
  );
}

function daysOf(range: string): number {
  return Number(RANGES.find(([days]) => days === range)?.[0] ?? 14);
}

/** Everything in the range, which no page of a list could hold. */
function CsvLink({ asked }: { asked: Asked }): ReactNode {
  const groups: Group[] = asked.isOperator ? ["tenant", ...CSV_GROUPS] : [...CSV_GROUPS];
  const url = urlOf(pathOf(asked), {}, queryOf(asked, { group_by: groups, format: "csv" }));
  return <a className="button" href={url} download={`usage-since-${asked.calendar[0]}.csv`}>CSV</a>;
}

function useDays(asked: Asked) {
  return useQuery({
    queryKey: ["usage", "days", asked],
    queryFn: ({ signal }) => sumsOf(asked, { group_by: ["day"], limit: 500 }, signal),
  });
}

function Days({ asked }: { asked: Asked }): ReactNode {
  const [metric, setMetric] = useParam("metric", "tokens");
  const chosen = METRICS.find(([name]) => name === metric) ?? METRICS[0]!;
  return (
    <Loaded query={useDays(asked)}>
      {({ data }) => (
        <>
          <Totals sums={data} />
          <Panel title="By day"
            actions={<Segments label="Figure" options={METRICS} value={chosen[0]} onChange={setMetric} />}>
            <Chart label={`${chosen[1]} by day`} times={asked.calendar.map((day) => `${day}T00:00:00Z`)}
              kind="bars" height={210} series={daily(chosen[0], asked.calendar, data)} format={formatOf(chosen[0])} />
          </Panel>
        </>
      )}
    </Loaded>
  );
}

function formatOf(metric: Metric): (value: number | null) => string {
  return metric === "byte_seconds" ? (value) => `${bytes(value)}·s` : count;
}

function Totals({ sums }: { sums: UsageSum[] }): ReactNode {
  const all = total(sums);
  const cached = all.prompt_tokens === 0 ? null : all.cached_tokens / all.prompt_tokens;
  return (
    <Figures figures={[
      { label: "Requests", value: count(all.requests) },
      { label: "Prompt tokens", value: count(all.prompt_tokens), note: `${percent(cached)} from the cache` },
      { label: "Generated tokens", value: count(all.completion_tokens) },
      { label: "Cold loads", value: count(all.cold_loads), note: "requests that waited for weights" },
      { label: "On the device", value: `${bytes(all.residency_byte_seconds)}·s` },
      ...(all.currency ? [{ label: "Charged", value: money(all.amount, all.currency) }] : []),
    ]} />
  );
}

function Sums({ asked }: { asked: Asked }): ReactNode {
  const initial: Group = asked.isOperator && asked.tenant === null ? "tenant" : "adapter";
  const [typed, setGroup] = useParam("by", initial);
  const options = groupsFor(asked);
  const group = options.find(([name]) => name === typed)?.[0] ?? initial;
  const groups = groupsOf(group, asked);
  const sums = usePages<UsageSum>(["usage", "sums", asked, groups], (after, signal) =>
    sumsOf(asked, { group_by: groups, after: after ?? null }, signal),
  );
  const inAll = useDays(asked);
  return (
    <Panel title="Breakdown" flush
      actions={<Segments label="Group" options={options} value={group} onChange={setGroup} />}>
      <DataTable caption="Usage" columns={columnsOf(groups, inAll.data && total(inAll.data.data))} source={sums} rowId={(sum) => groups.map((name) => sum[name] ?? "").join("/")}
        empty={<EmptyState title="No usage" command={'loraplex chat MODEL "Hello"'}>
          The ledger has no requests in this range.
        </EmptyState>} />
    </Panel>
  );
}

function groupsFor({ isOperator, tenant }: Asked): readonly (readonly [Group, string])[] {
  const names: Group[] = isOperator && tenant === null ? ["tenant", "adapter", "version", "day"] : ["adapter", "version", "day"];
  return names.map((name) => [name, GROUPS[name]] as const);
}

/** A name alone says nothing: adapters are a tenant's, and versions an adapter's. */
function groupsOf(group: Group, { isOperator, tenant }: Asked): Group[] {
  const owners: Group[] = isOperator && tenant === null ? ["tenant"] : [];
  if (group === "adapter") return [...owners, "adapter"];
  if (group === "version") return [...owners, "adapter", "version"];
  return [group];
}

/** Operators see costs, if the server has rates. */
function hasCosts(inAll: UsageSum): boolean {
  return inAll.cost !== undefined && inAll.cost !== sumOfMoney([]);
}

/** `inAll`: the sum over all rows, of which a page shows a part. */
function columnsOf(groups: Group[], inAll: UsageSum | undefined): Columns<UsageSum> {
  const names: Record<Group, Columns<UsageSum>[number]> = {
    day: { header: "Day", cell: ({ row }) => row.original.day },
    tenant: { header: "Tenant", cell: ({ row }) => row.original.tenant },
    adapter: { header: "Adapter", cell: ({ row }) => row.original.adapter ?? <span className="soft">base model</span> },
    version: { header: "Version", cell: ({ row }) => row.original.version ?? "" },
  };
  const figure = (header: string, read: (sum: UsageSum) => string): Columns<UsageSum>[number] => ({
    header, meta: { end: true }, cell: ({ row }) => read(row.original), ...(inAll && { footer: () => read(inAll) }),
  });
  return [
    ...groups.map((group, place) => (place === 0 && inAll ? { ...names[group], footer: "In all" } : names[group])),
    figure("Requests", (sum) => count(sum.requests)),
    figure("Prompt tokens", (sum) => count(sum.prompt_tokens)),
    figure("From the cache", (sum) => percent(sum.prompt_tokens === 0 ? null : sum.cached_tokens / sum.prompt_tokens)),
    figure("Generated tokens", (sum) => count(sum.completion_tokens)),
    ...(inAll?.trained_tokens ? [figure("Trained tokens", (sum) => count(sum.trained_tokens))] : []),
    figure("Cold loads", (sum) => count(sum.cold_loads)),
    figure("On the device", (sum) => `${bytes(sum.residency_byte_seconds)}·s`),
    figure("Steps", (sum) => duration(sum.step_seconds * 1000)),
    figure("KV cache", (sum) => `${bytes(sum.kv_byte_seconds)}·s`),
    ...(inAll?.currency ? [figure("Charged", (sum) => money(sum.amount, sum.currency))] : []),
    ...(inAll && hasCosts(inAll) ? [
      figure("Cost", (sum) => money(sum.cost ?? "0.00", sum.currency)),
      figure("Margin", (sum) => money(sum.margin ?? "0.00", sum.currency)),
    ] : []),
  ];
}
