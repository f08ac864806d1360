/** What a new tenant does first, with what is done already. It goes when all of it is, or when it is hidden. */

import { useQuery } from "@tanstack/react-query";
import { useState, type ReactNode } from "react";
import { Link } from "react-router";
import { api } from "../api/client.ts";
import type { AdapterSummary } from "../api/types.ts";
import { addressOf } from "../lib/addresses.ts";
import { useScope } from "../session.tsx";
import { Button, Command } from "./button.tsx";
import { Icon } from "./icons.tsx";
import { Panel } from "./layout.tsx";
import { State } from "./values.tsx";

const REFRESH_MS = 3_000;

const hiddenKey = (tenant: string): string => `loraplex.first-steps.${tenant}`;

interface Progress {
  /** Null: the reader may not see keys. */
  hasKey: boolean | null;
  adapter: AdapterSummary | null;
  hasUsage: boolean;
}

async function loadProgress(tenant: string, seesKeys: boolean, signal: AbortSignal): Promise<Progress> {
  const [keys, adapters, usage] = await Promise.all([
    seesKeys ? api("get", "/v1/keys", { query: { active: true, limit: 1 }, tenant, signal }) : null,
    api("get", "/v1/adapters", { query: { sort: "requests", limit: 1 }, tenant, signal }),
    api("get", "/v1/usage", { query: { limit: 1 }, tenant, signal }),
  ]);
  return { hasKey: keys && keys.data.length > 0, adapter: adapters.data[0] ?? null, hasUsage: usage.data.length > 0 };
}

function isComplete({ hasKey, adapter, hasUsage }: Progress): boolean {
  return hasKey !== false && adapter?.state === "ready" && hasUsage;
}

/** The steps of `tenant`; nothing for readers who cannot take any of them. */
export function FirstSteps({ tenant }: { tenant: string }): ReactNode {
  const { may } = useScope();
  const [isHidden, setHidden] = useState(() => localStorage.getItem(hiddenKey(tenant)) !== null);
  const canAct = may("adapters:write");
  const query = useQuery({
    queryKey: ["first-steps", tenant],
    queryFn: ({ signal }) => loadProgress(tenant, may("keys:manage"), signal),
    enabled: canAct && !isHidden,
    refetchInterval: ({ state: { data } }) => (data && isComplete(data) ? false : REFRESH_MS),
  });
  const hide = (): void => {
    localStorage.setItem(hiddenKey(tenant), "hidden");
    setHidden(true);
  };
  if (isHidden || query.data === undefined || isComplete(query.data)) return null;
  const { hasKey, adapter, hasUsage } = query.data;
  return (
    <Panel title="First steps" actions={<Button small onClick={hide}>Hide</Button>}>
      <ol className="steps">
        <Step isDone={hasKey === true} title="Create an API key">
          {hasKey === null
            ? <p>An owner of the tenant creates keys.</p>
            : <p>Programs authenticate with it. <Link to="/keys">Create a key</Link>; it is shown once.</p>}
        </Step>
        <Step isDone={adapter?.state === "ready"} title="Upload an adapter">
          {adapter !== null
            ? <p><Link to={addressOf(tenant, adapter.name)}>{adapter.name}</Link> is <State state={adapter.state} /></p>
            : <><p><Link to="/adapters">Upload</Link> a folder that PEFT has saved, or push it:</p>
                <Command>loraplex adapters push ./my-adapter my-adapter --alias prod</Command></>}
        </Step>
        <Step isDone={hasUsage} title="Send the first request">
          {adapter === null
            ? <p>The page of the adapter will show the code.</p>
            : <p>Copy the <Link to={addressOf(tenant, adapter.name, "call")}>code for {adapter.name}</Link>
                {may("infer") && <> or try it in the <Link to={`/playground?model=${encodeURIComponent(adapter.name)}`}>playground</Link></>}.</p>}
        </Step>
      </ol>
    </Panel>
  );
}

function Step({ isDone, title, children }: { isDone: boolean; title: string; children: ReactNode }): ReactNode {
  return (
    <li className={isDone ? "is-done" : ""}>
      <span className="step-mark" aria-hidden="true">{isDone && <Icon name="check" />}</span>
      <div className="stack tight">
        <h3>{title}<span className="visually-hidden">{isDone ? ", done" : ", to do"}</span></h3>
        {!isDone && children}
      </div>
    </li>
  );
}
