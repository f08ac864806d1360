/** What tokens cost: the prices of all tenants, and those of single ones. For operators. */

import { useState, type ReactNode } from "react";
import { Link } from "react-router";
import { api, type QueryOf } from "../api/client.ts";
import { Button } from "../components/button.tsx";
import { DataTable, type Columns } from "../components/data-table.tsx";
import { Filter } from "../components/form.tsx";
import { Page, Panel } from "../components/layout.tsx";
import { EndPrice, SetPrices, type Price, type PriceDraft } from "../components/price-dialogs.tsx";
import { EmptyState } from "../components/states.tsx";
import { Badge, Time } from "../components/values.tsx";
import { tenantAddress } from "../lib/addresses.ts";
import { useParam } from "../lib/hooks.ts";
import { usePages } from "../lib/pages.ts";
import { priceState } from "../lib/prices.ts";
import { useScope } from "../session.tsx";

type Asked = { what: "set"; draft: PriceDraft } | { what: "end"; price: Price & { tenant: string } } | null;
type Wanted = QueryOf<"get", "/admin/prices">;

const VALIDITIES = [["", "Current and scheduled"], ["all", "Also past"]] as const;
const TONES = { "in effect": "good", scheduled: "accent", past: "" } as const;
const PAGE_SIZE = 50;

export default function PricesPage(): ReactNode {
  const { tenant, isAdmin } = useScope();
  const [validity, setValidity] = useParam("validity");
  const [asked, setAsked] = useState<Asked>(null);
  const close = (): void => setAsked(null);
  const table = { current: validity !== "all", mayChange: isAdmin, onAsk: setAsked };
  return (
    <Page title="Prices" lead="What a million tokens cost. A request is charged by the price in effect when it was admitted."
      actions={
        <>
          <Filter label="Validity" value={validity} onChange={setValidity} options={VALIDITIES} />
          {isAdmin && (
            <Button tone="primary" onClick={() => setAsked({ what: "set", draft: { tenant } })}>Set prices</Button>
          )}
        </>
      }>
      <Prices caption="Prices of all tenants" wanted={{ own: false }} {...table}
        empty={<EmptyState title="No prices" command="loraplex prices set --currency EUR --prompt-tokens 0.15 --completion-tokens 0.60">
          Requests are free. Set prices here or with the CLI.
        </EmptyState>} />
      <Prices caption={tenant === null ? "Prices of single tenants" : `Own prices of ${tenant}`} wanted={{ own: true, tenant }} {...table}
        empty={<EmptyState title="No own prices">
          {tenant ?? "Every tenant"} pays the prices of all tenants. Own prices take precedence over them.
        </EmptyState>} />
      {asked?.what === "set" && <SetPrices draft={asked.draft} onClose={close} />}
      {asked?.what === "end" && <EndPrice price={asked.price} onClose={close} />}
    </Page>
  );
}

interface PricesProps {
  caption: string;
  wanted: Pick<Wanted & object, "own" | "tenant">;
  current: boolean;
  mayChange: boolean;
  onAsk: (asked: Asked) => void;
  empty: ReactNode;
}

function Prices({ caption, wanted, current, mayChange, onAsk, empty }: PricesProps): ReactNode {
  const prices = usePages<Price>(["prices", wanted, current], (after, signal) =>
    api("get", "/admin/prices", { query: { ...wanted, current, after: after ?? null, limit: PAGE_SIZE }, signal }),
  );
  const currency = prices.rows?.[0]?.currency;
  return (
    <Panel title={caption} flush note={currency && `${currency} per million tokens`}>
      <DataTable caption={caption} source={prices} rowId={(price) => String(price.id)} empty={empty}
        columns={[
          ...(wanted.own ? [TENANT] : []),
          ...COLUMNS,
          ...(mayChange ? [actionsOf(onAsk)] : []),
        ]} />
    </Panel>
  );
}

const TENANT: Columns<Price>[number] = {
  header: "Tenant",
  cell: ({ row: { original: { tenant } } }) => tenant !== null && <Link to={tenantAddress(tenant)}>{tenant}</Link>,
};

const COLUMNS: Columns<Price> = [
  { header: "Base", cell: ({ row }) => row.original.base },
  {
    header: "State",
    cell: ({ row }) => {
      const state = priceState(row.original, Date.now());
      return <Badge tone={TONES[state]}>{state}</Badge>;
    },
  },
  { header: "Prompt", meta: { end: true }, cell: ({ row }) => row.original.prompt_tokens },
  { header: "Cached", meta: { end: true }, cell: ({ row }) => row.original.cached_tokens },
  { header: "Generated", meta: { end: true }, cell: ({ row }) => row.original.completion_tokens },
  { header: "Trained", meta: { end: true }, cell: ({ row }) => row.original.trained_tokens },
  {
    header: "Batches", meta: { end: true },
    cell: ({ row }) => row.original.batch_discount > 0 ? `−${row.original.batch_discount} %` : "",
  },
  { header: "From", cell: ({ row }) => <Time at={row.original.effective_from} exact /> },
  { header: "Until", cell: ({ row: { original: { effective_until } } }) => effective_until && <Time at={effective_until} exact /> },
];

function actionsOf(onAsk: (asked: Asked) => void): Columns<Price>[number] {
  return {
    id: "actions", header: "", meta: { end: true },
    cell: ({ row: { original: price } }) => priceState(price, Date.now()) !== "past" && (
      <Actions price={price} onAsk={onAsk} />
    ),
  };
}

function Actions({ price, onAsk }: { price: Price; onAsk: (asked: Asked) => void }): ReactNode {
  const { tenant, base } = price;
  const of = tenant === null ? base : `${base} for ${tenant}`;
  return (
    <span className="nowrap">
      <Button small tone="plain" aria-label={`Change the price of ${of}`}
        onClick={() => onAsk({ what: "set", draft: price })}>Change</Button>
      {tenant !== null && (
        <Button small tone="plain" aria-label={`End the price of ${of}`}
          onClick={() => onAsk({ what: "end", price: { ...price, tenant } })}>End</Button>
      )}
    </span>
  );
}
