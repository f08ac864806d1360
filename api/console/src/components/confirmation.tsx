/** The dialog that asks for the password again before a grave change. */

import { useEffect, useRef, useState, type FormEvent, type ReactNode } from "react";
import { useLocation } from "react-router";
import { hooks } from "../api/client.ts";
import { confirmPassword } from "../api/session.ts";
import { Button } from "./button.tsx";
import { Dialog } from "./dialog.tsx";
import { TextField } from "./form.tsx";
import { ProviderButton } from "./provider-button.tsx";
import { Username } from "./username.tsx";
import { ErrorNotice } from "./states.tsx";
import { useSession } from "../session.tsx";

export function Confirmation(): ReactNode {
  const session = useSession();
  const [open, setOpen] = useState(false);
  const waiting = useRef<((confirmed: boolean) => void)[]>([]);
  useEffect(() => {
    hooks.confirm = () =>
      new Promise((resolve) => {
        waiting.current.push(resolve);
        setOpen(true);
      });
  }, []);
  if (!open) return null;
  const close = (confirmed: boolean): void => {
    setOpen(false);
    for (const answer of waiting.current.splice(0)) answer(confirmed);
  };
  if (session.signed_in_with === "provider") return <ProviderDialog onClose={() => close(false)} />;
  return <PasswordDialog onDone={() => close(true)} onClose={() => close(false)} />;
}

/** The change itself is not kept: the browser leaves this page. */
function ProviderDialog({ onClose }: { onClose: () => void }): ReactNode {
  const { pathname, search } = useLocation();
  return (
    <Dialog title="Confirm your identity" onClose={onClose} footer={<Button onClick={onClose}>Cancel</Button>}>
      <p className="soft">
        This change requires a recent sign-in. Sign in again, then repeat the change. The confirmation lasts ten
        minutes.
      </p>
      <ProviderButton place={pathname + search} again />
    </Dialog>
  );
}

function PasswordDialog({ onDone, onClose }: { onDone: () => void; onClose: () => void }): ReactNode {
  const [password, setPassword] = useState("");
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState<unknown>(null);
  const submit = async (event: FormEvent): Promise<void> => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      await confirmPassword(password);
      onDone();
    } catch (thrown) {
      setError(thrown);
      setBusy(false);
    }
  };
  const footer = (
    <>
      <Button onClick={onClose}>Cancel</Button>
      <Button tone="primary" type="submit" form="confirmation" busy={busy}>Confirm</Button>
    </>
  );
  return (
    <Dialog title="Confirm your identity" onClose={onClose} footer={footer}>
      <p className="soft">This change requires your password. The confirmation lasts ten minutes.</p>
      <form id="confirmation" className="form" onSubmit={(event) => void submit(event)}>
        <Username />
        <TextField label="Password" type="password" autoComplete="current-password" required
          value={password} onChange={(event) => setPassword(event.target.value)} />
      </form>
      {error !== null && <ErrorNotice error={error} />}
    </Dialog>
  );
}
