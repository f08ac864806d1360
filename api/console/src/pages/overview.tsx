import { keepPreviousData, useQuery } from "@tanstack/react-query";
import type { ReactNode } from "react";
import { Link } from "react-router";
import { api } from "../api/client.ts";
import type { Overview as Figures, PlatformOverview, TenantLoad } from "../api/types.ts";
import { Chart, seriesColor, type TimeChartProps, type Series } from "../components/chart.tsx";
import { FirstSteps } from "../components/first-steps.tsx";
import { Figures as FigureRow, Page, Panel, Segments } from "../components/layout.tsx";
import { EmptyState, Loaded } from "../components/states.tsx";
import { tenantAddress } from "../lib/addresses.ts";
import { bytes, count, duration, number, percent, plural } from "../lib/format.ts";
import { useParam } from "../lib/hooks.ts";
import { latest } from "../lib/series.ts";
import { useScope } from "../session.tsx";

const RANGES = [["15m", "15 min"], ["1h", "1 h"], ["6h", "6 h"], ["24h", "24 h"], ["7d", "7 d"]] as const;
type Range = (typeof RANGES)[number][0];
type Answer = Figures | PlatformOverview;

const REFRESH_MS = 5_000;
const MAX_TENANTS_DRAWN = 7;

export default function Overview(): ReactNode {
  const { tenant } = useScope();
  const [param, setRange] = useParam("range", "1h");
  const range = RANGES.some(([known]) => known === param) ? (param as Range) : "1h";
  const query = useQuery({
    queryKey: ["overview", tenant, range],
    queryFn: ({ signal }): Promise<Answer> =>
      tenant === null
        ? api("get", "/admin/overview", { query: { range }, signal })
        : api("get", "/v1/overview", { query: { range }, tenant, signal }),
    refetchInterval: REFRESH_MS,
    placeholderData: keepPreviousData,
  });
  return (
    <Page title="Overview" lead={tenant === null ? "All tenants, all servers." : `Usage of ${tenant}.`}
      actions={<Segments label="Time range" options={RANGES} value={range} onChange={setRange} />}>
      {tenant !== null && <FirstSteps key={tenant} tenant={tenant} />}
      <Loaded query={query}>{(overview) => <Everything overview={overview} />}</Loaded>
    </Page>
  );
}

function Everything({ overview }: { overview: Answer }): ReactNode {
  return (
    <>
      <Now overview={overview} />
      {isIdle(overview) && (
        <section className="panel">
          <EmptyState title="No requests in this period" command="loraplex chat ADAPTER">
            Charts appear after the first request.
          </EmptyState>
        </section>
      )}
      <Charts overview={overview} />
      {overview.objectives.length > 0 && <Objectives objectives={overview.objectives} />}
      {"tenants" in overview && overview.tenants.length > 0 && <Shares overview={overview} />}
    </>
  );
}

function isIdle({ series }: Answer): boolean {
  return series.requests_per_second.every((rate) => !rate);
}

function Now({ overview: { now, series } }: { overview: Answer }): ReactNode {
  const arena = now.arena_bytes;
  return (
    <FigureRow figures={[
      { label: "Output", value: number(latest(series.output_tokens_per_second), 1), note: "tokens per second" },
      { label: "Requests", value: number(latest(series.requests_per_second)), note: "per second" },
      { label: "Errors", value: number(latest(series.errors_per_second)), note: "per second" },
      { label: "First token p95", value: duration(latest(series.ttft_p95_ms)) },
      { label: "Inter-token p95", value: duration(latest(series.itl_p95_ms)) },
      ...(hasObjectives(series) ? [{
        label: "Objectives attained",
        value: percent(latest(series.attained_share)),
        note: `goodput ${number(latest(series.goodput_per_second))} per second`,
      }] : []),
      { label: "Running", value: count(now.running), note: `${count(now.waiting)} waiting` },
      { label: "KV in use", value: percent(now.kv_used_fraction) },
      {
        label: "Adapters on device",
        value: bytes(now.adapter_device_bytes),
        note: arena ? `of ${bytes(arena)}` : undefined,
      },
      ...(now.num_servers ? [{ label: "Servers", value: count(now.num_servers) }] : []),
    ]} />
  );
}

/** Whether any request of the range had a service level objective. */
function hasObjectives(series: Figures["series"]): boolean {
  return latest(series.attained_share) !== null;
}

const rate = (value: number | null): string => number(value);

function Charts({ overview: { times, series, step_seconds } }: { overview: Answer }): ReactNode {
  const draw = (
    title: string,
    format: TimeChartProps["format"],
    lines: Series[],
    more: Partial<TimeChartProps> = {},
  ): ReactNode => (
    <Panel title={title}>
      <Chart label={`${title}, in steps of ${plural(step_seconds, "second")}`} times={times} series={lines}
        format={format} {...more} />
    </Panel>
  );
  return (
    <div className="columns">
      {draw("Throughput, tokens per second", rate, [
        { label: "Output", values: series.output_tokens_per_second },
        { label: "Prompt", values: series.prompt_tokens_per_second },
      ])}
      {draw("Requests per second", rate, [
        { label: "Requests", values: series.requests_per_second },
        { label: "Errors", values: series.errors_per_second, color: 2 },
        ...(hasObjectives(series) ? [{ label: "Goodput", values: series.goodput_per_second, color: 3 }] : []),
      ])}
      {draw("Time to first token", duration, percentiles(series, "ttft"))}
      {draw("Inter-token latency", duration, percentiles(series, "itl"))}
      {hasObjectives(series) && draw("Attained share of objectives", percent, [
        { label: "Attained", values: series.attained_share },
      ], { atLeast: 1 })}
      {draw("Sequences", rate, [
        { label: "Running", values: series.running },
        { label: "Waiting", values: series.waiting, color: 2 },
      ])}
      {draw("KV cache in use", percent, [{ label: "In use", values: series.kv_used_fraction }], {
        kind: "area", atLeast: 1,
      })}
      {draw("Adapters on the device", bytes, [{ label: "Bytes", values: series.adapter_device_bytes }], {
        kind: "area", binary: true,
      })}
      {draw("Cold loads per second", rate, [
        { label: "Requests that waited for weights", values: series.cold_loads_per_second, color: 4 },
      ])}
    </div>
  );
}

function percentiles(series: Figures["series"], name: "ttft" | "itl"): Series[] {
  return (["p50", "p95", "p99"] as const).map((part) => ({
    label: part,
    values: series[`${name}_${part}_ms`],
  }));
}

const RESULTS = [
  ["met", "Met"], ["ttft", "Late first token"], ["itl", "Slow tokens"], ["refused", "Refused"], ["failed", "Failed"],
] as const;

/** How the objectives were attained, by who set them. */
function Objectives({ objectives }: { objectives: Answer["objectives"] }): ReactNode {
  return (
    <Panel title="Service level objectives" flush note="requests that ended in this period, by who set the targets">
      <div className="table-wrap" tabIndex={0} role="region" aria-label="Service level objectives">
        <table className="table cards">
          <thead>
            <tr>
              <th scope="col">Set by</th><th scope="col" className="end">Attained</th>
              {RESULTS.map(([name, text]) => <th key={name} scope="col" className="end">{text}</th>)}
            </tr>
          </thead>
          <tbody>
            {objectives.map((one) => (
              <tr key={one.set_by}>
                <td data-label="Set by">{one.set_by}</td>
                <td data-label="Attained" className="end">{percent(one.attained_share)}</td>
                {RESULTS.map(([name, text]) => <td key={name} data-label={text} className="end">{count(one[name])}</td>)}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}

function Shares({ overview }: { overview: PlatformOverview }): ReactNode {
  const busiest = overview.tenants.slice(0, MAX_TENANTS_DRAWN);
  const lines = busiest.map((one) => ({ label: one.tenant, values: one.output_tokens_per_second }));
  return (
    <div className="columns">
      <Panel title="Output by tenant, tokens per second"
        note={overview.tenants.length > busiest.length && `the busiest ${busiest.length} of ${overview.tenants.length}`}>
        <Chart label="Output tokens per second by tenant" times={overview.times} series={lines} kind="stack"
          format={rate} height={200} />
      </Panel>
      <Panel title="Fair share" flush
        note="of the output tokens; the mark is the share that the weight gives">
        <div className="table-wrap" tabIndex={0} role="region" aria-label="Fair share by tenant">
          <table className="table cards">
            <thead>
              <tr>
                <th scope="col">Tenant</th><th scope="col" className="end">Weight</th>
                <th scope="col">Share</th><th scope="col" className="end">Actual</th>
                <th scope="col" className="end">Fair</th><th scope="col" className="end">Objectives</th>
              </tr>
            </thead>
            <tbody>
              {overview.tenants.map((load, i) => <ShareRow key={load.tenant} load={load} color={i + 1} />)}
            </tbody>
          </table>
        </div>
      </Panel>
    </div>
  );
}

function ShareRow({ load, color }: { load: TenantLoad; color: number }): ReactNode {
  return (
    <tr>
      <td data-label="Tenant"><Link to={tenantAddress(load.tenant)}>{load.tenant}</Link></td>
      <td data-label="Weight" className="end">{number(load.weight)}</td>
      <td data-label="Share" className="share-cell">
        <div className="share" aria-hidden="true">
          <span style={{
            width: percent(load.share).replace(" ", ""),
            background: color > MAX_TENANTS_DRAWN ? "var(--line-strong)" : seriesColor(color),
          }} />
          <i style={{ left: percent(load.fair_share).replace(" ", "") }} />
        </div>
      </td>
      <td data-label="Actual" className="end">{percent(load.share)}</td>
      <td data-label="Fair" className="end">{percent(load.fair_share)}</td>
      <td data-label="Objectives" className="end">{percent(load.attained_share)}</td>
    </tr>
  );
}
