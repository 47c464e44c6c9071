// Server-sent events from a fetch body. Lines end at CR, LF or CRLF and nowhere else: text may hold U+2028.

export class EventParser {
  #rest = "";
  #data = [];

  // Text in, the `data` of every event that is complete now out.
  feed(text) {
    const events = [];
    const lines = (this.#rest + text).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop(); // with a CR at its end: an LF may follow in the next piece
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length > 0) events.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
    return events;
  }
}

export async function* readEvents(body) {
  const parser = new EventParser();
  const decoder = new TextDecoder();
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.feed(decoder.decode(value, { stream: true }));
    }
  } finally {
    reader.releaseLock();
  }
}
