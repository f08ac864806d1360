/** One webhook: what it is sent, and what came of it. */

import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState, type ReactNode } from "react";
import { Link, useNavigate, useParams } from "react-router";
import { api, tagged, type Answer, type QueryOf } from "../api/client.ts";
import { toApiError } from "../api/errors.ts";
import { Button } from "../components/button.tsx";
import { DataTable, type Columns } from "../components/data-table.tsx";
import { Filter } from "../components/form.tsx";
import { Facts, Page, Panel } from "../components/layout.tsx";
import { NeedsTenant } from "../components/needs-tenant.tsx";
import { EmptyState, Loaded } from "../components/states.tsx";
import { useToast } from "../components/toast.tsx";
import { Badge, Time } from "../components/values.tsx";
import { WebhookBadge } from "../components/webhook-badge.tsx";
import {
  DeleteWebhook, DisableWebhook, EditWebhook, RotateSecret, WebhookSecret, hostOf, type IssuedWebhook, type Webhook,
} from "../components/webhook-dialogs.tsx";
import { plural } from "../lib/format.ts";
import { useParam } from "../lib/hooks.ts";
import { usePages } from "../lib/pages.ts";
import { disabledText, failureText } from "../lib/webhooks.ts";
import { useScope } from "../session.tsx";

type Asked = "edit" | "rotate" | "disable" | "delete" | null;
type Delivery = Answer<"get", "/v1/webhooks/{webhook_id}/deliveries">["data"][number];
type DeliveryState = NonNullable<QueryOf<"get", "/v1/webhooks/{webhook_id}/deliveries">["state"]>;

const REFRESH_MS = 5_000;
const PAGE_SIZE = 50;
const STATES = [["", "Any state"], ["pending", "Pending"], ["delivered", "Delivered"], ["failed", "Failed"]] as const;
const TONES = { pending: "accent", delivered: "good", failed: "bad" } as const;

export default function WebhookPage(): ReactNode {
  const { id = "" } = useParams();
  return <NeedsTenant what="Webhooks">{(tenant) => <OneWebhook key={tenant} tenant={tenant} id={id} />}</NeedsTenant>;
}

function OneWebhook({ tenant, id }: { tenant: string; id: string }): ReactNode {
  const { may } = useScope();
  const navigate = useNavigate();
  const [asked, setAsked] = useState<Asked>(null);
  const [issued, setIssued] = useState<IssuedWebhook | null>(null);
  const query = useQuery({
    queryKey: ["webhooks", tenant, "one", id],
    queryFn: ({ signal }) => tagged("get", "/v1/webhooks/{webhook_id}", { path: { webhook_id: id }, tenant, signal }),
    refetchInterval: REFRESH_MS,
  });
  const webhook = query.data?.data;
  const of = { tenant, onClose: () => setAsked(null) };
  return (
    <Page title={webhook ? hostOf(webhook) : "Webhook"} crumbs={<Link to="/webhooks">Webhooks</Link>} lead={webhook?.description}
      actions={webhook && may("webhooks:write") && <Actions tenant={tenant} webhook={webhook} onAsk={setAsked} />}>
      <Loaded query={query}>
        {({ data, etag }) => (
          <>
            <Warnings webhook={data} />
            <Panel title="Webhook"><About webhook={data} /></Panel>
            <Deliveries tenant={tenant} id={id} />
            {asked === "edit" && <EditWebhook {...of} webhook={data} etag={etag} />}
            {asked === "rotate" && <RotateSecret {...of} webhook={data} onIssued={setIssued} />}
            {asked === "disable" && <DisableWebhook {...of} webhook={data} />}
            {asked === "delete" && <DeleteWebhook {...of} webhook={data} onDeleted={() => void navigate("/webhooks")} />}
            {asked === null && issued && <WebhookSecret issued={issued} onClose={() => setIssued(null)} />}
          </>
        )}
      </Loaded>
    </Page>
  );
}

function Actions({ tenant, webhook, onAsk }: { tenant: string; webhook: Webhook; onAsk: (asked: Asked) => void }): ReactNode {
  const client = useQueryClient();
  const toast = useToast();
  const path = { webhook_id: webhook.id };
  const attempt = async (done: string, change: () => Promise<unknown>): Promise<void> => {
    try {
      await change();
      toast(done);
      await client.invalidateQueries({ queryKey: ["webhooks", tenant] });
    } catch (error) {
      toast(toApiError(error).message, "bad");
    }
  };
  const sendTest = () => attempt("A test event is on its way.", () => api("post", "/v1/webhooks/{webhook_id}/test", { path, tenant }));
  const enable = () => attempt("The webhook is enabled.", () =>
    api("patch", "/v1/webhooks/{webhook_id}", { path, body: { disabled: false }, tenant }));
  const isDisabled = webhook.disabled_at !== null;
  return (
    <>
      {!isDisabled && <Button onClick={() => void sendTest()}>Send test event</Button>}
      <Button onClick={() => onAsk("edit")}>Edit</Button>
      <Button onClick={() => onAsk("rotate")}>Rotate secret</Button>
      {isDisabled
        ? <Button tone="primary" onClick={() => void enable()}>Enable</Button>
        : <Button onClick={() => onAsk("disable")}>Disable</Button>}
      <Button tone="danger" onClick={() => onAsk("delete")}>Delete</Button>
    </>
  );
}

function Warnings({ webhook }: { webhook: Webhook }): ReactNode {
  const disabled = disabledText(webhook);
  const { dropped_events: dropped } = webhook;
  return (
    <>
      {disabled && <div className="notice warn">{disabled} Enable it when the receiver works again.</div>}
      {dropped > 0 && (
        <div className="notice warn">{plural(dropped, "event")} not kept, because too many were pending.</div>
      )}
    </>
  );
}

function About({ webhook }: { webhook: Webhook }): ReactNode {
  return (
    <Facts facts={[
      ["URL", <code key="url">{webhook.url}</code>],
      ["State", <WebhookBadge key="state" of={webhook} />],
      ["Events", webhook.events?.join(", ") ?? "all, including future types"],
      ...(webhook.failing_since ? [["Failing since", <Time key="since" at={webhook.failing_since} exact />] as [string, ReactNode]] : []),
      ...(webhook.previous_secret_until
        ? [["Old secret signs until", <Time key="until" at={webhook.previous_secret_until} exact />] as [string, ReactNode]]
        : []),
      ["Created", <span key="at"><Time at={webhook.created_at} exact /> by {webhook.created_by}</span>],
      ["Id", <code key="id">{webhook.id}</code>],
    ]} />
  );
}

const COLUMNS: Columns<Delivery> = [
  {
    header: "Event",
    cell: ({ row: { original: delivery } }) => <>{delivery.type}<span className="sub mono">{delivery.event}</span></>,
  },
  {
    header: "State",
    cell: ({ row: { original: { state } } }) => <Badge tone={TONES[state]}>{state}</Badge>,
  },
  { header: "Attempts", meta: { end: true }, cell: ({ row }) => row.original.attempts },
  { header: "Last failure", cell: ({ row }) => failureText(row.original) },
  { header: "Created", cell: ({ row }) => <Time at={row.original.created_at} /> },
  {
    header: "Next attempt",
    cell: ({ row: { original: { next_attempt_at: at } } }) => at && (Date.parse(at) <= Date.now() ? "now" : <Time at={at} />),
  },
  { header: "Ended", cell: ({ row: { original: { ended_at: at } } }) => at && <Time at={at} /> },
];

function Deliveries({ tenant, id }: { tenant: string; id: string }): ReactNode {
  const [state, setState] = useParam("state");
  const deliveries = usePages<Delivery>(["webhooks", tenant, "deliveries", id, state], (after, signal) =>
    api("get", "/v1/webhooks/{webhook_id}/deliveries", {
      path: { webhook_id: id },
      query: { state: (state || null) as DeliveryState | null, after: after ?? null, limit: PAGE_SIZE },
      tenant, signal,
    }), { refetchInterval: REFRESH_MS });
  return (
    <Panel title="Deliveries" flush note="of the last 30 days"
      actions={<Filter label="State" value={state} onChange={setState} options={STATES} />}>
      <DataTable caption="Deliveries" columns={COLUMNS} source={deliveries} rowId={(delivery) => delivery.id}
        empty={<EmptyState title="No deliveries">{state ? "Clear the filter." : "Send a test event, or wait for the next one."}</EmptyState>} />
    </Panel>
  );
}
