import { useQuery } from "@tanstack/react-query";
import type { ReactNode } from "react";
import { api, type Answer } from "../api/client.ts";
import { dateTime } from "../lib/format.ts";
import { money } from "../lib/money.ts";
import { EmptyState, Loaded } from "./states.tsx";
import { Meter } from "./values.tsx";

type Budget = Answer<"get", "/v1/budgets">["data"][number];

/** The budgets of a tenant, its users and its keys, and how much of each is spent. */
export function BudgetsInUse({ tenant }: { tenant: string | null }): ReactNode {
  const query = useQuery({
    queryKey: ["budgets-in-use", tenant],
    queryFn: ({ signal }) => api("get", "/v1/budgets", { tenant, signal }),
    refetchInterval: 10_000,
  });
  return (
    <Loaded query={query}>
      {({ data }) => data.length === 0 ? (
        <EmptyState title="No budgets" command="loraplex budgets set 250.00 --of-tenant SLUG">
          Nothing limits what the tenant, its users and its keys may spend.
        </EmptyState>
      ) : (
        <div className="table-wrap" tabIndex={0} role="region" aria-label="Budgets">
          <table className="table">
            <thead>
              <tr>
                <th scope="col">Budget</th><th scope="col" className="end">Spent</th>
                <th scope="col" className="end">Reserved</th><th scope="col" className="end">Amount</th>
                <th scope="col">Usage</th><th scope="col">Resets</th>
              </tr>
            </thead>
            <tbody>{data.map((budget) => <Row key={`${nameOf(budget)} ${budget.period}`} budget={budget} />)}</tbody>
          </table>
        </div>
      )}
    </Loaded>
  );
}

function nameOf({ holder, id }: Budget): string {
  return id === null ? "tenant" : `${holder} ${id}`;
}

function Row({ budget }: { budget: Budget }): ReactNode {
  const { amount, spent, reserved, currency, period, period_ends_at: ends } = budget;
  const label = `${nameOf(budget)}, per ${period}`;
  return (
    <tr>
      <th scope="row">{label}</th>
      <td className="end">{money(spent, currency)}</td>
      <td className="end">{Number(reserved) > 0 ? money(reserved, currency) : ""}</td>
      <td className="end">{money(amount, currency)}</td>
      <td><Meter value={Number(spent) + Number(reserved)} max={Number(amount)} label={label} /></td>
      <td>{dateTime(ends)}</td>
    </tr>
  );
}
