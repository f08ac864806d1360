import { useEffect, useState } from "react";
import { useSearchParams } from "react-router";

/** `value` as it was once it had rested for `ms`. */
export function useRested<T>(value: T, ms = 250): T {
  const [rested, setRested] = useState(value);
  useEffect(() => {
    const timer = window.setTimeout(() => setRested(value), ms);
    return () => window.clearTimeout(timer);
  }, [value, ms]);
  return rested;
}

/** A choice kept in the page's address, so that it can be shared and gone back to. */
export function useParam(name: string, initial = ""): [string, (value: string) => void] {
  const [params, setParams] = useSearchParams();
  const set = (value: string): void => {
    // The router gives those of the last rendering, without a change that came since.
    const after = new URLSearchParams(window.location.search);
    if (value === initial) after.delete(name);
    else after.set(name, value);
    setParams(after, { replace: true });
  };
  return [params.get(name) ?? initial, set];
}
