// The API reference, drawn from openapi.json.

import { listModels, streamChat } from "./api.js";

const $ = (id) => document.getElementById(id);
const CHAT = "/v1/chat/completions";

// A DOM node; strings among the children become text, `code` in backticks becomes <code>.
function node(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function prose(text) {
  return text.split("`").map((part, index) => (index % 2 ? node("code", {}, part) : part));
}

// -- schemas -------------------------------------------------------------------------------------------------

const INT32_MAX = 2 ** 31 - 1;
const nameOf = (schema) => schema.$ref.split("/").at(-1);

// What a value must be: a type with its limits, and links to other objects.
function typeOf(schema) {
  if (schema.$ref) return [node("a", { href: `#${nameOf(schema)}` }, nameOf(schema))];
  if (schema.anyOf) return schema.anyOf.flatMap((each, index) => [...(index ? [" or "] : []), ...typeOf(each)]);
  if (schema.enum) return [schema.enum.filter((each) => each !== null).map((each) => JSON.stringify(each)).join(" | ")];
  if (schema.type === "array") return ["list of ", ...typeOf(schema.items ?? {}), ...limit(schema, "maxItems", "items")];
  if (schema.type === "object") {
    const values = schema.additionalProperties;
    return values && values !== true ? ["object of ", ...typeOf(values)] : ["object"];
  }
  return [[schema.type ?? "any", range(schema)].filter(Boolean).join(", ")];
}

function limit(schema, name, unit) {
  return schema[name] === undefined ? [] : [`, at most ${schema[name]} ${unit}`];
}

function range(schema) {
  const low = schema.minimum ?? schema.exclusiveMinimum;
  const high = schema.maximum ?? schema.exclusiveMaximum;
  if (schema.maxLength) return `at most ${schema.maxLength} characters`;
  if (low === undefined && high === undefined) return "";
  if (Math.abs(high) >= INT32_MAX) return Math.abs(low) >= INT32_MAX ? "" : `at least ${low}`;
  if (schema.exclusiveMinimum !== undefined) return `above ${low}, at most ${high}`;
  return `${low} to ${high}`;
}

function fields(schema) {
  const required = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => {
    const first = node("td", {}, name, ...(required.has(name) ? [" ", node("span", { class: "required" }, "required")] : []));
    return node("tr", {}, first, node("td", {}, ...typeOf(field)), node("td", {}, ...prose(field.description ?? "")));
  });
  const head = node("tr", {}, ...["Field", "Type", ""].map((title) => node("th", { scope: "col" }, title)));
  return node("div", { class: "wide" }, node("table", {}, node("thead", {}, head), node("tbody", {}, ...rows)));
}

// -- routes --------------------------------------------------------------------------------------------------

function curl(path, example, needsKey) {
  const address = new URL(`.${path}`, document.baseURI).href;
  const parts = [`curl ${example ? "-N " : ""}${address}`];
  if (needsKey) parts.push(`-H "Authorization: Bearer $API_KEY"`);
  if (example) {
    parts.push(`-H "Content-Type: application/json"`);
    parts.push(`-d '${JSON.stringify(example, null, 2).replaceAll("'", "'\\''")}'`);
  }
  return parts.join(" \\\n  ");
}

function copyable(text) {
  const button = node("button", { class: "button", type: "button" }, "Copy");
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  });
  const extras = navigator.clipboard ? [button] : []; // there is no clipboard without TLS
  return node("div", { class: "copied" }, node("pre", { class: "code" }, text), ...extras);
}

function answers(responses) {
  const rows = Object.entries(responses).map(([status, response]) => {
    const kinds = Object.entries(response.content ?? {}).flatMap(([type, { schema }]) => [
      node("div", {}, node("code", {}, type), ...(schema ? [" ", ...typeOf(schema)] : [])),
    ]);
    return node("tr", {}, node("td", {}, status), node("td", {}, response.description), node("td", {}, ...kinds));
  });
  return node("div", { class: "wide" }, node("table", {}, node("tbody", {}, ...rows)));
}

function routeSection(path, method, operation, schemas, model) {
  const body = operation.requestBody?.content["application/json"];
  const example = body && { ...body.example, model };
  const section = node(
    "section",
    { id: operation.operationId },
    node("h2", {}, operation.summary),
    node("p", { class: "address" }, node("span", { class: "method" }, method.toUpperCase()), path),
    node("p", {}, ...prose(operation.description ?? "")),
    copyable(curl(path, example, Boolean(operation.security))),
  );
  if (body) {
    const schema = schemas[nameOf(body.schema)];
    section.append(node("h3", {}, "Body"), fields(schema), node("p", { class: "note" }, schema.description));
  }
  section.append(node("h3", {}, "Answers"), answers(operation.responses));
  return section;
}

function draw(api, model) {
  const { schemas } = api.components;
  $("version").textContent = api.info.version;
  $("intro").textContent = api.info.description;
  const routeLinks = [];
  const bodies = new Set();
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      $("routes").append(routeSection(path, method, operation, schemas, model));
      routeLinks.push(node("a", { href: `#${operation.operationId}`, title: operation.summary }, path));
      const body = operation.requestBody?.content["application/json"].schema;
      if (body) bodies.add(nameOf(body));
    }
  }
  const names = Object.keys(schemas).filter((name) => !bodies.has(name));
  for (const name of names) {
    const parts = [node("h3", {}, name), node("p", { class: "note" }, schemas[name].description ?? ""), fields(schemas[name])];
    $("schemas").append(node("section", { id: name }, ...parts));
  }
  const objectLinks = names.map((name) => node("a", { href: `#${name}` }, name));
  $("contents").append(
    node("a", { href: "#try" }, "Try it"),
    node("h2", {}, "Routes"), ...routeLinks,
    node("h2", {}, "Objects"), ...objectLinks,
  );
  document.getElementById(location.hash.slice(1))?.scrollIntoView();
}

// -- try it --------------------------------------------------------------------------------------------------

let running = null;

// Fills the form; returns a model's name for the examples. Without a key there may be none to see.
async function loadModels(example) {
  const names = await listModels($("try-key").value).then((models) => models.map((each) => each.id), () => []);
  const model = names[0] ?? "MODEL";
  $("try-model").replaceChildren(...names.map((name) => new Option(name, name)));
  if (names.length || !$("try-body").value) fillBody({ ...example, model });
  return model;
}

function fillBody(body) {
  $("try-body").value = JSON.stringify(body, null, 2);
}

async function run() {
  const out = $("try-out");
  out.replaceChildren();
  out.classList.remove("failed");
  running = new AbortController();
  $("try-run").disabled = true;
  $("try-stop").disabled = false;
  try {
    const body = { ...JSON.parse($("try-body").value), stream: true };
    for await (const chunk of streamChat(body, $("try-key").value, running.signal)) {
      const text = chunk.choices.map((choice) => choice.delta.content ?? "").join("");
      out.append($("try-raw").checked ? `data: ${JSON.stringify(chunk)}\n\n` : text);
      out.scrollTop = out.scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      out.classList.add("failed");
      out.append(`\n${error.message}`);
    }
  }
  $("try-run").disabled = false;
  $("try-stop").disabled = true;
}

$("try-form").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
$("try-stop").addEventListener("click", () => running?.abort());
$("try-model").addEventListener("change", () => {
  try {
    fillBody({ ...JSON.parse($("try-body").value), model: $("try-model").value });
  } catch {
    // not JSON while it is being edited: leave it alone
  }
});

try {
  const api = await (await fetch("openapi.json")).json();
  const { example } = api.paths[CHAT].post.requestBody.content["application/json"];
  $("try-key").addEventListener("change", () => loadModels(example));
  draw(api, await loadModels(example));
} catch {
  $("intro").textContent = "The description of the API could not be loaded from this server.";
}
