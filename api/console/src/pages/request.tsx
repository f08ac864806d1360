import { useQuery } from "@tanstack/react-query";
import type { ReactNode } from "react";
import { Link, useParams } from "react-router";
import { api } from "../api/client.ts";
import { ApiError } from "../api/errors.ts";
import type { Explanation, RequestRow } from "../api/types.ts";
import { CopyButton } from "../components/button.tsx";
import { Facts, Page, Panel } from "../components/layout.tsx";
import { Loaded } from "../components/states.tsx";
import { State, Time, Words } from "../components/values.tsx";
import { addressOf } from "../lib/addresses.ts";
import { count, duration, number, plural } from "../lib/format.ts";
import { waterfall } from "../lib/waterfall.ts";
import { useScope } from "../session.tsx";

const PHASES: Record<string, string> = {
  queue: "Queued",
  adapter: "Loading the adapter",
  prompt: "Prefill",
  output: "Decode",
  refused: "Refused",
};
const REFRESH_MS = 2_000;

/** One request's whole way; while it runs, the page waits for its end. */
export default function Request(): ReactNode {
  const { id = "" } = useParams();
  const { tenant, isOperator } = useScope();
  const query = useQuery({
    queryKey: ["requests", "one", tenant, id],
    queryFn: ({ signal }) => isOperator
      ? api("get", "/admin/requests/{request_id}", { path: { request_id: id }, signal })
      : api("get", "/v1/requests/{request_id}", { path: { request_id: id }, signal }),
    refetchInterval: ({ state }) => (isMissing(state.error) ? REFRESH_MS : false),
  });
  return (
    <Page title="Request" crumbs={<><Link to="/requests">Requests</Link> /</>}
      lead={<span className="mono">{id}<CopyButton text={id} label="Copy the id" /></span>}>
      <section className="stack">
        {isMissing(query.error) && query.data === undefined ? (
          <div className="notice" role="status">
            The request is not in the log. A running request appears here when it finishes; the list shows its current state.
          </div>
        ) : <Loaded query={query}>{(explanation) => <Way explanation={explanation} />}</Loaded>}
      </section>
    </Page>
  );
}

function isMissing(error: unknown): boolean {
  return error instanceof ApiError && error.status === 404;
}

function Way({ explanation: { request, summary, phases } }: { explanation: Explanation }): ReactNode {
  return (
    <>
      <div className={request.error_code ? "notice bad" : "notice"}><div><Words>{summary}</Words></div></div>
      <Panel title="Time" note={duration(request.total_ms)}>
        <div className="waterfall">
          {waterfall(phases, request.total_ms).map((bar) => (
            <div key={bar.phase} style={{ display: "contents" }}>
              <div>{PHASES[bar.phase] ?? bar.phase}<div className="soft">{bar.summary}</div></div>
              <b>{duration(bar.ms)}</b>
              <div className="lane" aria-hidden="true">
                <span className={bar.phase} style={{ left: `${bar.from * 100}%`, width: `${(bar.to - bar.from) * 100}%` }} />
              </div>
            </div>
          ))}
        </div>
      </Panel>
      <Panel title="Details"><Facts facts={factsOf(request)} /></Panel>
    </>
  );
}

function factsOf(request: RequestRow): [string, ReactNode][] {
  const { adapter, adapter_version, tenant } = request;
  const generating = request.total_ms - (request.first_token_ms ?? request.total_ms);
  const speed = request.completion_tokens && generating > 0
    ? `, ${number((request.completion_tokens - 1) / (generating / 1000), 1)} per second` : "";
  return [
    ["Finished", <Time key="ended" at={request.created_at} exact />],
    ["Tenant", tenant],
    ["Route", <code key="route">{request.route}</code>],
    ["Status", `${request.status || "client disconnected"}${request.error_code ? `, ${request.error_code}` : ""}`],
    ["Requested model", request.model ?? "–"],
    ["Served by", adapter === null ? (request.finish_reason === null || (request.error_code && !request.completion_tokens) ? "nothing" : "the base model") : (
      <Link key="adapter" to={`${addressOf(tenant, adapter)}?version=${adapter_version}`}>{adapter}@{adapter_version}</Link>
    )],
    ["Adapter was", <State key="tier" state={request.tier} />],
    ["Load time", duration(request.load_ms)],
    ["Prompt", request.prompt_tokens === null ? "–"
      : `${plural(request.prompt_tokens, "token")}, ${count(request.cached_tokens ?? 0)} of them cached`],
    ["Output", request.completion_tokens === null ? "–" : `${plural(request.completion_tokens, "token")}${speed}`],
    ["Finish reason", request.finish_reason ?? "–"],
    ["Key", <code key="key">{request.key_id ?? "–"}</code>],
  ];
}
