import { useId, useState, type FormEvent, type ReactNode } from "react";
import { Button } from "./button.tsx";
import { Dialog } from "./dialog.tsx";
import { ErrorNotice } from "./states.tsx";

interface FormDialogProps {
  title: string;
  /** What the button says: the deed itself. */
  action: string;
  children: ReactNode;
  wide?: boolean;
  /** Does it; true keeps the dialog open, for what it shows next. */
  onSubmit: (event: FormEvent<HTMLFormElement>) => Promise<boolean | void>;
  onClose: () => void;
}

/** A form in a dialog, which stays open with the error if what it asks for fails. */
export function FormDialog({ title, action, children, wide = false, onSubmit, onClose }: FormDialogProps): ReactNode {
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState<unknown>(null);
  const form = useId();
  const submit = async (event: FormEvent<HTMLFormElement>): Promise<void> => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      if (!(await onSubmit(event))) onClose();
    } catch (thrown) {
      setError(thrown);
    }
    setBusy(false);
  };
  const footer = (
    <>
      <Button onClick={onClose}>Cancel</Button>
      <Button type="submit" form={form} tone="primary" busy={busy}>{action}</Button>
    </>
  );
  return (
    <Dialog title={title} onClose={onClose} footer={footer} wide={wide}>
      <form id={form} className="form" onSubmit={(event) => void submit(event)}>{children}</form>
      {error !== null && <ErrorNotice error={error} />}
    </Dialog>
  );
}
