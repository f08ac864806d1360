/** One tenant: what it is, what it may use, and whether it is served. */

import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState, type FormEvent, type ReactNode } from "react";
import { Link, useParams } from "react-router";
import { api, tagged, type Answer } from "../api/client.ts";
import { BudgetDialog } from "../components/budgets.tsx";
import { BudgetsInUse } from "../components/budgets-in-use.tsx";
import { Button } from "../components/button.tsx";
import { ConfirmDialog } from "../components/dialog.tsx";
import { FormDialog } from "../components/form-dialog.tsx";
import { TextField } from "../components/form.tsx";
import { Facts, Page, Panel } from "../components/layout.tsx";
import { LimitsDialog } from "../components/limits-dialog.tsx";
import { LimitsInUse } from "../components/limits-in-use.tsx";
import { Loaded } from "../components/states.tsx";
import { useToast } from "../components/toast.tsx";
import { Badge, Time } from "../components/values.tsx";
import { duration, number, percent, plural } from "../lib/format.ts";
import { useScope, useSessionContext } from "../session.tsx";

type Tenant = Answer<"get", "/admin/tenants/{slug}">;
type Asked = "edit" | "suspend" | "resume" | "limits" | "budgets" | null;

export default function TenantPage(): ReactNode {
  const { slug = "" } = useParams();
  const { isAdmin } = useScope();
  const [asked, setAsked] = useState<Asked>(null);
  const query = useQuery({
    queryKey: ["tenant", slug],
    queryFn: ({ signal }) => tagged("get", "/admin/tenants/{slug}", { path: { slug }, signal }),
  });
  const close = (): void => setAsked(null);
  return (
    <Page title={slug} crumbs={<Link to="/tenants">Tenants</Link>}
      actions={isAdmin && query.data && <Actions tenant={query.data.data} onAsk={setAsked} />}>
      <Loaded query={query}>
        {({ data: tenant, etag }) => (
          <>
            {tenant.suspended_at && <Suspended since={tenant.suspended_at} />}
            <div className="columns">
              <Panel title="Tenant"><About tenant={tenant} /></Panel>
              <Panel title="Resources"><Parts slug={slug} /></Panel>
            </div>
            <Panel title="Limits" flush
              note="Limits apply across all servers."
              actions={isAdmin && <Button small onClick={() => setAsked("limits")}>Change limits</Button>}>
              <LimitsInUse tenant={slug} />
            </Panel>
            <Panel title="Budgets" flush
              actions={isAdmin && <Button small onClick={() => setAsked("budgets")}>Change budgets</Button>}>
              <BudgetsInUse tenant={slug} />
            </Panel>
            {asked === "edit" && <EditTenant tenant={tenant} etag={etag} onClose={close} />}
            {asked === "suspend" && <Suspend slug={slug} onClose={close} />}
            {asked === "resume" && <Resume slug={slug} onClose={close} />}
            {asked === "limits" && <LimitsDialog slug={slug} onClose={close} />}
            {asked === "budgets" && (
              <BudgetDialog tenant={slug} holder={{ kind: "tenant", id: slug, name: slug }} onClose={close} />
            )}
          </>
        )}
      </Loaded>
    </Page>
  );
}

function Actions({ tenant, onAsk }: { tenant: Tenant; onAsk: (asked: Asked) => void }): ReactNode {
  return (
    <>
      <Button onClick={() => onAsk("edit")}>Edit</Button>
      {tenant.suspended_at
        ? <Button tone="primary" onClick={() => onAsk("resume")}>Resume</Button>
        : <Button tone="danger" onClick={() => onAsk("suspend")}>Suspend</Button>}
    </>
  );
}

function Suspended({ since }: { since: string }): ReactNode {
  return (
    <div className="notice warn">
      <div>This tenant is suspended: its keys are refused, and its users cannot sign in.</div>
      <div className="meta">since <Time at={since} exact /></div>
    </div>
  );
}

function About({ tenant }: { tenant: Tenant }): ReactNode {
  return (
    <Facts facts={[
      ["Slug", <code>{tenant.slug}</code>],
      ["Name", tenant.name ?? <span className="faint">none</span>],
      ["State", tenant.suspended_at ? <Badge tone="warn">suspended</Badge> : <Badge tone="good">active</Badge>],
      ["Weight", number(tenant.weight)],
      ["Objective", objectiveText(tenant.slo)],
      ["Attained in 24 hours", <Attained slug={tenant.slug} />],
      ["Created", <Time at={tenant.created_at} exact />],
      ["Id", <code>{tenant.id}</code>],
    ]} />
  );
}

/** Such as "first token 2 s, inter-token 80 ms"; a tenant without targets has the server's. */
function objectiveText({ ttft_ms: ttft, itl_ms: itl }: Tenant["slo"]): ReactNode {
  if (ttft === null && itl === null) return <span className="faint">the server's</span>;
  return [
    ...(ttft === null ? [] : [`first token ${duration(ttft)}`]), ...(itl === null ? [] : [`inter-token ${duration(itl)}`]),
  ].join(", ");
}

/** The share of the tenant's requests that met their objective. */
function Attained({ slug }: { slug: string }): ReactNode {
  const query = useQuery({
    queryKey: ["overview", slug, "24h"],
    queryFn: ({ signal }) => api("get", "/v1/overview", { query: { range: "24h" }, tenant: slug, signal }),
  });
  const objectives = query.data?.objectives ?? [];
  const judged = objectives.flatMap(({ met, ttft, itl, refused, failed }) => [met, ttft, itl, refused, failed]);
  const total = judged.reduce((sum, part) => sum + part, 0);
  if (total === 0) return <span className="faint">no requests with an objective</span>;
  const met = objectives.reduce((sum, one) => sum + one.met, 0);
  return `${percent(met / total)} of ${plural(total, "request")}`;
}

const PARTS = [
  ["/adapters", "Adapters"], ["/keys", "Keys"], ["/users", "Users"], ["/webhooks", "Webhooks"], ["/prices", "Prices"], ["/usage", "Usage"], ["/audit", "Audit log"],
] as const;

/** The other pages, narrowed to this tenant. */
function Parts({ slug }: { slug: string }): ReactNode {
  const { pickTenant } = useSessionContext();
  return (
    <ul className="row">
      {PARTS.map(([to, text]) => (
        <li key={to}><Link className="button" to={to} onClick={() => pickTenant(slug)}>{text}</Link></li>
      ))}
    </ul>
  );
}

function useRefresh(slug: string): () => Promise<void> {
  const client = useQueryClient();
  return async () => {
    await Promise.all([
      client.invalidateQueries({ queryKey: ["tenant", slug] }),
      client.invalidateQueries({ queryKey: ["tenants"] }),
    ]);
  };
}

function EditTenant({ tenant, etag, onClose }: {
  tenant: Tenant;
  etag: string | null;
  onClose: () => void;
}): ReactNode {
  const refresh = useRefresh(tenant.slug);
  // Of what the fields show, also when the page has read the tenant anew behind them.
  const [ifMatch] = useState(etag);
  const submit = async (event: FormEvent<HTMLFormElement>): Promise<void> => {
    const form = new FormData(event.currentTarget);
    const name = String(form.get("name")).trim() || null;
    const body = { name, weight: Number(form.get("weight")) };
    await api("patch", "/admin/tenants/{slug}", { path: { slug: tenant.slug }, body, ifMatch });
    await refresh();
  };
  return (
    <FormDialog title={`Edit ${tenant.slug}`} action="Save" onSubmit={submit} onClose={onClose}>
      <TextField label="Name" name="name" maxLength={200} autoComplete="off" defaultValue={tenant.name ?? ""} />
      <TextField label="Weight" name="weight" type="number" required min={0.01} max={100} step="any"
        defaultValue={tenant.weight} hint="2 gets twice the share of 1 while both have requests waiting." />
    </FormDialog>
  );
}

function Suspend({ slug, onClose }: { slug: string; onClose: () => void }): ReactNode {
  const refresh = useRefresh(slug);
  const toast = useToast();
  const suspend = async (): Promise<void> => {
    await api("patch", "/admin/tenants/{slug}", { path: { slug }, body: { suspended: true } });
    await refresh();
    toast(`${slug} is suspended.`);
  };
  return (
    <ConfirmDialog title={`Suspend ${slug}?`} action={`Suspend ${slug}`} typed={slug} danger
      onConfirm={suspend} onClose={onClose}>
      <p>
        This server immediately, and every other server within five seconds, refuses the tenant's keys
        (<code>tenant_suspended</code>) and signs out its users. Running requests finish and are charged.
      </p>
      <p>Its adapters, aliases, keys, limits and ledger are kept. Resuming the tenant restores access.</p>
    </ConfirmDialog>
  );
}

function Resume({ slug, onClose }: { slug: string; onClose: () => void }): ReactNode {
  const refresh = useRefresh(slug);
  const toast = useToast();
  const resume = async (): Promise<void> => {
    await api("patch", "/admin/tenants/{slug}", { path: { slug }, body: { suspended: false } });
    await refresh();
    toast(`${slug} is served again.`);
  };
  return (
    <ConfirmDialog title={`Resume ${slug}?`} action={`Resume ${slug}`} onConfirm={resume} onClose={onClose}>
      <p>Its keys work again and its users can sign in.</p>
    </ConfirmDialog>
  );
}
