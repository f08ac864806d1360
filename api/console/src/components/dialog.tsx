import { useId, useLayoutEffect, useRef, useState, type ReactNode } from "react";
import { ErrorNotice } from "./states.tsx";
import { Button } from "./button.tsx";
import { Icon } from "./icons.tsx";

const FIELDS = ".dialog-body :is(input:not([hidden]), select, textarea):enabled";

interface DialogProps {
  title: string;
  /** Escape or the cross; a click beside it would lose what was typed, sent or shown once. */
  onClose: () => void;
  children: ReactNode;
  footer?: ReactNode;
  wide?: boolean;
}

/** The browser's modal dialog: it keeps the focus inside and gives it back. */
export function Dialog({ title, onClose, children, footer, wide }: DialogProps): ReactNode {
  const ref = useRef<HTMLDialogElement>(null);
  const heading = useId();
  // Before it is taken away: a dialog that closes gives the focus back to what had it.
  useLayoutEffect(() => {
    const dialog = ref.current;
    dialog?.showModal();
    dialog?.querySelector<HTMLElement>(FIELDS)?.focus();
    return () => dialog?.close();
  }, []);
  return (
    <dialog ref={ref} className={wide ? "dialog wide" : "dialog"} aria-labelledby={heading}
      onCancel={(event) => { event.preventDefault(); onClose(); }}>
      <div className="dialog-head">
        <h2 id={heading}>{title}</h2>
        <Button tone="plain" small onClick={onClose} aria-label="Close"><Icon name="close" /></Button>
      </div>
      <div className="dialog-body">{children}</div>
      {footer && <div className="dialog-foot">{footer}</div>}
    </dialog>
  );
}

interface ConfirmProps {
  title: string;
  /** What will happen, in words. */
  children: ReactNode;
  /** What the button says: the deed itself. */
  action: string;
  /** A word that has to be typed before, where there is no way back. */
  typed?: string;
  /** What the button says that gives it up; by default "Cancel". */
  otherwise?: string;
  danger?: boolean;
  onConfirm: () => Promise<unknown>;
  /** It was given up. */
  onClose: () => void;
  /** It is done; without it, the dialog closes. */
  onDone?: () => void;
}

/** What a confirmation is about, name by name; a long list scrolls. */
export function NameList({ names }: { names: string[] }): ReactNode {
  return (
    <ul className="names" tabIndex={0} aria-label="Names">
      {names.map((name, place) => <li key={place}>{name}</li>)}
    </ul>
  );
}

/** Asks before something is done, and stays open with the error if it fails. */
export function ConfirmDialog(props: ConfirmProps): ReactNode {
  const { title, children, action, typed, otherwise = "Cancel", danger, onConfirm, onClose, onDone = onClose } = props;
  const [text, setText] = useState("");
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState<unknown>(null);
  const input = useId();
  const run = async (): Promise<void> => {
    setBusy(true);
    setError(null);
    try {
      await onConfirm();
      onDone();
    } catch (thrown) {
      setError(thrown);
      setBusy(false);
    }
  };
  const footer = (
    <>
      <Button onClick={onClose}>{otherwise}</Button>
      <Button tone={danger ? "danger primary" : "primary"} busy={busy}
        disabled={typed !== undefined && text !== typed} onClick={() => void run()}>
        {action}
      </Button>
    </>
  );
  return (
    <Dialog title={title} onClose={onClose} footer={footer}>
      {children}
      {typed !== undefined && (
        <div className="field">
          <label htmlFor={input}>Type <code>{typed}</code> to continue</label>
          <input id={input} className="input mono" autoComplete="off" spellCheck={false} value={text}
            onChange={(event) => setText(event.target.value)} />
        </div>
      )}
      {error !== null && <ErrorNotice error={error} />}
    </Dialog>
  );
}
