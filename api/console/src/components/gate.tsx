import { useEffect, type ReactNode } from "react";
import { Mark } from "./icons.tsx";
import { ThemeSwitch } from "./theme-switch.tsx";

/** The frame of the pages before one is signed in. */
export function Gate({ title, children }: { title: string; children: ReactNode }): ReactNode {
  useEffect(() => {
    document.title = `${title} · Loraplex`;
  }, [title]);
  return (
    <main className="gate">
      <div className="gate-card">
        <div className="row spread"><span className="brand"><Mark />Loraplex</span><ThemeSwitch /></div>
        <h1>{title}</h1>
        {children}
      </div>
    </main>
  );
}
