// Torch's caching allocator: a port of trainer/fakegpu/allocator.py, equal to the byte (tests/planner/test_fit_page.py).
// Names are those of the Python file, which names its sources in torch. Streams do not share blocks.
"use strict";

const MIB = 2 ** 20, MIN_BLOCK = 512, SMALL_SIZE = MIB, SMALL_SEGMENT = 2 * MIB, LARGE_SEGMENT = 20 * MIB;
const MIN_LARGE_ALLOC = 10 * MIB, SEGMENT_STEP = 2 * MIB, ADDRESSES = 2 ** 50;
const roundUp = (number, step) => Math.ceil(number / step) * step;

class OutOfMemory extends Error {}

class Block {
  constructor(address, size, pool, segment = null) {
    this.address = address;
    this.size = size;
    this.pool = pool;
    this.segment = segment;  // start of its expandable segment
    this.requested = 0;
    this.allocated = false;
    this.mapped = true;
    this.previous = this.next = null;
  }

  // Keep the first `size` bytes and return a block of the rest, which is in no list yet.
  split(size) {
    const rest = new Block(this.address + size, this.size - size, this.pool, this.segment);
    rest.mapped = this.mapped;
    rest.previous = this;
    rest.next = this.next;
    if (this.next) this.next.previous = rest;
    this.next = rest;
    this.size = size;
    return rest;
  }

  // Merge with the neighbours that are free and, like this block, mapped or unmapped.
  merge() {
    const before = this.previous, after = this.next;
    if (before && !before.allocated && before.mapped === this.mapped) {
      before.pool.remove(before);
      this.address = before.address;
      this.size += before.size;
      this.previous = before.previous;
      if (this.previous) this.previous.next = this;
    }
    if (after && !after.allocated && after.mapped === this.mapped) {
      after.pool.remove(after);
      this.size += after.size;
      this.next = after.next;
      if (this.next) this.next.previous = this;
    }
  }

  get extent() {
    return this.next && !this.next.mapped ? this.size + this.next.size : this.size;
  }

  hasRoom(size) {
    let found = 0;
    for (let block = this; block && !block.allocated && found < size; block = block.next) found += block.size;
    return found >= size;
  }
}

// The free blocks of one stream, small or large: `free` by size and address, `unmapped` by address.
class Pool {
  constructor(small) {
    this.page = small ? SMALL_SEGMENT : LARGE_SEGMENT;
    this.free = [];
    this.unmapped = [];
  }

  // Return the place in `free` of the first block of at least `size` bytes, at `address` or above if equal.
  place(size, address = 0) {
    let low = 0, high = this.free.length;
    while (low < high) {
      const middle = (low + high) >> 1, block = this.free[middle];
      if (block.size < size || (block.size === size && block.address < address)) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  placeUnmapped(address) {
    const found = this.unmapped.findIndex(block => block.address >= address);
    return found < 0 ? this.unmapped.length : found;
  }

  insert(block) {
    if (block.mapped) this.free.splice(this.place(block.size, block.address), 0, block);
    else this.unmapped.splice(this.placeUnmapped(block.address), 0, block);
  }

  remove(block) {
    if (block.mapped) this.free.splice(this.place(block.size, block.address), 1);
    else this.unmapped.splice(this.placeUnmapped(block.address), 1);
  }
}

class CachingAllocator {
  // `capacity` limits the reserved bytes; `expandable` is expandable_segments of PYTORCH_CUDA_ALLOC_CONF.
  constructor(expandable = false, capacity = Infinity) {
    this.expandable = expandable;
    this.capacity = capacity;
    this.pools = new Map();
    this.allocated = this.peakAllocated = this.reserved = this.peakReserved = this.retries = this.freed = 0;
    this.nextAddress = 2 ** 40;
  }

  malloc(requested, stream = 0) {
    if (!(requested > 0)) throw new Error(`a block of ${requested} bytes cannot be allocated`);
    const size = Math.max(MIN_BLOCK, roundUp(requested, MIN_BLOCK)), small = size <= SMALL_SIZE;
    const key = 2 * stream + small;
    if (!this.pools.has(key)) this.pools.set(key, new Pool(small));
    const pool = this.pools.get(key);
    const block = this.cached(pool, size) ?? this.fromDriver(pool, size) ?? this.retried(pool, size);
    const rest = block.size - size;
    if (small || this.expandable ? rest >= MIN_BLOCK : rest > SMALL_SIZE) pool.insert(block.split(size));
    block.allocated = true;
    block.requested = requested;
    this.allocated += block.size;
    if (this.allocated > this.peakAllocated) this.peakAllocated = this.allocated;
    return block;
  }

  free(block) {
    block.allocated = false;
    this.allocated -= block.size;
    block.merge();
    block.pool.insert(block);
  }

  // Return all unused segments and mapped pages to the driver; return how many.
  releaseCached() {
    let freed = 0;
    for (const pool of this.pools.values()) for (const block of [...pool.free]) {
      const before = this.reserved;
      if (block.segment !== null) this.unmap(block);
      else if (!block.previous && !block.next) {
        pool.remove(block);
        this.reserved -= block.size;
      }
      freed += this.reserved < before;
    }
    return freed;
  }

  cached(pool, size) {
    const free = pool.free;
    let index = pool.place(size);
    if (index === free.length) return null;
    if (this.expandable)  // the extent of a block counts, so a larger block with a smaller extent is preferred
      while (index + 1 < free.length && free[index + 1].extent < free[index].extent) index++;
    return free.splice(index, 1)[0];
  }

  retried(pool, size) {
    this.freed += this.releaseCached();
    this.retries++;
    const block = this.fromDriver(pool, size);
    if (!block) throw new OutOfMemory();
    return block;
  }

  fromDriver(pool, size) {
    if (!this.expandable) {
      const segment = size <= SMALL_SIZE ? SMALL_SEGMENT : size < MIN_LARGE_ALLOC ? LARGE_SEGMENT : roundUp(size, SEGMENT_STEP);
      return this.reserve(segment) ? new Block(this.newAddress(segment), segment, pool) : null;
    }
    let block = this.lowest(pool, size);
    if (!block.mapped && !this.map(block, Math.min(block.size, size))) return null;
    while (block.size < size) {
      const gap = block.next;
      if (!this.map(gap, Math.min(gap.size, size - block.size))) return null;
      block = gap;  // mapping merged both
    }
    pool.remove(block);
    return block;
  }

  reserve(size) {
    if (this.reserved + size > this.capacity) return false;
    this.reserved += size;
    if (this.reserved > this.peakReserved) this.peakReserved = this.reserved;
    return true;
  }

  newAddress(size) {
    this.nextAddress += size;
    return this.nextAddress - size;
  }

  // Return the first free or unmapped block at which `size` bytes of addresses are unused.
  lowest(pool, size) {
    for (const gap of pool.unmapped) {
      const first = gap.previous && !gap.previous.allocated ? gap.previous : gap;
      if (first.hasRoom(size)) return first;
    }
    const addresses = roundUp(Math.max(ADDRESSES, size), pool.page), address = this.newAddress(addresses);
    const block = new Block(address, addresses, pool, address);
    block.mapped = false;
    pool.insert(block);
    return block;
  }

  map(block, size) {
    const pool = block.pool, mapped = roundUp(size, pool.page);
    if (!this.reserve(mapped)) return false;
    pool.remove(block);
    if (mapped < block.size) pool.insert(block.split(mapped));
    block.mapped = true;
    block.merge();
    pool.insert(block);
    return true;
  }

  // Unmap the pages that lie completely in a free `block`.
  unmap(block) {
    const pool = block.pool, segment = block.segment, begin = segment + roundUp(block.address - segment, pool.page);
    let end = block.address + block.size;
    end -= (end - segment) % pool.page;
    if (begin >= end) return;
    pool.remove(block);
    let middle = block;
    if (begin > block.address) {
      middle = block.split(begin - block.address);
      pool.insert(block);
    }
    if (middle.size > end - begin) pool.insert(middle.split(end - begin));
    middle.mapped = false;
    middle.merge();
    this.reserved -= end - begin;
    if (middle.previous || middle.next) pool.insert(middle);  // otherwise the whole segment is gone
  }
}
