/** What a part of a page shows while there is nothing to show. */

import type { ReactNode } from "react";
import { toApiError } from "../api/errors.ts";
import { plural } from "../lib/format.ts";
import { Button, Command } from "./button.tsx";
import { Words } from "./values.tsx";

export function Loading({ what = "Loading" }: { what?: string }): ReactNode {
  return <div className="loading" role="status">{what}…</div>;
}

interface EmptyProps {
  title: string;
  children?: ReactNode;
  /** The command line that fills it. */
  command?: string;
}

export function EmptyState({ title, children, command }: EmptyProps): ReactNode {
  return (
    <div className="empty">
      <h3>{title}</h3>
      {children && <p>{children}</p>}
      {command && <Command>{command}</Command>}
    </div>
  );
}

/** An error in words, with the code to look up and the request to ask about. */
export function ErrorNotice({ error, children }: { error: unknown; children?: ReactNode }): ReactNode {
  const { message, code, param, requestId, retryAfter } = toApiError(error);
  const facts = [
    `code ${code}`,
    param && `field ${param}`,
    requestId && `request ${requestId}`,
    retryAfter && `try again in ${plural(Math.ceil(retryAfter), "second")}`,
  ];
  return (
    <div className="notice bad" role="alert">
      <div><Words>{message}</Words></div>
      <div className="meta">{facts.filter(Boolean).join(" · ")}</div>
      {children}
    </div>
  );
}

export function ErrorState({ error, onRetry }: { error: unknown; onRetry?: () => void }): ReactNode {
  return (
    <div className="panel-body">
      <ErrorNotice error={error}>
        {onRetry && <div><Button small onClick={onRetry}>Try again</Button></div>}
      </ErrorNotice>
    </div>
  );
}

interface Query<T> {
  data: T | undefined;
  error: unknown;
  refetch: () => unknown;
}

/** The data of a query once it is there, under the error if it can't be had anew; before, that it loads. */
export function Loaded<T>({ query, children }: {
  query: Query<T>;
  children: (data: T) => ReactNode;
}): ReactNode {
  const error = query.error ? <ErrorState error={query.error} onRetry={() => void query.refetch()} /> : null;
  if (query.data === undefined) return error ?? <Loading />;
  return <>{error}{children(query.data)}</>;
}
