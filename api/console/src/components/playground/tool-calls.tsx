/** The tools that an answer calls, and the form for what they gave. */

import { useState, type FormEvent, type ReactNode } from "react";
import type { Message, ToolCall } from "../../lib/chat.ts";
import { formatted } from "../../lib/parameters.ts";
import { Button } from "../button.tsx";
import { CodeBlock } from "../code-block.tsx";
import { Field } from "../form.tsx";

export function ToolCalls({ calls, onResults }: {
  calls: readonly ToolCall[];
  /** Takes the results; null: it is not the time for them. */
  onResults: ((results: Message[]) => void) | null;
}): ReactNode {
  return (
    <div className="stack tight">
      {calls.map((call, i) => (
        <div key={i} className="stack tight">
          <div>Calls <code>{call.name}</code></div>
          <CodeBlock label={`Arguments of ${call.name}`} code={formatted(call.arguments)} />
        </div>
      ))}
      {onResults && <Results calls={calls} onResults={onResults} />}
    </div>
  );
}

function Results({ calls, onResults }: { calls: readonly ToolCall[]; onResults: (results: Message[]) => void }): ReactNode {
  const [results, setResults] = useState<Readonly<Record<number, string>>>({});
  const submit = (event: FormEvent): void => {
    event.preventDefault();
    onResults(calls.map(({ id }, i) => ({ role: "tool", tool_call_id: id, content: results[i] ?? "" })));
  };
  return (
    <form className="form" onSubmit={submit}>
      {calls.map((call, i) => (
        <Field key={i} label={`Result of ${call.name}`}>
          {(control) => (
            <textarea {...control} className="input mono" rows={2} spellCheck={false} value={results[i] ?? ""}
              onChange={(event) => setResults({ ...results, [i]: event.target.value })} />
          )}
        </Field>
      ))}
      <div><Button small type="submit">Send results</Button></div>
    </form>
  );
}
