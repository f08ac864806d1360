import { useQuery, useQueryClient } from "@tanstack/react-query";
import { createColumnHelper } from "@tanstack/react-table";
import { useState, type ReactNode } from "react";
import { Link } from "react-router";
import { api, type QueryOf } from "../api/client.ts";
import type { LiveRequest, RequestRow } from "../api/types.ts";
import { Button } from "../components/button.tsx";
import { DataTable, type Columns } from "../components/data-table.tsx";
import { ConfirmDialog } from "../components/dialog.tsx";
import { Filter, Search } from "../components/form.tsx";
import { Page } from "../components/layout.tsx";
import { EmptyState } from "../components/states.tsx";
import { useToast } from "../components/toast.tsx";
import { Badge, State, Time } from "../components/values.tsx";
import { requestAddress } from "../lib/addresses.ts";
import { count, duration, plural } from "../lib/format.ts";
import { useParam, useRested } from "../lib/hooks.ts";
import { usePages } from "../lib/pages.ts";
import { useScope } from "../session.tsx";

const LIVE_MS = 2_000;
const ENDED_MS = 5_000;
const MAX_LIVE = 100;
const PAGE_SIZE = 50;
const STATUSES = [
  ["", "Any status"], ["200", "200, OK"], ["0", "0, client disconnected"], ["400", "400"], ["403", "403"],
  ["404", "404"], ["422", "422"], ["429", "429"], ["500", "500"], ["503", "503"],
] as const;

type Wanted = QueryOf<"get", "/v1/requests">;

export default function Requests(): ReactNode {
  return (
    <Page title="Requests" lead="Running requests and what they wait for; finished requests and where their time went.">
      <Live />
      <Ended />
    </Page>
  );
}

function Live(): ReactNode {
  const { tenant, may } = useScope();
  const [aborting, setAborting] = useState<LiveRequest | null>(null);
  const query = useQuery({
    queryKey: ["requests", "live", tenant],
    queryFn: ({ signal }) => tenant === null
      ? api("get", "/admin/requests/live", { query: { limit: MAX_LIVE }, signal })
      : api("get", "/v1/requests/live", { query: { limit: MAX_LIVE }, tenant, signal }),
    refetchInterval: LIVE_MS,
  });
  const rows = query.data?.data;
  const source = { rows, error: query.error, isStale: false, refetch: query.refetch };
  const waiting = rows?.filter((row) => row.state === "waiting").length ?? 0;
  return (
    <section className="panel" aria-labelledby="live">
      <div className="panel-head">
        <div className="row">
          <h2 id="live">Live</h2>
          {query.data && (
            <span className="note">
              {plural(query.data.num_sequences, "sequence")} on this server{waiting > 0 && `, ${waiting} waiting`}
              {rows && query.data.num_sequences > rows.length && `, the oldest ${rows.length} shown`}
            </span>
          )}
        </div>
      </div>
      <DataTable caption="Live requests" columns={liveColumns(tenant === null, may("infer") ? setAborting : null)}
        source={source} rowId={(row) => `${row.request_id} ${row.index}`}
        empty={<EmptyState title="No running requests" command="loraplex chat ADAPTER" />} />
      {aborting && <Abort request={aborting} onClose={() => setAborting(null)} />}
    </section>
  );
}

function Abort({ request, onClose }: { request: LiveRequest; onClose: () => void }): ReactNode {
  const client = useQueryClient();
  const toast = useToast();
  const abort = async (): Promise<void> => {
    await api("delete", "/v1/requests/{request_id}", {
      path: { request_id: request.request_id }, tenant: request.tenant,
    });
    toast("Request aborted.");
    await client.invalidateQueries({ queryKey: ["requests"] });
  };
  return (
    <ConfirmDialog title="Abort this request?" action="Abort" danger onConfirm={abort} onClose={onClose}>
      <p>
        The client receives the error <code>request_cancelled</code>. {request.generated_tokens === 0
          ? "No tokens were generated yet."
          : `Generated tokens are charged: ${request.generated_tokens}.`}
      </p>
      <p className="mono soft">{request.request_id}</p>
    </ConfirmDialog>
  );
}

const live = createColumnHelper<LiveRequest>();

function liveColumns(ofAll: boolean, onAbort: ((request: LiveRequest) => void) | null): Columns<LiveRequest> {
  return [
    live.accessor("request_id", {
      header: "Request",
      cell: ({ row: { original } }) => (
        <Link to={requestAddress(original.request_id)} className="mono">
          <span title={original.request_id}>{shortId(original.request_id)}</span>{original.index > 0 && ` #${original.index}`}
        </Link>
      ),
    }),
    ...(ofAll ? [live.accessor("tenant", { header: "Tenant" })] : []),
    live.accessor("model", { header: "Model", cell: ({ getValue }) => getValue() ?? "internal probe, or ending" }),
    live.accessor("state", {
      header: "State",
      cell: ({ row: { original } }) => (
        <><State state={original.state} />{original.reason && <span className="sub">{original.reason}</span>}</>
      ),
    }),
    live.accessor("age_ms", { header: "Age", meta: { end: true }, cell: ({ getValue }) => duration(getValue()) }),
    live.accessor("computed_tokens", {
      header: "Prompt", meta: { end: true },
      cell: ({ row: { original } }) => promptProgress(original),
    }),
    live.accessor("generated_tokens", {
      header: "Generated", meta: { end: true },
      cell: ({ row: { original } }) => (
        <>
          {count(original.generated_tokens)}
          {original.preemptions > 0 && <span className="sub">preempted {original.preemptions} ×</span>}
        </>
      ),
    }),
    live.accessor("priority", { header: "Priority", meta: { end: true } }),
    ...(onAbort ? [live.display({
      id: "abort", header: () => <span className="visually-hidden">Abort</span>, meta: { end: true },
      cell: ({ row: { original } }) => original.model !== null && (
        <Button small tone="danger" onClick={() => onAbort(original)}>Abort</Button>
      ),
    })] : []),
  ];
}

const ID_CHARACTERS = 14;

function shortId(id: string): string {
  return id.length > ID_CHARACTERS ? `${id.slice(0, ID_CHARACTERS)}…` : id;
}

function promptProgress({ prompt_tokens, computed_tokens, state }: LiveRequest): string {
  if (state === "decoding" || computed_tokens >= prompt_tokens) return count(prompt_tokens);
  return `${count(computed_tokens)} of ${count(prompt_tokens)}`;
}

function Ended(): ReactNode {
  const { tenant } = useScope();
  const [adapter, setAdapter] = useParam("adapter");
  const [code, setCode] = useParam("code");
  const [status, setStatus] = useParam("status");
  const wanted: Wanted = {
    adapter: useRested(adapter) || null,
    code: useRested(code) || null,
    status: status === "" ? null : Number(status),
    limit: PAGE_SIZE,
  };
  const source = usePages(["requests", "ended", tenant, wanted], (after, signal) => {
    const query = { ...wanted, after: after ?? null };
    return tenant === null
      ? api("get", "/admin/requests", { query, signal })
      : api("get", "/v1/requests", { query, tenant, signal });
  }, { refetchInterval: ENDED_MS });
  const isNarrowed = Boolean(adapter || code || status);
  return (
    <section className="panel" aria-labelledby="ended">
      <div className="panel-head">
        <div className="row"><h2 id="ended">Finished</h2><span className="note">newest first</span></div>
        <div className="row">
          <Search label="Adapter" value={adapter} onChange={setAdapter} />
          <Search label="Error code" value={code} onChange={setCode} />
          <Filter label="Status" value={status} onChange={setStatus} options={STATUSES} />
        </div>
      </div>
      <DataTable caption="Finished requests" columns={tenant === null ? ENDED : ENDED.filter((one) => one !== TENANT)}
        source={source} rowId={(row) => row.id}
        empty={isNarrowed ? <EmptyState title="No requests match" />
          : <EmptyState title="No requests yet" command="loraplex chat ADAPTER" />} />
    </section>
  );
}

const ended = createColumnHelper<RequestRow>();
const TENANT: Columns<RequestRow>[number] = ended.accessor("tenant", { header: "Tenant" });

const ENDED: Columns<RequestRow> = [
  ended.accessor("created_at", {
    header: "Finished",
    cell: ({ row: { original } }) => <Link to={requestAddress(original.id)}><Time at={original.created_at} /></Link>,
  }),
  TENANT,
  ended.accessor("model", { header: "Model", cell: ({ row: { original } }) => modelOf(original) }),
  ended.accessor("status", {
    header: "Status",
    cell: ({ row: { original } }) => (
      <>
        <Badge tone={original.status >= 200 && original.status < 300 && !original.error_code ? "good" : "bad"}>
          {original.status || "gone"}
        </Badge>
        {original.error_code && <span className="sub mono">{original.error_code}</span>}
      </>
    ),
  }),
  ended.accessor("tier", { header: "Adapter was", cell: ({ getValue }) => <State state={getValue()} /> }),
  ended.accessor("prompt_tokens", {
    header: "Prompt", meta: { end: true },
    cell: ({ row: { original } }) => (
      <>{count(original.prompt_tokens)}{original.cached_tokens ? <span className="sub">{count(original.cached_tokens)} cached</span> : null}</>
    ),
  }),
  ended.accessor("completion_tokens", { header: "Output", meta: { end: true }, cell: ({ getValue }) => count(getValue()) }),
  ended.accessor("queue_ms", { header: "Waited", meta: { end: true }, cell: ({ getValue }) => duration(getValue()) }),
  ended.accessor("first_token_ms", { header: "First token", meta: { end: true }, cell: ({ getValue }) => duration(getValue()) }),
  ended.accessor("total_ms", { header: "Total", meta: { end: true }, cell: ({ getValue }) => duration(getValue()) }),
];

function modelOf({ adapter, adapter_version, model }: RequestRow): string {
  if (adapter === null) return model ?? "–";
  return adapter_version === null ? adapter : `${adapter}@${adapter_version}`;
}
