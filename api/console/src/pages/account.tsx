import { useState, type FormEvent, type ReactNode } from "react";
import { changePassword, signOutEverywhere } from "../api/session.ts";
import { Button } from "../components/button.tsx";
import { ConfirmDialog } from "../components/dialog.tsx";
import { TextField } from "../components/form.tsx";
import { Facts, Page, Panel } from "../components/layout.tsx";
import { NewPassword } from "../components/new-password.tsx";
import { ErrorNotice } from "../components/states.tsx";
import { Username } from "../components/username.tsx";
import { useToast } from "../components/toast.tsx";
import { Time } from "../components/values.tsx";
import { useSession, useSessionContext } from "../session.tsx";

export default function Account(): ReactNode {
  const session = useSession();
  const { setSession } = useSessionContext();
  const [asking, setAsking] = useState(false);
  const leave = async (): Promise<void> => {
    await signOutEverywhere();
    setSession(null);
  };
  return (
    <Page title="Your account">
      <div className="columns">
        <Panel title="Session" actions={<Button small onClick={() => setAsking(true)}>Sign out everywhere</Button>}>
          <Facts facts={[
            ["Name", session.name],
            ["Kind", session.kind === "operator" ? "operator" : `user of ${session.tenant}`],
            ["Role", session.role],
            ["May", session.scopes.join(", ") || "–"],
            ["Expires", <Time key="ends" at={session.expires_at} />],
          ]} />
        </Panel>
        {session.signed_in_with === "password" && <Panel title="Password"><PasswordForm /></Panel>}
      </div>
      {asking && (
        <ConfirmDialog title="Sign out everywhere?" action="Sign out everywhere" onConfirm={leave}
          onClose={() => setAsking(false)}>
          <p>All sessions of this account end, including this one. API keys stay valid.</p>
        </ConfirmDialog>
      )}
    </Page>
  );
}

function PasswordForm(): ReactNode {
  const toast = useToast();
  const [current, setCurrent] = useState("");
  const [next, setNext] = useState("");
  const [error, setError] = useState<unknown>(null);
  const [busy, setBusy] = useState(false);
  const submit = async (event: FormEvent): Promise<void> => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      await changePassword(current, next);
      setCurrent("");
      setNext("");
      toast("Password changed. Other sessions of this account were ended.");
    } catch (thrown) {
      setError(thrown);
    } finally {
      setBusy(false);
    }
  };
  return (
    <form className="form" onSubmit={(event) => void submit(event)}>
      <Username />
      <TextField label="Current password" type="password" required autoComplete="current-password"
        value={current} onChange={(event) => setCurrent(event.target.value)} />
      <NewPassword value={next} onChange={setNext} />
      {error !== null && <ErrorNotice error={error} />}
      <div><Button tone="primary" type="submit" busy={busy}>Change password</Button></div>
    </form>
  );
}
