// The chat page: one conversation with /v1/chat/completions, streamed. All text, ours and the
// model's, becomes text nodes; nothing is ever parsed as HTML.

const byId = (id) => document.getElementById(id);
const log = byId("log");
const statusLine = byId("status");
const promptField = byId("prompt");
const keyField = byId("key");
const modelField = byId("model");
const settings = byId("settings");
const sendButton = byId("send");
const stopButton = byId("stop");

const KEY = "firsttoken-api-key";
const hasTracePage = document.querySelector("meta[name=trace-page]").content === "yes";

let history = []; // the messages that the next request sends, without the system prompt
let running = null; // the AbortController of the answer that is being streamed

// ---------------------------------------------------------------- small things

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function say(text) {
  statusLine.textContent = text;
}

function randomHex(numBytes) {
  const bytes = crypto.getRandomValues(new Uint8Array(numBytes));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function headers(more) {
  const key = keyField.value.trim();
  return key ? { ...more, Authorization: `Bearer ${key}` } : { ...more };
}

function stickToEnd(change) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function rememberKey() {
  const key = keyField.value.trim();
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

// ---------------------------------------------------------------- models and the key

async function loadModels() {
  let answer;
  try {
    answer = await fetch("/v1/models", { headers: headers() });
  } catch {
    retryModels("The server can't be reached.");
    return;
  }
  if (answer.status === 401) {
    askForKey(keyField.value ? "This key is not taken." : "This server asks for an API key.");
    return;
  }
  if (!answer.ok) {
    retryModels(`No model yet: ${await failureOf(answer)}`);
    return;
  }
  const models = (await answer.json()).data;
  const chosen = modelField.value;
  modelField.replaceChildren(...models.map((model) => new Option(model.id, model.id)));
  if (models.some((model) => model.id === chosen)) modelField.value = chosen;
  modelField.disabled = false;
  say("");
}

function retryModels(why) {
  say(`${why} Trying again…`);
  setTimeout(loadModels, 2000);
}

function askForKey(why) {
  byId("key-field").hidden = false;
  settings.open = true;
  say(why);
  keyField.focus();
}

async function failureOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `${answer.status} ${answer.statusText}`;
  }
}

// ---------------------------------------------------------------- one request

function requestBody() {
  const system = byId("system").value.trim();
  const body = {
    model: modelField.value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...history],
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  for (const id of ["temperature", "top_p", "max_tokens", "seed"]) {
    const value = byId(id).value.trim();
    if (value) body[id] = Number(value);
  }
  return body;
}

// Yields the `data` of each server-sent event; comments are left out.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ")) yield part.slice("data: ".length);
    }
  }
}

async function answer() {
  const view = new AnswerView(randomHex(16));
  running = new AbortController();
  setBusy(true);
  try {
    await stream(view, running.signal);
  } catch (error) {
    if (error.name === "AbortError") view.end("stopped");
    else view.fail("The connection to the server is lost.");
  }
  if (view.content) history.push({ role: "assistant", content: view.content });
  else history.pop(); // what was asked is not part of the chat before it has an answer
  running = null;
  setBusy(false);
}

async function stream(view, signal) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: headers({
      "Content-Type": "application/json",
      traceparent: `00-${view.traceId}-${randomHex(8)}-01`,
    }),
    body: JSON.stringify(requestBody()),
    signal,
  });
  view.requestId = response.headers.get("x-request-id") ?? "";
  view.ignored = response.headers.get("x-ignored-params") ?? "";
  if (!response.ok) {
    view.fail(await failureOf(response));
    if (response.status === 401) askForKey("This server asks for an API key.");
    return;
  }
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) {
      view.fail(event.error.message);
      return;
    }
    view.take(event);
  }
  view.fail("The answer ended too early.");
}

// ---------------------------------------------------------------- what is shown

function addMessage(role, name) {
  byId("empty")?.remove();
  const message = element("article", `message ${role}`);
  message.append(element("h2", "who", name));
  stickToEnd(() => log.append(message));
  return message;
}

// One answer: its text as it comes, and the facts under it.
class AnswerView {
  content = "";
  requestId = "";
  ignored = "";
  tokens = 0;
  started = performance.now();
  firstAt = null;
  lastAt = null;

  constructor(traceId) {
    this.traceId = traceId;
    this.message = addMessage("assistant", modelField.value);
    this.message.classList.add("busy");
    this.message.setAttribute("aria-busy", "true");
    this.text = document.createTextNode("");
    const block = element("div", "text");
    block.append(this.text);
    this.facts = element("ul", "facts");
    this.message.append(block, this.facts);
  }

  take(event) {
    if (event.usage) this.tokens = event.usage.completion_tokens;
    const choice = event.choices[0];
    if (!choice) {
      this.showFacts();
      return;
    }
    const { content, reasoning_content, reasoning = reasoning_content } = choice.delta;
    if (content || reasoning) {
      this.lastAt = performance.now();
      this.firstAt ??= this.lastAt;
    }
    stickToEnd(() => {
      if (reasoning) this.think(reasoning);
      if (content) {
        this.content += content;
        this.text.appendData(content);
      }
      this.showFacts();
    });
    if (choice.finish_reason) this.end(choice.finish_reason);
  }

  think(text) {
    if (!this.thought) {
      const details = element("details", "thought");
      this.thought = element("p");
      details.append(element("summary", "", "Thought"), this.thought);
      this.message.querySelector(".text").before(details);
    }
    this.thought.append(text);
  }

  end(how) {
    this.finish = how;
    this.message.classList.remove("busy");
    this.message.removeAttribute("aria-busy");
    stickToEnd(() => this.showFacts());
    say(how === "length" ? "The answer reached its maximum of tokens." : "");
  }

  fail(why) {
    const line = element("p", "error", why);
    line.setAttribute("role", "alert");
    this.facts.before(line);
    this.end("failed");
  }

  showFacts() {
    const facts = [];
    const add = (name, ...values) => {
      const item = element("li");
      item.append(`${name} `, ...values);
      facts.push(item);
    };
    const strong = (text) => element("b", "", text);
    add("tokens", strong(String(this.tokens)));
    if (this.firstAt !== null) {
      add("TTFT", strong(`${Math.round(this.firstAt - this.started)} ms`));
      const seconds = (this.lastAt - this.firstAt) / 1000;
      if (this.tokens > 1 && seconds > 0) {
        add("tokens/s", strong(((this.tokens - 1) / seconds).toFixed(1)));
      }
    }
    if (this.finish) {
      add("end", strong(this.finish));
      if (this.requestId) add("request", element("code", "request-id", this.requestId));
      facts.push(this.traceFact());
      if (this.ignored) add("ignored", element("code", "", this.ignored));
    }
    this.facts.replaceChildren(...facts);
  }

  traceFact() {
    const item = element("li", "trace");
    if (hasTracePage) {
      const link = element("a", "", `trace ${this.traceId}`);
      link.href = `/traces/${this.traceId}`;
      item.append(link);
    } else {
      item.append(`trace ${this.traceId}: `, element("code", "", `firsttoken ttft ${this.traceId}`));
    }
    return item;
  }
}

function setBusy(busy) {
  sendButton.hidden = busy;
  stopButton.hidden = !busy;
  byId("new").disabled = busy;
  if (busy) say("Answering…");
  else if (statusLine.textContent === "Answering…") say("");
}

// ---------------------------------------------------------------- what people do

async function send() {
  const content = promptField.value.trim();
  if (running || !content) return;
  if (!modelField.value) {
    say("There is no model to ask yet.");
    return;
  }
  if (!byId("controls").checkValidity()) {
    settings.open = true;
    byId("controls").reportValidity();
    return;
  }
  addMessage("user", "You").append(element("div", "text", content));
  history.push({ role: "user", content });
  promptField.value = "";
  log.scrollTop = log.scrollHeight;
  await answer();
  promptField.focus();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});

promptField.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});

stopButton.addEventListener("click", () => running?.abort());

byId("controls").addEventListener("submit", (event) => event.preventDefault());

keyField.addEventListener("change", () => {
  rememberKey();
  loadModels();
});

byId("new").addEventListener("click", () => {
  history = [];
  log.replaceChildren();
  say("A new chat.");
  promptField.focus();
});

settings.open = matchMedia("(min-width: 45.01rem)").matches;
keyField.value = sessionStorage.getItem(KEY) ?? "";
if (keyField.value) byId("key-field").hidden = false;
promptField.focus();
loadModels();
