import type { ReactNode } from "react";
import { Link } from "react-router";
import { useScope } from "../session.tsx";
import { EmptyState } from "./states.tsx";

/** What belongs to one tenant; an operator has to pick it first. */
export function NeedsTenant({ what, children }: {
  what: string;
  children: (tenant: string) => ReactNode;
}): ReactNode {
  const { tenant } = useScope();
  if (tenant !== null) return children(tenant);
  return (
    <section className="panel">
      <EmptyState title="Select a tenant">
        {what} belong to one tenant. Pick it at the top of the navigation, or from
        {" "}<Link to="/tenants">the list of tenants</Link>.
      </EmptyState>
    </section>
  );
}
