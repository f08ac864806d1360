import { useState, type ButtonHTMLAttributes, type ReactNode } from "react";
import { useToast } from "./toast.tsx";
import { Icon } from "./icons.tsx";

interface ButtonProps extends ButtonHTMLAttributes<HTMLButtonElement> {
  /** `primary`: what most people came for; `danger`: destroys; `plain`: without a frame. */
  tone?: "primary" | "danger" | "danger primary" | "plain";
  small?: boolean;
  /** What it started has not ended: it can't be started again. */
  busy?: boolean;
}

export function Button(props: ButtonProps): ReactNode {
  const { tone, small, busy, className, disabled, ...rest } = props;
  const names = ["button", tone, small && "small", className].filter(Boolean).join(" ");
  return (
    <button type="button" {...rest} className={names} disabled={disabled || busy}
      aria-busy={busy || undefined} />
  );
}

/** Copies `text`; says so to ears and eyes. */
export function CopyButton({ text, label = "Copy" }: { text: string; label?: string }): ReactNode {
  const [copied, setCopied] = useState(false);
  const toast = useToast();
  const copy = async (): Promise<void> => {
    try {
      await navigator.clipboard.writeText(text);
      setCopied(true);
      window.setTimeout(() => setCopied(false), 1500);
    } catch {
      toast("The browser blocked copying. Select the text and copy it.", "warn");
    }
  };
  return (
    <Button tone="plain" small onClick={() => void copy()} aria-label={copied ? "Copied" : label}>
      <Icon name={copied ? "check" : "copy"} />
      <span className="visually-hidden" role="status">{copied ? "Copied" : ""}</span>
    </Button>
  );
}

/** A command line to run, with a button that copies it. */
export function Command({ children }: { children: string }): ReactNode {
  return (
    <div className="command">
      <code>{children}</code>
      <CopyButton text={children} label="Copy the command" />
    </div>
  );
}
