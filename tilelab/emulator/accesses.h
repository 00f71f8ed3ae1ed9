// Which accesses to memory are allowed? engine.cpp includes this file.
//
// The cell is compiled with g++'s instrumentation for race detection, without its library: each load and store calls a
// function __tsan_… below. An access must be aligned and hit a tensor or shared memory. Two threads may touch the same
// bytes, one of them writing, only if something orders them: a barrier, an mbarrier, or fences with an atomic.
//
// Each thread has a clock, `now`, which ticks when it publishes what it did. It knows up to which moment of each other
// thread all accesses lie before its own: `base`, which a barrier of the whole block gives to all threads, and `row`,
// its own addition. A copy engine's load counts as a thread of its own, with the phases of its mbarrier as the clock.
// A moment is 22 bits of the block's serial number, 12 of the thread, 29 of its clock, and 1 for atomic and volatile
// accesses, which do not race with each other.

struct Slot {  // who has touched some bytes last: a writer, and the first and the last reader since then
    u64 write, read[2];
    bool operator==(const Slot& other) const {
        return write == other.write && read[0] == other.read[0] && read[1] == other.read[1];
    }
};
struct Cell : Slot {  // of 4 bytes of memory, or, in `split`, of each one
    u32 split, launch;
};
struct Region {
    u64 begin, end;
    Cell* cells;  // null: accesses are not recorded
    int tensor;  // its number, or -1 for shared memory
    u64 since;  // what is recorded of an earlier moment does not count
};

constexpr size_t MOST_TRACKED = 96 << 20;  // bytes of memory with a cell for every 4 bytes
constexpr u32 MBARRIER = 4095;  // the "thread" that has written an mbarrier
static Cell* all_cells;
static size_t cells_used;
static std::vector<Slot> split_slots;
static std::vector<Region> regions;  // static and dynamic shared memory of the loaded block, and tensors
static Region recent[16];
static Region& recent_at(u64 address) { return recent[u32(address >> 12) * 0x9e3779b1 >> 28]; }
static struct {  // the thread that runs
    u64 stack = 0, identity = 0;  // its moments without the clock
    u64 before = 0;  // a moment of another thread that lies before its accesses
} running;
static u32 last_serial, launch_number;
static u64 first_moment;  // of this launch; older ones do not count
static std::vector<dim3> serial_blocks;  // by serial number, from this launch's first one on
static u64 effects;  // counts what a waiting thread could see
static std::vector<u8> is_written;  // by tensor: whether the threads of this launch have written to it
static std::unordered_map<u32, Knowledge> viewed;  // by a block's serial number: what came before a proxy fence in it
static std::unordered_map<u64, u32> fenced_global;  // by thread, as in a moment: its last proxy fence of global memory
static std::vector<u64> read_bytes;  // by tensor: what the threads of this launch have read, without copies
// What is known to whoever reads an atomic or volatile variable; see key_in_block.
static std::unordered_map<u64, Knowledge> signals;

// A write that races may still be harmless, if it writes the value that is there. The next access tells.
static struct {
    u64 address, other;
    bool other_writes;
    u32 bytes = 0;
    u8 before[16];
    Where where;
    bool is_in_step;  // the other write is of a lane of the same warp, by the same instruction
} unsettled;

// ---- knowledge

static void raise(std::vector<u32>& to, const std::vector<u32>& from) {
    if (to.size() < from.size()) to.resize(from.size());
    for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}
static void raise(std::vector<u32>& to, u32 component, u32 clock) {
    if (to.size() <= component) to.resize(component + 1);
    to[component] = std::max(to[component], clock);
}
static std::vector<u32>& known_of(Clock& clock, u32 owner, u32 serial) {
    return owner == serial ? clock.known : clock.others[serial];
}
// Add what is known in `from`, a clock of a block, to that of a block, or to one of no block, number 0.
static void join(Clock& to, u32 to_serial, const Clock& from, u32 from_serial) {
    if (from_serial) raise(known_of(to, to_serial, from_serial), from.known);
    for (auto& [serial, known] : from.others) raise(known_of(to, to_serial, serial), known);
}
static Knowledge merge(const Knowledge& a, const Knowledge& b, u32 serial) {
    if (!a || a == b) return b;
    if (!b) return a;
    static Knowledge last_a, last_b, last;  // the threads of a warp often know the same
    if (a == last_a && b == last_b) return last;
    auto both = std::make_shared<Clock>(*a);
    join(*both, serial, *b, serial);
    last_a = a, last_b = b, last = both;
    return both;
}

static void publish_own(const Thread& thread, std::vector<u32>& known) {
    const Block& block = blocks[thread.block];
    raise(known, u32(&thread - &threads[block.first_thread]), thread.now);
    if (thread.products_waited) raise(known, thread.product_component, thread.products_waited);
    if (thread.stores_waited) raise(known, thread.store_component, thread.stores_waited);
}
// Let whoever acquires `to` know what the thread has done. Threads of its own block share its base already.
// If it does not release, it tells only what came before its last fence.
static void publish(Thread& thread, Clock& to, u32 to_serial, bool releases = true) {
    const Block& block = blocks[thread.block];
    if (!releases) {
        for (auto& released : {thread.released, block.released})
            if (released) join(to, to_serial, *released, block.serial);
        return;
    }
    if (block.serial != to_serial && block.base && to.last_base != block.base)
        join(to, to_serial, *block.base, block.serial), to.last_base = block.base;
    if (thread.row && to.last_row != thread.row)
        join(to, to_serial, *thread.row, block.serial), to.last_row = thread.row;
    publish_own(thread, known_of(to, to_serial, block.serial));
    ++thread.now;
}
static void acquire(Thread& thread, const Knowledge& knowledge) {
    if (knowledge != thread.acquired)
        thread.row = merge(thread.row, knowledge, blocks[thread.block].serial), thread.acquired = knowledge;
}
// All threads of a block have met.
static void join_block(Block& block) {
    auto all = block.base ? std::make_shared<Clock>(*block.base) : std::make_shared<Clock>();
    std::shared_ptr<Clock> released;
    const Clock* last = nullptr;
    const u32 count = blockDim.x * blockDim.y * blockDim.z;
    for (u32 i = 0; i < count; ++i) {
        Thread& thread = threads[block.first_thread + i];
        if (thread.row && thread.row.get() != last) join(*all, block.serial, *thread.row, block.serial);
        last = thread.row.get();
        publish_own(thread, all->known);
        ++thread.now;
        thread.released_in_block = nullptr;
        if (!thread.released) continue;
        if (!released) released = block.released ? std::make_shared<Clock>(*block.released) : std::make_shared<Clock>();
        join(*released, block.serial, *thread.released, block.serial);
        thread.released = nullptr;
    }
    for (u32 i = 0; i < count; ++i) threads[block.first_thread + i].row = nullptr;
    block.base = all;
    if (released) block.released = released;
}

static u64 moment(u32 serial, u32 component, u32 clock, bool relaxed = false) {
    return u64(serial) << 42 | u64(component) << 30 | u64(clock & 0x1fffffff) << 1 | relaxed;
}
static u64 moment(const Thread& thread, bool relaxed = false) {
    const Block& block = blocks[thread.block];
    return moment(block.serial, u32(&thread - &threads[block.first_thread]), thread.now, relaxed);
}

static bool is_known(const std::vector<u32>& known, u32 component, u32 clock) {
    return component < known.size() && known[component] >= clock;
}
// Return whether a moment lies before everything that the thread does from now on.
static bool is_before(u64 at, const Thread& thread) {
    if (at < first_moment) return true;
    const Block& block = blocks[thread.block];
    const u32 serial = u32(at >> 42), component = u32(at >> 30) & 4095, clock = u32(at >> 1) & 0x1fffffff;
    if (serial == block.serial) {
        if (&threads[block.first_thread] + component == &thread) return true;
        if (component == thread.product_component && clock <= thread.products_waited) return true;
        if (component == thread.store_component && clock <= thread.stores_waited) return true;
        return (block.base && is_known(block.base->known, component, clock)) ||
               (thread.row && is_known(thread.row->known, component, clock));
    }
    for (auto* knowledge : {&block.base, &thread.row}) {
        if (!*knowledge) continue;
        const auto found = (*knowledge)->others.find(serial);
        if (found != (*knowledge)->others.end() && is_known(found->second, component, clock)) return true;
    }
    return false;
}

void fence_memory(bool in_block) {
    Thread& thread = me();
    Block& block = my_block();
    if (thread.read) thread.row = merge(thread.row, std::exchange(thread.read, nullptr), block.serial);
    auto all = std::make_shared<Clock>();
    if (block.base) *all = *block.base;
    if (thread.row) join(*all, block.serial, *thread.row, block.serial);
    publish_own(thread, all->known);
    ++thread.now;
    thread.released_in_block = in_block ? all : nullptr;
    if (!in_block) thread.released = all;
}

// ---- where an access goes

static Cell* cells_at(const Region& region, u64 address) { return region.cells + (address / 4 - region.begin / 4); }

static std::string describe_bytes(u64 address) {
    std::string said;
    u64 nearest = 1 << 30;
    for (auto& region : regions) {
        if (region.tensor < 0 || region.begin == region.end) continue;
        const bool is_behind = address >= region.end;
        const u64 distance = is_behind ? address - region.end : region.begin - address;
        if (distance >= nearest) continue;
        nearest = distance;
        said = text("%llu bytes %s of the tensor `%s`", distance, is_behind ? "past the end" : "before the start",
                    tensor_names[region.tensor].c_str());
    }
    return said;
}

// Return the first moment of a block's cluster: what is recorded before is of other blocks, which had this memory.
static u64 cluster_moment(u32 block) { return moment(blocks[first_of_cluster(block)].serial, 0, 0); }

static const Region* find_region(u64 address, u64 bytes) {
    for (auto& region : regions)
        if (region.begin <= address && address + bytes <= region.end) return &region;
    for (auto& block : blocks) {  // shared memory of another block of the cluster
        const u64 begin = reinterpret_cast<u64>(block.memory.data());
        if (address - begin >= shared_bytes || address - begin + bytes > shared_bytes) continue;
        static Region elsewhere;
        elsewhere = {begin, begin + shared_bytes, block.cells, -1, cluster_moment(u32(&block - blocks.data()))};
        return &elsewhere;
    }
    return nullptr;
}

[[noreturn]] static void refuse_address(u64 address, u64 bytes, const char* verb) {
    const u64 in_dynamic = address - reinterpret_cast<u64>(dynamic_shared);
    const u64 in_static = address - reinterpret_cast<u64>(static_begin);
    if (address < 4096) fail("%s %llu bytes through a null pointer", verb, bytes);
    if (in_dynamic < MOST_SHARED && shared_bytes == dynamic_base)
        fail("%s dynamic shared memory, and the launch gives none: pass its bytes as kernel[grid, block, bytes]", verb);
    if (in_dynamic < MOST_SHARED)
        fail("%s %llu bytes at byte %llu of dynamic shared memory, of which the launch gives %u", verb, bytes,
             in_dynamic, shared_bytes - dynamic_base);
    if (in_static < static_bytes + 65536)
        fail("%s %llu bytes at shared address %llu; the __shared__ variables end at %u", verb, bytes, in_static,
             static_bytes);
    const std::string said = describe_bytes(address);
    if (!said.empty()) fail("%s %llu bytes that lie %s", verb, bytes, said.c_str());
    fail(
        "%s at address 0x%llx, where no tensor and no shared memory is: an index is out of range, or was read too "
        "early",
        verb, address);
}

// Whether it is a variable of the engine itself, such as threadIdx.
static bool is_of_engine(u64 address) {
    return is_in_engine(address) && address - reinterpret_cast<u64>(dynamic_shared) >= MOST_SHARED;
}

static void forget_recent() { std::fill(std::begin(recent), std::end(recent), Region()); }

// Return the region that holds these bytes, or null for the thread's own variables and the program's constants.
static const Region* locate(u64 address, u64 bytes, const char* verb) {
    Region& known = recent_at(address);
    if (address >= known.begin && address + bytes <= known.end) return &known;
    if (address - running.stack < STACK_BYTES) return nullptr;
    if (const Region* found = find_region(address, bytes)) return known = *found, &known;
    if (address - reinterpret_cast<u64>(code_begin) < u64(image_end - code_begin)) {
        if (!static_bytes || address + bytes <= reinterpret_cast<u64>(static_begin) ||
            address >= reinterpret_cast<u64>(static_begin) + static_bytes)
            return nullptr;
    }
    if (is_of_engine(address)) return nullptr;
    refuse_address(address, bytes, verb);
}

// ---- races

static std::string describe_thread(u64 at) {
    const u32 serial = u32(at >> 42), component = u32(at >> 30) & 4095;
    const dim3 block = serial_blocks[serial - u32(first_moment >> 42)];
    const std::string said = serial == my_block().serial ? "" : text("block %s, ", name_index(block, gridDim).c_str());
    const u32 x = component % blockDim.x, y = component / blockDim.x % blockDim.y;
    return said + "thread " + name_index({x, y, component / blockDim.x / blockDim.y}, blockDim);
}

static std::string describe_place(u64 address) {
    for (auto& region : regions)
        if (region.tensor >= 0 && region.begin <= address && address < region.end)
            return text("byte %llu of the tensor `%s`", address - region.begin, tensor_names[region.tensor].c_str());
    for (auto& block : blocks) {
        const u64 offset = address - reinterpret_cast<u64>(block.memory.data());
        if (offset < shared_bytes && &block != &blocks[loaded])
            return text("shared address %llu of block %s", offset, name_index(block.index, gridDim).c_str());
    }
    const u64 offset = address - reinterpret_cast<u64>(static_begin);
    if (offset < static_bytes) return text("shared address %llu", offset);
    return text("shared address %llu", dynamic_base + address - reinterpret_cast<u64>(dynamic_shared));
}

// Say why two accesses race. `other` is the moment of the one that came first.
static std::string describe_race(u64 address, u64 other, bool writes, bool other_writes) {
    const u32 component = u32(other >> 30) & 4095;
    const std::string place = describe_place(address);
    const char* verb = writes ? "writes" : "reads";
    if (component == MBARRIER)
        return text("%s %s, which holds an mbarrier: mbarrier_inval must come first", verb, place.c_str());
    if (component >= blockDim.x * blockDim.y * blockDim.z)
        return text(
            "%s %s, where a load of the copy engine writes: the thread has not waited for its mbarrier, nor met "
            "a thread that has",
            verb, place.c_str());
    const std::string who = describe_thread(other);
    const bool is_warp = u32(other >> 42) == my_block().serial && component / 32 == my_number() / 32;
    const bool is_block = u32(other >> 42) == my_block().serial;
    return text("%s %s, which %s %s, and %s: a data race", verb, place.c_str(), who.c_str(),
                other_writes ? "has written" : "has read",
                is_warp    ? "no __syncwarp() or other barrier lies between"
                : is_block ? "no barrier lies between"
                           : "nothing orders the two blocks");
}

// Return the moment of an access to the same bytes that nothing orders with this one, or 0. Record this one.
static inline u64 touch(Slot& slot, u64 mine, bool writes, const Thread& thread, u64 since) {
    const auto clashes = [&](u64 at) {
        if (at < since || (at ^ mine) >> 30 == 0 || at == running.before || at & mine & 1) return false;
        if (!is_before(at, thread)) return true;
        running.before = at;
        return false;
    };
    if (!writes && (slot.read[0] == mine || slot.read[1] == mine)) return 0;
    if (clashes(slot.write)) return slot.write;
    if (writes) {
        for (u64 at : slot.read)
            if (clashes(at)) return at;
        slot = {mine, {0, 0}};
    } else if (slot.read[0] < since || (slot.read[0] ^ mine) >> 30 == 0 || is_before(slot.read[0], thread)) {
        slot.read[0] = mine;
    } else {
        slot.read[1] = mine;
    }
    return 0;
}

// Call use(slot, address of its first byte, bytes) for what is recorded about some bytes; `use` returns whether to end.
template <typename Use>
static void for_each_slot(const Region& region, u64 address, u64 bytes, Use use) {
    Cell* cell = cells_at(region, address);
    const u64 end = address + bytes;
    for (; address < end; ++cell) {
        if (address % 4 == 0 && address + 4 <= end && cell->launch != launch_number) {
            if (use(static_cast<Slot&>(*cell), address, 4u)) return;
            address += 4;
            continue;
        }
        if (cell->launch != launch_number) {
            cell->launch = launch_number, cell->split = u32(split_slots.size());
            split_slots.insert(split_slots.end(), 4, *cell);
        }
        do
            if (use(split_slots[cell->split + address % 4], address, 1u)) return;
        while (++address < end && address % 4);
    }
}

static void settle() {
    const u32 bytes = std::exchange(unsettled.bytes, 0);
    if (!memcmp(reinterpret_cast<void*>(unsettled.address), unsettled.before, bytes)) return;
    if (unsettled.is_in_step) {
        if (hint.empty())
            note_hint(unsettled.where, "writes " + describe_place(unsettled.address) + ", as " +
                                           describe_thread(unsettled.other) +
                                           " does in the same instruction with another value: one of them wins");
        return;
    }
    fail_at(unsettled.where, "%s",
            describe_race(unsettled.address, unsettled.other, true, unsettled.other_writes).c_str());
}

// The programming guide says that one of the lanes that write the same place in one instruction wins, and not which.
//
// The lanes of a warp run one after the other here, and in step on a GPU while they do not diverge: all of them read x
// before one of them writes it. So a lane reads what was there before another lane of its warp has written, if it then
// writes the same value to the same place: `x = f(x)` in a whole warp is no fault.
static struct {
    u64 address, at, code;
    u32 bytes;
    u8 before[16];
} last_writes[256];
static u32 writes_count;

struct Overtaken {  // what a lane has read in step and must write
    u64 address, other;
    u32 bytes;
    u8 after[16];
    Where where;
};
static std::vector<Overtaken> overtaken;

static u64 code_of(const void* frame) { return static_cast<const u64*>(frame)[1]; }

static inline void remember_write(u64 address, u64 bytes, u64 at, const void* frame) {
    if (bytes > 16) return;
    auto& write = last_writes[writes_count++ % 256];
    write = {address, at, code_of(frame), u32(bytes)};
    memcpy(write.before, reinterpret_cast<void*>(address), bytes);
}

static bool is_of_warp(u64 at) {
    return u32(at >> 42) == my_block().serial && (u32(at >> 30) & 4095) / 32 == my_number() / 32;
}

// Undo the write of another lane for this lane's read. Return false if it was none, or is not known any more.
static bool read_in_step(u64 address, u64 bytes, u64 other, const void* frame) {
    for (auto& each : overtaken)
        if (each.address == address && each.bytes == bytes) return true;
    if (bytes <= 16 && (other & 1)) {  // an atomic must follow, as in a loop around atomicCAS, which begins with a read
        overtaken.push_back({address, other, u32(bytes), {}, find_caller(frame)});
        return true;
    }
    if (!is_of_warp(other)) return false;
    const u8* before = nullptr;
    Overtaken read = {address, other, u32(bytes), {}, find_caller(frame)};
    for (u32 i = writes_count < 256 ? 0 : writes_count - 256; i != writes_count; ++i) {
        auto& write = last_writes[i % 256];
        if (write.address != address || write.bytes != bytes || write.at != other) continue;
        if (before) {  // the lane has written again
            memcpy(read.after, write.before, bytes);
            memcpy(reinterpret_cast<void*>(address), before, bytes);
            overtaken.push_back(read);
            return true;
        }
        before = write.before;
    }
    if (!before) return false;
    memcpy(read.after, reinterpret_cast<void*>(address), bytes);
    memcpy(reinterpret_cast<void*>(address), before, bytes);
    overtaken.push_back(read);
    return true;
}

// The lane waits or has ended: what it has read in step must be written.
static void require_in_step() {
    if (overtaken.empty()) return;
    const Overtaken read = overtaken[0];
    overtaken.clear();
    fail_at(read.where, "%s", describe_race(read.address, read.other, false, true).c_str());
}

// Return whether another lane of the warp has written the same bytes by the same instruction.
static bool is_written_in_step(u64 address, u64 bytes, u64 other, const void* frame) {
    return is_of_warp(other) && std::any_of(last_writes, last_writes + 256, [=](auto& write) {
               return write.address == address && write.bytes == bytes && write.at == other &&
                      write.code == code_of(frame);
           });
}

static void require_unread(u64 address, u64 bytes, const char* verb);
static void require_landed(u64 address, u64 bytes, const char* verb);

static void access(u64 address, u64 bytes, bool writes, bool relaxed, const void* frame) {
    if (!is_running) return;  // a constructor of the cell's library
    if (unsettled.bytes) settle();
    const Region* region = locate(address, bytes, writes ? "writes" : "reads");
    if (!region) return;
    effects += writes;
    if (region->tensor >= 0) {
        if (writes) is_written[region->tensor] = true;
        else read_bytes[region->tensor] += bytes;
    }
    Thread& thread = me();
    if (region->tensor < 0 && !thread.copies.empty()) require_landed(address, bytes, writes ? "writes" : "reads");
    if (!region->cells) return;
    if (writes && region->tensor < 0 && my_block().open_reads) require_unread(address, bytes, "writes");
    const u64 mine = moment(thread, relaxed);
    for_each_slot(*region, address, bytes, [&](Slot& slot, u64 at, u32) {
        const u64 write = slot.write, other = touch(slot, mine, writes, thread, region->since);
        if (write < region->since && !writes && region->tensor < 0 && hint.empty())
            note_hint(find_caller(frame), "reads " + describe_place(at) + ", which nobody has written");
        if (!other) return false;
        if (!writes) {
            if (read_in_step(address, bytes, other, frame)) return true;
            fail("%s", describe_race(at, other, false, true).c_str());
        }
        unsettled.address = address, unsettled.other = other, unsettled.other_writes = other == write;
        unsettled.bytes = u32(std::min<u64>(bytes, 16)), unsettled.where = find_caller(frame);
        unsettled.is_in_step = unsettled.other_writes && is_written_in_step(address, bytes, other, frame);
        memcpy(unsettled.before, reinterpret_cast<void*>(address), unsettled.bytes);
        for (size_t i = 0; i < overtaken.size(); ++i) {
            if (overtaken[i].address != address || overtaken[i].bytes != bytes) continue;
            memcpy(unsettled.before, overtaken[i].after, bytes);
            unsettled.is_in_step = false;  // the value depends on what the other lane has overwritten
            overtaken.erase(overtaken.begin() + i);
        }
        return true;
    });
    if (writes && !relaxed) remember_write(address, bytes, mine, frame);
}

// The frequent case of `access`, without calls: the region is no new one, and nothing races. Return false for any other.
template <u32 BYTES, bool WRITES>
static inline bool access_in_order(u64 address, const void* frame) {
    if (address - running.stack < STACK_BYTES) return true;
    const Region& region = recent_at(address);
    if (address < region.begin || address + BYTES > region.end) return !WRITES && is_of_engine(address);
    if (!region.cells || unsettled.bytes) return false;
    const Thread& thread = me();
    if (region.tensor < 0 && (!thread.copies.empty() || (WRITES && my_block().open_reads))) return false;
    const u64 noted = !WRITES && region.tensor < 0 && hint.empty() ? region.since : 0;  // a read of what nobody wrote
    const u64 mine = running.identity | u64(thread.now & 0x1fffffff) << 1;
    Cell* cell = cells_at(region, address);
    if (BYTES < 4) {
        if (cell->launch != launch_number) return false;
        Slot* slot = &split_slots[cell->split + address % 4];
        for (u32 i = 0; i < BYTES; ++i)
            if (slot[i].write < noted || touch(slot[i], mine, WRITES, thread, region.since)) return false;
    }
    for (u32 i = 0; i < BYTES / 4; ++i) {
        if (cell[i].launch == launch_number || cell[i].write < noted) return false;
        if (touch(cell[i], mine, WRITES, thread, region.since)) return false;
    }
    if (WRITES) {
        ++effects, remember_write(address, BYTES, mine, frame);
        if (region.tensor >= 0) is_written[region.tensor] = true;
    } else if (region.tensor >= 0) {
        read_bytes[region.tensor] += BYTES;
    }
    return true;
}

// ---- accesses that the engine makes or begins for the current thread: addresses are offsets in shared memory

static Region shared_region(u32 block) { return {0, shared_bytes, blocks[block].cells, -1, cluster_moment(block)}; }
static u64 address_in_shared(u64 offset) {
    return reinterpret_cast<u64>(offset < dynamic_base ? static_begin + offset
                                                       : dynamic_shared + (offset - dynamic_base));
}

static void record_shared(u32 offset, u32 bytes, u64 at) {
    if (!my_block().cells) return;
    for_each_slot(shared_region(me().block), offset, bytes, [=](Slot& slot, u64, u32) {
        slot = {at, {0, 0}};
        return false;
    });
}
// Record an access of the thread to its block's memory, or check only that it may write there (`writes` is false).
static void record_shared(u32 offset, u32 bytes, bool writes, const char* what, const Where* where = nullptr) {
    if (my_block().open_reads) require_unread(address_in_shared(offset), bytes, what);
    ++effects;
    if (!my_block().cells) return;
    const u64 mine = moment(me()), since = cluster_moment(me().block);
    for_each_slot(shared_region(me().block), offset, bytes, [&](Slot& slot, u64 at, u32) {
        Slot copy = slot;
        if (const u64 other = touch(writes ? slot : copy, mine, true, me(), since))
            fail_at(where ? *where : find_caller(__builtin_frame_address(0)), "%s: %s", what,
                    describe_race(address_in_shared(at), other, true, other == slot.write).c_str());
        return false;
    });
}

static const char* const UNORDERED = "no barrier lies between";

// Check that nobody else uses the tile of a load, which may land from now on, at the moment `at` of its mbarrier.
static void begin_load(const Operation& operation, u64 at) {
    Block& block = blocks[operation.block];
    for (auto& read : block.reads)
        if (operation.tile < read.end && read.begin < operation.tile + operation.span && !is_before(read.moment, me()))
            fail(
                "%s overwrites shared address %llu, which %s may still read: its wait must come before the stage is "
                "given back",
                operation.what, std::max<u64>(operation.tile, read.begin), read.what);
    if (!block.cells) return;
    const u64 mine = moment(me()), since = cluster_moment(operation.block);
    const Region region = shared_region(operation.block);
    Slot accepted = {};  // may be overwritten, as may others with the same accesses
    for_each_tile_unit(operation, [&](u32 unit, u32 bytes) {
        for_each_slot(region, unit, bytes, [&](Slot& slot, u64 where, u32) {
            const Slot before = slot;
            if (slot == accepted) return slot = {at, {0, 0}}, false;
            if (const u64 other = touch(slot, mine, true, me(), since)) {
                if (u32(other >> 30 & 4095) == MBARRIER)
                    fail("%s overwrites the mbarrier at shared address %llu", operation.what, where);
                if (u32(other >> 30 & 4095) >= blockDim.x * blockDim.y * blockDim.z)
                    fail(
                        "%s overwrites shared address %llu, where an earlier load may still be landing: nobody has "
                        "waited for its mbarrier and said so to this thread",
                        operation.what, where);
                fail("%s overwrites shared address %llu, which %s %s, and %s", operation.what, where,
                     describe_thread(other).c_str(), other == slot.write ? "has written" : "has read", UNORDERED);
            }
            accepted = before, slot = {at, {0, 0}};
            return false;
        });
    });
}

// Check that what the tensor core or the copy engine reads is there, and went through the proxy fence. PTX says that a
// proxy fence takes effect within the thread that executes it, and its memory model has no rule by which it covers what
// another thread has written. So each writer fences after its writes, and the barrier comes after the fence.
static void begin_read(u32 offset, u32 bytes, const char* what) {
    Block& block = my_block();
    if (!block.cells) return;
    static u64 accepted;  // the last write that was found to be right, and for which thread
    static u32 reader;
    for_each_slot(shared_region(me().block), offset, bytes, [&](Slot& slot, u64 where, u32) {
        if (!slot.write && hint.empty())
            note_hint(find_caller(__builtin_frame_address(0)),
                      text("gives %s the shared address %llu, which nobody has written", what, where));
        if ((slot.write == accepted && current == reader) || slot.write >> 42 != block.serial) return false;
        const u32 component = u32(slot.write >> 30) & 4095;
        if (component == MBARRIER) fail("%s reads the mbarrier at shared address %llu", what, where);
        const bool is_load = component >= blockDim.x * blockDim.y * blockDim.z;
        if (!is_before(slot.write, me())) {
            if (is_load)
                fail(
                    "%s reads shared address %llu, where a load may still be landing: the thread has not waited for "
                    "its mbarrier",
                    what, where);
            fail("%s reads shared address %llu, which %s has written, and %s", what, where,
                 describe_thread(slot.write).c_str(), UNORDERED);
        }
        if (!is_load && block.fenced[component] < (u32(slot.write >> 1) & 0x1fffffff))
            fail(
                "%s reads shared address %llu, which %s has written without fence_proxy_async() (fence.proxy.async) after it. The fence "
                "acts only for the thread that executes it: each writer fences, and the barrier follows",
                what, where, describe_thread(slot.write).c_str());
        accepted = slot.write, reader = current;
        return false;
    });
}

static void fence_global_view() {
    Block& block = my_block();
    fenced_global[moment(me()) >> 30] = me().now++;
    Knowledge& known = viewed[block.serial];
    known = merge(known, merge(block.base, me().row, block.serial), block.serial);
}

// Return whether a moment came before a proxy fence of global memory in a block.
static bool is_viewed(u32 owner, u64 at) {
    const auto block = viewed.find(owner);
    if (block == viewed.end() || !block->second) return false;
    const Knowledge& knowledge = block->second;
    const u32 serial = u32(at >> 42), component = u32(at >> 30) & 4095, clock = u32(at >> 1) & 0x1fffffff;
    if (serial == owner) return is_known(knowledge->known, component, clock);
    const auto found = knowledge->others.find(serial);
    return found != knowledge->others.end() && is_known(found->second, component, clock);
}

// Check that what the copy engine reads of global memory went through a proxy fence, if threads of this launch have
// written it: one of the writer after its write, or one of a thread in its block or in this one that knew of the write.
static void require_viewed(const Operation& operation) {
    const u64 first = operation.is_box ? operation.map.address : reinterpret_cast<u64>(operation.global);
    const Region* region = first ? find_region(first, 1) : nullptr;
    if (!region || region->tensor < 0 || !region->cells || !is_written[region->tensor]) return;
    u64 accepted = 0;
    const auto check = [&](u64 address, u64 bytes) {
        for_each_slot(*region, address, bytes, [&](Slot& slot, u64 at, u32) {
            if (slot.write < region->since || slot.write == accepted || !is_before(slot.write, me())) return false;
            const auto fence = fenced_global.find(slot.write >> 30);
            if (!(fence != fenced_global.end() && (u32(slot.write >> 1) & 0x1fffffff) <= fence->second) &&
                !is_viewed(u32(slot.write >> 42), slot.write) && !is_viewed(my_block().serial, slot.write))
                fail(
                    "%s reads %s, which %s has written in this launch without a proxy fence of global memory after it: "
                    "fence.proxy.async must come between the write and the barrier",
                    operation.what, describe_place(at).c_str(), describe_thread(slot.write).c_str());
            accepted = slot.write;
            return false;
        });
    };
    if (!operation.is_box) return check(first, operation.bytes);
    const u32 itemsize = operation.map.itemsize;
    for_each_unit(operation, [&](u32, long x, const u8* from) {
        const long end = std::min<long>(x + 16 / itemsize, operation.map.shape[0]), begin = std::max(x, 0l);
        if (from && begin < end)
            check(reinterpret_cast<u64>(from) + (begin - x) * itemsize, u64(end - begin) * itemsize);
    });
}

static u32 unit_address(u64 descriptor, u32 row, u32 unit);
static u32 element_address(u64 descriptor, u32 row, u32 k);
// Return whether a piece of some rows, which an address and its bytes give, is one that is wanted.
template <typename Wanted>
static bool any_piece(const Rows& rows, Wanted is_wanted) {
    for (u32 row = rows.first; row < rows.first + rows.count; ++row)
        for (u32 i = 0; i < (rows.transposed ? 16 : 2); ++i)
            if (rows.transposed ? is_wanted(element_address(rows.descriptor, row, i), 2)
                                : is_wanted(unit_address(rows.descriptor, row, i), 16))
                return true;
    return false;
}
static void begin_read(const Rows& rows) {
    any_piece(rows, [](u32 address, u32) { return begin_read(address & ~3u, 4, "wgmma"), false; });
}

// Remember a read until nobody can overwrite its tile too early.
static void add_read(const TileRead& read) {
    Block& block = my_block();
    constexpr u32 MOST = 128;
    if (block.reads.size() < MOST) block.reads.push_back(read);
    else {
        TileRead& oldest = block.reads[block.next_read++ % MOST];
        block.open_reads -= oldest.is_open;
        oldest = read;
    }
    ++block.open_reads;
}
static void add_read(const Rows& rows, u64 at) {
    TileRead read = {~0ull, 0, at, true, "a wgmma", rows};
    any_piece(rows, [&](u32 address, u32 bytes) {
        read.begin = std::min<u64>(read.begin, address), read.end = std::max<u64>(read.end, address + bytes);
        return false;
    });
    add_read(read);
}
// The current thread has waited for the reads of a component up to a moment of its clock.
static void close_reads(u32 component, u32 clock) {
    Block& block = my_block();
    for (auto& read : block.reads)
        if (read.is_open && (u32(read.moment >> 30) & 4095) == component &&
            (u32(read.moment >> 1) & 0x1fffffff) <= clock)
            read.is_open = false, --block.open_reads;
}

static u64 offset_in_shared(u64 address) {
    const u64 in_static = address - reinterpret_cast<u64>(static_begin);
    return in_static < static_bytes ? in_static : address - reinterpret_cast<u64>(dynamic_shared) + dynamic_base;
}

// Check that the thread does not touch what its own cp.async may still bring.
static void require_landed(u64 address, u64 bytes, const char* verb) {
    const u64 offset = offset_in_shared(address);
    for (auto& copy : me().copies)
        if (offset < copy.tile + copy.bytes && copy.tile < offset + bytes)
            fail(
                "%s shared address %llu, where its cp_async may still write: cp_async_commit and cp_async_wait must "
                "come first",
                verb, offset);
}

// Check that no tile that is being read lies here.
static void require_unread(u64 address, u64 bytes, const char* what) {
    const u64 offset = offset_in_shared(address);
    for (auto& read : my_block().reads) {
        if (!read.is_open || offset >= read.end || read.begin >= offset + bytes || is_before(read.moment, me()))
            continue;
        const bool overlaps = !read.rows.count || any_piece(read.rows, [=](u32 piece, u32 size) {
            return offset < piece + size && piece < offset + bytes;
        });
        if (overlaps)
            fail("%s shared address %llu, which %s may still read: its wait must come first", what, offset, read.what);
    }
}

static void begin_store(const Operation& operation, u64 at) {
    for_each_tile_unit(operation, [&](u32 unit, u32 bytes) { begin_read(unit, bytes, operation.what); });
    add_read({operation.tile, operation.tile + u64(operation.span), at, true, operation.what});
}

// ---- atomic and volatile variables

static struct {
    u64 address;
    u32 bytes = 0;
    u8 before[16];
} polled;  // by the last atomic; it is an effect if the value has changed

static void count_polled() {
    const u32 bytes = std::exchange(polled.bytes, 0);
    if (bytes && memcmp(reinterpret_cast<void*>(polled.address), polled.before, bytes)) ++effects;
}

// The thread's plain reads of what it touches by an atomic now could find any value: they are as good as atomic.
static void excuse_reads(u64 address, u32 bytes) {
    for (size_t i = overtaken.size(); i-- > 0;)
        if (overtaken[i].address == address && (overtaken[i].other & 1)) overtaken.erase(overtaken.begin() + i);
    const Region* region = locate(address, bytes, "reads");
    if (!region || !region->cells) return;
    const u64 mine = moment(me());
    for_each_slot(*region, address, bytes, [=](Slot& slot, u64, u32) {
        for (u64& at : slot.read)
            if (at && (at ^ mine) >> 30 == 0) at |= 1;
        return false;
    });
}

// Where `signals` holds what only threads of the same block may know from a variable.
static u64 key_in_block(u64 address) { return address ^ u64(my_block().serial) << 48; }

// The scope of the access is the block: no other block may have written there without an order between the two.
static void require_own_block(u64 address, u32 bytes) {
    const Region* region = locate(address, bytes, "uses");
    if (!region || region->tensor < 0 || !region->cells) return;
    for_each_slot(*region, address, bytes, [&](Slot& slot, u64 where, u32) {
        if (slot.write >= region->since && slot.write >> 42 != my_block().serial && !is_before(slot.write, me()))
            fail(
                "uses %s in the scope of its block (.cta, _block), and %s has written it: the scope must be the GPU "
                "(.gpu)",
                describe_place(where).c_str(), describe_thread(slot.write).c_str());
        return false;
    });
}

static void touch_signal(u64 address, u32 bytes, bool reads, bool writes, const void* frame, bool acquires = true,
                         bool in_block = false) {
    if (!is_running) return;
    count_polled();
    if (reads && writes) excuse_reads(address, bytes);
    if (address - running.stack < STACK_BYTES) return;
    if (reads) pause();
    if (in_block) require_own_block(address, bytes);
    const u64 effects_before = effects;
    access(address, bytes, writes, true, frame);
    Thread& thread = me();
    Block& block = my_block();
    if (writes && reads) {
        effects = effects_before;
        polled.address = address, polled.bytes = std::min(bytes, 16u);
        memcpy(polled.before, reinterpret_cast<void*>(address), polled.bytes);
    }
    const std::pair<u64, const Knowledge*> sources[] = {
        {address, &thread.released}, {address, &block.released}, {key_in_block(address), &thread.released_in_block}};
    for (auto [key, released] : sources) {
        if (!writes || !*released) continue;
        Knowledge& signal = signals[key];
        auto all = signal ? std::make_shared<Clock>(*signal) : std::make_shared<Clock>();
        join(*all, 0, **released, block.serial);
        signal = all;
    }
    for (const u64 key : {address, key_in_block(address)}) {
        const auto found = signals.find(key);
        if (!reads || found == signals.end() || found->second == thread.acquired) continue;
        Knowledge& known = acquires ? thread.row : thread.read;
        auto all = known ? std::make_shared<Clock>(*known) : std::make_shared<Clock>();
        join(*all, block.serial, *found->second, 0);
        known = all;
        if (acquires) thread.acquired = found->second;
    }
}

void begin_atomic(const void* address, u32 bytes, bool orders, bool in_block, bool acquires) {
    if (orders) fence_memory(in_block);
    touch_signal(reinterpret_cast<u64>(address), bytes, true, true, __builtin_frame_address(0), acquires, in_block);
}

void begin_signal(const void* address, u32 bytes, bool writes, bool orders, bool in_block) {
    if (orders && writes) fence_memory(in_block);
    touch_signal(reinterpret_cast<u64>(address), bytes, !writes, writes, __builtin_frame_address(0), orders, in_block);
}

void require_constant(const void* at, u32 bytes) {
    const u64 address = reinterpret_cast<u64>(at);
    const Region* region = locate(address, bytes, "reads");
    if (!region || region->tensor < 0 || !region->cells || !is_written[region->tensor]) return;
    for_each_slot(*region, address, bytes, [&](Slot& slot, u64 where, u32) {
        if (slot.write >= region->since)
            fail(
                "reads %s through the cache for read-only data (__ldg, ld.global.nc), and %s has written it in this "
                "launch: the cache may hold an old value",
                describe_place(where).c_str(), describe_thread(slot.write).c_str());
        return false;
    });
}

// ---- a launch

static Cell* take_cells(size_t bytes) {
    const size_t count = bytes / 4 + 2;
    if (cells_used + count > MOST_TRACKED / 4) return nullptr;
    cells_used += count;
    return all_cells + (cells_used - count);
}

static void prepare_regions(const u64* ranges, const char** names, u32 count, u32 blocks_of_grid) {
    constexpr size_t BYTES = MOST_TRACKED / 4 * sizeof(Cell);
    if (!all_cells) {
        void* memory = mmap(nullptr, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        all_cells = static_cast<Cell*>(memory);
    }
    if (cells_used > MOST_TRACKED / 32 || last_serial + u64(blocks_of_grid) >= 1 << 22) {
        madvise(all_cells, BYTES, MADV_DONTNEED);  // gives the memory back, and begins anew
        if (last_serial + u64(blocks_of_grid) >= 1 << 22) last_serial = 0;
    }
    cells_used = 0;
    ++launch_number;
    first_moment = moment(last_serial + 1, 0, 0);
    split_slots.clear(), serial_blocks.clear(), signals.clear(), tensor_names.clear();
    unsettled.bytes = polled.bytes = 0, overtaken.clear();
    regions.assign(2, Region{0, 0, nullptr, -1, 0});
    read_bytes.assign(count, 0), is_written.assign(count, false), fenced_global.clear(), viewed.clear();
    for (u32 i = 0; i < count; ++i) {
        tensor_names.push_back(names[i]);
        regions.push_back({ranges[2 * i], ranges[2 * i + 1], nullptr, int(i), first_moment});
    }
    std::sort(regions.begin() + 2, regions.end(), [](auto& a, auto& b) { return a.begin < b.begin; });
    u64 end = 0, begin = 0;
    Cell* cells = nullptr;
    for (auto region = regions.begin() + 2; region != regions.end(); ++region) {
        if (region->begin >= end) {  // tensors that overlap share their cells
            begin = region->begin, end = region->end;
            for (auto other = region; other != regions.end() && other->begin < end; ++other)
                end = std::max(end, other->end);
            cells = take_cells(end - begin);
        }
        region->cells = cells ? cells + (region->begin / 4 - begin / 4) : nullptr;
    }
    forget_recent();
}
