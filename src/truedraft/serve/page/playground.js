// The playground: a request, and its answer with accepted draft tokens marked.

import { ApiError, call, events, ofBody } from "./api.js";
import { Cutter } from "./tokens.js";

const at = (id) => document.getElementById(id);
const form = at("request");
const seconds = (ms) => `${(ms / 1000).toFixed(2)} s`;

/** One answer as it streams in. */
class Answer {
  #reasons = false; // whether what was shown last is reasoning

  constructor() {
    this.started = performance.now();
    this.first = null;
    this.tokens = this.drafted = 0;
    this.text = this.id = "";
    this.cutter = new Cutter();
    this.figures = null;
    this.box = at("answer");
    this.box.replaceChildren();
    for (const name of ["tokens", "drafted", "acceptance", "first", "seconds", "seed"]) at(`answer-${name}`).textContent = "–";
  }

  /** Take one event of the stream. */
  take(data) {
    const chunk = JSON.parse(data);
    if (chunk.error) throw ofBody(chunk);
    this.id = chunk.id;
    if (chunk.truedraft) this.figures = { ...chunk.truedraft, seed: /"seed":(-?\d+)/.exec(data)?.[1] ?? "–" };
    for (const choice of chunk.choices) {
      const tokens = choice.tokens ?? [];
      const text = choice.text ?? choice.delta?.content ?? "";
      const reasoning = choice.delta?.reasoning_content ?? "";
      if (tokens.length) this.first ??= performance.now();
      this.tokens += tokens.length;
      this.drafted += tokens.filter((token) => token.drafted).length;
      this.#append(this.cutter.add(tokens, `${reasoning}${this.#reasons && text ? "\n\n" : ""}${text}`));
      this.#reasons = (this.#reasons || Boolean(reasoning)) && !text;
      this.text += text;
    }
    this.show();
  }

  /** Show what was still held back. */
  end() {
    this.#append(this.cutter.end());
    this.show();
  }

  #append(parts) {
    const followed = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 40;
    for (const { text, drafted } of parts) {
      const part = document.createElement(drafted ? "mark" : "span");
      part.className = drafted ? "drafted" : "own";
      part.textContent = text;
      this.box.append(part);
    }
    if (followed) this.box.scrollTop = this.box.scrollHeight;
  }

  /** Tokens per pass: as the server counts them, until then by the passes that ended in a token of the model's own. */
  get acceptance() {
    const passes = this.figures?.passes ?? this.tokens - this.drafted;
    return passes ? (this.tokens / passes).toFixed(2) : "–";
  }

  get elapsed() {
    return performance.now() - this.started;
  }

  show() {
    at("answer-tokens").textContent = String(this.tokens);
    at("answer-drafted").textContent = String(this.drafted);
    at("answer-acceptance").textContent = this.acceptance;
    at("answer-first").textContent = this.first === null ? "–" : seconds(this.first - this.started);
    at("answer-seconds").textContent = seconds(this.elapsed);
    if (this.figures) at("answer-seed").textContent = this.figures.seed;
  }
}

export class Playground {
  #model = null;
  #chosen = false; // whether the user has chosen the endpoint
  #running = null; // AbortController of the request that runs
  #answer = null;

  constructor() {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    addEventListener("keydown", (event) => this.#key(event));
    at("stop-button").addEventListener("click", () => this.stop());
    form.addEventListener("change", ({ target }) => {
      this.#chosen ||= target.name === "endpoint";
      this.#endpoint();
    });
    at("add-message").addEventListener("click", () => addMessage("user", "").focus());
    at("add-reference").addEventListener("click", () => addReference("text", "").focus());
    at("as-prediction").addEventListener("click", () => this.#asPrediction());
    at("as-reference").addEventListener("click", () => this.#asReference());
    at("as-message").addEventListener("click", () => this.#asMessage());
    addMessage("user", "");
    this.#endpoint();
  }

  /** card: of the model, from `/v1/models`. */
  setModel(card) {
    this.#model = card.id;
    const select = form.elements.draft;
    const chosen = select.value;
    select.replaceChildren(...card.drafts.map((name, i) => new Option(i ? name : `${name} (default)`, name)));
    if (card.drafts.includes(chosen)) select.value = chosen;
    if (this.#chosen || form.elements.prompt.value) return;
    form.elements.endpoint.value = card.chat ? "chat" : "completions";
    this.#endpoint();
  }

  #key(event) {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && form.contains(event.target)) {
      event.preventDefault();
      this.send();
    } else if (event.key === "Escape" && this.#running) {
      event.preventDefault();
      this.stop();
    }
  }

  stop() {
    this.#running?.abort();
  }

  async send() {
    if (this.#running) return;
    showError(null);
    const chat = form.elements.endpoint.value === "chat";
    let body;
    try {
      body = bodyOf(this.#model, chat);
    } catch (error) {
      showError(error);
      return;
    }
    this.#running = new AbortController();
    const answer = new Answer();
    this.#answer = answer;
    busy(true);
    at("status").textContent = "The answer is being written.";
    try {
      await this.#stream(chat ? "v1/chat/completions" : "v1/completions", body, answer);
      const count = `${answer.tokens} tokens in ${answer.figures?.passes ?? "?"} passes`;
      at("status").textContent = `Finished: ${count}, ${answer.acceptance} per pass, in ${seconds(answer.elapsed)}.`;
    } catch (error) {
      this.#failed(error, answer);
    } finally {
      this.#running = null;
      busy(false);
      at("again").hidden = !answer.text;
    }
  }

  async #stream(path, body, answer) {
    const headers = { "Content-Type": "application/json" };
    const response = await call(path, { method: "POST", headers, body, signal: this.#running.signal });
    for await (const data of events(response)) {
      if (data === "[DONE]") return answer.end();
      answer.take(data);
    }
    throw new ApiError(0, "the connection ended before the answer did");
  }

  #failed(error, answer) {
    answer.end();
    if (error.name === "AbortError") {
      at("status").textContent = `Stopped after ${answer.tokens} tokens.`;
      return;
    }
    at("status").textContent = "";
    const lost = error instanceof ApiError ? error : new ApiError(0, "the connection to the server was lost");
    showError(lost);
    if (lost.status === 401) at("key-details").open = true;
  }

  #endpoint() {
    const chat = form.elements.endpoint.value === "chat";
    at("prompt-field").hidden = chat;
    at("messages-field").hidden = !chat;
    at("as-message").hidden = !chat;
  }

  #asPrediction() {
    at("more").open = true;
    form.elements.prediction.value = this.#answer.text;
    form.elements.prediction.focus();
  }

  #asReference() {
    at("more").open = true;
    addReference("response", this.#answer.id).focus();
  }

  #asMessage() {
    addMessage("assistant", this.#answer.text);
    addMessage("user", "").focus();
  }
}

function busy(running) {
  at("send").disabled = running;
  at("stop-button").disabled = !running;
  at("answer").classList.toggle("running", running);
  at("answer").setAttribute("aria-busy", String(running));
  if (running) at("again").hidden = true;
}

function addMessage(role, content) {
  const entry = addEntry("message");
  entry.querySelector(".role").value = role;
  return contentOf(entry, content);
}

function addReference(kind, content) {
  const entry = addEntry("reference");
  entry.querySelector(".kind").value = kind;
  return contentOf(entry, content);
}

function addEntry(kind) {
  const list = at(`${kind}s`);
  const entry = at(`${kind}-template`).content.firstElementChild.cloneNode(true);
  entry.querySelector(".remove").addEventListener("click", () => {
    entry.remove();
    at(`add-${kind}`).focus();
  });
  list.append(entry);
  return entry;
}

function contentOf(entry, content) {
  const area = entry.querySelector(".content");
  area.value = content;
  return area;
}

const entries = (kind) => [...at(`${kind}s`).children];

/** The body of the request as JSON. Throws ApiError for a field that is no number. */
function bodyOf(model, chat) {
  const fields = form.elements;
  const body = { stream: true, return_tokens: true };
  if (model) body.model = model;
  if (chat) {
    body.messages = entries("message").map((entry) => ({
      role: entry.querySelector(".role").value,
      content: entry.querySelector(".content").value,
    }));
  } else body.prompt = fields.prompt.value;
  for (const name of ["max_tokens", "temperature", "top_p"]) {
    const value = numberOf(name, /^-?\d*\.?\d+$/);
    if (value !== null) body[name] = Number(value);
  }
  if (fields.draft.value) body.draft = fields.draft.value;
  if (fields.prediction.value) body.prediction = { type: "content", content: fields.prediction.value };
  const stop = fields.stop.value.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
  if (stop.length) body.stop = stop;
  const references = entries("reference").map(referenceOf);
  if (references.length) body.references = references;
  const seed = numberOf("seed", /^-?\d+$/);
  const json = JSON.stringify(body);
  return seed === null ? json : `${json.slice(0, -1)},"seed":${BigInt(seed)}}`; // seeds have more digits than numbers here
}

/** The text of a field that must look like a number; null where it is empty. */
function numberOf(name, pattern) {
  const text = form.elements[name].value.trim();
  if (!text) return null;
  if (!pattern.test(text)) throw new ApiError(400, `${name}=${text}: give a number`, name);
  return text;
}

function referenceOf(entry) {
  const content = entry.querySelector(".content").value;
  switch (entry.querySelector(".kind").value) {
    case "file":
      return { type: "file", name: content.trim() };
    case "response":
      return { type: "response", id: content.trim() };
    default:
      return { type: "text", text: content };
  }
}

/** Show an error, and mark the field that it is about; null for none. */
function showError(error) {
  for (const field of form.querySelectorAll("[aria-invalid]")) {
    field.removeAttribute("aria-invalid");
    field.removeAttribute("aria-describedby");
  }
  at("error").hidden = error === null;
  at("error").textContent = error?.message ?? "";
  const name = error?.param?.match(/^\w+/)?.[0];
  const field = name && form.elements[name];
  if (!(field instanceof HTMLElement)) return;
  field.setAttribute("aria-invalid", "true");
  field.setAttribute("aria-describedby", "error");
  const details = field.closest("details");
  if (details) details.open = true;
}
