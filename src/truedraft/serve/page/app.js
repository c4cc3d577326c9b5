// The page of a server: its live figures, and a playground.

import { call, setKey, storedKey } from "./api.js";
import { Live } from "./live.js";
import { Playground } from "./playground.js";

const at = (id) => document.getElementById(id);
const playground = new Playground();
const live = new Live(loadModel);

async function loadModel() {
  const { data } = await (await call("v1/models")).json();
  playground.setModel(data[0]);
  document.title = `${data[0].id} · truedraft`;
}

at("key").value = storedKey();
at("keep-key").checked = Boolean(storedKey());
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(at("key").value.trim(), at("keep-key").checked);
  live.retry();
});
live.run();
