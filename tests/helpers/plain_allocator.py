"""Torch's caching allocator written as plainly as can be, to test the fast one against.

It keeps no free lists and merges nothing: its state is which pages of which segments have memory, and which ranges of
addresses are in use. What is free, and what could be mapped, is worked out from that at every request. It writes down
what it does in the form of ``torch.cuda.memory._snapshot()``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MiB = 2**20


def up(number: int, step: int) -> int:
    return (number + step - 1) // step * step


@dataclass
class Segment:
    address: int
    size: int
    page: int
    stream: int
    small: bool
    mapped: set[int] = field(default_factory=set)  # addresses of pages
    used: dict[int, int] = field(default_factory=dict)  # address: size

    def ranges(self, mapped: bool) -> list[tuple[int, int]]:
        """Maximal ranges that are not in use, with or without memory."""
        cuts = {self.address, self.address + self.size, *self.used, *(a + s for a, s in self.used.items())}
        cuts = sorted({*cuts, *self.mapped, *(page + self.page for page in self.mapped)})
        found: list[tuple[int, int]] = []
        for begin, end in zip(cuts, cuts[1:], strict=False):
            page = begin - (begin - self.address) % self.page
            if (page in self.mapped) == mapped and not any(a <= begin < a + s for a, s in self.used.items()):
                first = found.pop()[0] if found and found[-1][1] == begin else begin
                found.append((first, end))
        return found


class PlainAllocator:
    def __init__(self, expandable: bool, capacity: int | None, addresses: list[int] | None = None) -> None:
        self.expandable, self.capacity = expandable, capacity
        self.addresses = addresses  # where the segments go, in this order; else one after the other
        self.next_address = 2**40
        self.segments: list[Segment] = []
        self.requested: dict[int, tuple[int, int]] = {}  # by address: (bytes, stream)
        self.peak_reserved = self.peak_allocated = self.retries = 0
        self.entries: list[dict] = []

    @property
    def reserved(self) -> int:
        return sum(len(segment.mapped) * segment.page for segment in self.segments)

    @property
    def allocated(self) -> int:
        return sum(sum(segment.used.values()) for segment in self.segments)

    def malloc(self, requested: int, stream: int = 0) -> int | None:
        size = up(max(requested, 1), 512)
        found = self._search(size, stream) or self._grow(size, stream)
        if found is None:
            self.retries += 1
            self.release()
            found = self._grow(size, stream)
        if found is None:
            self._record("oom", 0, size, stream)
            return None
        segment, begin, end = found
        rest = end - begin - size
        split = rest >= 512 if segment.small or self.expandable else rest > MiB
        segment.used[begin] = size if split else end - begin
        self.requested[begin] = (requested, stream)
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self._record("alloc", begin, requested, stream)
        return begin

    def free(self, address: int) -> None:
        (segment,) = [segment for segment in self.segments if address in segment.used]
        del segment.used[address]
        requested, stream = self.requested.pop(address)
        self._record("free_requested", address, requested, stream)
        self._record("free_completed", address, requested, stream)

    def release(self) -> None:
        for segment in list(self.segments):
            for begin, end in segment.ranges(mapped=True):
                pages = [page for page in segment.mapped if begin <= page and page + segment.page <= end]
                if pages:
                    segment.mapped -= set(pages)
                    action = "segment_unmap" if self.expandable else "segment_free"
                    self._record(action, min(pages), len(pages) * segment.page, segment.stream)
                    if not segment.mapped:
                        self.segments.remove(segment)

    def snapshot(self) -> dict:
        segments = []
        for segment in self.segments:
            free = {begin: end - begin for begin, end in segment.ranges(mapped=True)}
            for address, size in sorted({**free, **segment.used}.items()):
                last = segments[-1] if segments else None
                state = "active_allocated" if address in segment.used else "inactive"
                if last is None or last["address"] + last["total_size"] != address or address == segment.address:
                    segments.append({"device": 0, "address": address, "total_size": 0, "blocks": []})
                segments[-1]["blocks"].append({"size": size, "state": state})
                segments[-1]["total_size"] += size
        self._record("snapshot", 0, self.allocated, 0)
        return {
            "segments": segments,
            "device_traces": [self.entries],
            "allocator_settings": {"expandable_segments": self.expandable},
        }

    def _search(self, size: int, stream: int) -> tuple[Segment, int, int] | None:
        mine = [s for s in self.segments if s.stream == stream and s.small == (size <= MiB)]
        free = [(end - begin, begin, s) for s in mine for begin, end in s.ranges(mapped=True)]
        fits = sorted((item for item in free if item[0] >= size), key=lambda item: item[:2])
        if not fits:
            return None

        def could_be(item: tuple[int, int, Segment]) -> int:
            length, begin, segment = item
            gaps = dict(segment.ranges(mapped=False))
            return gaps.get(begin + length, begin + length) - begin

        choice = 0
        while self.expandable and choice + 1 < len(fits) and could_be(fits[choice + 1]) < could_be(fits[choice]):
            choice += 1
        length, begin, segment = fits[choice]
        return segment, begin, begin + length

    def _grow(self, size: int, stream: int) -> tuple[Segment, int, int] | None:
        small = size <= MiB
        if self.expandable:
            segment, begin = self._lowest(size, stream, small)
            return self._fill(segment, begin, size)
        length = 2 * MiB if small else 20 * MiB if size < 10 * MiB else up(size, 2 * MiB)
        if self.capacity is not None and self.reserved + length > self.capacity:
            return None
        segment = Segment(self._address(length), length, length, stream, small)
        self.segments.append(segment)
        segment.mapped.add(segment.address)
        self._reserved("segment_alloc", segment.address, length, stream)
        return segment, segment.address, segment.address + length

    def _lowest(self, size: int, stream: int, small: bool) -> tuple[Segment, int]:
        for segment in sorted(self.segments, key=lambda segment: segment.address):
            if segment.stream != stream or segment.small != small:
                continue
            before = {end: begin for begin, end in segment.ranges(mapped=True)}
            for gap, _ in segment.ranges(mapped=False):
                begin = before.get(gap, gap)
                wall = min([a for a in segment.used if a >= begin], default=segment.address + segment.size)
                if wall - begin >= size:
                    return segment, begin
        page = 2 * MiB if small else 20 * MiB
        length = up(2**50, page)
        segment = Segment(self._address(max(length, up(size, page))), max(length, up(size, page)), page, stream, small)
        self.segments.append(segment)
        return segment, segment.address

    def _fill(self, segment: Segment, begin: int, size: int) -> tuple[Segment, int, int] | None:
        while True:
            end = dict(segment.ranges(mapped=True)).get(begin, begin)
            if end - begin >= size:
                return segment, begin, end
            gap_end = dict(segment.ranges(mapped=False))[end]
            length = up(min(gap_end - end, size - (end - begin)), segment.page)
            if self.capacity is not None and self.reserved + length > self.capacity:
                return None
            segment.mapped.update(range(end, end + length, segment.page))
            self._reserved("segment_map", end, length, segment.stream)

    def _reserved(self, action: str, address: int, size: int, stream: int) -> None:
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._record(action, address, size, stream)

    def _address(self, length: int) -> int:
        if self.addresses is not None:
            return self.addresses.pop()
        address, self.next_address = self.next_address, self.next_address + length
        return address

    def _record(self, action: str, address: int, size: int, stream: int) -> None:
        entry = {"action": action, "size": size, "stream": stream, "time_us": len(self.entries), "frames": []}
        if action == "oom":
            entry["device_free"] = 0
        else:
            entry["addr"] = address
        self.entries.append(entry)
