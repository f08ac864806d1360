import { useEffect, useRef, useState, type ReactNode } from "react";
import { Link, useNavigate } from "react-router";
import { finishSignIn, placeBefore } from "../api/session.ts";
import { Gate } from "../components/gate.tsx";
import { ProviderButton } from "../components/provider-button.tsx";
import { ErrorNotice, Loading } from "../components/states.tsx";
import { useSessionContext } from "../session.tsx";

interface Sent {
  code: string | null;
  state: string | null;
}

/** Takes what the identity provider added to the address, which works once, out of the history. */
function takeAnswer(): Sent {
  const query = new URLSearchParams(window.location.search);
  window.history.replaceState(window.history.state, "", window.location.pathname);
  return { code: query.get("code"), state: query.get("state") };
}

/** The page to which the identity provider sends the browser: signs in, or says why not. */
export default function SignInCallback(): ReactNode {
  const { setSession } = useSessionContext();
  const navigate = useNavigate();
  const [{ code, state }] = useState(takeAnswer);
  const [error, setError] = useState<unknown>(null);
  const isSent = useRef(false);
  useEffect(() => {
    if (code === null || state === null || isSent.current) return;
    isSent.current = true;
    finishSignIn(code, state)
      .then((session) => {
        setSession(session);
        return navigate(placeBefore(), { replace: true });
      })
      .catch(setError);
  }, [code, state, setSession, navigate]);

  const isRefused = code === null || state === null;
  if (!isRefused && error === null) return <Gate title="Signing in"><Loading /></Gate>;
  return (
    <Gate title="You are not signed in">
      {isRefused && <p role="alert">The identity provider did not sign you in.</p>}
      {error !== null && <ErrorNotice error={error} />}
      <ProviderButton place={placeBefore()} again />
      <p><Link to="/sign-in">Sign in with a password</Link></p>
    </Gate>
  );
}
