/** Setting prices, and ending those of one tenant. */

import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState, type FormEvent, type ReactNode } from "react";
import { api, type Answer, type BodyOf } from "../api/client.ts";
import { localTime, momentOf } from "../lib/format.ts";
import { earliestEnd, priceState } from "../lib/prices.ts";
import { useSession } from "../session.tsx";
import { ConfirmDialog } from "./dialog.tsx";
import { FormDialog } from "./form-dialog.tsx";
import { TextField } from "./form.tsx";
import { Loaded } from "./states.tsx";

export type Price = Answer<"get", "/admin/prices">["data"][number];
type PriceOrder = BodyOf<"post", "/admin/prices">;

/** What a new price begins with: an earlier one, or the tenant that it is for. */
export type PriceDraft = Price | { tenant: string | null };

const AMOUNT = { required: true, inputMode: "decimal", autoComplete: "off", maxLength: 20 } as const;

function useRefresh(): () => Promise<void> {
  const client = useQueryClient();
  return () => client.invalidateQueries({ queryKey: ["prices"] });
}

/** Sets the prices of a base for all tenants or for one. */
export function SetPrices({ draft, onClose }: { draft: PriceDraft; onClose: () => void }): ReactNode {
  const refresh = useRefresh();
  const { server } = useSession();
  const query = useQuery({
    queryKey: ["prices", "currency"],
    queryFn: ({ signal }) => api("get", "/admin/prices", { query: { limit: 1 }, signal }),
  });
  const before = "base" in draft ? draft : null;
  const begin = before && priceState(before, Date.now()) === "scheduled" ? before.effective_from : null;
  const submit = async (event: FormEvent<HTMLFormElement>): Promise<boolean> => {
    // Without the currency the form has no field for it.
    if (query.data === undefined) return true;
    await api("post", "/admin/prices", { body: orderOf(new FormData(event.currentTarget), begin) });
    await refresh();
    return false;
  };
  return (
    <FormDialog title="Set prices" action="Set prices" wide onSubmit={submit} onClose={onClose}>
      <p className="soft">
        Prices are of a million tokens. They supersede the earlier ones of the same base and tenant.
      </p>
      <Loaded query={query}>
        {({ data: [first] }) => (
          <div className="columns narrow">
            <TextField label="Base" name="base" required autoComplete="off" spellCheck={false}
              defaultValue={before?.base ?? server.base_model} />
            <TextField label="Tenant" name="tenant" autoComplete="off" spellCheck={false} placeholder="all tenants"
              defaultValue={draft.tenant ?? ""} hint="The slug of the only tenant that pays them." />
            <TextField label="Currency" name="currency" required minLength={3} maxLength={3} autoComplete="off"
              readOnly={first !== undefined} defaultValue={first?.currency ?? ""}
              hint={first ? "The same in all prices." : "Such as EUR. It cannot be changed later."} />
            <TextField label="Prompt tokens" name="prompt_tokens" {...AMOUNT} placeholder="0.15" defaultValue={before?.prompt_tokens} />
            <TextField label="Cached prompt tokens" name="cached_tokens" {...AMOUNT} required={false} defaultValue={before?.cached_tokens}
              placeholder="as other prompt tokens" hint="Found in the prefix cache." />
            <TextField label="Generated tokens" name="completion_tokens" {...AMOUNT} placeholder="0.60" defaultValue={before?.completion_tokens} />
            <TextField label="Trained tokens" name="trained_tokens" {...AMOUNT} required={false} defaultValue={before?.trained_tokens}
              placeholder="free" hint="Of fine-tuning jobs." />
            <TextField label="Batch discount (percent)" name="batch_discount" type="number" required min={0} max={100} step={1}
              defaultValue={before?.batch_discount ?? 0} />
            <TextField label="From" name="from" type="datetime-local" step={1} defaultValue={begin ? localTime(begin) : ""}
              hint="In your time zone. Empty: in 30 seconds." />
          </div>
        )}
      </Loaded>
    </FormDialog>
  );
}

/** `begin`: what the field of the time began with; it has no fractions of a second. */
function orderOf(form: FormData, begin: string | null): PriceOrder {
  const text = (name: string): string => String(form.get(name)).trim();
  const from = text("from");
  return {
    base: text("base"),
    tenant: text("tenant") || null,
    currency: text("currency"),
    prompt_tokens: text("prompt_tokens"),
    cached_tokens: text("cached_tokens") || null,
    completion_tokens: text("completion_tokens"),
    trained_tokens: text("trained_tokens") || null,
    batch_discount: Number(form.get("batch_discount")),
    effective_from: begin !== null && from === localTime(begin) ? begin : momentOf(from),
  };
}

/** Ends a tenant's own price. */
export function EndPrice({ price, onClose }: { price: Price & { tenant: string }; onClose: () => void }): ReactNode {
  const refresh = useRefresh();
  const [from, setFrom] = useState("");
  const isScheduled = priceState(price, Date.now()) === "scheduled";
  const { tenant, base } = price;
  const end = async (): Promise<void> => {
    const effective_from = momentOf(from) ?? earliestEnd(price, Date.now());
    await api("post", "/admin/prices/end", { body: { tenant, base, effective_from } });
    await refresh();
  };
  return (
    <ConfirmDialog title={`End the price of ${tenant}?`} action="End price" danger onConfirm={end} onClose={onClose}>
      <p>
        {tenant} then pays the prices of all tenants for <code>{base}</code>; without any, its requests are free. Own
        prices that begin later still do.
      </p>
      <TextField label="From" type="datetime-local" step={1} value={from} onChange={(event) => setFrom(event.target.value)}
        hint={isScheduled ? "In your time zone. Empty: it does not begin at all." : "In your time zone. Empty: in 30 seconds."} />
    </ConfirmDialog>
  );
}
