import { useQuery } from "@tanstack/react-query";
import type { ReactNode } from "react";
import { api, type Answer } from "../api/client.ts";
import { dateTime, duration } from "../lib/format.ts";
import { LIMITS, type LimitText } from "../lib/limits.ts";
import { Loaded } from "./states.tsx";
import { Meter } from "./values.tsx";

type Use = Answer<"get", "/v1/quota">;

/** A tenant's limits, and how much of each is used now. */
export function LimitsInUse({ tenant }: { tenant: string | null }): ReactNode {
  const query = useQuery({
    queryKey: ["limits-in-use", tenant],
    queryFn: ({ signal }) => api("get", "/v1/quota", { tenant, signal }),
    refetchInterval: 10_000,
  });
  return (
    <Loaded query={query}>
      {(use) => (
        <div className="table-wrap" tabIndex={0} role="region" aria-label="Limits">
          <table className="table cards">
            <thead>
              <tr>
                <th scope="col">Limit</th><th scope="col" className="end">Used</th>
                <th scope="col" className="end">Reserved</th><th scope="col" className="end">Limit</th>
                <th scope="col">Usage</th><th scope="col">Resets</th>
              </tr>
            </thead>
            <tbody>{LIMITS.map((limit) => <Row key={limit.name} limit={limit} use={use} />)}</tbody>
          </table>
        </div>
      )}
    </Loaded>
  );
}

function Row({ limit, use }: { limit: LimitText; use: Use }): ReactNode {
  const { used, reserved, limit: most, reset_seconds: reset } = use[limit.name];
  const again = limit.name.endsWith("tokens_per_period") ? dateTime(use.period_ends_at) : reset ? `in ${duration(reset * 1000)}` : "";
  return (
    <tr>
      <th scope="row">{limit.label}</th>
      <td data-label="Used" className="end">{limit.format(used)}</td>
      <td data-label="Reserved" className="end">{reserved ? limit.format(reserved) : ""}</td>
      <td data-label="Limit" className="end">{most === null ? <span className="faint">none</span> : limit.format(most)}</td>
      <td data-label="Usage">{most !== null && used !== null && <Meter value={used + reserved} max={most} label={limit.label} />}</td>
      <td data-label="Resets">{most === null ? "" : again}</td>
    </tr>
  );
}
