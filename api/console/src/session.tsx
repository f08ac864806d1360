/** Who is signed in, and for which tenant the pages speak. */

import { useQuery, useQueryClient, type QueryClient } from "@tanstack/react-query";
import { createContext, useContext, useEffect, useMemo, useState, type ReactNode } from "react";
import { hooks } from "./api/client.ts";
import { loadSession, signOut, type Session } from "./api/session.ts";
import { ErrorState } from "./components/states.tsx";
import { idleSeconds, lastActivity, noteActivity } from "./lib/activity.ts";

const SESSION_KEY = ["session"];
const TENANT_KEY = "loraplex.tenant";
const ACTIVITY = ["pointerdown", "keydown", "visibilitychange"] as const;
/** The browser's other tabs have the same cookie, and so the same session. */
const otherTabs = new BroadcastChannel("loraplex.session");

interface SessionContextValue {
  session: Session | null;
  /** A session begins, or null: it is over. */
  setSession: (session: Session | null) => void;
  /** The tenant that the pages are about; null: an operator looks at all of them. */
  tenant: string | null;
  pickTenant: (slug: string | null) => void;
}

const SessionContext = createContext<SessionContextValue | null>(null);

export function SessionProvider({ children }: { children: ReactNode }): ReactNode {
  const client = useQueryClient();
  const query = useQuery({ queryKey: SESSION_KEY, queryFn: loadSession, staleTime: Infinity });
  const [picked, setPicked] = useState(() => sessionStorage.getItem(TENANT_KEY));
  const session = query.data ?? null;

  const value = useMemo<SessionContextValue>(() => {
    const setSession = (next: Session | null): void => {
      begin(client, next);
      otherTabs.postMessage(null);
    };
    const pickTenant = (slug: string | null): void => {
      if (slug === null) sessionStorage.removeItem(TENANT_KEY);
      else sessionStorage.setItem(TENANT_KEY, slug);
      setPicked(slug);
    };
    return { session, setSession, tenant: session?.tenant ?? picked, pickTenant };
  }, [client, session, picked]);

  useEffect(() => {
    hooks.onSignedOut = () => value.setSession(null);
    hooks.idleSeconds = idleSeconds;
  }, [value]);
  useEffect(() => {
    otherTabs.onmessage = () => void follow(client);
  }, [client]);
  useSignOutWhenIdle(session, client);

  if (query.isPending) return null;
  if (query.error) return <ErrorState error={query.error} onRetry={() => void query.refetch()} />;
  return <SessionContext value={value}>{children}</SessionContext>;
}

/** Forget what the session before was told, and go on with `next`. */
function begin(client: QueryClient, next: Session | null): void {
  client.removeQueries({ predicate: (one) => one.queryKey[0] !== SESSION_KEY[0] });
  client.setQueryData(SESSION_KEY, next);
  if (next === null) hooks.csrfToken = null;
}

/** Another tab has signed in or out: whoever it is, the pages of this tab begin anew. */
async function follow(client: QueryClient): Promise<void> {
  begin(client, null);
  begin(client, await loadSession().catch(() => null));
}

/**
 * The server ends the session too; the page need not wait to be told. Who works in another tab has not left.
 * The other tabs are told only when the server knows: until then it would say that the session lives.
 */
function useSignOutWhenIdle(session: Session | null, client: QueryClient): void {
  useEffect(() => {
    if (session === null) return;
    let timer = 0;
    const check = (): void => {
      const rest = lastActivity() + session.idle_seconds * 1000 - Date.now();
      if (rest > 0) {
        timer = window.setTimeout(check, rest);
        return;
      }
      void signOut()
        .catch(() => undefined)
        .finally(() => otherTabs.postMessage(null));
      begin(client, null);
    };
    const note = (): void => noteActivity();
    note();
    check();
    for (const event of ACTIVITY) document.addEventListener(event, note, { passive: true });
    return () => {
      window.clearTimeout(timer);
      for (const event of ACTIVITY) document.removeEventListener(event, note);
    };
  }, [session, client]);
}

export function useSessionContext(): SessionContextValue {
  const value = useContext(SessionContext);
  if (value === null) throw new Error("outside SessionProvider");
  return value;
}

/** The session of a page that only those who are signed in see. */
export function useSession(): Session {
  const { session } = useSessionContext();
  if (session === null) throw new Error("nobody is signed in");
  return session;
}

export interface Scope {
  /** The tenant that the page is about; null: an operator looks at all of them. */
  tenant: string | null;
  isOperator: boolean;
  /** May change things of the platform. */
  isAdmin: boolean;
  /** Whether the session may do what needs `scope` to the tenant. */
  may: (scope: string) => boolean;
}

export function useScope(): Scope {
  const { tenant } = useSessionContext();
  const session = useSession();
  const isOperator = session.kind === "operator";
  return {
    tenant,
    isOperator,
    isAdmin: isOperator && session.role === "admin",
    may: (scope) => session.scopes.includes(scope),
  };
}
