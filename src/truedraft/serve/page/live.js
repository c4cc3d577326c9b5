// The feed of snapshots: figures, charts and the table of requests; and what to do while it does not come.

import { call, events } from "./api.js";
import { Chart } from "./chart.js";

const SILENT = 5000; // milliseconds without a snapshot after which the connection counts as lost
const LONGEST_WAIT = 30; // seconds between two tries
const RECENT = 5000; // milliseconds over which tokens per pass are taken for the chart
const GUARANTEES = {
  tokens: "tokens: the text that the model alone would give",
  distribution: "distribution: drawn by the law of the model alone",
  none: "none: not the text of the model alone",
};

const at = (id) => document.getElementById(id);
const show = (id, text) => {
  if (at(id).textContent !== text) at(id).textContent = text;
};
const whole = (number) => Math.round(number).toLocaleString("en");
const short = (number) => number.toLocaleString("en", { maximumFractionDigits: number < 10 ? 2 : number < 100 ? 1 : 0 });
const share = (part, all) => (all ? `${Math.round((100 * part) / all)} %` : "–");
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

/** Resolves while the page is visible: hidden ones read nothing, as browsers have few connections for all their tabs. */
function visible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((done) => document.addEventListener("visibilitychange", () => done(visible()), { once: true }));
}

/** Shows the feed for as long as the page is open and visible. */
export class Live {
  #charts = {
    tokens: new Chart(at("tokens-chart"), at("tokens-chart-range"), "Tokens per second"),
    acceptance: new Chart(at("acceptance-chart"), at("acceptance-chart-range"), "Tokens per pass"),
  };
  #recent = [];
  #reading = null; // AbortController of the feed
  #interrupted = false; // it was ended here, not by the server
  #wake = () => {};

  /** onConnected: called whenever the feed begins. */
  constructor(onConnected) {
    this.onConnected = onConnected;
    at("retry").addEventListener("click", () => this.retry());
    addEventListener("online", () => this.retry());
    document.addEventListener("visibilitychange", () => this.retry());
  }

  /** Read the feed anew, now: after another key was given, or when the user asks for it. */
  retry() {
    this.#interrupted = true;
    this.#reading?.abort();
    this.#wake();
  }

  async run() {
    for (let failures = 0; ; ) {
      await visible();
      this.#interrupted = false;
      let error = null;
      try {
        await this.#read(() => (failures = 0));
      } catch (raised) {
        error = raised;
      }
      if (this.#interrupted) {
        failures = 0;
        continue;
      }
      failures += 1;
      if (error !== null || failures > 1) await this.#wait(error, Math.min(2 ** (failures - 1), LONGEST_WAIT));
      else await sleep(250); // a feed that has ended in order: the next one follows
    }
  }

  async #read(begun) {
    const reading = new AbortController();
    this.#reading = reading;
    let timer = setTimeout(() => reading.abort(), SILENT);
    try {
      const response = await call("live", { signal: reading.signal });
      let first = true;
      for await (const event of events(response)) {
        clearTimeout(timer);
        timer = setTimeout(() => reading.abort(), SILENT);
        if (first) {
          first = false;
          begun();
          this.#connected();
        }
        this.#show(JSON.parse(event));
      }
    } finally {
      clearTimeout(timer);
    }
  }

  #connected() {
    state("ready", "ready");
    at("lost").hidden = true;
    at("live").classList.remove("stale");
    this.onConnected();
  }

  /** Say what is wrong, and wait: for some seconds, or for `retry`; without an accepted key only for the latter. */
  async #wait(error, seconds) {
    const needsKey = error?.status === 401;
    const [name, text] = needsKey ? ["key", "This server needs an API key."] : await reason(error);
    state(name, { key: "needs a key", ending: "ending", starting: "starting", lost: "not answering" }[name] ?? name);
    at("live").classList.add("stale");
    show("lost-text", text);
    at("lost").hidden = false;
    if (needsKey) at("key-details").open = true;
    let retried = false;
    const woken = new Promise((done) => (this.#wake = () => done((retried = true))));
    for (let left = seconds; !retried && (needsKey || left > 0); left--) {
      show("countdown", needsKey ? "" : `Next try in ${left} s.`);
      await Promise.race([woken, needsKey ? woken : sleep(1000)]);
    }
    show("countdown", "Trying…");
  }

  #show(snapshot) {
    show("model", snapshot.model);
    show("drafter", snapshot.drafter);
    show("guarantee", GUARANTEES[snapshot.guarantee] ?? snapshot.guarantee);
    show("uptime", duration(snapshot.uptime));
    show("rows", whole(snapshot.rows));
    show("max-rows", whole(snapshot.max_rows));
    show("waiting", whole(snapshot.waiting));
    show("tokens-per-second", short(snapshot.tokens_per_second));
    show("passes-per-second", short(snapshot.passes_per_second));
    show("acceptance", snapshot.row_passes ? snapshot.mean_acceptance_length.toFixed(2) : "–");
    show("accepted", share(snapshot.accepted_tokens, snapshot.drafted_tokens));
    show("drafted", `${whole(snapshot.accepted_tokens)} of ${whole(snapshot.drafted_tokens)}`);
    show("cached", share(snapshot.cached_tokens, snapshot.prompt_tokens));
    show("prompted", `${whole(snapshot.cached_tokens)} of ${whole(snapshot.prompt_tokens)} prompt tokens`);
    const now = performance.now();
    this.#charts.tokens.add(now, snapshot.tokens_per_second);
    this.#charts.acceptance.add(now, this.#recentAcceptance(now, snapshot));
    showRequests(snapshot.running);
  }

  /** Tokens per pass of a row over the last seconds; null where there was no pass. */
  #recentAcceptance(now, { tokens, row_passes: passes }) {
    const last = this.#recent.at(-1);
    if (last && tokens < last.tokens) this.#recent = []; // the server was started again
    this.#recent.push({ now, tokens, passes });
    while (this.#recent[0].now < now - RECENT) this.#recent.shift();
    const [first] = this.#recent;
    return passes > first.passes ? (tokens - first.tokens) / (passes - first.passes) : null;
  }
}

function state(name, text) {
  document.querySelector(".state").dataset.state = name;
  show("state", text);
}

/** Why the feed does not come: [state, sentence]. */
async function reason(error) {
  if (error?.status === 429) return ["busy", `The server sends no figures: ${error.message}.`];
  try {
    const response = await fetch("health", { cache: "no-store", signal: AbortSignal.timeout(SILENT) });
    const { status } = await response.json();
    if (status === "ending") return ["ending", "The server is ending: running requests finish, new ones are refused."];
    if (status !== "ready") return ["starting", "The server is not ready yet."];
    return ["interrupted", error?.status ? `The server sends no figures: ${error.message}.` : "The connection was lost."];
  } catch {
    return ["lost", "The server does not answer."];
  }
}

function showRequests(rows) {
  const body = at("requests");
  while (body.rows.length > rows.length) body.lastElementChild.remove();
  while (body.rows.length < rows.length) body.append(emptyRow());
  rows.forEach((row, i) => {
    const texts = [
      row.id, row.state, whole(row.prompt_tokens), whole(row.tokens),
      row.passes ? row.mean_acceptance_length.toFixed(2) : "–", row.seconds.toFixed(1),
    ];
    const { cells } = body.rows[i];
    texts.forEach((text, column) => (cells[column].textContent = text));
    cells[1].dataset.state = row.state;
  });
  at("no-requests").hidden = rows.length > 0;
}

function emptyRow() {
  const row = document.createElement("tr");
  row.setAttribute("role", "row");
  for (const label of ["Id", "State", "Prompt", "Tokens", "Per pass", "Seconds"]) {
    const cell = row.insertCell();
    cell.setAttribute("role", "cell");
    cell.dataset.label = label;
  }
  return row;
}

function duration(seconds) {
  const s = Math.floor(seconds);
  const [days, hours, minutes] = [Math.floor(s / 86400), Math.floor(s / 3600) % 24, Math.floor(s / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${s % 60} s` : `${s} s`;
}
