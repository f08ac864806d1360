import type { ReactNode } from "react";
import { useSession } from "../session.tsx";

/** Tells a password manager whose password a form is about, where the page asks for no name. */
export function Username(): ReactNode {
  return <input type="text" hidden readOnly autoComplete="username" value={useSession().name} />;
}
