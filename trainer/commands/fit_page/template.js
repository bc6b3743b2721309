// Templates of traces: the events of a run at any micro-batch, what they need, and how long a step takes.
// A template holds the columns of event_columns in trainer/fakegpu/snapshot.py; costs are those of trainer/fakegpu/cost.py.
"use strict";

const EMPTY_CACHE = -1, FREE = -2, WORKSPACE = 8519680, HOST_STREAM = -1, HOST_THREAD = -2;
const CATEGORIES = ["params", "gradients", "optimizer", "activations", "temporaries", "batch"];

// Events in order: the kind of an allocated block, EMPTY_CACHE, or FREE, and for a free the place of its allocation.
class Events {
  constructor(kinds, owners, marks) {
    this.kinds = kinds;
    this.owners = owners;
    this.marks = marks;  // [index of the next event, phase]
  }

  static from(template) {
    const { code, marks } = template, kinds = new Int32Array(code.length), owners = new Int32Array(code.length), live = [];
    for (let at = 0; at < code.length; at++) {
      kinds[at] = code[at] > 0 ? code[at] - 1 : code[at] < 0 ? FREE : EMPTY_CACHE;
      if (code[at] > 0) live.push(at);
      else if (code[at] < 0) owners[at] = live.splice(live.length + code[at], 1)[0];
    }
    return new Events(kinds, owners, marks);
  }

  // The same run with one micro-step per step: without the events of every second one. What it would have freed
  // is freed, and what it would have left is not allocated. Tests compare this with a trace of one micro-step.
  whole() {
    const cuts = [];
    for (let at = 3; at + 1 < this.marks.length; at++)
      if (this.marks[at][1] === "forward" && this.marks[at - 2][1] === "forward") cuts.push([this.marks[at][0], this.marks[at + 2][0]]);
    const kinds = [], owners = [], place = new Int32Array(this.kinds.length).fill(-1), moved = [];
    for (let at = 0; at < this.kinds.length; at++) {
      moved.push(kinds.length);
      const kind = this.kinds[at], inside = cuts.some(([from, to]) => from <= at && at < to);
      if (kind === FREE ? place[this.owners[at]] < 0 : inside) continue;
      place[at] = kinds.length;
      kinds.push(kind);
      owners.push(kind === FREE ? place[this.owners[at]] : 0);
    }
    moved.push(kinds.length);
    const marks = this.marks.filter(([at]) => !cuts.some(([from, to]) => from <= at && at < to));
    return new Events(Int32Array.from(kinds), Int32Array.from(owners), marks.map(([at, phase]) => [moved[at], phase]));
  }
}

// One combination of techniques at one length of input; `sizes` are the micro-batches that were traced.
class Template {
  constructor(columns) {
    Object.assign(this, { tokens: null, least: columns.sizes[0], single: columns.micro_steps.length === 2 }, columns);
    this.cache = {};
  }

  events(whole) {
    this.cache.all ??= Events.from(this);
    if (!whole || this.single) return this.cache.all;
    return this.cache.whole ??= this.cache.all.whole();
  }

  isTraced(micro) {
    return this.sizes.includes(micro);
  }

  // Between traces every size is a straight line of the micro-batch.
  at(values, from, micro) {
    const [small, large] = this.sizes, first = values[from];
    return large === undefined ? first : first + (values[from + 1] - first) / (large - small) * (micro - small);
  }

  // Bytes of each kind of block; the workspace of a matrix product depends on the card.
  bytes(micro, workspace) {
    return this.blocks.map(row => row[4] === WORKSPACE && row[4 + this.sizes.length - 1] === WORKSPACE
      ? workspace : Math.round(this.at(row, 4, micro)));
  }

  // A lower bound of the peak of allocated memory: rounded sizes, without rests that are not split.
  floor(micro, whole, workspace) {
    const { kinds, owners } = this.events(whole), bytes = this.bytes(micro, workspace).map(size => roundUp(size, MIN_BLOCK));
    let now = 0, most = 0;
    for (let at = 0; at < kinds.length; at++) {
      if (kinds[at] >= 0) now += bytes[kinds[at]];
      else if (kinds[at] === FREE) now -= bytes[kinds[owners[at]]];
      if (now > most) most = now;
    }
    return most;
  }

  // Seconds of a step with `microSteps` micro-steps on a card, as cost.step_cost.
  seconds(micro, microSteps, card, constants) {
    const count = this.sizes.length;
    const rows = this.operations.map(row => operation(row, this.at(row, 5, micro), this.at(row, 5 + count, micro), card, constants));
    const [middle, end] = this.micro_steps.slice(-2), work = this.work, first = work.slice(0, middle);
    if (this.single) return stepSeconds(work, rows, card, constants);
    if (microSteps === 1) return stepSeconds([...first, ...work.slice(end)], rows, card, constants);
    const once = stepSeconds(work, rows, card, constants);
    if (microSteps === 2) return once;
    return once + (microSteps - 2) * (stepSeconds([...first, ...work], rows, card, constants) - once);
  }
}

// Replay events with the allocator. Without `details`, only peaks; null if the capacity is too small.
function replay(events, bytes, blocks, { expandable = false, capacity = Infinity, details = false } = {}) {
  const allocator = new CachingAllocator(expandable, capacity), { kinds, owners } = events, count = kinds.length;
  const held = new Array(count), sizes = details ? new Float64Array(count) : null;
  const allocated = details ? new Float64Array(count) : null, reserved = details ? new Float64Array(count) : null;
  try {
    for (let at = 0; at < count; at++) {
      const kind = kinds[at];
      if (kind >= 0) {
        const block = held[at] = allocator.malloc(bytes[kind], blocks[kind][2]);
        if (details) sizes[at] = block.size;
      } else if (kind === FREE) {
        if (details) sizes[at] = -held[owners[at]].size;
        allocator.free(held[owners[at]]);
        held[owners[at]] = null;
      } else allocator.releaseCached();
      if (details) {
        allocated[at] = allocator.allocated;
        reserved[at] = allocator.reserved;
      }
    }
  } catch (error) {
    if (error instanceof OutOfMemory) return null;
    throw error;
  }
  const found = { allocated: allocator.peakAllocated, reserved: allocator.peakReserved, retries: allocator.retries, freed: allocator.freed };
  return details ? { ...found, ...describe(events, sizes, allocated, reserved, blocks) } : found;
}

// The peak's parts, and a curve of about 800 points by category, with both peaks.
function describe(events, sizes, allocated, reserved, blocks) {
  const count = sizes.length, points = new Set([count - 1]), buckets = Math.min(count, 400);
  for (let bucket = 0; bucket < buckets; bucket++) {
    const from = Math.floor(bucket * count / buckets), to = Math.floor((bucket + 1) * count / buckets);
    let most = from, taken = from;
    for (let at = from; at < to; at++) {
      if (allocated[at] > allocated[most]) most = at;
      if (reserved[at] > reserved[taken]) taken = at;
    }
    points.add(most).add(taken);
  }
  const peak = allocated.indexOf(allocated.reduce((a, b) => Math.max(a, b), 0)), held = CATEGORIES.map(() => 0);
  const curve = CATEGORIES.map(() => []), at = [...points].sort((a, b) => a - b), live = new Map();
  let categories = null, parts = null;
  for (let event = 0; event < count; event++) {
    const kind = events.kinds[event], owner = kind === FREE ? events.owners[event] : event, row = blocks[events.kinds[owner]];
    if (kind !== EMPTY_CACHE) held[CATEGORIES.indexOf(row[3])] += sizes[event];
    if (kind >= 0) live.set(event, row);
    else if (kind === FREE) live.delete(owner);
    if (event === peak) {
      categories = Object.fromEntries(CATEGORIES.map((name, place) => [name, held[place]]));
      parts = new Map();
      for (const [own, [op, phase, , category]] of live) {
        const name = `${category}\t${op}\t${phase}`;
        parts.set(name, (parts.get(name) ?? 0) + sizes[own]);
      }
    }
    if (points.has(event)) curve.forEach((line, place) => line.push(held[place]));
  }
  const marks = events.marks.filter(([event]) => event < count).map(([event, phase]) => [at.findIndex(point => point >= event), phase]);
  const phase = events.marks.filter(([event]) => event <= peak).pop()?.[1] ?? "";
  const largest = [...parts].sort((a, b) => b[1] - a[1]).map(([name, size]) => [...name.split("\t"), size]);
  return { peak, phase, categories, largest, curve, marks, line: at.map(event => reserved[event]), fragmentation: reserved[peak] - allocated[peak] };
}

// A card with the rates of its products, memory and multiprocessors: GPU.product_rate and GPU.clocks of gpus.py.
function withRates(gpu, { MEMORY }) {
  const part = dtype => ({ tfloat32: 1, float16: 2, bfloat16: 2 })[dtype] ?? 0, units = gpu.capability[0] === 8 && gpu.capability[1] === 0 ? 64 : 128;
  const rates = Object.fromEntries(Object.entries(gpu.flops).map(([dtype, rate]) => [dtype, rate * gpu.products[part(dtype)]]));
  return { ...gpu, rates, moves: gpu.bandwidth * MEMORY, clocks: gpu.flops.float32 / (2 * units) };
}

// One operation with its times on a card: [kind, phase, stream, op, CPU seconds, seconds on the card, bytes].
function operation([op, kind, phase, stream, dtype], flops, bytes, card, constants) {
  const { LAUNCH, NO_KERNEL, KERNEL, EXPOSED, ELEMENTS, ATTENTION, COPY } = constants, launch = NO_KERNEL[op] ?? LAUNCH;
  if (kind !== "compute") return { op, kind, phase, stream, launch, bytes, seconds: COPY + bytes / card.bus };
  let seconds = 0;
  if (flops || bytes) {
    const rate = (card.rates[dtype] ?? card.rates.float32) * (op.includes("attention") ? ATTENTION : 1);
    const bits = /\d+/.exec(dtype), limit = ELEMENTS * (bits ? bits[0] / 8 : 1) * card.clocks;
    const moves = flops ? card.moves : Math.min(card.moves, limit), arithmetic = flops / rate, traffic = bytes / moves;
    seconds = KERNEL + Math.max(arithmetic, traffic) + EXPOSED * Math.min(arithmetic, traffic);
  }
  return { op, kind, phase, stream, launch, bytes, seconds };
}

// Seconds until all work is done: ResourceClocks of cost.py without collectives.
function stepSeconds(work, rows, card, { HOST_MEMORY }) {
  let launched = 0, computed = 0, phase = "", ahead = [];
  const free = { to_device: 0, to_host: 0 }, done = () => Math.max(launched, computed, free.to_device, free.to_host);
  for (const number of work) {
    const one = rows[number];
    if (one.phase !== phase) {
      computed = Math.max(computed, free.to_device);
      if (phase === "backward") computed = done();
      phase = one.phase;
      const end = done();
      let updated = 0;
      for (const [arrived, item] of ahead)
        if (item.op !== "copy_" || Math.max(updated, arrived) < end) updated = Math.max(updated, arrived) + item.bytes / HOST_MEMORY;
      ahead = [];
      launched = computed = Math.max(end, updated);
    }
    if (one.stream === HOST_THREAD) ahead.push([Math.max(launched, free.to_host), one]);
    else if (one.stream === HOST_STREAM) launched = computed = done() + one.bytes / HOST_MEMORY;
    else {
      launched += one.launch;
      if (one.kind === "compute") computed = Math.max(launched, computed) + one.seconds;
      else {
        const needs = one.kind === "to_host" || !one.stream ? computed : 0;
        free[one.kind] = Math.max(launched, free[one.kind], needs) + one.seconds;
        if (!one.stream) computed = free[one.kind];
      }
    }
  }
  return done();
}

// All templates of one combination of techniques and one length, each for micro-batches from `least` on.
class Combination {
  constructor(templates) {
    this.templates = templates;
    this.flags = templates[0].flags;
    this.tokens = templates[0].tokens;
  }

  templateFor(micro) {
    const found = this.templates.filter(one => one.least <= micro).pop();
    return found && (found.sizes.length > 1 || found.sizes[0] === micro) ? found : null;
  }

  // The micro-batches that have a template and cut `batch` evenly, or were traced with it.
  microBatches(batch, isTraced) {
    const found = [];
    for (let micro = 1; micro <= batch; micro++) {
      const template = this.templateFor(micro);
      if (batch % micro && !(isTraced && template?.isTraced(micro))) continue;
      if (template && (!template.single || micro === batch)) found.push(micro);
    }
    return found;
  }
}

function combine(plans) {
  const groups = new Map();
  for (const plan of plans) {
    const key = JSON.stringify([plan.flags, plan.tokens]);
    groups.set(key, [...groups.get(key) ?? [], new Template(plan)]);
  }
  return [...groups.values()].map(templates => new Combination(templates.sort((a, b) => a.least - b.least)));
}

const sourceOf = ({ template, micro }, card) => [9, 10].includes(card.capability[0]) && template.blocks.some(row => row[0].includes("flash_attention") && !template.tokens)
  ? "interpolated" : template.isTraced(micro) ? "traced" : micro > Math.max(...template.sizes) ? "extrapolated" : "interpolated";

const isExpandable = ({ flags }, asked) => asked.expandable || flags["memory.expandable_segments"] === true;

// The fastest plan of `combinations` that fits a card; else the one that needs least; null if none is stored. Plans
// with allocator retries count as 3 % slower, as in trainer plan.
function search(combinations, asked, card, { costs, margin }, details = true) {
  const limit = Math.floor(asked.budget / (1 + margin)), plans = [];
  for (const combination of combinations) for (const micro of combination.microBatches(asked.batch, asked.isTraced)) {
    if (asked.micro && micro !== asked.micro) continue;
    const template = combination.templateFor(micro), steps = Math.ceil(asked.batch / micro);
    const least = template.floor(micro, steps === 1, card.workspace);
    plans.push({ combination, template, micro, steps, least });
  }
  const run = (plan, options) => {
    const events = plan.template.events(plan.steps === 1), bytes = plan.template.bytes(plan.micro, card.workspace);
    return replay(events, bytes, plan.template.blocks, { expandable: isExpandable(plan.combination, asked), ...options });
  };
  const possible = plans.filter(plan => plan.least <= limit);
  for (const plan of possible) plan.seconds = plan.template.seconds(plan.micro, plan.steps, card, costs);
  let best = null;
  for (const plan of possible.sort((a, b) => a.seconds - b.seconds)) {
    if (best && plan.seconds >= best.rank) break;
    const memory = run(plan, {});
    let rank = plan.seconds, retries = null;
    if (memory.reserved > limit) {
      const within = run(plan, { capacity: limit });
      if (!within) continue;
      retries = { times: within.retries, freed: within.freed };
      plan.seconds += within.freed / 2 * costs.CUDA_FREE;  // two steps were traced
      rank = plan.seconds * 1.03;
    }
    if (!best || rank < best.rank) best = { ...plan, rank, retries, memory, runs: true };
  }
  const chosen = best ?? plans.sort((a, b) => a.least - b.least)[0];
  if (!chosen) return null;
  chosen.seconds ??= chosen.template.seconds(chosen.micro, chosen.steps, card, costs);
  if (details || !chosen.memory || chosen.retries) chosen.memory = run(chosen, { details, capacity: chosen.retries ? limit : Infinity });
  return chosen;
}
