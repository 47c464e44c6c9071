// The chat page. Model output only ever becomes text nodes.

import { listModels, streamChat } from "./api.js";

const $ = (id) => document.getElementById(id);
const log = $("log");
const scroll = $("scroll");
const prompt = $("prompt");
const model = $("model");
const settings = ["system", "temperature", "max-tokens", "key"].map($);
const MODEL_POLL_MS = 3000;

let history = []; // what the model is shown: {role, content}
let running = null; // the AbortController of the answer that is streaming
let pollTimer = 0;

// -- settings ------------------------------------------------------------------------------------------------

for (const field of settings) {
  field.value = sessionStorage.getItem(`headrace.${field.id}`) ?? "";
  field.addEventListener("change", () => sessionStorage.setItem(`headrace.${field.id}`, field.value));
}
$("key").addEventListener("change", loadModels);
$("open-settings").addEventListener("click", () => $("settings").showModal());

function requestBody(messages) {
  const system = $("system").value.trim();
  const body = {
    model: model.value,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
  };
  if ($("temperature").value !== "") body.temperature = Number($("temperature").value);
  if ($("max-tokens").value !== "") body.max_tokens = Number($("max-tokens").value);
  return body;
}

// -- models --------------------------------------------------------------------------------------------------

async function loadModels() {
  clearTimeout(pollTimer);
  try {
    const models = await listModels($("key").value);
    showModels(models);
    say(models.length ? "" : "No model is ready yet. Waiting for a worker…");
    if (!models.length) pollTimer = setTimeout(loadModels, MODEL_POLL_MS);
  } catch (error) {
    showModels([]);
    if (error.status === 401) {
      say("This server asks for an API key. Put it into Settings.");
    } else {
      say(error.message);
      pollTimer = setTimeout(loadModels, MODEL_POLL_MS);
    }
  }
}

function showModels(models) {
  const chosen = model.value || sessionStorage.getItem("headrace.model");
  const options = models.map((each) => new Option(each.scripted ? `${each.id} (scripted)` : each.id, each.id));
  model.replaceChildren(...(options.length ? options : [new Option("No model", "")]));
  if (models.some((each) => each.id === chosen)) model.value = chosen;
  model.disabled = options.length === 0;
  update();
}

model.addEventListener("change", () => sessionStorage.setItem("headrace.model", model.value));

// -- turns ---------------------------------------------------------------------------------------------------

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

function addTurn(role, text) {
  const turn = element("li", `turn ${role}`);
  turn.append(element("span", "sr-only", role === "user" ? "You: " : "Model: "), element("div", "text", text));
  log.append(turn);
  $("welcome").classList.add("hidden");
  return turn;
}

class AnswerTurn {
  text = "";
  calls = []; // by index, the text nodes of their arguments

  constructor() {
    this.element = addTurn("assistant waiting", "");
    this.node = this.element.querySelector(".text").appendChild(document.createTextNode(""));
    this.startedMs = performance.now();
  }

  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    if (choice.finish_reason) this.finish = choice.finish_reason;
    if (choice.format_results) this.problem = choice.format_results.problem;
    const { content, reasoning, tool_calls: pieces = [] } = choice.delta;
    if (content || reasoning || pieces.length) this.#arrived();
    if (reasoning) this.#addReasoning(reasoning);
    if (content) {
      this.text += content;
      this.node.appendData(content);
    }
    for (const piece of pieces) this.#addToCall(piece);
  }

  end() {
    this.element.classList.remove("waiting", "streaming");
    if (this.problem) this.element.append(element("p", "problem", `Not in the format asked for: ${this.problem}`));
    const numbers = this.#numbers();
    if (numbers.length) this.element.append(element("p", "numbers", numbers.join(" · ")));
  }

  fail(message, again) {
    this.element.classList.remove("waiting", "streaming");
    const box = element("div", "failure");
    box.setAttribute("role", "alert");
    const button = element("button", "button", "Try again");
    button.type = "button";
    button.addEventListener("click", again);
    box.append(element("span", "", message), button);
    this.element.append(box);
  }

  #arrived() {
    this.lastMs = performance.now();
    if (this.firstMs !== undefined) return;
    this.firstMs = this.lastMs;
    this.element.classList.replace("waiting", "streaming");
  }

  #addReasoning(text) {
    if (!this.reasoning) {
      const details = element("details", "");
      this.reasoning = element("div", "reasoning").appendChild(document.createTextNode(""));
      details.append(element("summary", "", "Reasoning"), this.reasoning.parentNode);
      this.element.querySelector(".text").before(details);
    }
    this.reasoning.appendData(text);
  }

  #addToCall({ index, function: called }) {
    if (!this.calls[index]) {
      const box = element("div", "call");
      const title = element("p", "", "Calls ");
      title.append(element("code", "", called.name));
      this.calls[index] = document.createTextNode("");
      box.append(title, element("pre", "arguments"));
      box.lastChild.append(this.calls[index]);
      this.element.append(box);
    }
    this.calls[index].appendData(called.arguments ?? "");
  }

  #numbers() {
    const numbers = [];
    if (this.finish === "length") numbers.push("stopped at the token limit");
    if (this.finish === "content_filter") numbers.push("stopped by a content rule");
    if (this.firstMs !== undefined) numbers.push(`first token after ${duration(this.firstMs - this.startedMs)}`);
    const tokens = this.usage?.completion_tokens;
    if (tokens > 1 && this.lastMs > this.firstMs) {
      numbers.push(`${(((tokens - 1) * 1000) / (this.lastMs - this.firstMs)).toFixed(1)} tokens/s`);
    }
    if (tokens) numbers.push(`${tokens} tokens`);
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    if (cached) numbers.push(`${cached} of ${this.usage.prompt_tokens} prompt tokens cached`);
    return numbers;
  }
}

function duration(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`;
}

// -- sending -------------------------------------------------------------------------------------------------

async function ask(text) {
  const asked = [...history, { role: "user", content: text }];
  const question = addTurn("user", text);
  const answer = new AnswerTurn();
  const controller = new AbortController();
  running = controller;
  update();
  toEnd();
  try {
    for await (const chunk of streamChat(requestBody(asked), $("key").value, controller.signal)) {
      const follow = isAtEnd();
      answer.take(chunk);
      if (follow) toEnd();
    }
    answer.end();
  } catch (error) {
    if (error.name === "AbortError") {
      answer.end();
    } else if (running === controller) {
      answer.fail(error.message, () => retry(question, answer.element, text));
    }
  }
  if (running !== controller) return; // a new chat has begun
  // A question without an answer is not shown to the model again: templates want the roles to alternate.
  if (answer.text) history = [...asked, { role: "assistant", content: answer.text }];
  running = null;
  update();
  toEnd();
}

function retry(question, answer, text) {
  if (running) return;
  if (history.at(-1)?.role === "assistant" && history.at(-2)?.content === text) history = history.slice(0, -2);
  question.remove();
  answer.remove();
  ask(text);
}

function send() {
  const text = prompt.value.trim();
  if (!text || running || !model.value) return;
  prompt.value = "";
  resize();
  ask(text);
}

function newChat() {
  const controller = running;
  running = null;
  controller?.abort();
  history = [];
  log.replaceChildren();
  $("welcome").classList.remove("hidden");
  update();
  prompt.focus();
}

// -- page ----------------------------------------------------------------------------------------------------

function update() {
  $("send").classList.toggle("hidden", running !== null);
  $("stop").classList.toggle("hidden", running === null);
  $("send").disabled = !prompt.value.trim() || !model.value;
  log.setAttribute("aria-busy", String(running !== null));
}

function say(text) {
  $("status").textContent = text;
}

function resize() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
  update();
}

function isAtEnd() {
  return scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 80;
}

function toEnd() {
  scroll.scrollTop = scroll.scrollHeight;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("input", resize);
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return; // Enter also ends an input method
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("settings").open) running?.abort();
});
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", newChat);
for (const button of document.querySelectorAll("#starters button")) {
  button.addEventListener("click", () => {
    prompt.value = button.textContent;
    resize();
    prompt.focus();
  });
}

loadModels();
update();
if (matchMedia("(pointer: fine)").matches) prompt.focus();
