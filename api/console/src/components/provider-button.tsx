/** The button that leaves for the identity provider, if the server has one. */

import { useQuery } from "@tanstack/react-query";
import { useState, type ReactNode } from "react";
import { identityProvider, leaveForProvider } from "../api/session.ts";
import { Button } from "./button.tsx";
import { ErrorNotice } from "./states.tsx";

interface ProviderButtonProps {
  /** The page to open after the return. */
  place: string;
  /** The person has to authenticate even if signed in at the provider. */
  again?: boolean;
}

export function ProviderButton({ place, again = false }: ProviderButtonProps): ReactNode {
  const provider = useQuery({ queryKey: ["identity-provider"], queryFn: identityProvider, staleTime: Infinity });
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState<unknown>(null);
  if (provider.data == null) return null;
  const leave = async (): Promise<void> => {
    setBusy(true);
    setError(null);
    try {
      await leaveForProvider(place, again);
    } catch (thrown) {
      setError(thrown);
      setBusy(false);
    }
  };
  return (
    <>
      <Button tone="primary" busy={busy} onClick={() => void leave()}>Sign in with {provider.data}</Button>
      {error !== null && <ErrorNotice error={error} />}
    </>
  );
}
