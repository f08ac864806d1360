import type { FormEvent, KeyboardEvent, ReactNode } from "react";
import { Button } from "../button.tsx";
import { Field } from "../form.tsx";

interface ComposerProps {
  prompt: string;
  onPrompt: (prompt: string) => void;
  /** Why nothing can be sent now; null: it can. */
  obstacle: string | null;
  isRunning: boolean;
  onSend: () => void;
  onStop: () => void;
  onShowCode: () => void;
}

/** Where the next prompt is written, sent and stopped. */
export function Composer({ prompt, onPrompt, obstacle, isRunning, onSend, onStop, onShowCode }: ComposerProps): ReactNode {
  const isEmpty = prompt.trim() === "";
  const submit = (event: FormEvent<HTMLFormElement>): void => {
    event.preventDefault();
    if (!isRunning && !isEmpty && obstacle === null) onSend();
  };
  const sendOnEnter = (event: KeyboardEvent<HTMLTextAreaElement>): void => {
    if (event.key !== "Enter" || event.shiftKey || event.nativeEvent.isComposing) return;
    event.preventDefault();
    event.currentTarget.form?.requestSubmit();
  };
  return (
    <section className="panel panel-body composer" aria-label="Next prompt">
      <form className="form" onSubmit={submit}>
        <Field label="Prompt" hint="Enter sends, Shift and Enter begin a new line." problem={obstacle}>
          {(control) => (
            <textarea {...control} rows={2} className="input" value={prompt} onChange={(event) => onPrompt(event.target.value)}
              onKeyDown={sendOnEnter} />
          )}
        </Field>
        <div className="row">
          {isRunning
            ? <Button tone="danger" onClick={onStop}>Stop</Button>
            : <Button tone="primary" type="submit" disabled={isEmpty || obstacle !== null}>Send</Button>}
          <Button onClick={onShowCode} disabled={obstacle !== null}>View code</Button>
        </div>
      </form>
    </section>
  );
}
