/** Markdown of a model, rendered as elements of a fixed list: markup in it is text, and nothing is loaded. */

import Markdown from "markdown-to-jsx/react";
import { createElement, Fragment, type ReactElement, type ReactNode } from "react";
import { CodeBlock } from "./code-block.tsx";

type Props = Readonly<Record<string, unknown>> & { key?: string };

/** Elements that are rendered as they are, without their attributes. */
const KEPT = new Set([
  "p", "em", "strong", "del", "blockquote", "ul", "li", "hr", "br", "code", "thead", "tbody", "tr", "span", "div", "sup",
]);
/** A page has its own headings above: those of an answer stand below them. */
const HEADINGS: Readonly<Record<string, string>> = { h1: "h4", h2: "h4", h3: "h5", h4: "h5", h5: "h6", h6: "h6" };
const SAFE_LINK = /^(https?:\/\/|mailto:)/i;

export default function MarkdownText({ text, isRunning }: { text: string; isRunning: boolean }): ReactNode {
  return (
    <Markdown options={{
      createElement: element as typeof createElement, disableParsingRawHTML: true, disableFrontmatter: true, forceBlock: true,
      optimizeForStreaming: isRunning, wrapper: Fragment,
    }}>{text}</Markdown>
  );
}

function element(tag: unknown, props: Props | null, ...children: ReactNode[]): ReactNode {
  const key = props?.key;
  const render = (as: string, attributes: object = {}): ReactNode => createElement(as, { key, ...attributes }, ...children);
  if (typeof tag !== "string") return createElement(Fragment, { key }, ...children);
  if (HEADINGS[tag]) return render(HEADINGS[tag]);
  switch (tag) {
    case "a": {
      const href = String(props?.["href"] ?? "");
      return SAFE_LINK.test(href) ? render("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }) : render("span");
    }
    case "img":
      // Loading an image would send its URL, and any text of the conversation in it, to another host.
      return <span key={key} className="soft">[image: {String(props?.["alt"] ?? "")}]</span>;
    case "input":
      return <span key={key}>{props?.["checked"] ? "☑ " : "☐ "}</span>;
    case "pre":
      return <CodeBlock key={key} label="Code" code={textOf(children)} />;
    case "ol":
      return render("ol", { start: props?.["start"] });
    case "table":
      return <div key={key} className="table-wrap" tabIndex={0} role="region" aria-label="Table">{render("table", { className: "table" })}</div>;
    case "th": case "td":
      return render(tag, { style: { textAlign: (props?.["style"] as { textAlign?: string } | undefined)?.textAlign } });
    default:
      return render(KEPT.has(tag) ? tag : "span");
  }
}

function textOf(node: ReactNode): string {
  if (typeof node === "string" || typeof node === "number") return String(node);
  if (Array.isArray(node)) return node.map(textOf).join("");
  if (node !== null && typeof node === "object" && "props" in node) {
    return textOf((node as ReactElement<{ children?: ReactNode }>).props.children);
  }
  return "";
}
