/** Short messages about what was done, read out by screen readers. */

import { createContext, useCallback, useContext, useState, type ReactNode } from "react";

export type Tone = "good" | "warn" | "bad";
type Show = (message: string, tone?: Tone) => void;

const LIFETIME_MS = 6000;
const ToastContext = createContext<Show>(() => undefined);

interface Toast {
  id: number;
  message: string;
  tone: Tone;
}

let lastId = 0;

export function ToastProvider({ children }: { children: ReactNode }): ReactNode {
  const [toasts, setToasts] = useState<Toast[]>([]);
  const show = useCallback<Show>((message, tone = "good") => {
    lastId += 1;
    const id = lastId;
    setToasts((shown) => [...shown.slice(-3), { id, message, tone }]);
    window.setTimeout(() => setToasts((shown) => shown.filter((one) => one.id !== id)), LIFETIME_MS);
  }, []);
  return (
    <ToastContext value={show}>
      {children}
      <div className="toasts" role="status" aria-live="polite">
        {toasts.map((toast) => (
          <div key={toast.id} className={`notice ${toast.tone}`}>{toast.message}</div>
        ))}
      </div>
    </ToastContext>
  );
}

export function useToast(): Show {
  return useContext(ToastContext);
}
