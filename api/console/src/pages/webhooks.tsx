/** A tenant's webhooks: where its events are sent. */

import { useState, type ReactNode } from "react";
import { Link } from "react-router";
import { api } from "../api/client.ts";
import { Button } from "../components/button.tsx";
import { DataTable, type Columns } from "../components/data-table.tsx";
import { Page, Panel } from "../components/layout.tsx";
import { NeedsTenant } from "../components/needs-tenant.tsx";
import { EmptyState } from "../components/states.tsx";
import { Time } from "../components/values.tsx";
import { CreateWebhook, WebhookSecret, hostOf, type IssuedWebhook, type Webhook } from "../components/webhook-dialogs.tsx";
import { WebhookBadge } from "../components/webhook-badge.tsx";
import { webhookAddress } from "../lib/addresses.ts";
import { usePages } from "../lib/pages.ts";
import { useScope } from "../session.tsx";

const COLUMNS: Columns<Webhook> = [
  {
    header: "Receiver",
    cell: ({ row: { original: webhook } }) => (
      <>
        <Link to={webhookAddress(webhook.id)}>{hostOf(webhook)}</Link>
        {webhook.description && <span className="sub">{webhook.description}</span>}
      </>
    ),
  },
  { header: "State", cell: ({ row }) => <WebhookBadge of={row.original} /> },
  { header: "Events", cell: ({ row }) => row.original.events?.join(", ") ?? "all" },
  { header: "Created", cell: ({ row }) => <Time at={row.original.created_at} /> },
];

export default function WebhooksPage(): ReactNode {
  const { tenant, may } = useScope();
  const [isCreating, setCreating] = useState(false);
  const [issued, setIssued] = useState<IssuedWebhook | null>(null);
  return (
    <Page title="Webhooks" lead="Events of the tenant, sent to HTTPS servers. Each request is signed with the webhook's secret."
      actions={tenant && may("webhooks:write") && (
        <Button tone="primary" onClick={() => setCreating(true)}>New webhook</Button>
      )}>
      <NeedsTenant what="Webhooks">{(slug) => <Webhooks key={slug} tenant={slug} />}</NeedsTenant>
      {isCreating && tenant && <CreateWebhook tenant={tenant} onIssued={setIssued} onClose={() => setCreating(false)} />}
      {!isCreating && issued && <WebhookSecret issued={issued} onClose={() => setIssued(null)} />}
    </Page>
  );
}

function Webhooks({ tenant }: { tenant: string }): ReactNode {
  const webhooks = usePages<Webhook>(["webhooks", tenant], (after, signal) =>
    api("get", "/v1/webhooks", { query: { after: after ?? null }, tenant, signal }),
  );
  return (
    <Panel title={`Webhooks of ${tenant}`} flush>
      <DataTable caption="Webhooks" columns={COLUMNS} source={webhooks} rowId={(webhook) => webhook.id}
        empty={<EmptyState title="No webhooks" command={`loraplex webhooks create https://hooks.example.com/loraplex --tenant ${tenant}`}>
          A webhook reports versions, aliases, batches, budgets and deletions to a server of yours. The operator lists
          the hosts that may be named.
        </EmptyState>} />
    </Panel>
  );
}
