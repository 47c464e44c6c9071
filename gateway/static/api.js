// Calls to the server. Every failure is an `ApiError` with a message for people.

import { readEvents } from "./sse.js";

export class ApiError extends Error {
  constructor(message, status = 0, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

function headers(key) {
  const sent = { "content-type": "application/json" };
  if (key) sent.authorization = `Bearer ${key}`;
  return sent;
}

async function call(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const error = body?.error;
  throw new ApiError(error?.message ?? `The server answered ${response.status}.`, response.status, error?.code);
}

export async function listModels(key) {
  const response = await call("v1/models", { headers: headers(key) });
  return (await response.json()).data;
}

// Yields the chunks of a streamed chat. Ends normally only after [DONE].
export async function* streamChat(body, key, signal) {
  const options = { method: "POST", headers: headers(key), body: JSON.stringify(body), signal };
  const response = await call("v1/chat/completions", options);
  try {
    for await (const data of readEvents(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, 0, chunk.error.code);
      yield chunk;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
  }
  throw new ApiError("The connection broke before the answer was complete.");
}
