import type { ReactNode } from "react";
import { CopyButton } from "./button.tsx";
import { Dialog } from "./dialog.tsx";

interface SecretDialogProps {
  title: string;
  /** Shown once: it is nowhere after this. */
  secret: string;
  /** What the copy button is called. */
  copyLabel: string;
  children: ReactNode;
  onClose: () => void;
}

/** Shows what nobody can show again. */
export function SecretDialog({ title, secret, copyLabel, children, onClose }: SecretDialogProps): ReactNode {
  return (
    <Dialog title={title} onClose={onClose}>
      {children}
      <div className="command">
        <code data-secret>{secret}</code>
        <CopyButton text={secret} label={copyLabel} />
      </div>
      <p className="soft">It is shown only once. Store it in a safe place.</p>
    </Dialog>
  );
}
