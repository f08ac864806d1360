/** What stands around every page: navigation, the tenant that is looked at, who is signed in. */

import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { useEffect, useRef, useState, type ReactNode } from "react";
import { Link, NavLink, useLocation } from "react-router";
import { api } from "../api/client.ts";
import { toApiError } from "../api/errors.ts";
import { providerSignOutUrl, signOut } from "../api/session.ts";
import { useRested } from "../lib/hooks.ts";
import { useScope, useSession, useSessionContext, type Scope } from "../session.tsx";
import { Button } from "./button.tsx";
import { Icon, Mark, type IconName } from "./icons.tsx";
import { ThemeSwitch } from "./theme-switch.tsx";
import { useToast } from "./toast.tsx";

interface Place {
  to: string;
  name: string;
  icon: IconName;
  isShown?: (scope: Scope) => boolean;
}

const PLACES: { title: string; places: Place[] }[] = [
  {
    title: "Serving",
    places: [
      { to: "/", name: "Overview", icon: "overview" },
      { to: "/adapters", name: "Adapters", icon: "adapters" },
      { to: "/fine-tuning", name: "Fine-tuning", icon: "tuning", isShown: (scope) => scope.may("adapters:read") },
      { to: "/memory", name: "Memory", icon: "memory" },
      { to: "/replicas", name: "Replicas", icon: "replicas", isShown: (scope) => scope.isOperator },
      { to: "/requests", name: "Requests", icon: "requests" },
      { to: "/playground", name: "Playground", icon: "playground", isShown: (scope) => scope.may("infer") },
    ],
  },
  {
    title: "Access",
    places: [
      { to: "/tenants", name: "Tenants", icon: "tenants", isShown: (scope) => scope.isOperator },
      { to: "/users", name: "Users", icon: "users", isShown: (scope) => scope.may("users:manage") },
      { to: "/keys", name: "Keys", icon: "keys", isShown: (scope) => scope.may("keys:manage") },
      { to: "/webhooks", name: "Webhooks", icon: "webhooks", isShown: (scope) => scope.may("webhooks:read") },
    ],
  },
  {
    title: "Records",
    places: [
      { to: "/usage", name: "Usage", icon: "usage" },
      { to: "/prices", name: "Prices", icon: "prices", isShown: (scope) => scope.isOperator },
      { to: "/audit", name: "Audit log", icon: "audit", isShown: (scope) => scope.isOperator || scope.may("audit:read") },
      { to: "/settings", name: "Settings", icon: "settings", isShown: (scope) => scope.isOperator },
    ],
  },
];

export function Shell({ children }: { children: ReactNode }): ReactNode {
  const main = useRef<HTMLElement>(null);
  const { pathname } = useLocation();
  const isFirst = useRef(true);
  useEffect(() => {
    // A new page is read from its beginning, as after a full load.
    if (isFirst.current) isFirst.current = false;
    else main.current?.focus();
    window.scrollTo(0, 0);
  }, [pathname]);
  return (
    <>
      <a className="skip" href="#main">Skip to content</a>
      <div className="frame">
        <Rail key={pathname} />
        <main id="main" ref={main} tabIndex={-1} className="content">{children}</main>
      </div>
    </>
  );
}

function Rail(): ReactNode {
  const [isOpen, setOpen] = useState(false);
  return (
    <header className="rail">
      <div className="rail-top">
        <Link to="/" className="brand"><Mark />Loraplex</Link>
        <Button tone="plain" className="menu-button" aria-expanded={isOpen} aria-controls="menu"
          onClick={() => setOpen(!isOpen)}>
          <Icon name={isOpen ? "close" : "menu"} />Menu
        </Button>
      </div>
      <div id="menu" className={isOpen ? "rail-body is-open" : "rail-body"}>
        <TenantSwitch />
        <Navigation />
        <Who />
      </div>
    </header>
  );
}

function Navigation(): ReactNode {
  const scope = useScope();
  return (
    <nav className="nav" aria-label="Pages">
      {PLACES.map(({ title, places }) => {
        const shown = places.filter((place) => place.isShown?.(scope) ?? true);
        return shown.length > 0 && (
          <div key={title}>
            <h2>{title}</h2>
            {shown.map(({ to, name, icon }) => (
              <NavLink key={to} to={to} end={to === "/"}><Icon name={icon} />{name}</NavLink>
            ))}
          </div>
        );
      })}
    </nav>
  );
}

/** How many tenants are offered to pick from; typing narrows them. */
const SUGGESTIONS = 20;

/** An operator looks at all tenants, or acts on one of them. */
function TenantSwitch(): ReactNode {
  const { session, tenant, pickTenant } = useSessionContext();
  const [text, setText] = useState<string | null>(null);
  const isOperator = session?.kind === "operator";
  const search = useRested(text ?? "") || null;
  const query = useQuery({
    queryKey: ["tenants", "names", search],
    queryFn: ({ signal }) => api("get", "/admin/tenants", { query: { search, limit: SUGGESTIONS }, signal }),
    placeholderData: keepPreviousData,
    enabled: isOperator,
    staleTime: 60_000,
  });
  const toast = useToast();
  if (!isOperator) return null;
  const slugs = query.data?.data.map((one) => one.slug) ?? [];
  const choose = async (slug: string): Promise<void> => {
    setText(null);
    if (slug === "") return pickTenant(null);
    try {
      if (!slugs.includes(slug)) await api("get", "/admin/tenants/{slug}", { path: { slug } });
      pickTenant(slug);
    } catch (error) {
      toast(toApiError(error).message, "warn");
    }
  };
  return (
    <form className="field" onSubmit={(event) => { event.preventDefault(); void choose(text ?? tenant ?? ""); }}>
      <label htmlFor="tenant" className="visually-hidden">Tenant</label>
      <input id="tenant" className="input" list="tenants" placeholder="All tenants" spellCheck={false}
        autoComplete="off" value={text ?? tenant ?? ""}
        onChange={(event) => {
          if (isTyped(event.nativeEvent)) setText(event.target.value);
          else void choose(event.target.value);
        }}
        onBlur={() => { if (text !== null) void choose(text); }} />
      <datalist id="tenants">{slugs.map((slug) => <option key={slug} value={slug} />)}</datalist>
      {tenant && <Button tone="plain" small onClick={() => void choose("")}>Show all tenants</Button>}
    </form>
  );
}

/** What is typed may be the beginning of a longer name; what is picked from the list is whole. */
function isTyped(event: Event): boolean {
  return event instanceof InputEvent && !["", "insertReplacementText"].includes(event.inputType);
}

function Who(): ReactNode {
  const session = useSession();
  const { setSession } = useSessionContext();
  const toast = useToast();
  const leave = async (): Promise<void> => {
    try {
      const next = await providerSignOutUrl(session).catch(() => null);
      await signOut();
      setSession(null);
      if (next !== null) window.location.assign(next);
    } catch (error) {
      toast(`You are still signed in. ${toApiError(error).message}`, "bad");
    }
  };
  return (
    <div className="rail-foot">
      <Link to="/account" className="who">
        <b className="truncate">{session.name}</b>
        <span className="soft truncate">
          {session.kind === "operator" ? `operator, ${session.role}` : `${session.tenant}, ${session.role}`}
        </span>
      </Link>
      <ThemeSwitch />
      <Button tone="plain" small onClick={() => void leave()}><Icon name="leave" />Sign out</Button>
      <span className="faint truncate" title={session.server.base_model}>
        {session.server.base_model} · {session.server.version}
      </span>
    </div>
  );
}
