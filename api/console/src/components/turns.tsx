import type { ReactNode } from "react";
import { Link } from "react-router";
import { requestAddress } from "../lib/addresses.ts";
import { tokensPerSecond, type Reply } from "../lib/chat.ts";
import type { Turn } from "../lib/conversation.ts";
import { count, duration, number } from "../lib/format.ts";
import { ErrorNotice } from "./states.tsx";
import { State } from "./values.tsx";

/** What was asked and answered, and how each answer was served. */
export function Turns({ turns }: { turns: Turn[] }): ReactNode {
  return (
    <ol className="stack turns">
      {turns.map((turn, i) => (
        <li key={i}>
          <p className="turn-prompt">{turn.prompt}</p>
          <Reasoning reply={turn.reply} />
          <div className="turn-reply" aria-busy={turn.state === "running"}>{turn.reply.text}</div>
          {turn.state === "ended" && turn.reply.text === "" && turn.error === null && (
            <p className="soft">{whyEmpty(turn.reply)}</p>
          )}
          {turn.state === "stopped" && <p className="soft">Stopped. Generated tokens are charged.</p>}
          {turn.error !== null && <ErrorNotice error={turn.error} />}
          {turn.reply.served && <Measures reply={turn.reply} />}
        </li>
      ))}
    </ol>
  );
}

/** What came before the answer: open until the answer begins. */
function Reasoning({ reply: { reasoning, text } }: { reply: Reply }): ReactNode {
  if (reasoning === "") return null;
  return (
    <details open={text === ""}>
      <summary>Reasoning</summary>
      <div className="turn-reasoning">{reasoning}</div>
    </details>
  );
}

function whyEmpty({ reasoning, finishReason }: Reply): string {
  if (reasoning === "") return "The answer is empty: the first token was the end of sequence.";
  return finishReason === "length"
    ? "There is no answer: the reasoning reached Max tokens."
    : "The answer is empty: generation ended with the reasoning.";
}

function Measures({ reply }: { reply: Reply }): ReactNode {
  const { served } = reply;
  const speed = tokensPerSecond(reply);
  return (
    <ul className="row turn-measures">
      {reply.model && <li><code>{reply.model}</code></li>}
      {served?.tier && <li>adapter: <State state={served.tier} /></li>}
      {served?.loadMs ? <li>loaded in {duration(served.loadMs)}</li> : null}
      {served?.waitMs ? <li>waited {duration(served.waitMs)} for them</li> : null}
      {reply.firstTokenMs !== null && <li>first token after {duration(reply.firstTokenMs)}</li>}
      {speed !== null && <li>{number(speed, 1)} tokens/s</li>}
      {reply.outputTokens !== null && <li>{count(reply.promptTokens)} + {count(reply.outputTokens)} tokens</li>}
      {reply.finishReason && reply.finishReason !== "stop" && <li>ended by {reply.finishReason}</li>}
      {served?.requestId && <li><Link to={requestAddress(served.requestId)}>trace</Link></li>}
    </ul>
  );
}
