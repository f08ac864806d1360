/** Server-sent events, read from a body as it comes. */

/** The `data` of each event. Comments, which only fill silence, are left out. */
export async function* eventsOf(body: ReadableStream<Uint8Array>): AsyncGenerator<string> {
  const reader = body.pipeThrough(new TextDecoderStream() as TransformStream<Uint8Array, string>).getReader();
  let pending = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (pending + value).split(/\r?\n/);
      pending = lines.pop() ?? "";
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trimStart();
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}
