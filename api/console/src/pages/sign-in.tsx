import { useState, type FormEvent, type ReactNode } from "react";
import { Navigate, useLocation } from "react-router";
import { signIn } from "../api/session.ts";
import { Button, Command } from "../components/button.tsx";
import { TextField } from "../components/form.tsx";
import { Gate } from "../components/gate.tsx";
import { Segments } from "../components/layout.tsx";
import { ProviderButton } from "../components/provider-button.tsx";
import { ErrorNotice } from "../components/states.tsx";
import { useSessionContext } from "../session.tsx";

const KINDS = [["user", "Tenant's user"], ["operator", "Operator"]] as const;
type Kind = (typeof KINDS)[number][0];
const LAST_KEY = "loraplex.sign-in";

interface Last {
  kind: Kind;
  tenant: string;
}

/** As whom this browser signed in last; never a name or password. */
function lastUsed(): Last {
  const [kind, tenant] = (localStorage.getItem(LAST_KEY) ?? "operator ").split(" ");
  return { kind: kind === "user" ? "user" : "operator", tenant: tenant ?? "" };
}

export default function SignIn(): ReactNode {
  const { session, setSession } = useSessionContext();
  const from = (useLocation().state as { from?: string } | null)?.from ?? "/";
  const [last] = useState(lastUsed);
  const [kind, setKind] = useState<Kind>(last.kind);
  const [tenant, setTenant] = useState(last.tenant);
  const [name, setName] = useState("");
  const [password, setPassword] = useState("");
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState<unknown>(null);
  if (session !== null) return <Navigate to={from} replace />;

  const submit = async (event: FormEvent): Promise<void> => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      const next = await signIn(name, password, kind === "user" ? tenant : null);
      localStorage.setItem(LAST_KEY, `${kind} ${kind === "user" ? tenant : ""}`);
      setSession(next);
    } catch (thrown) {
      setPassword("");
      setError(thrown);
      setBusy(false);
    }
  };
  return (
    <Gate title="Sign in">
      <ProviderButton place={from} />
      <Segments label="Account" options={KINDS} value={kind} onChange={setKind} />
      <form onSubmit={(event) => void submit(event)}>
        {kind === "user" && (
          <TextField label="Tenant" required autoComplete="organization" spellCheck={false}
            autoCapitalize="none" value={tenant} onChange={(event) => setTenant(event.target.value)} />
        )}
        <TextField label={kind === "user" ? "E-mail" : "Name"} required autoComplete="username"
          spellCheck={false} autoCapitalize="none" value={name}
          onChange={(event) => setName(event.target.value)} />
        <TextField label="Password" type="password" required autoComplete="current-password"
          value={password} onChange={(event) => setPassword(event.target.value)} />
        {error !== null && <ErrorNotice error={error} />}
        <Button tone="primary" type="submit" busy={busy}>Sign in</Button>
      </form>
      <details className="soft">
        <summary>No password yet, or forgotten?</summary>
        <div className="stack" style={{ gap: 8, paddingTop: 8 }}>
          <p>
            Whoever runs the server makes a link that lets you set one. It is good once, for a day.
          </p>
          <Command>
            {kind === "operator" ? `loraplex operators invite ${name || "NAME"}`
              : `loraplex users invite ${name || "E-MAIL"} --tenant ${tenant || "TENANT"}`}
          </Command>
        </div>
      </details>
    </Gate>
  );
}
