/** Asking a model, or two of them side by side, and seeing how each was served. */

import { useState, type ReactNode } from "react";
import { Button } from "../components/button.tsx";
import { RequestCode } from "../components/code-block.tsx";
import { Dialog } from "../components/dialog.tsx";
import { Page, Panel, Segments } from "../components/layout.tsx";
import { ModelField } from "../components/model-field.tsx";
import { NeedsTenant } from "../components/needs-tenant.tsx";
import { Composer } from "../components/playground/composer.tsx";
import { ParametersPanel } from "../components/playground/parameters.tsx";
import { Turns, VIEWS, type View } from "../components/playground/turns.tsx";
import { EmptyState } from "../components/states.tsx";
import type { ChatRequest, Message } from "../lib/chat.ts";
import { requestOf, useConversation, type Settings } from "../lib/conversation.ts";
import { useParam } from "../lib/hooks.ts";
import { fieldsOf, INITIAL } from "../lib/parameters.ts";
import { useScope, useSession } from "../session.tsx";

const LAYOUTS = [["one", "One model"], ["two", "Side by side"]] as const;
/** How many alternatives are asked for by whoever wants to see tokens. */
const NUM_ALTERNATIVES = "5";

export default function PlaygroundPage(): ReactNode {
  const [layout, setLayout] = useParam("view", "one");
  const { may } = useScope();
  const isPaired = layout === "two";
  if (!may("infer")) return <Page title="Playground"><NotPermitted /></Page>;
  return (
    <Page title="Playground"
      lead="What is asked here is metered like every other request. Compare two versions, or an adapter against its base."
      actions={<Segments label="View" options={LAYOUTS} value={isPaired ? "two" : "one"} onChange={setLayout} />}>
      <NeedsTenant what="Adapters">
        {(tenant) => <Playground key={tenant} tenant={tenant} isPaired={isPaired} />}
      </NeedsTenant>
    </Page>
  );
}

function NotPermitted(): ReactNode {
  const session = useSession();
  return (
    <section className="panel">
      <EmptyState title="Your role does not permit the playground">
        The playground generates text, which needs the permission <code>infer</code>. The role {session.role} does not have
        it. {session.kind === "operator" ? "An administrator" : "An owner of the tenant"} can change your role.
      </EmptyState>
    </section>
  );
}

function Playground({ tenant, isPaired }: { tenant: string; isPaired: boolean }): ReactNode {
  const base = useSession().server.base_model;
  const [asked] = useParam("model");
  const [models, setModels] = useState<[string, string]>([asked, base]);
  const [parameters, setParameters] = useState(INITIAL);
  const [prompt, setPrompt] = useState("");
  const [view, setView] = useState<View>("markdown");
  const [code, setCode] = useState<ChatRequest | null>(null);
  const left = useConversation();
  const right = useConversation();
  const shown = isPaired ? [left, right] : [left];
  const isRunning = shown.some((one) => one.isRunning);
  const { fields, problems } = fieldsOf(parameters);
  const obstacle = Object.keys(problems).length > 0 ? "Correct the parameters first." : null;

  const settingsOf = (i: number): Settings => ({ model: models[i] || base, system: parameters["system"] ?? "", fields, tenant });
  const written: Message[] = [{ role: "user", content: prompt }];
  const send = (): void => {
    shown.forEach((conversation, i) => conversation.ask(written, settingsOf(i)));
    setPrompt("");
  };
  const changeView = (next: View): void => {
    setView(next);
    if (next === "tokens" && parameters["top_logprobs"] === "") setParameters({ ...parameters, top_logprobs: NUM_ALTERNATIVES });
  };
  return (
    <div className={isPaired ? "playground is-paired" : "playground"}>
      <div className="stack">
        <div className="row spread">
          <Segments label="Show answers as" options={VIEWS} value={view} onChange={changeView} />
          {view === "tokens" && <span className="soft">Answers from now on have probabilities.</span>}
        </div>
        <div className="columns pair">
          {shown.map((conversation, i) => (
            <Panel key={i} title={models[i] || base} actions={
              conversation.turns.length > 0 && <Button small onClick={conversation.clear}>Clear</Button>
            }>
              <div className="stack">
                <ModelField label={i === 0 ? "Model" : "Second model"} tenant={tenant} base={base} value={models[i] ?? ""}
                  onChange={(model) => setModels((before) => (i === 0 ? [model, before[1]] : [before[0], model]))} />
                {conversation.turns.length === 0
                  ? <EmptyState title="Nothing asked yet" command={`loraplex chat ${models[i] || base}`}>
                      Write below, or ask on the command line.
                    </EmptyState>
                  : <Turns conversation={conversation} view={view} canAsk={!isRunning && obstacle === null}
                      onAsk={(messages, numKept) => conversation.ask(messages, settingsOf(i), numKept)} onShowCode={setCode} />}
              </div>
            </Panel>
          ))}
        </div>
        <Composer prompt={prompt} onPrompt={setPrompt} obstacle={obstacle} isRunning={isRunning} onSend={send}
          onStop={() => shown.forEach((one) => one.stop())}
          onShowCode={() => setCode(requestOf(settingsOf(0), left.turns, written))} />
      </div>
      <ParametersPanel parameters={parameters} problems={problems} onChange={setParameters} />
      {code && <CodeDialog request={code} onClose={() => setCode(null)} />}
    </div>
  );
}

function CodeDialog({ request, onClose }: { request: ChatRequest; onClose: () => void }): ReactNode {
  return (
    <Dialog title="Code of the request" wide onClose={onClose}>
      <p className="soft">
        It sends the same request, without streaming. Replace the placeholder by a key of the tenant.
      </p>
      <RequestCode request={{ origin: window.location.origin, path: "/chat/completions", body: request }} />
    </Dialog>
  );
}
