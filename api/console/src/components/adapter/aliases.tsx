/** What an adapter's names mean: moving, splitting and rolling them back. */

import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState, type FormEvent, type ReactNode } from "react";
import { Link } from "react-router";
import { api } from "../../api/client.ts";
import { toApiError } from "../../api/errors.ts";
import type { Adapter, AliasCanary, CanaryLimits } from "../../api/types.ts";
import { addressOf } from "../../lib/addresses.ts";
import { DEFAULT_LIMITS, limitsText } from "../../lib/canary.ts";
import { useScope } from "../../session.tsx";
import { Button } from "../button.tsx";
import { ConfirmDialog } from "../dialog.tsx";
import { Field, SelectField, TextField } from "../form.tsx";
import { Panel } from "../layout.tsx";
import { EmptyState, ErrorNotice, Loaded } from "../states.tsx";
import { useToast } from "../toast.tsx";
import { Time } from "../values.tsx";
import { AliasGate } from "./alias-gate.tsx";
import { Shadow } from "./shadow.tsx";

interface Props {
  tenant: string;
  adapter: Adapter;
}

const CALLED = "prod";

export function Aliases({ tenant, adapter }: Props): ReactNode {
  const { may } = useScope();
  const aliases = Object.keys(adapter.aliases);
  return (
    <>
      {aliases.length === 0 && (
        <section className="panel">
          <EmptyState title="No aliases yet" command={`loraplex adapters alias set ${adapter.name} ${CALLED} 1`}>
            The bare name resolves to the alias {CALLED} if it exists, otherwise to the newest ready version.
          </EmptyState>
        </section>
      )}
      <div className="columns">
        {aliases.map((alias) => <Alias key={alias} tenant={tenant} adapter={adapter} alias={alias} />)}
        {may("adapters:write") && <NewAlias tenant={tenant} adapter={adapter} />}
      </div>
    </>
  );
}

/**
 * Sends a change of aliases and has what it changed read again: `change` throws what went wrong,
 * `run` keeps it as the error to show.
 */
function useAliasChange(tenant: string, adapter: string) {
  const client = useQueryClient();
  const toast = useToast();
  const [error, setError] = useState<unknown>(null);
  const [busy, setBusy] = useState(false);
  const change = async (call: () => Promise<unknown>, done: string): Promise<void> => {
    await call();
    toast(done);
    await client.invalidateQueries({ queryKey: ["adapter", tenant, adapter] });
  };
  const run = async (...what: Parameters<typeof change>): Promise<void> => {
    setBusy(true);
    setError(null);
    try {
      await change(...what);
    } catch (thrown) {
      setError(thrown);
    } finally {
      setBusy(false);
    }
  };
  return { change, run, error, busy };
}

function readyVersions(adapter: Adapter): [string, string][] {
  return adapter.versions
    .filter((version) => version.state === "ready")
    .map((version) => [String(version.version), `Version ${version.version}`]);
}

function Alias({ tenant, adapter, alias }: Props & { alias: string }): ReactNode {
  const { may } = useScope();
  const version = adapter.aliases[alias];
  const canary = adapter.canaries[alias];
  const [isRemoving, setRemoving] = useState(false);
  const { change, run, error, busy } = useAliasChange(tenant, adapter.name);
  const path = { name: adapter.name, alias };
  const detail = useQuery({
    queryKey: ["adapter", tenant, adapter.name, "alias", alias, "detail"],
    queryFn: ({ signal }) => api("get", "/v1/adapters/{name}/aliases/{alias}", { path, tenant, signal }),
  });
  const rollBack = (): Promise<void> => run(
    () => api("post", "/v1/adapters/{name}/aliases/{alias}/rollback", { path, tenant }),
    `${alias} means what it meant before.`,
  );
  const actions = may("adapters:write") && (
    <>
      <Button small busy={busy} onClick={() => void rollBack()}>Roll back</Button>
      <Button small tone="danger" onClick={() => setRemoving(true)}>Remove</Button>
    </>
  );
  return (
    <Panel title={`${adapter.name}@${alias}`} actions={actions}
      note={`version ${version}${canary ? `, ${canary.percent} % to ${canary.version}` : ""}`}>
      <div className="stack">
        {may("adapters:write") && (
          <Loaded query={detail}>
            {({ canary: split }) => (
              <Split key={JSON.stringify([version, split])} adapter={adapter} alias={alias} canary={split} busy={busy}
                onSet={(body, done) => run(
                  () => api("put", "/v1/adapters/{name}/aliases/{alias}", { path, body, tenant }), done,
                )} />
            )}
          </Loaded>
        )}
        {error !== null && <Refusal error={error} tenant={tenant} adapter={adapter.name} />}
        <AliasGate tenant={tenant} adapter={adapter.name} alias={alias} />
        <Shadow tenant={tenant} adapter={adapter} alias={alias} />
        <AliasHistory tenant={tenant} adapter={adapter} alias={alias} />
      </div>
      {isRemoving && (
        <ConfirmDialog title={`Remove the alias ${alias}?`} action="Remove" danger onClose={() => setRemoving(false)}
          onConfirm={() => change(
            () => api("delete", "/v1/adapters/{name}/aliases/{alias}", { path, tenant }), `${alias} is removed.`,
          )}>
          <p>Requests for {adapter.name}@{alias} are refused from now on. The versions stay.</p>
        </ConfirmDialog>
      )}
    </Panel>
  );
}

/** What went wrong; evaluations show why a gate did not let the alias move. */
function Refusal({ error, tenant, adapter }: { error: unknown; tenant: string; adapter: string }): ReactNode {
  const isGate = ["gate_not_passed", "gate_refused"].includes(toApiError(error).code);
  return (
    <ErrorNotice error={error}>
      {isGate && <div><Link to={addressOf(tenant, adapter, "evaluations")}>Show the evaluations</Link></div>}
    </ErrorNotice>
  );
}

interface AliasBody {
  version: number;
  canary?: { version: number; percent: number; limits: Partial<CanaryLimits> | null } | null;
}

/** The version an alias means, and the part of its requests that goes to another. */
function Split({ adapter, alias, canary, busy, onSet }: {
  adapter: Adapter;
  alias: string;
  canary: AliasCanary | null;
  busy: boolean;
  onSet: (body: AliasBody, done: string) => Promise<void>;
}): ReactNode {
  const versions = readyVersions(adapter);
  const [version, setVersion] = useState(String(adapter.aliases[alias] ?? ""));
  const others = versions.filter(([one]) => one !== version);
  const [other, setOther] = useState(String(canary?.version ?? others[0]?.[0] ?? ""));
  const [percent, setPercent] = useState(canary?.percent ?? 0);
  const [isWatched, setWatched] = useState(canary === null || canary.limits !== null);
  const [judge, setJudge] = useState(canary?.limits?.judge_model ?? "");
  const limits = { ...canary?.limits ?? DEFAULT_LIMITS, judge_model: judge.trim() || null };
  const split = percent > 0 && other !== "" && other !== version;
  const submit = (event: FormEvent): void => {
    event.preventDefault();
    const target = Number(version);
    const body: AliasBody = split
      ? { version: target, canary: { version: Number(other), percent, limits: isWatched ? limits : null } }
      : { version: target };
    void onSet(body, split
      ? `${percent} % of ${alias} goes to version ${other}, the rest to ${version}.`
      : `${alias} means version ${version}.`);
  };
  return (
    <form className="form" onSubmit={submit}>
      <SelectField label="Version" options={versions} value={version}
        onChange={(event) => setVersion(event.target.value)} />
      {others.length > 0 && (
        <>
          <Field label={`Canary: ${percent} %`} hint={split
            ? `The X-Request-Id of a request selects the version.`
            : "Send a share of the requests to another version."}>
            {(control) => (
              <input {...control} type="range" min={0} max={99} step={1} value={percent}
                aria-valuetext={`${percent} %`} onChange={(event) => setPercent(event.target.valueAsNumber)} />
            )}
          </Field>
          {percent > 0 && (
            <SelectField label="of the requests go to" options={others} value={other}
              onChange={(event) => setOther(event.target.value)} />
          )}
          {split && (
            <label className="check">
              <input type="checkbox" checked={isWatched} onChange={(event) => setWatched(event.target.checked)} />
              End the canary automatically if it is worse: {limitsText(limits)}
            </label>
          )}
          {split && isWatched && (
            <TextField label="Judge" maxLength={256} spellCheck={false} autoComplete="off" value={judge}
              hint={`A model that compares answers of both versions in ${limits.judge_percent} % of the requests. Empty: none.`}
              onChange={(event) => setJudge(event.target.value)} />
          )}
        </>
      )}
      <div><Button tone="primary" type="submit" busy={busy}>Apply</Button></div>
    </form>
  );
}

function NewAlias({ tenant, adapter }: Props): ReactNode {
  const versions = readyVersions(adapter);
  const [alias, setAlias] = useState(CALLED in adapter.aliases ? "" : CALLED);
  const [version, setVersion] = useState(versions.at(-1)?.[0] ?? "");
  const { run, error, busy } = useAliasChange(tenant, adapter.name);
  if (versions.length === 0) return null;
  const submit = (event: FormEvent): void => {
    event.preventDefault();
    void run(async () => {
      await api("put", "/v1/adapters/{name}/aliases/{alias}", {
        path: { name: adapter.name, alias }, body: { version: Number(version) }, tenant,
      });
      setAlias("");
    }, `${alias} means version ${version}.`);
  };
  return (
    <Panel title="New alias">
      <form className="form" onSubmit={submit}>
        <TextField label="Name" required maxLength={64} spellCheck={false} autoComplete="off" value={alias}
          onChange={(event) => setAlias(event.target.value)} />
        <SelectField label="Version" options={versions} value={version}
          onChange={(event) => setVersion(event.target.value)} />
        {error !== null && <Refusal error={error} tenant={tenant} adapter={adapter.name} />}
        <div><Button tone="primary" type="submit" busy={busy}>Set alias</Button></div>
      </form>
    </Panel>
  );
}

function AliasHistory({ tenant, adapter, alias }: Props & { alias: string }): ReactNode {
  const query = useQuery({
    queryKey: ["adapter", tenant, adapter.name, "alias", alias],
    queryFn: ({ signal }) => api("get", "/v1/adapters/{name}/aliases/{alias}/history", {
      path: { name: adapter.name, alias }, query: { limit: 20 }, tenant, signal,
    }),
  });
  return (
    <Loaded query={query}>
      {({ data }) => (
        <ol className="timeline">
          {data.map((change, i) => (
            <li key={i}>
              <div>
                {change.action}: {change.version === null ? "nothing" : `version ${change.version}`}
                {change.canary && `, ${change.canary.percent} % to ${change.canary.version}`}
                {change.canary?.limits && ", watched"}
                {change.override && `, although its gate was not passed: ${change.override}`}
                {change.evaluation && (
                  <> after an <Link to={addressOf(tenant, adapter.name, "evaluations", change.evaluation)}>evaluation</Link></>
                )}
                {change.changed_by && <span className="soft"> by {change.changed_by}</span>}
                {change.reason && <div className="soft">{change.reason}</div>}
              </div>
              <Time at={change.changed_at} exact />
            </li>
          ))}
        </ol>
      )}
    </Loaded>
  );
}
