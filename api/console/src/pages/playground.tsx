/** Asking a model, or two of them side by side, and seeing how each was served. */

import { useState, type FormEvent, type KeyboardEvent, type ReactNode } from "react";
import { Button } from "../components/button.tsx";
import { TextField, Field } from "../components/form.tsx";
import { Page, Panel, Segments } from "../components/layout.tsx";
import { ModelField } from "../components/model-field.tsx";
import { NeedsTenant } from "../components/needs-tenant.tsx";
import { Turns } from "../components/turns.tsx";
import { useConversation } from "../lib/conversation.ts";
import { useParam } from "../lib/hooks.ts";
import { useSession } from "../session.tsx";
import { EmptyState } from "../components/states.tsx";

const VIEWS = [["one", "One model"], ["two", "Side by side"]] as const;
const MAX_TOKENS = 256;

export default function PlaygroundPage(): ReactNode {
  const [view, setView] = useParam("view", "one");
  const isPaired = view === "two";
  return (
    <Page title="Playground"
      lead="What is asked here is metered like every other request. Compare two versions, or an adapter against its base."
      actions={<Segments label="View" options={VIEWS} value={isPaired ? "two" : "one"} onChange={setView} />}>
      <NeedsTenant what="Adapters">
        {(tenant) => <Playground key={tenant} tenant={tenant} isPaired={isPaired} />}
      </NeedsTenant>
    </Page>
  );
}

function Playground({ tenant, isPaired }: { tenant: string; isPaired: boolean }): ReactNode {
  const base = useSession().server.base_model;
  const [asked] = useParam("model");
  const [models, setModels] = useState<[string, string]>([asked, base]);
  const left = useConversation();
  const right = useConversation();
  const shown = isPaired ? [left, right] : [left];
  const isRunning = shown.some((one) => one.isRunning);
  const send = (form: FormData): void => {
    shown.forEach((conversation, i) =>
      conversation.ask(String(form.get("prompt")), {
        model: models[i] || base,
        system: String(form.get("system")),
        maxTokens: Number(form.get("max_tokens")),
        temperature: Number(form.get("temperature")),
        tenant,
      }),
    );
  };
  return (
    <>
      <div className="columns">
        {shown.map((conversation, i) => (
          <Panel key={i} title={models[i] || base} actions={
            conversation.turns.length > 0 && <Button small onClick={conversation.clear}>Clear</Button>
          }>
            <div className="stack">
              <ModelField label={i === 0 ? "Model" : "Second model"} tenant={tenant} base={base} value={models[i] ?? ""}
                onChange={(model) => setModels((before) => (i === 0 ? [model, before[1]] : [before[0], model]))} />
              {conversation.turns.length === 0
                ? <EmptyState title="Nothing asked yet" command={`loraplex chat ${models[i] || base}`}>
                    Write below. The same can be had on the command line.
                  </EmptyState>
                : <Turns turns={conversation.turns} />}
            </div>
          </Panel>
        ))}
      </div>
      <Composer isRunning={isRunning} onSend={send} onStop={() => shown.forEach((one) => one.stop())} />
    </>
  );
}

interface ComposerProps {
  isRunning: boolean;
  onSend: (form: FormData) => void;
  onStop: () => void;
}

function Composer({ isRunning, onSend, onStop }: ComposerProps): ReactNode {
  const [prompt, setPrompt] = useState("");
  const submit = (event: FormEvent<HTMLFormElement>): void => {
    event.preventDefault();
    if (isRunning || prompt.trim() === "") return;
    onSend(new FormData(event.currentTarget));
    setPrompt("");
  };
  const sendOnEnter = (event: KeyboardEvent<HTMLTextAreaElement>): void => {
    if (event.key !== "Enter" || event.shiftKey || event.nativeEvent.isComposing) return;
    event.preventDefault();
    event.currentTarget.form?.requestSubmit();
  };
  return (
    <Panel>
      <form className="form" onSubmit={submit}>
        <Field label="Prompt" hint="Enter sends, Shift and Enter begin a new line.">
          {(control) => (
            <textarea {...control} name="prompt" rows={3} className="input" value={prompt}
              onChange={(event) => setPrompt(event.target.value)} onKeyDown={sendOnEnter} />
          )}
        </Field>
        <div className="columns">
          <TextField label="System prompt" name="system" autoComplete="off" />
          <div className="columns narrow">
            <TextField label="Max tokens" name="max_tokens" type="number" min={1} step={1} required defaultValue={MAX_TOKENS} />
            <TextField label="Temperature" name="temperature" type="number" min={0} max={2} step="any" required defaultValue={0} />
          </div>
        </div>
        <div className="row">
          {isRunning
            ? <Button tone="danger" onClick={onStop}>Stop</Button>
            : <Button tone="primary" type="submit" disabled={prompt.trim() === ""}>Send</Button>}
        </div>
      </form>
    </Panel>
  );
}
