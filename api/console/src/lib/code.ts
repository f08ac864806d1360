/** Code that sends a request of the public API: with curl, and with the `openai` clients of Python and JavaScript. */

export const LANGUAGES = [["curl", "curl"], ["python", "Python"], ["javascript", "JavaScript"]] as const;
export type Language = (typeof LANGUAGES)[number][0];

/** Stands where the key of whoever runs the code belongs. */
export const KEY = "YOUR_API_KEY";

export interface ApiRequest {
  /** Of the server, without a path. */
  origin: string;
  /** Below `/v1`. */
  path: string;
  body: Readonly<Record<string, unknown>>;
}

const CHAT = "/chat/completions";
const EMBEDDINGS = "/embeddings";
/** The methods of the `openai` clients; other routes are posted to. */
const METHODS: Readonly<Record<string, string>> = { [CHAT]: "chat.completions.create", [EMBEDDINGS]: "embeddings.create" };
/** Fields of a chat that the Python client has no argument for. */
const EXTRA = new Set(["top_k", "min_p", "repetition_penalty"]);

export function codeOf(language: Language, request: ApiRequest): string {
  return { curl: curl, python: python, javascript: javascript }[language](request);
}

function curl({ origin, path, body }: ApiRequest): string {
  return [
    `curl ${origin}/v1${path} \\`,
    `  -H 'Authorization: Bearer ${KEY}' \\`,
    "  -H 'Content-Type: application/json' \\",
    // In single quotes a shell reads everything as it is, but for the quote itself.
    `  -d '${JSON.stringify(body, null, 2).replaceAll("'", "'\\''")}'`,
  ].join("\n");
}

function python({ origin, path, body }: ApiRequest): string {
  const start = [
    "from openai import OpenAI", "",
    `client = OpenAI(base_url=${JSON.stringify(`${origin}/v1`)}, api_key="${KEY}")`,
  ];
  const method = METHODS[path];
  if (method === undefined) {
    return [...start, `answer = client.post(${JSON.stringify(path)}, body=${inPython(body, "")}, cast_to=object)`, "print(answer)"].join("\n");
  }
  const fields = Object.entries(body);
  const extra = Object.fromEntries(fields.filter(([name]) => EXTRA.has(name)));
  const lines = fields.filter(([name]) => !EXTRA.has(name)).map(([name, value]) => `    ${name}=${inPython(value, "    ")},`);
  if (Object.keys(extra).length > 0) lines.push(`    extra_body=${inPython(extra, "    ")},`);
  return [...start, `answer = client.${method}(`, ...lines, ")", ...printed(path, body, "python")].join("\n");
}

function javascript({ origin, path, body }: ApiRequest): string {
  const data = JSON.stringify(body, null, 2);
  const method = METHODS[path];
  return [
    'import OpenAI from "openai";', "",
    `const client = new OpenAI({ baseURL: ${JSON.stringify(`${origin}/v1`)}, apiKey: "${KEY}" });`,
    ...(method !== undefined
      ? [`const answer = await client.${method}(${data});`, ...printed(path, body, "javascript")]
      : [`const answer = await client.post(${JSON.stringify(path)}, { body: ${data} });`, "console.log(answer);"]),
  ].join("\n");
}

/** The lines that print the vectors or the text of an answer; of one that has more than a text, all of it. */
function printed(path: string, body: ApiRequest["body"], language: "python" | "javascript"): string[] {
  if (path === EMBEDDINGS) {
    return language === "python"
      ? ["for item in answer.data:", "    print(item.embedding)"]
      : ["for (const item of answer.data) console.log(item.embedding);"];
  }
  const isText = body["n"] === undefined && body["tools"] === undefined && body["logprobs"] === undefined;
  if (language === "python") return [isText ? "print(answer.choices[0].message.content)" : "print(answer.to_json())"];
  return [isText ? "console.log(answer.choices[0].message.content);" : "console.log(JSON.stringify(answer, null, 2));"];
}

/** A JSON value as a Python literal; strings are the same in both. */
function inPython(value: unknown, indent: string): string {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  const inner = `${indent}    `;
  if (Array.isArray(value)) return inBrackets("[", value.map((one) => inPython(one, inner)), "]", indent);
  if (typeof value === "object") {
    const pairs = Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${inPython(one, inner)}`);
    return inBrackets("{", pairs, "}", indent);
  }
  return JSON.stringify(value);
}

const MAX_LINE = 88;

function inBrackets(open: string, items: string[], close: string, indent: string): string {
  const line = `${open}${items.join(", ")}${close}`;
  if (items.length === 0 || (line.length + indent.length <= MAX_LINE && !line.includes("\n"))) return line;
  return [open, ...items.map((item) => `${indent}    ${item},`), `${indent}${close}`].join("\n");
}
