// Calls of the server's API, with the API key where there is one.

const STORED = "truedraft-api-key";
let key = sessionStorage.getItem(STORED) ?? "";

/** Use an API key from now on. keep: also after the page is loaded again, until its tab is closed. */
export function setKey(value, keep) {
  key = value;
  if (keep && key) sessionStorage.setItem(STORED, key);
  else sessionStorage.removeItem(STORED);
}

export const storedKey = () => sessionStorage.getItem(STORED) ?? "";

/** An answer of the API that is an error. */
export class ApiError extends Error {
  /** param: the path of the parameter that the error is about; null where there is none. */
  constructor(status, message, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** The response to a call; an answer other than 2xx is thrown as ApiError. path: relative to this page. */
export async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  try {
    return ofBody(await response.json(), response.status);
  } catch {
    return new ApiError(response.status, `the server answered ${response.status} ${response.statusText}`);
  }
}

/** The error of a body `{"error": {"message", "param"}}`. */
export function ofBody(body, status = 500) {
  return new ApiError(status, String(body.error.message), body.error.param ?? null);
}

/** The data of the server-sent events of a response, one string for each event. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice("data: ".length);
  }
}
