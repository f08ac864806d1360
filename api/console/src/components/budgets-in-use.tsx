import type { ReactNode } from "react";
import { dateTime } from "../lib/format.ts";
import { money } from "../lib/money.ts";
import { useBudgets, type Budget } from "./budgets.tsx";
import { EmptyState, Loaded } from "./states.tsx";
import { Meter } from "./values.tsx";

/** The budgets of a tenant, its users and its keys, and how much of each is spent. */
export function BudgetsInUse({ tenant }: { tenant: string | null }): ReactNode {
  return (
    <Loaded query={useBudgets(tenant)}>
      {({ data }) => data.length === 0 ? (
        <EmptyState title="No budgets" command={`loraplex budgets set 250.00 --of-tenant ${tenant ?? "SLUG"}`}>
          Nothing limits what the tenant, its users and its keys may spend.
        </EmptyState>
      ) : (
        <div className="table-wrap" tabIndex={0} role="region" aria-label="Budgets">
          <table className="table cards">
            <thead>
              <tr>
                <th scope="col">Budget</th><th scope="col" className="end">Spent</th>
                <th scope="col" className="end">Reserved</th><th scope="col" className="end">Amount</th>
                <th scope="col">Usage</th><th scope="col">Resets</th>
              </tr>
            </thead>
            <tbody>{data.map((budget) => <Row key={`${budget.id} ${budget.period}`} budget={budget} />)}</tbody>
          </table>
        </div>
      )}
    </Loaded>
  );
}

/** The user's e-mail address or the key's name. */
function nameOf({ holder, id, name }: Budget): string {
  return id === null ? "tenant" : `${holder} ${name ?? id}`;
}

function Row({ budget }: { budget: Budget }): ReactNode {
  const { amount, spent, reserved, currency, period, period_ends_at: ends } = budget;
  const label = `${nameOf(budget)}, per ${period}`;
  return (
    <tr>
      <th scope="row">{label}</th>
      <td data-label="Spent" className="end">{money(spent, currency)}</td>
      <td data-label="Reserved" className="end">{Number(reserved) > 0 ? money(reserved, currency) : ""}</td>
      <td data-label="Amount" className="end">{money(amount, currency)}</td>
      <td data-label="Usage"><Meter value={Number(spent) + Number(reserved)} max={Number(amount)} label={label} /></td>
      <td data-label="Resets">{dateTime(ends)}</td>
    </tr>
  );
}
