/** Budgets of money: how much of them is spent, and setting them. */

import { useQuery, useQueryClient, type UseQueryResult } from "@tanstack/react-query";
import type { FormEvent, ReactNode } from "react";
import { api, type Answer } from "../api/client.ts";
import { money } from "../lib/money.ts";
import type { Columns } from "./data-table.tsx";
import { FormDialog } from "./form-dialog.tsx";
import { TextField } from "./form.tsx";
import { Loaded } from "./states.tsx";
import { Meter } from "./values.tsx";

type Budgets = Answer<"get", "/v1/budgets">;
export type Budget = Budgets["data"][number];
type Period = "day" | "month";

/** Whose budgets they are; `name` is what people call it. */
export interface Holder {
  kind: "tenant" | "user" | "key";
  /** The slug of a tenant. */
  id: string;
  name: string;
}

const REFRESH_MS = 10_000;
const PERIODS: readonly (readonly [Period, string])[] = [["month", "A month, in UTC"], ["day", "A day, in UTC"]];

const keyOf = (tenant: string | null) => ["budgets", tenant] as const;

/** The budgets of a tenant, its users and its keys. */
export function useBudgets(tenant: string | null, enabled = true): UseQueryResult<Budgets> {
  return useQuery({
    queryKey: keyOf(tenant),
    queryFn: ({ signal }) => api("get", "/v1/budgets", { tenant, signal }),
    refetchInterval: REFRESH_MS,
    enabled,
  });
}

function isOf({ kind, id }: Pick<Holder, "kind" | "id">): (budget: Budget) => boolean {
  return (budget) => budget.holder === kind && (kind === "tenant" || budget.id === id);
}

/** The column of the budgets of the rows' users or keys; none while no row has one. */
export function budgetColumn<T extends { id: string }>(
  kind: "user" | "key",
  budgets: Budgets | undefined,
  nameOf: (row: T) => string,
): Columns<T> {
  const all = budgets?.data.filter((budget) => budget.holder === kind) ?? [];
  if (all.length === 0) return [];
  return [{
    header: "Budget",
    cell: ({ row: { original } }) =>
      all.filter(isOf({ kind, id: original.id })).map((budget) => <Use key={budget.period} of={budget} name={nameOf(original)} />),
  }];
}

function Use({ of, name }: { of: Budget; name: string }): ReactNode {
  const { spent, reserved, amount, currency, period } = of;
  return (
    <div className="budget">
      <span className="nowrap">{spent} of {money(amount, currency)} a {period}</span>
      <Meter value={Number(spent) + Number(reserved)} max={Number(amount)} label={`Spent by ${name} in this ${period}`} />
    </div>
  );
}

/** Sets, changes and removes the budgets of a holder. */
export function BudgetDialog({ tenant, holder, onClose }: { tenant: string; holder: Holder; onClose: () => void }): ReactNode {
  const client = useQueryClient();
  const query = useBudgets(tenant);
  const submit = async (event: FormEvent<HTMLFormElement>): Promise<boolean> => {
    // What is not there yet would be saved as no budgets at all.
    if (query.data === undefined) return true;
    const form = new FormData(event.currentTarget);
    const before = query.data.data.filter(isOf(holder));
    try {
      for (const [period] of PERIODS) {
        const budget = before.find((one) => one.period === period);
        await change(tenant, holder, period, budget, String(form.get(period)).trim());
      }
    } finally {
      await client.invalidateQueries({ queryKey: keyOf(tenant) });
    }
    return false;
  };
  return (
    <FormDialog title={`Budgets of ${holder.name}`} action="Save budgets" onSubmit={submit} onClose={onClose}>
      <p className="soft">
        What may be spent in each period. Requests that may cost more than is left are refused. Empty: no budget. New
        budgets alert at 50, 80 and 100 percent.
      </p>
      <Loaded query={query}>
        {({ data }) => PERIODS.map(([period, label]) => {
          const budget = data.filter(isOf(holder)).find((one) => one.period === period);
          return (
            <TextField key={period} label={budget?.currency ? `${label} (${budget.currency})` : label} name={period}
              inputMode="decimal" autoComplete="off" maxLength={20} placeholder="no budget" defaultValue={budget?.amount ?? ""}
              hint={budget && `${money(budget.spent, budget.currency)} spent, ${money(budget.remaining, budget.currency)} left`} />
          );
        })}
      </Loaded>
    </FormDialog>
  );
}

/** `amount`: empty for no budget; its alerts stay those of the budget before. */
async function change(tenant: string, holder: Holder, period: Period, before: Budget | undefined, amount: string): Promise<void> {
  if (amount === (before?.amount ?? "")) return;
  const { kind, id } = holder;
  const body = { amount, ...(before && { alert_percents: before.alert_percents }) };
  switch (kind) {
    case "tenant": {
      const path = { slug: id, period };
      if (amount === "") return api("delete", "/admin/tenants/{slug}/budgets/{period}", { path });
      await api("put", "/admin/tenants/{slug}/budgets/{period}", { path, body });
      return;
    }
    case "user": {
      const path = { user_id: id, period };
      if (amount === "") return api("delete", "/v1/users/{user_id}/budgets/{period}", { path, tenant });
      await api("put", "/v1/users/{user_id}/budgets/{period}", { path, body, tenant });
      return;
    }
    case "key": {
      const path = { key_id: id, period };
      if (amount === "") return api("delete", "/v1/keys/{key_id}/budgets/{period}", { path, tenant });
      await api("put", "/v1/keys/{key_id}/budgets/{period}", { path, body, tenant });
    }
  }
}
