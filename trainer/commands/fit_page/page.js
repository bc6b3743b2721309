// The page: reads the controls, searches the stored plans, and draws the answer.
"use strict";

const $ = id => document.getElementById(id), facts = JSON.parse($("facts").textContent);
// Cards before Ampere have other attention kernels than the traced ones, and no bf16.
facts.cards = facts.cards.filter(one => one.name === facts.card || (one.capability[0] >= 8 && one.reported.startsWith("NVIDIA")))
  .map(one => withRates(one, facts.costs));
const gb = bytes => bytes >= 1e9 ? (bytes / 1e9).toFixed(2) + " GB" : bytes >= 1e5 || !bytes
  ? (bytes / 1e6).toFixed(bytes >= 1e7 || !bytes ? 0 : 1) + " MB" : (bytes / 1e3).toFixed(1) + " kB";
const time = seconds => seconds < 10 ? +(1e3 * seconds).toPrecision(3) + " ms" : seconds.toFixed(1) + " s";
const make = (parent, tag, text = null, attributes = {}) => {  // text is never read as HTML
  const made = document.createElementNS(parent.namespaceURI, tag);
  if (text !== null) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return parent.appendChild(made);
};

// Data: scripts beside the page or in it call fit.add with the packed templates of a model.
const fit = {
  packed: new Map(),
  waiting: new Map(),
  add(name, text) {
    this.packed.set(name, text);
    this.waiting.get(name)?.();
  },
  async load(model) {
    if (!this.packed.has(model.name)) await new Promise((resolve, reject) => {
      this.waiting.set(model.name, resolve);
      make(document.body, "script", null, { src: model.file }).onerror = () => reject(new Error(`${model.file} is missing: keep the folder data beside this page`));
    });
    return unpack(this.packed.get(model.name));
  },
};

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return combine(await new Response(stream).json());
}

// Techniques, as flags of trainer, with the words for their values; the first value is the default.
const TECHNIQUES = {
  "lora": ["weights to train", { undefined: "all", 16: "LoRA adapters of rank 16" }],
  "model.lora.base": ["frozen weights", { undefined: "whole", nf4: "4 bits (QLoRA)" }],
  "memory.precision": ["precision", {}],
  "memory.stochastic_rounding": [null, {}],
  "memory.activation_checkpointing": ["activation checkpointing", { undefined: "none" }],
  "memory.activation_offload": ["activations", { undefined: "on the card", true: "on the host" }],
  "memory.optimizer_state_bits": ["optimizer", { undefined: "AdamW", 8: "AdamW, 8-bit state", 4: "AdamW, 4-bit state" }],
  "memory.cpu_offload": ["optimizer state", { undefined: "on the card", optimizer: "on the host" }],
  "memory.expandable_segments": ["segments", { undefined: "fixed", true: "expandable" }],
  "memory.optimizer_in_backward": ["update", { undefined: "after backward", true: "in backward" }],
};
const describeValue = (key, value) => TECHNIQUES[key]?.[1][value] ?? String(value ?? "default");

let model, combinations = [], card, loaded = 0;

function fill(select, options, value) {
  select.replaceChildren();
  for (const [key, text] of options) make(select, "option", text, { value: key });
  if (options.some(([key]) => String(key) === String(value))) select.value = value;
}

function showModels() {
  for (const group of new Set(facts.models.map(one => one.group))) {
    const part = make($("model"), "optgroup", null, { label: group ?? "this recipe" });
    for (const one of facts.models.filter(one => one.group === group)) make(part, "option", one.name, { value: one.name });
  }
  fill($("card"), facts.cards.map(one => [one.name, `${one.title}: ${gb(one.memory)}`]), facts.card ?? "rtx-4090");
  $("model").closest("label").hidden = facts.models.length < 2;
  if (facts.budget) $("budget").value = +facts.budget.toPrecision(4);
}

async function chooseModel() {
  model = facts.models.find(one => one.name === $("model").value);
  const number = ++loaded;
  try {
    const found = await fit.load(model);
    if (number !== loaded) return;  // another model was chosen in between
    combinations = found;
  } catch (error) {
    $("verdict").replaceChildren();
    make($("verdict"), "p", error.message);
    return;
  }
  const lengths = [...new Set(combinations.map(one => one.tokens))];
  fill($("tokens"), lengths.map(one => [one ?? "", one === null ? "image of the model's size" : `${one} tokens`]), $("tokens").value);
  $("tokens").closest("label").hidden = lengths.length < 2 && lengths[0] === null;
  const usual = model.batch ?? (model.task === "causal-lm" ? 16 : 64);
  if (!$("batch").dataset.own) $("batch").value = usual;
  const form = $("techniques"), chosen = Object.fromEntries([...form.querySelectorAll("select")].map(one => [one.name, one.value]));
  form.replaceChildren();
  for (const [key, [title]] of Object.entries(TECHNIQUES)) {
    const values = [...new Set(combinations.map(one => one.flags[key]))];
    if (values.length < 2 || !title) continue;
    const select = make(make(form, "label", title + " "), "select", null, { name: key });
    fill(select, [["any", "any: the fastest that fits"], ...values.map(value => [String(value), describeValue(key, value)])], chosen[key] ?? "any");
  }
  const check = make(form, "label", null, { class: "check" });
  make(check, "input", null, { type: "checkbox", id: "expandable" }).checked = chosen.expandable === "true";
  check.append("expandable segments of the allocator");
  show();
}

function read() {
  card = facts.cards.find(one => one.name === $("card").value);
  const share = Math.min(100, Math.max(0, $("budget").value === "" ? 90 : +$("budget").value)) / 100;
  const wanted = Object.fromEntries([...$("techniques").querySelectorAll("select")].map(one => [one.name, one.value]));
  const batch = Math.max(1, Math.min(4096, Math.round(+$("batch").value) || 1));
  return {
    batch,
    isTraced: batch === model.batch,
    budget: Math.min(card.usable, Math.floor(card.memory * share)),
    tokens: $("tokens").value === "" ? null : +$("tokens").value,
    micro: +$("micro").value || 0,
    expandable: $("expandable")?.checked ?? false,
    matches: one => Object.entries(wanted).every(([key, value]) => value === "any" || value === String(one.flags[key])),
  };
}

function show() {
  const began = performance.now(), asked = read();
  const own = combinations.filter(one => one.tokens === asked.tokens);
  const sizes = [...new Set(own.flatMap(one => one.microBatches(asked.batch, asked.isTraced)))].sort((a, b) => a - b);
  fill($("micro"), [[0, "any: the fastest that fits"], ...sizes.map(size => [size, `${Math.ceil(asked.batch / size)} × ${size}`])], asked.micro);
  asked.micro = +$("micro").value;
  const found = search(own.filter(asked.matches), asked, card, facts);
  showVerdict(found, asked);
  $("figure").hidden = !found;
  for (const id of ["parts", "largest"]) $(id).tBodies[0].replaceChildren();
  if (found) {
    draw(found.memory, asked.budget);
    showParts(found.memory);
  }
  $("verdict").dataset.ms = (performance.now() - began).toFixed(1);
  showPlans(own, asked, found);
}

function showVerdict(found, asked) {
  const verdict = $("verdict");
  verdict.replaceChildren();
  verdict.className = found?.runs ? "" : "no";
  const line = make(verdict, "p");
  if (!found) {
    make(line, "b", "not stored");
    make(verdict, "p", "No template has this batch, micro-batch and techniques: choose any micro-batch or technique, a batch with more divisors, or run trainer plan.");
    return;
  }
  const { memory, retries, micro, steps, seconds, combination } = found;
  const limit = `${gb(asked.budget)} for torch on ${card.title}`;
  const after = retries ? ` after ${retries.times} allocator ${retries.times === 1 ? "retry" : "retries"}` : "";
  const over = memory.reserved > asked.budget ? `: ${gb(memory.reserved - asked.budget)} too much` : found.runs ? "" : ": within the margin of 3 %, too close to say";
  make(line, "b", found.runs ? `fits${after}: ${gb(memory.reserved)} of ${limit}` : `does not fit: ${gb(memory.reserved)} of ${limit}${over}`);
  line.append(" ");
  make(line, "span", sourceOf(found, card), { class: "source" });
  const words = Object.entries(combination.flags).filter(([key]) => TECHNIQUES[key]?.[0]).map(([key, value]) => `${TECHNIQUES[key][0]}: ${describeValue(key, value)}`);
  const plan = `batch ${asked.batch} = ${steps} micro-batch${steps > 1 ? "es" : ""} of ${micro}; ${words.join("; ") || "no technique"}; about ${time(seconds)} per step (an estimate, ± 20 %)`;
  make(verdict, "p", (found.runs ? "the fastest that fits: " : "the smallest: ") + plan);
  make(verdict, "p", `Peak in ${memory.phase}: ${gb(memory.allocated)} allocated, ${gb(memory.fragmentation)} more reserved but unused. CUDA's context takes about ${gb(card.memory - card.usable)} in addition.`, { class: "dim" });
  for (const command of commands(found, asked)) {
    make(verdict, "pre").append(make(verdict, "code", command));
    const button = make(verdict, "button", "copy", { type: "button" });
    button.onclick = () => navigator.clipboard?.writeText(command).then(() => { button.textContent = "copied"; });
  }
}

// Commands that train or predict exactly this plan.
function commands({ combination, micro, template }, asked) {
  const flags = { ...combination.flags, "memory.micro_batch_size": micro };
  if (template.loss_chunk) flags["model.loss_chunk"] = template.loss_chunk * micro;
  const text = own => Object.entries(own).map(([key, value]) => ` --${key} ${value}`).join("");
  const start = asked.expandable && !flags["memory.expandable_segments"] ? "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True " : "";
  if (model.command) return [start + model.command + text(asked.batch === model.batch ? flags : { batch_size: asked.batch, ...flags })];
  const length = asked.tokens ? ` --tokens ${asked.tokens}` : "";
  const found = [`${start}trainer plan hf:${model.name} --task ${model.task}${length} --batch ${asked.batch} --gpu ${card.name}${text(flags)}`];
  if (model.task !== "sequence-classification") return found;
  return [`${start}trainer fit distilbert_imdb --model.name ${model.name} --model.weights ${model.name} --data.max_length ${asked.tokens}${text({ batch_size: asked.batch, ...flags })}`, ...found];
}

function showParts(memory) {
  const body = $("parts").tBodies[0], most = Math.max(...Object.values(memory.categories));
  for (const [name, [label, colour]] of Object.entries(facts.categories)) {
    if (!memory.categories[name]) continue;
    const row = make(body, "tr");
    make(row, "th", label, { class: "words", scope: "row" });
    make(row, "td", gb(memory.categories[name]));
    make(make(row, "td", null, { class: "wide" }), "span", null, { class: "bar", style: `--colour: ${colour}; width: ${100 * memory.categories[name] / most}%` });
  }
  for (const [category, op, phase, size] of memory.largest.slice(0, 8)) {
    const row = make($("largest").tBodies[0], "tr");
    make(row, "td", `${op || "the run"} (${facts.categories[category][0]})`, { class: "words" });
    make(row, "td", phase, { class: "words" });
    make(row, "td", gb(size));
  }
}

// The table of all combinations, a row at a time, so that the page stays responsive.
let filling = 0;
function showPlans(own, asked, found) {
  const body = $("plans").tBodies[0], number = ++filling;
  body.replaceChildren();
  const next = place => {
    if (number !== filling || place === own.length) return;
    const one = search([own[place]], asked, card, facts, false), row = make(body, "tr");
    if (own[place] === found?.combination) row.className = "chosen";
    const words = Object.entries(own[place].flags).filter(([key]) => TECHNIQUES[key]?.[0]).map(([key, value]) => `${TECHNIQUES[key][0]}: ${describeValue(key, value)}`);
    make(row, "td", words.join("; ") || "none", { class: "words" });
    make(row, "td", one ? `${one.steps} × ${one.micro}` : "not stored");
    make(row, "td", one ? gb(one.memory.reserved) : "");
    make(row, "td", one ? time(one.seconds) : "");
    make(row, "td", one ? one.retries ? "after retries" : one.runs ? "yes" : "no" : "", { class: one?.runs ? "yes" : "no" });
    make(row, "td", one ? sourceOf(one, card) : "", { class: "optional" });
    setTimeout(next, 0, place + 1);
  };
  setTimeout(next, 0, 0);
}

// The curve: stacked areas for allocated memory, a line for reserved memory, and a dashed line for the budget.
function draw(memory, budget) {
  const svg = $("curve"), wide = Math.max(300, svg.clientWidth), left = 62, top = 22, low = 300, count = memory.line.length;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${wide} 308`);
  const height = 1.12 * (budget > 2.5 * memory.reserved ? memory.reserved : Math.max(memory.reserved, budget));
  const x = place => left + (wide - left) * place / Math.max(1, count - 1), y = value => low - (low - top) * value / height;
  for (let step = 0; step <= 4; step++) {
    make(svg, "line", null, { x1: left, x2: wide, y1: y(height * step / 4), y2: y(height * step / 4), stroke: "var(--line)" });
    make(svg, "text", gb(height * step / 4), { x: 0, y: y(height * step / 4) + (step ? 4 : 0), style: "font-size: 11px" });
  }
  let below = new Array(count).fill(0);
  for (const [name, [, colour]] of Object.entries(facts.categories)) {
    const above = below.map((value, place) => value + memory.curve[CATEGORIES.indexOf(name)][place]);
    const edge = [...above.map((value, place) => [place, value]), ...below.map((value, place) => [place, value]).reverse()];
    make(svg, "polygon", null, { points: edge.map(([place, value]) => x(place).toFixed(1) + "," + y(value).toFixed(1)).join(" "), fill: colour, opacity: .85 });
    below = above;
  }
  const line = memory.line.map((value, place) => x(place).toFixed(1) + "," + y(value).toFixed(1)).join(" ");
  make(svg, "polyline", null, { points: line, fill: "none", stroke: "var(--dim)", "stroke-width": 2 });
  if (budget <= height) {
    make(svg, "line", null, { x1: left, x2: wide, y1: y(budget), y2: y(budget), stroke: "var(--ink)", "stroke-dasharray": "7 5" });
    make(svg, "text", "budget", { x: wide - 4, y: y(budget) - 4, "text-anchor": "end" });
  }
  memory.marks.forEach(([place, phase], number) => {
    const end = x(number + 1 < memory.marks.length ? memory.marks[number + 1][0] : count - 1);
    make(svg, "line", null, { x1: x(place), x2: x(place), y1: top - 4, y2: low, stroke: "var(--dim)", opacity: .4 });
    if (end - x(place) > 7.5 * phase.length) make(svg, "text", phase, { x: x(place) + 3, y: 13 });
  });
  const cursor = make(svg, "line", null, { y1: top, y2: low, stroke: "var(--ink)" });
  let now = below.indexOf(Math.max(...below));
  const tell = place => {
    now = Math.min(count - 1, Math.max(0, place));
    const caption = $("caption"), mark = memory.marks.filter(one => one[0] <= now).pop();
    caption.replaceChildren();
    make(caption, "span", `${mark?.[1] ?? ""}: ${gb(memory.line[now])} reserved (grey line), ${gb(below[now])} allocated: `);
    for (const [name, [label, colour]] of Object.entries(facts.categories)) {
      make(caption, "span", `${label} ${gb(memory.curve[CATEGORIES.indexOf(name)][now])}`, { class: "key", style: "--colour: " + colour });
      caption.append(" ");
    }
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(now));
  };
  svg.onpointermove = event => {
    const box = svg.getBoundingClientRect();
    tell(Math.round(((event.clientX - box.left) / box.width * wide - left) / (wide - left) * (count - 1)));
  };
  svg.onkeydown = event => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    tell(now + step * (event.shiftKey ? 20 : 4));
  };
  tell(now);
}

function showErrors() {
  const signed = value => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(1);
  for (const [kind, one] of Object.entries(facts.errors)) {
    const row = make($("errors").tBodies[0], "tr");
    make(row, "th", kind, { class: "words", scope: "row" });
    for (const text of [one.rows, one.sources, `${signed(one.low)} to ${signed(one.high)} %`, `${one.median.toFixed(1)} %`]) make(row, "td", text);
  }
  const notes = [
    `Traced on a simulated ${facts.traced}` + (facts.versions ? `, with ${facts.versions}; sizes from the published configurations.` : "."),
    "Traced: a trace of exactly this micro-batch was replayed. Interpolated: every size lies on the straight line between two traces; extrapolated: beyond the larger one. One micro-step per step is derived from a trace of two.",
    "A card with cuDNN attention (H100, H200, B200) may need other temporary memory for image models than the traced kernels: its answers count as interpolated.",
    "A plan fits if its reserved peak leaves 3 % of the budget free. Of techniques that are not stored here, trainer plan also tries combinations.",
    "Language models hold the logits of a part of the tokens at a time (model.loss_chunk).",
  ];
  for (const note of notes) make($("notes"), "li", note);
}

function start() {
  showModels();
  showErrors();
  $("model").onchange = chooseModel;
  $("batch").oninput = () => { $("batch").dataset.own = "yes"; show(); };
  for (const id of ["tokens", "card", "budget", "micro"]) $(id).oninput = show;
  $("techniques").oninput = show;
  for (const id of ["controls", "techniques"]) $(id).onsubmit = event => event.preventDefault();
  window.onresize = show;
  chooseModel();
}
document.addEventListener("DOMContentLoaded", start);
