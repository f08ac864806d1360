import { useState, type FormEvent, type ReactNode } from "react";
import { Link, useNavigate } from "react-router";
import { enrol } from "../api/session.ts";
import { Button, Command } from "../components/button.tsx";
import { TextField } from "../components/form.tsx";
import { Gate } from "../components/gate.tsx";
import { NewPassword } from "../components/new-password.tsx";
import { ErrorNotice } from "../components/states.tsx";
import { useSessionContext } from "../session.tsx";

/** Takes the token from the address, where others could read it over a shoulder or in the history. */
function takeToken(): string {
  const token = window.location.hash.slice(1);
  if (token) window.history.replaceState(window.history.state, "", window.location.pathname);
  return token;
}

/** The first password, set with the token of an invitation. */
export default function Join(): ReactNode {
  const { setSession } = useSessionContext();
  const navigate = useNavigate();
  const [given] = useState(takeToken);
  const [token, setToken] = useState(given);
  const [password, setPassword] = useState("");
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState<unknown>(null);

  const submit = async (event: FormEvent): Promise<void> => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      setSession(await enrol(token.trim(), password));
      await navigate("/", { replace: true });
    } catch (thrown) {
      setError(thrown);
      setBusy(false);
    }
  };
  return (
    <Gate title="Set your password">
      <form onSubmit={(event) => void submit(event)}>
        {given === "" && (
          <TextField label="Token" required autoComplete="off" spellCheck={false} value={token}
            hint="The part of the invitation link after #."
            onChange={(event) => setToken(event.target.value)} />
        )}
        <NewPassword value={password} onChange={setPassword} />
        {error !== null && <ErrorNotice error={error} />}
        <Button tone="primary" type="submit" busy={busy}>Set password and sign in</Button>
      </form>
      {error !== null && (
        <div className="stack" style={{ gap: 8 }}>
          <p className="soft">A token works once, within a day. To create another:</p>
          <Command>loraplex operators invite NAME</Command>
          <Command>loraplex users invite E-MAIL --tenant TENANT</Command>
        </div>
      )}
      <p><Link to="/sign-in">Sign in with a password</Link></p>
    </Gate>
  );
}
