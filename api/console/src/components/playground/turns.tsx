import { lazy, Suspense, useEffect, useRef, useState, type FormEvent, type ReactNode } from "react";
import { Link } from "react-router";
import { requestAddress } from "../../lib/addresses.ts";
import { tokensPerSecond, type ChatRequest, type Choice, type Message, type Reply } from "../../lib/chat.ts";
import { choiceOf, type Conversation, type Turn } from "../../lib/conversation.ts";
import { count, duration, number } from "../../lib/format.ts";
import { Button, CopyButton } from "../button.tsx";
import { Segments } from "../layout.tsx";
import { ErrorNotice } from "../states.tsx";
import { State } from "../values.tsx";
import { ToolCalls } from "./tool-calls.tsx";
import { Tokens } from "./tokens.tsx";

const MarkdownText = lazy(() => import("../markdown.tsx"));

export const VIEWS = [["markdown", "Markdown"], ["text", "Text"], ["tokens", "Tokens"]] as const;
export type View = (typeof VIEWS)[number][0];

interface TurnsProps {
  conversation: Conversation;
  view: View;
  /** Ask after the first `numKept` turns. */
  onAsk: (asked: readonly Message[], numKept: number) => void;
  /** Whether something can be asked now. */
  canAsk: boolean;
  onShowCode: (request: ChatRequest) => void;
}

/** What was asked and answered, and how each answer was served. */
export function Turns({ conversation, view, onAsk, canAsk, onShowCode }: TurnsProps): ReactNode {
  const { turns } = conversation;
  const last = useRef<HTMLLIElement>(null);
  useEffect(() => {
    last.current?.scrollIntoView({ block: "nearest" });
  }, [turns.length]);
  return (
    <ol className="stack turns">
      {turns.map((turn, i) => {
        const isLast = i === turns.length - 1;
        return (
          <li key={i} ref={isLast ? last : null}>
            <Asked turn={turn} onEdit={canAsk ? (prompt) => onAsk([{ role: "user", content: prompt }], i) : null} />
            <Answer turn={turn} view={view} onChoose={(choice) => conversation.choose(i, choice)}
              onResults={isLast && canAsk ? (results) => onAsk(results, turns.length) : null} />
            {turn.error !== null && <ErrorNotice error={turn.error} />}
            <div className="row turn-foot">
              {turn.reply.served && <Measures turn={turn} />}
              {turn.state !== "running" && (
                <span className="row tight">
                  {choiceOf(turn).text !== "" && <CopyButton text={choiceOf(turn).text} label="Copy answer" />}
                  <Button tone="plain" small onClick={() => onShowCode(turn.request)}>Code</Button>
                  {isLast && canAsk && <Button tone="plain" small onClick={() => onAsk(turn.asked, i)}>Regenerate</Button>}
                </span>
              )}
            </div>
          </li>
        );
      })}
    </ol>
  );
}

/** A prompt, which can be edited, or the results of tools. */
function Asked({ turn: { asked }, onEdit }: { turn: Turn; onEdit: ((prompt: string) => void) | null }): ReactNode {
  const [edited, setEdited] = useState<string | null>(null);
  const prompt = asked[0]?.content ?? "";
  if (asked[0]?.role === "tool") {
    return asked.map((result) => (
      <p key={result.tool_call_id} className="turn-prompt mono"><span className="visually-hidden">Result: </span>{result.content}</p>
    ));
  }
  if (edited !== null && onEdit !== null) {
    const submit = (event: FormEvent): void => {
      event.preventDefault();
      setEdited(null);
      onEdit(edited);
    };
    return (
      <form className="form" onSubmit={submit}>
        <textarea className="input" rows={3} aria-label="Edit the prompt" autoFocus value={edited}
          onChange={(event) => setEdited(event.target.value)} />
        <div className="row">
          <Button small tone="primary" type="submit" disabled={edited.trim() === ""}>Ask again</Button>
          <Button small onClick={() => setEdited(null)}>Cancel</Button>
        </div>
      </form>
    );
  }
  return (
    <div className="turn-asked">
      {onEdit && <Button tone="plain" small onClick={() => setEdited(prompt)}>Edit</Button>}
      <p className="turn-prompt">{prompt}</p>
    </div>
  );
}

function Answer({ turn, view, onChoose, onResults }: {
  turn: Turn;
  view: View;
  onChoose: (choice: number) => void;
  onResults: ((results: Message[]) => void) | null;
}): ReactNode {
  const choice = choiceOf(turn);
  const { choices } = turn.reply;
  const isRunning = turn.state === "running";
  return (
    <>
      {choices.length > 1 && (
        <div><Segments label="Answers" value={String(turn.chosen)} onChange={(value) => onChoose(Number(value))}
          options={choices.map((_, i) => [String(i), `Answer ${i + 1}`] as const)} /></div>
      )}
      <Reasoning choice={choice} />
      <div className={`turn-reply ${view === "markdown" ? "markdown" : ""}`} aria-busy={isRunning}>
        <AnswerText choice={choice} view={view} isRunning={isRunning} />
      </div>
      {choice.toolCalls.length > 0 && <ToolCalls calls={choice.toolCalls} onResults={onResults} />}
      {turn.state === "ended" && choice.text === "" && choice.toolCalls.length === 0 && turn.error === null && (
        <p className="soft">{whyEmpty(choice)}</p>
      )}
      {turn.state === "stopped" && <p className="soft">Stopped. Generated tokens are charged.</p>}
    </>
  );
}

function AnswerText({ choice: { text, tokens }, view, isRunning }: { choice: Choice; view: View; isRunning: boolean }): ReactNode {
  if (view === "tokens" && tokens.length > 0) return <Tokens tokens={tokens} />;
  if (view === "markdown") return <Suspense fallback={text}><MarkdownText text={text} isRunning={isRunning} /></Suspense>;
  return text;
}

/** What came before the answer: open until the answer begins. */
function Reasoning({ choice: { reasoning, text } }: { choice: Choice }): ReactNode {
  if (reasoning === "") return null;
  return (
    <details open={text === ""}>
      <summary>Reasoning</summary>
      <div className="turn-reasoning">{reasoning}</div>
    </details>
  );
}

function whyEmpty({ reasoning, finishReason }: Choice): string {
  if (reasoning === "") return "The answer is empty: the first token was the end of sequence.";
  return finishReason === "length"
    ? "There is no answer: the reasoning reached Max tokens."
    : "The answer is empty: generation ended with the reasoning.";
}

function Measures({ turn }: { turn: Turn }): ReactNode {
  const { reply } = turn;
  const { finishReason } = choiceOf(turn);
  return (
    <ul className="row turn-measures">
      {reply.model && <li><code>{reply.model}</code></li>}
      <ServedBy reply={reply} />
      {reply.outputTokens !== null && <li>{count(reply.promptTokens)} + {count(reply.outputTokens)} tokens</li>}
      {finishReason && finishReason !== "stop" && <li>ended by {finishReason}</li>}
      {reply.served?.requestId && <li><Link to={requestAddress(reply.served.requestId)}>trace</Link></li>}
    </ul>
  );
}

function ServedBy({ reply }: { reply: Reply }): ReactNode {
  const { served } = reply;
  const speed = tokensPerSecond(reply);
  return (
    <>
      {served?.tier && <li>adapter: <State state={served.tier} /></li>}
      {served?.loadMs ? <li>loaded in {duration(served.loadMs)}</li> : null}
      {served?.waitMs ? <li>waited {duration(served.waitMs)} for them</li> : null}
      {reply.firstTokenMs !== null && <li>first token after {duration(reply.firstTokenMs)}</li>}
      {speed !== null && <li>{number(speed, 1)} tokens/s</li>}
    </>
  );
}
