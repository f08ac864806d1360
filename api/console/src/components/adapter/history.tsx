import { useQuery } from "@tanstack/react-query";
import type { ReactNode } from "react";
import { api } from "../../api/client.ts";
import type { AdapterVersion } from "../../api/types.ts";
import { Panel } from "../layout.tsx";
import { Loaded } from "../states.tsx";
import { toneOf, Time } from "../values.tsx";

/** The states that a version went through. */
export function VersionHistory({ tenant, version }: {
  tenant: string;
  version: AdapterVersion;
}): ReactNode {
  const path = { name: version.adapter, number: version.version };
  const query = useQuery({
    queryKey: ["adapter", tenant, version.adapter, "history", version.version, version.state],
    queryFn: ({ signal }) =>
      api("get", "/v1/adapters/{name}/versions/{number}/history", { path, tenant, signal }),
  });
  return (
    <Panel title="History">
      <Loaded query={query}>
        {({ data }) => (
          <ol className="timeline">
            {[...data].reverse().map((step) => (
              <li key={step.at + step.state} className={toneOf(step.state)}>
                <div>{step.state}{step.reason && `: ${step.reason.message}`}</div>
                <Time at={step.at} exact />
              </li>
            ))}
          </ol>
        )}
      </Loaded>
    </Panel>
  );
}
