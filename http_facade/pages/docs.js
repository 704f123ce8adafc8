// Draws /openapi.json. Everything becomes text nodes: nothing is parsed as HTML.

const content = document.getElementById("content");
const contents = document.getElementById("contents");

function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// `code` in backticks, and nothing else of Markdown.
function words(text) {
  return text.split("`").map((part, i) => (i % 2 ? element("code", "", part) : part));
}

function paragraphs(text) {
  return text.split("\n\n").filter(Boolean).map((part) => element("p", "", ...words(part)));
}

function link(href, text) {
  const made = element("a", "", text);
  made.href = href;
  return made;
}

const nameOf = (ref) => ref.split("/").pop();

// ---------------------------------------------------------------- schemas

// What a schema takes, as text and links to the schemas it names.
function typeOf(schema) {
  if (schema.$ref) return [link(`#schema-${nameOf(schema.$ref)}`, nameOf(schema.$ref))];
  const options = schema.anyOf ?? schema.oneOf;
  if (options) return joined(options.map(typeOf), " or ");
  if (schema.enum) return [schema.enum.map((one) => JSON.stringify(one)).join(" or ")];
  if (schema.const !== undefined) return [JSON.stringify(schema.const)];
  if (schema.type === "array") return ["array of ", ...typeOf(schema.items ?? {})];
  if (schema.type === "object" && schema.additionalProperties) {
    return ["object of ", ...typeOf(schema.additionalProperties)];
  }
  const type = [schema.type ?? "any JSON"].flat().join(" or ");
  return [[type, ...limitsOf(schema)].join(", ")];
}

function joined(lists, separator) {
  return lists.flatMap((list, i) => (i ? [separator, ...list] : list));
}

// null is the same as absent, of every field that may be absent.
function withoutNull(schema) {
  const options = schema.anyOf?.filter((option) => option.type !== "null");
  return options?.length === 1 ? options[0] : { ...schema, ...(options && { anyOf: options }) };
}

const LARGEST_INT32 = 2 ** 31 - 1; // as a bound it only says which integers there are

function limitsOf(schema) {
  const limits = [];
  const add = (name, text) => {
    const value = schema[name];
    const isBound = typeof value === "number" && Math.abs(value) >= LARGEST_INT32;
    if (value !== undefined && !isBound) limits.push(text(value));
  };
  add("minimum", (n) => `at least ${n}`);
  add("exclusiveMinimum", (n) => `above ${n}`);
  add("maximum", (n) => `at most ${n}`);
  add("minLength", (n) => `from ${n} characters`);
  add("maxLength", (n) => `up to ${n} characters`);
  add("minItems", (n) => `from ${n} items`);
  add("maxItems", (n) => `up to ${n} items`);
  add("pattern", (text) => `like ${text}`);
  return limits;
}

function fieldsTable(schema) {
  const required = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => {
    const type = typeOf(required.has(name) ? field : withoutNull(field));
    if (schema.type && field.default !== undefined && field.default !== null) {
      type.push(`; default ${JSON.stringify(field.default)}`);
    }
    const head = element("th", "", element("code", "", name));
    head.scope = "row";
    if (required.has(name)) head.append(element("span", "must", " required"));
    return element("tr", "", head, element("td", "type", ...type),
      element("td", "", ...words(field.description ?? "")));
  });
  const names = ["Field", "Type", "Meaning"].map((name) => {
    const head = element("th", "", name);
    head.scope = "col";
    return head;
  });
  const table = element("table", "", element("thead", "", element("tr", "", ...names)),
    element("tbody", "", ...rows));
  const scroll = element("div", "scroll", table);
  scroll.tabIndex = 0;
  return scroll;
}

// ---------------------------------------------------------------- operations

function example(text) {
  const shown = element("div", "example", element("pre", "", text));
  if (!navigator.clipboard) return shown; // browsers have it on https and localhost only
  const copy = element("button", "", "Copy");
  copy.type = "button";
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  shown.append(copy);
  return shown;
}

function curl(method, path, body) {
  const lines = [`curl ${location.origin}${path}`];
  if (method === "POST") {
    lines.push("-H 'Content-Type: application/json'");
    lines.push(`-d '${JSON.stringify(body).replaceAll("'", "'\\''")}'`);
  }
  return lines.join(" \\\n  ");
}

function operationSection(path, method, operation, document_) {
  const verb = method.toUpperCase();
  const section = element("section", "",
    element("h3", "", element("span", `method ${method}`, verb), element("code", "", path),
      operation.summary),
    ...paragraphs(operation.description ?? ""));
  section.id = operation.operationId;
  const body = operation.requestBody?.content["application/json"];
  if (body) {
    section.append(element("h4", "", "Request"), schemaLine(body.schema));
    if (body.example) section.append(example(curl(verb, path, body.example)));
  } else if (!path.includes("{")) {
    section.append(example(curl(verb, path)));
  }
  section.append(element("h4", "", "Answers"));
  for (const [status, answer] of Object.entries(operation.responses)) {
    section.append(...answerParts(status, answer, document_));
  }
  return section;
}

function schemaLine(schema) {
  return element("p", "", ...typeOf(schema));
}

function answerParts(status, answer, document_) {
  const said = answer.$ref ? document_.components.responses[nameOf(answer.$ref)] : answer;
  const line = element("p", "", element("code", "", status), " ", ...words(said.description));
  const parts = [line];
  if (answer.$ref) return parts;
  for (const [media, { schema, example: shown }] of Object.entries(said.content)) {
    line.append(" ", element("code", "", media), " ",
      ...(media === "application/json" || schema.oneOf ? typeOf(schema) : []));
    if (schema.description) parts.push(element("p", "soft", ...words(schema.description)));
    if (shown) parts.push(example(JSON.stringify(shown, null, 2)));
  }
  return parts;
}

function draw(document_) {
  document.getElementById("version").textContent = document_.info.version;
  const drawn = [...paragraphs(document_.info.description)];
  for (const { name } of document_.tags) {
    drawn.push(element("h2", "", name));
    contents.append(element("h2", "", name));
    for (const [path, methods] of Object.entries(document_.paths)) {
      for (const [method, operation] of Object.entries(methods)) {
        if (!operation.tags.includes(name)) continue;
        drawn.push(operationSection(path, method, operation, document_));
        contents.append(link(`#${operation.operationId}`, path));
      }
    }
  }
  drawn.push(element("h2", "", "Schemas"));
  contents.append(element("h2", "", "Schemas"));
  for (const [name, schema] of Object.entries(document_.components.schemas)) {
    const section = element("section", "", element("h3", "", element("code", "", name)),
      ...paragraphs(schema.description ?? ""), fieldsTable(schema));
    section.id = `schema-${name}`;
    drawn.push(section);
    contents.append(link(`#schema-${name}`, name));
  }
  content.replaceChildren(...drawn);
  content.removeAttribute("aria-busy");
  if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
}

try {
  const answer = await fetch("/openapi.json");
  if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
  draw(await answer.json());
} catch (error) {
  document.getElementById("status").textContent = `The document can't be read: ${error.message}`;
}
