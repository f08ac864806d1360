/** Where a version's weights are, what they wait for, and how they came there. */

import { useQuery, type UseQueryResult } from "@tanstack/react-query";
import type { ReactNode } from "react";
import { api } from "../../api/client.ts";
import type { AdapterVersion, Readiness } from "../../api/types.ts";
import { bytes, count, duration, percent, plural } from "../../lib/format.ts";
import { spansOf, type Span } from "../../lib/residency.ts";
import { Facts, Panel } from "../layout.tsx";
import { Loaded } from "../states.tsx";
import { Badge, State, Time, toneOf, Words } from "../values.tsx";

const REFRESH_MS = 2_000;

export function useReadiness(tenant: string, version: AdapterVersion): UseQueryResult<Readiness> {
  const path = { name: version.adapter, number: version.version };
  return useQuery({
    queryKey: ["adapter", tenant, version.adapter, "readiness", version.version],
    queryFn: ({ signal }) =>
      api("get", "/v1/adapters/{name}/versions/{number}/readiness", { path, tenant, signal }),
    refetchInterval: REFRESH_MS,
  });
}

/** The answer to "why is it not ready?", in a sentence and in figures. */
export function ReadinessPanel({ query, title }: {
  query: UseQueryResult<Readiness>;
  title: string;
}): ReactNode {
  return (
    <Panel title={title}>
      <Loaded query={query}>
        {(readiness) => (
          <div className="stack">
            <p className="row">
              <Verdict readiness={readiness} />
              <span><Words>{readiness.summary}</Words></span>
            </p>
            <Facts facts={factsOf(readiness)} />
          </div>
        )}
      </Loaded>
    </Panel>
  );
}

function Verdict({ readiness }: { readiness: Readiness }): ReactNode {
  if (readiness.is_ready) return <Badge tone="good">ready</Badge>;
  if (readiness.is_servable) return <Badge tone="accent">after loading</Badge>;
  return <Badge tone="bad">unavailable</Badge>;
}

function factsOf({ reason, tier, wishes, load, retry_after_seconds }: Readiness): [string, ReactNode][] {
  const facts: [string, ReactNode][] = [
    ["Reason", <code key="reason">{reason}</code>],
    ["Location", <State key="tier" state={tier} />],
  ];
  for (const wish of wishes) {
    facts.push([wish.kind === "pin" ? "Pinned" : "Prefetched", (
      <span key={wish.kind}>since <Time at={wish.created_at} />{wish.expires_at && <>, until <Time at={wish.expires_at} /></>}</span>
    )]);
  }
  if (retry_after_seconds) facts.push(["Retry in", duration(retry_after_seconds * 1000)]);
  if (!load) return facts;
  if (load.reason) facts.push(["Last attempt", load.reason.message]);
  if (load.retry_in_seconds) facts.push(["Next attempt in", duration(load.retry_in_seconds * 1000)]);
  if (load.needed_bytes !== null) facts.push(["Needs on the device", bytes(load.needed_bytes)]);
  const { free_bytes, largest_free_bytes, leased_bytes } = load;
  if (free_bytes !== null && largest_free_bytes !== null && leased_bytes !== null) {
    facts.push(
      ["Free", `${bytes(free_bytes)}, largest block ${bytes(largest_free_bytes)}`],
      ["In use", bytes(leased_bytes)],
    );
  }
  facts.push(["Loads ahead", count(load.loads_ahead)]);
  return facts;
}

const WIDTH = 600;
const HEIGHT = 22;

/** The latest changes in the engine, as a band over time and as a list. */
export function Residency({ readiness }: { readiness: Readiness | undefined }): ReactNode {
  const transitions = readiness?.load?.transitions ?? [];
  const spans = spansOf(transitions);
  return (
    <Panel title="Location" note="since the engine started">
      {spans.length === 0 ? (
        <p className="soft">The engine has not loaded this version yet. The first request or a prefetch loads it.</p>
      ) : (
        <div className="stack">
          <Band spans={spans} />
          <ol className="timeline">
            {spans.slice().reverse().map((span) => (
              <li key={`${span.state} ${span.index}`} className={toneOf(span.state)}>
                <div>{span.state.replaceAll("_", " ")}{span.reason && ` (${span.reason})`}, {duration(span.seconds * 1000)}</div>
                <span className="faint">{duration(span.secondsAgo * 1000)} ago</span>
              </li>
            ))}
          </ol>
        </div>
      )}
    </Panel>
  );
}

/** Short states stay visible: widths grow with the root of the time. */
function Band({ spans }: { spans: Span[] }): ReactNode {
  const weights = spans.map((span) => Math.sqrt(Math.max(span.seconds, 0.001)));
  const total = weights.reduce((sum, weight) => sum + weight, 0);
  let x = 0;
  return (
    <svg className="band" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true">
      {spans.map((span, i) => {
        const width = (WIDTH * (weights[i] ?? 0)) / total;
        const left = x;
        x += width;
        return (
          <rect key={span.index} className={toneOf(span.state) || "plain"} x={left} y="0" height={HEIGHT}
            width={Math.max(1, width - 1)}><title>{`${span.state}, ${duration(span.seconds * 1000)}`}</title></rect>
        );
      })}
    </svg>
  );
}

/** Of each proposer, the fraction of its draft tokens that this version accepts. */
export function SpeculationPanel({ readiness }: { readiness: Readiness | undefined }): ReactNode {
  const proposers = readiness?.speculation ?? [];
  return (
    <Panel title="Speculation" note="since the engine started">
      {proposers.length === 0 ? <p className="soft">No draft tokens yet.</p> : (
        <div className="table-wrap" tabIndex={0} role="region" aria-label="Proposers">
          <table className="table cards">
            <thead>
              <tr>
                <th scope="col">Proposer</th><th scope="col" className="end">Acceptance</th>
                <th scope="col" className="end">Accepted</th><th scope="col" className="end">Draft length</th>
              </tr>
            </thead>
            <tbody>
              {proposers.map((one) => (
                <tr key={one.proposer}>
                  <td data-label="Proposer">{one.proposer}</td>
                  <td data-label="Acceptance" className="end">{percent(one.acceptance)}</td>
                  <td data-label="Accepted" className="end">{count(one.accepted_tokens)} of {plural(one.draft_tokens, "token")}</td>
                  <td data-label="Draft length" className="end">{one.num_tokens || "none"}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </Panel>
  );
}
