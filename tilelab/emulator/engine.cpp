// Run the blocks of a CUDA C++ kernel on the CPU, with a copy engine and a tensor core as awkward as PTX allows.
//
// Each thread is a coroutine that runs until it waits. A block runs alone, or together with the others of its cluster.
//
// The copy engine holds its operations back, or completes them in any order that the PTX manual allows, and each warp's
// part of a wgmma reads its tiles at any moment up to the wait. `seed` chooses the moments:
//
//     0       copies complete only when every thread waits, the newest first; products at the wait; low warps run ahead
//     1       copies and products complete at once; high warps run ahead
//     2       copies complete at once, products at the wait; low warps run ahead
//     others  everything at random; some warps lag behind
//
// A kernel that is right for every seed does not depend on their speed.
//
// Both see shared memory through a view of their own (the async proxy), which fence_proxy_async brings up to date.
//
// Addresses in shared memory: first the static variables, then dynamic memory. The top byte is 0 in a thread's own
// addresses and 1 + rank in those that name a block of the cluster.
#define ENGINE
#include "emulator.h"

#include <setjmp.h>
#include <signal.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

dim3 threadIdx, blockIdx, blockDim, gridDim;
namespace emulator {

constexpr u32 MOST_SHARED = 232448;
alignas(4096) u8 dynamic_shared[MOST_SHARED];

// ---- state

// What a thread, or whoever waits for an mbarrier, knows to lie before: up to which moment of each thread. accesses.h
// explains it.
struct Clock {
    std::vector<u32> known;  // by thread of its own block
    std::map<u32, std::vector<u32>> others;  // by the serial number of another block
    std::shared_ptr<const Clock> last_base, last_row;  // that were added, which need not be added again
};
typedef std::shared_ptr<const Clock> Knowledge;

// Where in the cell a call was made: return addresses behind the start of its code, the innermost first.
struct Where {
    u32 count = 0, offsets[6];
};

struct Barrier {
    int arrivals = 0, pending = 0;  // arrivals per phase; arrivals that the current phase still waits for
    long bytes = 0;  // bytes that are announced and have not landed
    u32 phase = 0;
    bool fenced = false, needs_fence = false;  // by fence_mbarrier_init; before a copy may signal it
    u32 component = 0;  // its loads, as a thread of its own
    u32 loaded = 0, waited = 0;  // the phase that its last load ends, and the one that a thread has last waited for
    Where load;  // the last one
    u64 initialised = 0;  // when
    Clock gathered;  // from those who arrive
    Knowledge done;  // for those who wait
};

// Threads that meet: the lanes of a mask in __syncwarp or in an exchange of values, or a block in a named barrier.
struct Meeting {
    u32 arrived = 0, generation = 0, threads = 0;
    const char* what = "";  // the call that the first of them has made
    u32 filled[2] = {0, 0};  // the lanes that have given a value, for even and odd generations
    u64 slots[2][32];  // their values
    Clock gathered;
    bool is_of_block = false, some_left = false;  // a named barrier; have arrived without waiting
    std::vector<u64> arrivals, last_arrivals;  // moments, at a barrier for a part of the block
    u32 last_threads = 0;
    Knowledge known[2];
    std::vector<u8> exchanged[2];  // of `exchange`
};

// Fields of a tensor map, as tilelab/emulator/tensor_map.py writes them. Index 0 is the innermost dimension.
struct Map {
    u64 address, end;  // of the tensor's memory
    u64 strides[5];  // bytes
    u32 shape[5];  // elements
    unsigned short box[5];
    u8 dimensions, itemsize, swizzle, fill_is_nan;
    char type[2];  // 'f' float, 'b' bfloat16 or 'i' integer, and of an integer 's' signed or 'u' unsigned
    u32 mark;
};
static_assert(sizeof(Map) <= 128, "");
constexpr u32 MAP_MARK = 0x70614d54;

struct Operation {
    Kind kind;
    u32 block;  // whose shared memory it uses
    u32 tile, bytes, barrier;
    u8* global;  // of a bulk copy; null: it sends the tile of its block to address `tile` of another block
    bool is_box;
    Map map;  // of a box
    int corner[5];
    u32 thread, group;  // of a store
    bool committed, read;
    std::vector<u8> data;  // of a store that has read it, or of a value that is sent
    u32 source;  // of what is sent
    Where where;
    u32 span;  // bytes of shared memory from the first to the last one
    const char* what;
    const char* change = "add";  // of a reduction, as PTX calls it
};

// One wgmma, which the 128 threads of a warp group issue. Each warp computes 16 of the 64 rows.
struct Product {
    ProductKind kind;
    u64 a, b;
    bool accumulate, a_in_registers;
    u32 a_registers[128][4];
    u32 issued[4] = {};  // threads of each warp
    u32 executed = 0;  // one bit per warp
    u32* d[128];
    Where where;  // it was issued
};

struct WarpGroup {
    u32 block, first_thread;
    std::deque<std::shared_ptr<Product>> products;  // in their order, without the `removed` first ones
    u32 removed = 0, next[4] = {};  // the product that each warp executes next
    u32 component = 0;  // of its products, as of a thread of their own
};

// The accumulators of one thread while products use them. Its own registers hold NaN meanwhile.
struct Accumulators {
    std::vector<u32> values;
    std::vector<u32*> registers;  // of the cell
    u32 uses = 0;
};

struct Issued {
    std::shared_ptr<Product> product;
    u32 group;
    u32* d;
};

struct CpAsync {  // a copy of cp.async, which lands when the thread waits for its group
    u8 data[16];
    u32 tile, bytes, group;
    Where where;
};

// What a thread waits for: functions of objects that lie on its stack meanwhile.
struct Wait {
    bool (*test)(void* ready) = nullptr;  // null: it can run
    std::string (*describe)(void* words) = nullptr;
    void *ready = nullptr, *words = nullptr;
    bool is_over() const { return !test || test(ready); }
};

struct Thread {
    bool started = false, finished = false;
    dim3 index;
    u32 block = 0;
    Wait wait;
    bool waits_for_barrier = false;
    bool is_counted = false;  // it waits in active_lanes
    u32 failed_polls = 0;  // since the last one that succeeded
    bool has_polled = false;  // since then
    u32 register_changes = 0, registers = 0;  // by setmaxnreg: how often, and the last number
    bool polls = false, gives_up = false;
    const void* frame = nullptr;  // the innermost one, where it waits or polls
    bool yielded = false;  // it can run, but polls
    u32 pauses = 0, now = 1;
    Knowledge row, acquired;
    Knowledge released, released_in_block;  // by its last fence, and by one for its block alone
    Knowledge read;  // by relaxed loads: a fence will acquire it
    u32 product_component = 0, products_waited = 0, store_component = 0, stores_waited = 0;
    std::vector<CpAsync> copies;
    u32 copy_groups = 0;
    u32 groups = 0;  // bulk groups that it has committed
    u32 cluster_generation = 0;
    u32 calls = 0;  // since its warp has met, of what one lane often does for all
    bool has_waited = false;  // for an mbarrier since then
    // wgmma
    u32 product_groups = 0, products = 0;
    bool fenced = false;
    std::vector<Issued> issued;
    std::map<u32*, Accumulators> accumulators;
    std::map<u32*, std::vector<u32>> returned;  // what wgmma_wait has returned last
};

struct Rows {  // of a matrix of a wgmma
    u64 descriptor;
    u32 first, count;
    bool transposed;
};

// A tile that the tensor core or the copy engine reads, from the instruction up to the wait.
struct TileRead {
    u64 begin, end;  // in shared memory
    u64 moment;
    bool is_open;  // nobody has waited yet
    const char* what;
    Rows rows = {};  // none: all bytes
};

struct Block {
    dim3 index;
    u32 serial = 0, components = 0;
    Knowledge base, released;
    std::vector<u32> fenced;  // by thread: its last fence_proxy_async
    std::vector<TileRead> reads;
    u32 next_read = 0, open_reads = 0;
    struct Cell* cells = nullptr;
    u32 first_thread = 0, live = 0;
    std::vector<bool> lags;  // by warp
    std::vector<u8> memory;  // used while another block of the cluster runs
    std::map<u32, Barrier> barriers;
    std::map<std::pair<u32, u32>, Meeting> meetings;  // by warp and mask
    std::map<u32, Meeting> named;  // barriers of the block
    u32 counted[2] = {};  // threads that gave true to __syncthreads_count, for even and odd generations of barrier 0
    std::vector<WarpGroup> warp_groups;
};

struct Coroutine {
    u8* stack;
    jmp_buf resume;
    bool is_idle = false;  // it has ended its kernel and can begin another
};
constexpr size_t STACK_BYTES = 128 << 10, GUARD_BYTES = 2 << 20;
static std::deque<Coroutine> coroutines;  // one per thread, kept for the next block and the next launch
static std::vector<Thread> threads;
static std::vector<Block> blocks;
static std::vector<Operation> operations;
static jmp_buf scheduler;
static u32 current, loaded;  // the thread that runs; the block whose shared memory is in place
struct Cluster {
    bool is_running = false;
    u32 arrived = 0, generation = 0;
    Clock gathered;
};
static std::vector<Cluster> clusters;  // that are resident, each with `blocks_per_cluster` of `blocks`
static u32 blocks_per_cluster;
static std::vector<std::string> tensor_names;
static u8* static_begin;
static u32 static_bytes, dynamic_base, shared_bytes;
static u32 seed;
static u64 random_state;
static u32 patience;  // an engine acts in one of so many calls, if it acts at random
static std::string failure;
static volatile sig_atomic_t ticks;  // tenths of a second of CPU time since a thread last changed anything
static int most_ticks;
static const u8 *code_begin, *code_end, *image_end;  // of the cell
static volatile sig_atomic_t is_interrupted;
static pthread_t engine_thread;
static bool is_running;  // a launch
static bool tracing;
static void (*kernel)(void**);
static void** arguments;

static u32 random_number() {  // splitmix64
    u64 z = random_state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return u32(z >> 32 ^ z);
}

extern "C" const u8 __ehdr_start[] __attribute__((visibility("hidden"))), _end[] __attribute__((visibility("hidden")));
static bool is_in_engine(u64 address) {
    return address >= reinterpret_cast<u64>(__ehdr_start) && address < reinterpret_cast<u64>(_end);
}

static Thread& me() { return threads[current]; }
static Block& my_block() { return blocks[me().block]; }
static u32 my_number() { return current - my_block().first_thread; }  // within the block
u32 lane_number() { return my_number() % 32; }
static u32 rank_of(u32 block) { return block % blocks_per_cluster; }
static u32 first_of_cluster(u32 block) { return block - rank_of(block); }
static Cluster& my_cluster() { return clusters[me().block / blocks_per_cluster]; }
u32 rank_in_cluster() { return rank_of(me().block); }
u32 cluster_size() { return blocks_per_cluster; }

// ---- errors

static std::string text_of(const char* format, va_list values) {
    char text[600];
    vsnprintf(text, sizeof text, format, values);
    return text;
}
static std::string text(const char* format, ...) {
    va_list values;
    va_start(values, format);
    std::string said = text_of(format, values);
    va_end(values);
    return said;
}
// Return where the cell has called the engine. `frame` is the innermost stack frame; each begins with the address of the
// next one and a return address.
static Where find_caller(const void* frame, u32 thread = current) {
    Where where;
    const u8* stack = coroutines[thread].stack;
    for (auto at = static_cast<const u64*>(frame); where.count < 6; at = reinterpret_cast<const u64*>(at[0])) {
        const u64 offset = reinterpret_cast<const u8*>(at) - stack;
        if (offset > STACK_BYTES - 16) break;
        const u64 code = at[1] - reinterpret_cast<u64>(code_begin);
        if (code < u64(code_end - code_begin)) where.offsets[where.count++] = u32(code);
    }
    return where;
}

// Return a mark that tilelab.emulator replaces by "line 12: ".
static std::string mark(const Where& where) {
    std::string said;
    for (u32 i = 0; i < where.count; ++i) said += text("%s%x", i ? "," : "\1", where.offsets[i]);
    return where.count ? said + "\2" : said;
}

static std::string name_index(dim3 index, dim3 extents) {
    if (extents.z > 1) return text("(%u, %u, %u)", index.x, index.y, index.z);
    return extents.y > 1 ? text("(%u, %u)", index.x, index.y) : std::to_string(index.x);
}

static std::string place(const Thread& thread, const Where& where) {
    return mark(where) + text("block %s, thread %s", name_index(blocks[thread.block].index, gridDim).c_str(),
                              name_index(thread.index, blockDim).c_str());
}

// Say where a thread waits or polls.
static std::string place(const Thread& thread) {
    return place(thread, find_caller(thread.frame, u32(&thread - threads.data())));
}

[[noreturn]] static void end_run(const Where& where, const char* format, va_list values) {
    failure = place(me(), where) + ": " + text_of(format, values);
    _longjmp(scheduler, 1);
}

[[noreturn]] static void fail_at(const Where& where, const char* format, ...) {
    va_list values;
    va_start(values, format);
    end_run(where, format, values);
}

void fail(const char* format, ...) {
    va_list values;
    va_start(values, format);
    end_run(find_caller(__builtin_frame_address(0)), format, values);
}

// What is allowed, but may be why a result is wrong: the first of it in a launch.
static std::string hint;
static void note_hint(const Where& where, const std::string& what) { hint = place(me(), where) + ": " + what; }

static std::string printed;
void print(const char* format, ...) {
    char text[4096];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    printed += text;
}
u64 cycles() {
    static u64 count;
    return count += 16;
}

// While this lives, an access to memory that does not exist, a division by zero or a loop without end ends the run with
// a sentence, not the process.
class CatchSignals {
    static inline u8 stack[64 << 10];
    static constexpr int COUNT = 6, SIGNALS[COUNT] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGVTALRM, SIGINT};
    static inline struct sigaction before[COUNT];
    stack_t stack_before;
    timer_t timer;

    // Return the address that the signal has interrupted, and the stack frame there.
    static std::pair<u64, u64> find_interrupted(void* context) {
        [[maybe_unused]] const auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
        return {registers.gregs[REG_RIP], registers.gregs[REG_RBP]};
#elif defined(__aarch64__)
        return {registers.pc, registers.regs[29]};
#else
        return {0, 0};
#endif
    }

    // Return whether a signal concerns another thread than the one that runs the kernel, and see to it.
    static bool is_elsewhere(int signal, siginfo_t* info, void* context) {
        if (signal == SIGINT) {
            const struct sigaction& python = before[COUNT - 1];
            if (python.sa_handler == SIG_IGN) return true;
            is_interrupted = 1;
            if (python.sa_flags & SA_SIGINFO) python.sa_sigaction(signal, info, context);
            else if (python.sa_handler != SIG_DFL) python.sa_handler(signal);
        }
        if (pthread_equal(pthread_self(), engine_thread)) return false;
        if (signal != SIGINT && signal != SIGVTALRM)
            sigaction(signal, &before[std::find(SIGNALS, SIGNALS + COUNT, signal) - SIGNALS], nullptr);
        return true;
    }

    static void say(int signal, siginfo_t* info, void* context) {
        if (is_elsewhere(signal, info, context)) return;
        const auto [code, frame] = find_interrupted(context);
        const u64 offset = code - reinterpret_cast<u64>(code_begin);
        const bool is_in_cell = offset < u64(code_end - code_begin);  // which may be left, not the engine or Python
        if (signal == SIGVTALRM) ticks = ticks + 1;
        if (is_interrupted && is_in_cell) {
            failure = "\3";
            _longjmp(scheduler, 1);
        }
        if (signal == SIGINT || (signal == SIGVTALRM && (ticks < most_ticks || !is_in_cell))) return;
        Where where = find_caller(reinterpret_cast<void*>(frame));
        if (is_in_cell) {
            std::copy_backward(where.offsets, where.offsets + 5, where.offsets + 6);
            where.offsets[0] = u32(offset) + 1, where.count = std::min(where.count + 1, 6u);
        }
        const auto fail = [&where](const char* format, ...) {
            va_list values;
            va_start(values, format);
            end_run(where, format, values);
        };
        if (signal == SIGVTALRM) fail("has run for %.1f s without waiting: a loop does not end", most_ticks / 10.0);
        if (signal == SIGFPE) fail("divides an integer by zero");
        if (signal == SIGILL) fail("comes to code that g++ has found to be undefined");
        const u64 address = reinterpret_cast<u64>(info->si_addr);
        for (auto& coroutine : coroutines)
            if (reinterpret_cast<u64>(coroutine.stack) - 1 - address < GUARD_BYTES)
                fail("needs more than %zu KiB for its local variables and calls", STACK_BYTES >> 10);
        fail("reads or writes at address 0x%llx, where no memory is: an index is out of range, or was read too early",
             address);
    }

    // Send SIGVTALRM to this thread every 100 ms of its own processor time. A timer of the process would also count the
    // threads of torch, and give the signal to one of them.
    void start_timer() {
        sigevent event = {};
        event.sigev_notify = SIGEV_THREAD_ID, event.sigev_signo = SIGVTALRM;
        event._sigev_un._tid = pid_t(syscall(SYS_gettid));
        timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer);
        const itimerspec interval = {{0, 100'000'000}, {0, 100'000'000}};
        timer_settime(timer, 0, &interval, nullptr);
    }

  public:
    CatchSignals() {
        engine_thread = pthread_self();
        is_interrupted = 0;
        stack_t own = {};
        own.ss_sp = stack, own.ss_size = sizeof stack;
        sigaltstack(&own, &stack_before);
        struct sigaction action = {};
        action.sa_sigaction = say;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER | SA_RESTART;
        for (int i = 0; i < COUNT; ++i) sigaction(SIGNALS[i], &action, &before[i]);
        start_timer();
    }
    ~CatchSignals() {
        timer_delete(timer);
        for (int i = 0; i < COUNT; ++i) {
            // A last tick may still be pending. By default it would end the process.
            if (SIGNALS[i] == SIGVTALRM && before[i].sa_handler == SIG_DFL) before[i].sa_handler = SIG_IGN;
            sigaction(SIGNALS[i], &before[i], nullptr);
        }
        sigaltstack(&stack_before, nullptr);
    }
};

// ---- tiles in shared memory

static u32 place_in_swizzle(u32 address, u32 swizzle) {
    return swizzle ? address ^ (address >> 7 & (swizzle / 16 - 1)) << 4 : address;
}

// Call use(shared address, coordinate of the unit's first element, global address or null) for each unit of 16 bytes.
// The address is null where an outer coordinate lies outside of the tensor.
template <typename Use>
static void for_each_unit(const Operation& operation, Use use) {
    const Map& map = operation.map;
    const u32 row_bytes = map.box[0] * map.itemsize, pitch = std::max<u32>(row_bytes, map.swizzle);
    u32 rows = 1;
    for (u32 d = 1; d < map.dimensions; ++d) rows *= map.box[d];
    for (u32 row = 0; row < rows; ++row) {
        u64 from = map.address;
        bool inside = true;
        for (u32 d = 1, rest = row; d < map.dimensions; rest /= map.box[d], ++d) {
            const long at = operation.corner[d] + long(rest % map.box[d]);
            inside &= at >= 0 && at < long(map.shape[d]);
            from += at * map.strides[d];
        }
        for (u32 byte = 0; byte < row_bytes; byte += 16) {
            const long x = operation.corner[0] + long(byte / map.itemsize);
            use(place_in_swizzle(operation.tile + row * pitch + byte, map.swizzle), x,
                inside ? reinterpret_cast<u8*>(from + x * map.itemsize) : nullptr);
        }
    }
}

// Call use(offset in shared memory, bytes) for each piece of an operation's tile.
template <typename Use>
static void for_each_tile_unit(const Operation& operation, Use use) {
    if (operation.is_box) return for_each_unit(operation, [&](u32 at, long, const u8*) { use(at, 16u); });
    use(operation.tile, operation.bytes);
}

#include "accesses.h"

// ---- shared memory

static u8* own_view(u32 block, u32 offset) {
    if (block != loaded) return blocks[block].memory.data() + offset;
    return offset < dynamic_base ? static_begin + offset : dynamic_shared + (offset - dynamic_base);
}

// Copy the shared memory that is in place to `memory`, or back.
static void copy_shared(u8* memory, bool out) {
    const std::pair<u8*, u8*> parts[] = {{static_begin, memory}, {dynamic_shared, memory + dynamic_base}};
    const u32 sizes[] = {static_bytes, shared_bytes - dynamic_base};
    for (int i = 0; i < 2; ++i)
        if (sizes[i]) memcpy(out ? parts[i].second : parts[i].first, out ? parts[i].first : parts[i].second, sizes[i]);
}

static void refresh_regions();

static void load_block(u32 block) {
    if (block == loaded) return;
    if (loaded < blocks.size()) copy_shared(blocks[loaded].memory.data(), true);
    loaded = block;
    copy_shared(blocks[loaded].memory.data(), false);
    refresh_regions();
}

bool is_shared(const void* pointer) {
    const u8* byte = static_cast<const u8*>(pointer);
    return (byte >= static_begin && byte < static_begin + static_bytes) ||
           (byte >= dynamic_shared && byte < dynamic_shared + (shared_bytes - dynamic_base));
}

bool is_in_tensor(const void* pointer) {
    const Region* region = find_region(reinterpret_cast<u64>(pointer), 1);
    return region && region->tensor >= 0;
}

u32 address_of(const void* pointer) {
    const u8* byte = static_cast<const u8*>(pointer);
    if (static_bytes && byte >= static_begin && byte < static_begin + static_bytes) return u32(byte - static_begin);
    // Lanes may form addresses behind the memory, as long as they do not use them: each use is checked.
    if (byte >= dynamic_shared && byte < dynamic_shared + (1 << 20)) return dynamic_base + u32(byte - dynamic_shared);
    if (static_bytes && byte == static_begin + static_bytes) return static_bytes;
    fail("takes the shared address of a pointer that does not point into shared memory");
}

u32 cluster_address(u32 address, u32 rank) {
    if (address >> 24) fail("the address 0x%x names a block of the cluster already", address);
    if (rank >= blocks_per_cluster) fail("names block %u of the cluster, which has %u", rank, blocks_per_cluster);
    return address | (rank + 1) << 24;
}

static bool has_ended(u32 block) { return blocks[block].live == 0; }

// Return the number of the block that an address names, and cut the address to the offset.
static u32 find_block(u32& address) {
    const u32 rank = address >> 24;
    address &= 0xffffff;
    if (!rank) return me().block;
    if (rank > blocks_per_cluster) fail("an address names block %u of a cluster of %u", rank - 1, blocks_per_cluster);
    const u32 block = first_of_cluster(me().block) + rank - 1;
    if (has_ended(block)) fail("uses the shared memory of block %u of its cluster, which has ended already", rank - 1);
    return block;
}

static void require_inside(u32 offset, u64 bytes, const char* what) {
    if (offset + bytes > shared_bytes || (offset < dynamic_base && offset + bytes > dynamic_base))
        fail("%s of %llu bytes at shared address %u leaves shared memory, which ends at %u", what, bytes, offset,
             offset < dynamic_base ? dynamic_base : shared_bytes);
}

u8* find_shared(u32 address, u32 bytes, const char* what) {
    const u32 block = find_block(address);
    if (address % bytes) fail("%s at shared address %u, which is no multiple of %u", what, address, bytes);
    require_inside(address, bytes, what);
    return own_view(block, address);
}

static void show_barriers_to_engine();

void fence_views(bool of_shared, bool of_global) {
    if (of_global) fence_global_view();
    if (of_shared) my_block().fenced[my_number()] = me().now++, show_barriers_to_engine();
}

// ---- waiting

static void engine_may_act();

static void switch_to_scheduler();

// Let others run, and go on when it is this thread's turn again.
static void yield() {
    me().yielded = true;
    switch_to_scheduler();
}

void pause() {
    if (++me().pauses % 4 == 0 || seed > 2) yield();
}

template <typename Ready, typename Words>
static void wait_until(Ready ready, Words waits_for, bool for_barrier = false) {
    engine_may_act();
    if (ready()) return;
    me().wait = {[](void* ready) { return (*static_cast<Ready*>(ready))(); },
                 [](void* words) -> std::string { return (*static_cast<Words*>(words))(); }, &ready, &waits_for};
    me().waits_for_barrier = for_barrier;
    switch_to_scheduler();
}

static void release_meeting(Meeting& meeting, u32 members, Block& block) {
    if (!meeting.arrived || meeting.arrived < members) return;
    Knowledge& known = meeting.known[meeting.generation % 2] = nullptr;
    if (meeting.is_of_block && meeting.arrived >= block.live && !meeting.some_left) join_block(block);
    else meeting.gathered.last_row = nullptr, known = std::make_shared<Clock>(std::move(meeting.gathered));
    meeting.gathered = {}, meeting.some_left = false;
    meeting.last_arrivals.swap(meeting.arrivals), meeting.arrivals.clear(), meeting.last_threads = meeting.threads;
    meeting.arrived = 0;
    ++meeting.generation;
}

static u32 count_lanes(const Block& block, u32 warp, u32 mask) {
    u32 members = 0;
    const u32 count = blockDim.x * blockDim.y * blockDim.z;
    if (block.live == count && count % 32 == 0) return u32(__builtin_popcount(mask));
    for (u32 lane = 0; lane < 32 && warp * 32 + lane < count; ++lane)
        members += (mask >> lane & 1) && !threads[block.first_thread + warp * 32 + lane].finished;
    return members;
}

// __syncwarp orders accesses to memory. A shuffle or a vote does not, says the programming guide.
// wgmma.wait_group.sync.aligned: no lane goes on before all lanes of its warp have come, so one may then arrive for all.
static const char* const WAIT = "wgmma_wait()";

static void come_together(Thread& thread) { thread.calls = 0, thread.has_waited = false; }

Votes meet(const char* what, u32 mask, u64 value) {
    const bool orders = !strcmp(what, "__syncwarp()") || !strcmp(what, "bar.warp.sync") || !strcmp(what, WAIT);
    const u32 warp = my_number() / 32, lane = lane_number();
    if (!(mask >> lane & 1)) fail("lane %u calls %s with mask 0x%x, which does not name it", lane, what, mask);
    Meeting& meeting = my_block().meetings[{warp, mask}];
    if (!meeting.arrived) meeting.what = what;
    if (strcmp(meeting.what, what)) fail("lanes of one warp meet in %s and in %s", meeting.what, what);
    const u32 before = meeting.generation, half = before % 2;
    if (!meeting.arrived) meeting.filled[half] = 0;
    meeting.slots[half][lane] = value;
    meeting.filled[half] |= 1u << lane;
    ++meeting.arrived;
    if (orders) publish(me(), meeting.gathered, my_block().serial);
    release_meeting(meeting, count_lanes(my_block(), warp, mask), my_block());
    wait_until([&meeting, before] { return meeting.generation != before; },
               [what, mask] { return text("in %s for the other lanes of mask 0x%x", what, mask); });
    if (orders) acquire(me(), meeting.known[half]);
    come_together(me());
    return {meeting.slots[half], meeting.filled[half]};
}

const u8* exchange(const char* what, const void* value, u32 bytes) {
    Meeting& meeting = my_block().meetings[{my_number() / 32, 0xffffffff}];
    std::vector<u8>& values = meeting.exchanged[meeting.generation % 2];
    values.resize(std::max<size_t>(values.size(), 32 * bytes));
    memcpy(&values[lane_number() * bytes], value, bytes);
    if (meet(what, 0xffffffff, 0).filled != 0xffffffff) fail("%s needs all 32 lanes of the warp", what);
    return values.data();
}

static Meeting& join_block_barrier(u32 name, u32 count, const char* what) {
    if (name > 15) fail("the named barrier %u does not exist; a block has the barriers 0 to 15", name);
    if (count % 32) fail("a named barrier counts whole warps; %u threads are none", count);
    const bool is_counted = count;
    if (count == blockDim.x * blockDim.y * blockDim.z) count = 0;
    const auto in_words = [](u32 count) { return count ? text("%u", count) : std::string("all"); };
    Meeting& meeting = my_block().named[name];
    if (!meeting.arrived) meeting.threads = count, meeting.is_of_block = true;
    bool is_other = meeting.threads != count;
    u32 others = meeting.threads;
    if (!is_other && meeting.last_threads != count)  // or it might have been, as nothing orders the two
        for (const u64 at : meeting.last_arrivals) is_other |= !is_before(at, me()), others = meeting.last_threads;
    if (is_other)
        fail("comes to barrier %u %s, where it waits for %s threads of the block, while another thread waits for %s%s",
             name, what, in_words(count).c_str(), in_words(others).c_str(),
             name ? "" : ": __syncthreads() is barrier 0, so a part of the block needs another one");
    ++meeting.arrived;
    if (count) meeting.arrivals.push_back(moment(me()));
    if (is_counted) publish(me(), meeting.gathered, my_block().serial);  // else join_block asks all threads
    return meeting;
}

void arrive_at_block_barrier(u32 name, u32 count, const char* what) {
    Meeting& meeting = join_block_barrier(name, count, what);
    meeting.some_left = true;
    release_meeting(meeting, count, my_block());
    engine_may_act();
    if (seed > 2 && random_number() % 4 == 0) yield();
}

void block_barrier(u32 name, u32 count, const char* what) {
    Meeting& meeting = join_block_barrier(name, count, what);
    const u32 before = meeting.generation;
    release_meeting(meeting, count ? count : my_block().live, my_block());
    wait_until([&meeting, before] { return meeting.generation != before; },
               [&meeting, name, count, what] {
                   return std::string(what) + (name || count
                                                   ? text(" at barrier %u, where %u of %u threads have arrived", name,
                                                          meeting.arrived, count)
                                                   : "");
               });
    if (meeting.known[before % 2]) acquire(me(), meeting.known[before % 2]);
    come_together(me());
}

int count_in_block(bool value) {
    Block& block = my_block();
    const Meeting& meeting = block.named[0];
    const u32 half = meeting.generation % 2;
    if (!meeting.arrived) block.counted[half] = 0;
    block.counted[half] += value;
    block_barrier(0, 0, "in a __syncthreads() that counts");
    return int(block.counted[half]);
}

u32 active_lanes() {
    Meeting& meeting = my_block().meetings[{my_number() / 32, 0}];
    const u32 before = meeting.generation, half = before % 2, warp = my_number() / 32;
    if (!meeting.arrived++) meeting.filled[half] = 0;
    meeting.filled[half] |= 1u << lane_number();
    const u32 first = my_block().first_thread + warp * 32, count = blockDim.x * blockDim.y * blockDim.z;
    me().is_counted = true;
    wait_until(
        [&meeting, before, half, first, warp, count] {
            if (meeting.generation != before) return true;
            for (u32 lane = 0; lane < 32 && warp * 32 + lane < count; ++lane) {
                Thread& thread = threads[first + lane];
                if (!thread.finished && !thread.is_counted && thread.wait.is_over()) return false;
            }
            meeting.arrived = 0;
            ++meeting.generation;
            for (u32 lane = 0; lane < 32 && warp * 32 + lane < count; ++lane) threads[first + lane].is_counted = false;
            return true;
        },
        [] { return "in __activemask() or coalesced_threads() for the other lanes of its warp"; });
    return meeting.filled[half];
}

// Each lane of a warp executes an aligned instruction together with the others. They may have parted where one has made
// calls that another has not, or in the loop of a wait.
void require_together(const char* what) {
    Thread& thread = me();
    const u32 calls = thread.calls;
    bool has_parted = thread.has_waited;
    const Votes votes = meet(what, 0xffffffff, calls);
    for (u32 lane = 0; lane < 32; ++lane) has_parted |= (votes.filled >> lane & 1) && votes.slots[lane] != calls;
    if (has_parted)
        fail(
            "comes to %s where the lanes of its warp may have parted: all execute it together, so __syncwarp() must "
            "come first",
            what);
}

static u32 count_live(u32 first_block) {
    u32 live = 0;
    for (u32 rank = 0; rank < blocks_per_cluster; ++rank) live += blocks[first_block + rank].live;
    return live;
}

static void release_cluster(u32 first) {
    Cluster& cluster = clusters[first / blocks_per_cluster];
    if (!cluster.arrived || cluster.arrived < count_live(first)) return;
    for (u32 b = first; b < first + blocks_per_cluster; ++b) {
        auto base = blocks[b].base ? std::make_shared<Clock>(*blocks[b].base) : std::make_shared<Clock>();
        join(*base, blocks[b].serial, cluster.gathered, 0);
        blocks[b].base = base;
    }
    cluster.gathered = {};
    cluster.arrived = 0;
    ++cluster.generation;
}

void arrive_at_cluster(bool releases) {
    if (me().cluster_generation) fail("calls cluster_arrive a second time without cluster_wait between");
    Cluster& cluster = my_cluster();
    me().cluster_generation = cluster.generation + 1;
    publish(me(), cluster.gathered, 0, releases);
    ++cluster.arrived;
    release_cluster(first_of_cluster(me().block));
}

void wait_for_cluster() {
    const u32 generation = me().cluster_generation;
    if (!generation) fail("calls cluster_wait without cluster_arrive since the last one");
    wait_until([&cluster = my_cluster(), generation] { return cluster.generation >= generation; },
               [] { return "in cluster_wait() for the other threads of the cluster"; });
    me().cluster_generation = 0;  // arrivals and waits alternate
}

// ---- mbarriers

static Barrier& find_barrier(u32 block, u32 address);

// A GPU of today needs no fence where a barrier of the block or of the cluster follows; Triton emits none. NVIDIA's guide
// and CUTLASS have one, and the course teaches it, so its own wrapper `needs_fence`.
void init_barrier(u32 address, u32 arrivals, bool needs_fence) {
    if (address % 8) fail("the mbarrier at shared address %u must lie at a multiple of 8 bytes", address);
    require_inside(address, 8, "an mbarrier");
    if (arrivals == 0 || arrivals >= 1 << 20)
        fail("an mbarrier waits for 1 to 1,048,575 arrivals per phase; this one is initialised for %u", arrivals);
    Block& block = my_block();
    if (block.barriers.count(address))
        fail(
            "initialises the mbarrier at shared address %u a second time without mbarrier.inval before it; a barrier "
            "that is used again keeps its phases, so flip the parity instead",
            address);
    Barrier& barrier = block.barriers[address];
    barrier.arrivals = barrier.pending = int(arrivals);
    barrier.component = block.components++;
    barrier.needs_fence = needs_fence;
    barrier.initialised = moment(me());
    record_shared(address, 8, true, "an mbarrier");
    record_shared(address, 8, moment(block.serial, MBARRIER, 0));
    ++effects, ++me().calls;
}

static void show_barriers_to_engine() {
    for (auto& [address, barrier] : my_block().barriers) barrier.fenced = true;
}
void fence_barriers() { show_barriers_to_engine(), fence_memory(); }

static Barrier& find_barrier(u32 block, u32 address) {
    auto found = blocks[block].barriers.find(address);
    if (found == blocks[block].barriers.end()) {
        if (block == me().block) fail("shared address %u holds no mbarrier that was initialised", address);
        fail(
            "block %u of the cluster has initialised no mbarrier at shared address %u: cluster_arrive and "
            "cluster_wait are missing behind the initialisation",
            block, address);
    }
    if (!is_before(found->second.initialised, me()))
        fail("uses the mbarrier at shared address %u, which %s initialises without a barrier between", address,
             describe_thread(found->second.initialised).c_str());
    return found->second;
}

static void complete_phase_if_due(u32 block, u32 address) {
    Barrier& barrier = blocks[block].barriers[address];
    if (barrier.pending || barrier.bytes) return;
    u32 on_their_way = 0;
    for (auto& operation : operations)
        if (operation.kind == LOAD && operation.block == block && operation.barrier == address)
            on_their_way += operation.bytes;
    if (on_their_way)
        failure = text(
            "block %s: phase %u of the mbarrier at shared address %u ended although %u bytes were not "
            "announced: a load is on its way, and no expect_tx named them before the last arrival",
            name_index(blocks[block].index, gridDim).c_str(), barrier.phase, address, on_their_way);
    ++effects;
    ++barrier.phase;
    barrier.pending = barrier.arrivals;
    raise(barrier.gathered.known, barrier.component, barrier.phase);
    auto done = std::make_shared<Clock>(barrier.gathered);
    done->last_base = done->last_row = nullptr;
    barrier.done = done;
}

static void complete_phase(u32 block, u32 address) {  // if it is due, as the current thread may have brought about
    complete_phase_if_due(block, address);
    if (failure.empty()) return;
    failure = mark(find_caller(__builtin_frame_address(0))) + failure;
    _longjmp(scheduler, 1);
}

void invalidate_barrier(u32 address) {
    find_barrier(me().block, address);
    my_block().barriers.erase(address);
    record_shared(address, 8, moment(me()));  // the memory may hold something else
}

u64 arrive(u32 address, u32 bytes, u32 arrivals, bool drops, bool releases) {
    const u32 block = find_block(address);
    Barrier& barrier = find_barrier(block, address);
    const u32 phase = barrier.phase;
    if (barrier.pending < int(arrivals))
        fail("the mbarrier at shared address %u gets more arrivals in a phase than the %d it was initialised for",
             address, barrier.arrivals);
    barrier.bytes += bytes;
    barrier.pending -= arrivals;
    if (drops) barrier.arrivals -= arrivals;
    ++effects, ++me().calls;
    publish(me(), barrier.gathered, blocks[block].serial, releases);
    complete_phase(block, address);
    engine_may_act();
    if (seed > 2 && random_number() % 4 == 0) yield();
    return phase;
}

void expect_bytes(u32 address, long bytes) {
    const u32 block = find_block(address);
    Barrier& barrier = find_barrier(block, address);
    barrier.bytes += bytes;
    complete_phase(block, address);
    engine_may_act();
}

static void wait_for_phase(u32 address, u32 parity, bool polls, bool acquires) {
    const u32 block = find_block(address);
    if (block != me().block) fail("waits for an mbarrier of another block; a thread can only wait for its own block's");
    Barrier& barrier = find_barrier(block, address);
    Thread& thread = me();
    thread.polls = polls, thread.gives_up = false;
    thread.has_waited = true;
    wait_until([&barrier, &thread, parity] { return (barrier.phase & 1) != (parity & 1) || thread.gives_up; },
               [&barrier, address, parity] {
                   std::string lacks = text("still lacks %d of %d arrivals", barrier.pending, barrier.arrivals);
                   if (!barrier.pending) lacks = text("has %d of %d arrivals", barrier.arrivals, barrier.arrivals);
                   if (barrier.bytes > 0)
                       lacks +=
                           text(barrier.pending ? " and %ld bytes" : " and still lacks %ld bytes", long(barrier.bytes));
                   if (barrier.bytes < 0)
                       lacks += text(", and %ld bytes came that were not announced", -long(barrier.bytes));
                   return text("for parity %u of the mbarrier at shared address %u. Its phase %u (parity %u) %s",
                               parity & 1, address, barrier.phase, barrier.phase & 1, lacks.c_str());
               },
               true);
    thread.polls = false;
    if (thread.gives_up) return;
    thread.failed_polls = 0, thread.has_polled = false;
    barrier.waited = barrier.phase;
    if (acquires) acquire(thread, barrier.done);
    else thread.read = merge(thread.read, barrier.done, my_block().serial);
}

void wait_for_phase(u32 address, u32 parity) { wait_for_phase(address, parity, false, true); }

// A poll may fail at any time. With most seeds a thread's first one does, so that a kernel without a loop is found out.
bool try_phase(u32 address, u32 parity, bool acquires) {
    if (seed != 1 && seed != 2 && !tracing && !me().has_polled && address >> 24 == 0 &&
        (find_barrier(me().block, address).phase & 1) == (parity & 1)) {
        me().has_polled = true;
        return false;
    }
    wait_for_phase(address, parity, true, acquires);
    return !me().gives_up;
}

// Let polls of barriers fail where nothing else can run. Return whether there was one that has not failed often.
static bool let_polls_fail() {
    bool someone_can_run = false;
    for (auto& thread : threads)
        if (!thread.finished && thread.polls && !thread.gives_up && thread.failed_polls++ < 8)
            thread.gives_up = someone_can_run = true;
    return someone_can_run;
}

// ---- numbers

u32 bf16_bits(float value) {
    u32 bits = __float_as_uint(value);
    if (value != value) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

float f16_value(u32 bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float sign = bits >> 15 & 1 ? -1.0f : 1.0f;
    if (exponent == 31) return fraction ? NAN : sign * INFINITY;
    return sign * (exponent ? ldexpf(1024 + fraction, exponent - 25) : ldexpf(fraction, -24));
}

u32 f16_bits(float value) {
    const u32 sign = __float_as_uint(value) >> 31 << 15;
    if (value != value) return 0x7fff;
    value = fabsf(value);
    if (value >= 65520) return sign | 0x7c00;
    int exponent;
    frexpf(value, &exponent);
    if (value == 0 || exponent < -13) return sign | u32(nearbyintf(ldexpf(value, 24)));
    return sign | ((u32(exponent + 13) << 10) + u32(nearbyintf(ldexpf(value, 11 - exponent))));  // may carry upwards
}

static float bf16_value(u32 bits) { return __uint_as_float(bits << 16); }

static float e4m3_value(u32 bits) {
    const int exponent = bits >> 3 & 15, fraction = bits & 7;
    if ((bits & 127) == 127) return NAN;
    return (bits >> 7 ? -1 : 1) * (exponent ? ldexpf(8 + fraction, exponent - 10) : ldexpf(fraction, -9));
}

float element_value(Elements elements, u32 bits) {
    switch (elements) {
        case BF16: return bf16_value(bits & 0xffff);
        case F16: return f16_value(bits & 0xffff);
        case TF32: return __uint_as_float(bits & 0xffffe000);
        case E4M3: return e4m3_value(bits & 0xff);
        case E5M2: return f16_value((bits & 0xff) << 8);
        case S8: return float(static_cast<signed char>(bits));
        default: return float(bits & 0xff);
    }
}

u32 float8_bits(Elements elements, float value) {
    const u32 sign = __float_as_uint(value) >> 31 << 7, fraction_bits = elements == E4M3 ? 3 : 2;
    if (value != value) return elements == E4M3 ? 0x7f : 0x7f | sign;
    value = fabsf(value);
    const int bias = elements == E4M3 ? 7 : 15, largest = elements == E4M3 ? 0x7e : 0x7b;
    int exponent;
    frexpf(value, &exponent);
    exponent = std::max(exponent - 1, 1 - bias);
    if (value == 0) return sign;
    if (exponent > 128) return sign | largest;  // infinity
    const int units = int(nearbyintf(ldexpf(value, int(fraction_bits) - exponent)));  // may carry upwards
    return sign | u32(std::min(((exponent + bias - 1) << fraction_bits) + units, largest));
}

static u32 element_bytes(Elements elements) {
    return elements == TF32 ? 4 : elements == BF16 || elements == F16 ? 2 : 1;
}

// ---- the copy engine

static void fill(u8* to, const Map& map, u32 elements) {
    memset(to, 0, elements * map.itemsize);
    if (!map.fill_is_nan) return;
    const u64 nan = map.itemsize == 8 ? 0x7fffffffffffffff : map.itemsize == 4 ? 0x7fffffff : 0x7fff;
    for (u32 i = 0; i < elements; ++i) memcpy(to + i * map.itemsize, &nan, map.itemsize);
}

static void load_box(Operation& operation) {
    const Map& map = operation.map;
    const long columns = map.shape[0], elements = 16 / map.itemsize;
    for_each_unit(operation, [&](u32 at, long x, const u8* from) {
        u8 unit[16];
        const long first = std::clamp<long>(-x, 0, elements), last = std::clamp<long>(columns - x, 0, elements);
        if (from && first == 0 && last == elements) {
            memcpy(unit, from, 16);
        } else {
            fill(unit, map, elements);
            if (from && first < last)
                memcpy(unit + first * map.itemsize, from + first * map.itemsize, (last - first) * map.itemsize);
        }
        memcpy(own_view(operation.block, at), unit, 16);
    });
}

static void read_box(Operation& operation) {
    for_each_unit(operation, [&](u32 at, long, const u8*) {
        const u8* unit = own_view(operation.block, at);
        operation.data.insert(operation.data.end(), unit, unit + 16);
    });
}

template <typename T>
static T combine(const char* change, T a, T b) {
    const auto is = [=](const char* name) { return !strcmp(change, name); };
    if (is("add")) return a + b;
    if (is("min")) return std::min(a, b);
    if (is("max")) return std::max(a, b);
    if constexpr (std::is_integral_v<T>) {
        if (is("and")) return a & b;
        if (is("or")) return a | b;
        if (is("xor")) return a ^ b;
        if (is("inc")) return a >= b ? 0 : a + 1;
        if (is("dec")) return a == 0 || a > b ? b : a - 1;
    }
    fail("has a reduction .%s of numbers with a point, which PTX does not have", change);
}
template <typename T>
static void change_element(u8* to, const u8* from, const char* change) {
    T a, b;
    memcpy(&a, to, sizeof(T)), memcpy(&b, from, sizeof(T));
    a = combine(change, a, b);
    memcpy(to, &a, sizeof(T));
}
static void change_element(u8* to, const u8* from, const Map& map, const char* change) {
    u32 a = 0, b = 0;
    const bool is_integer = map.type[0] == 'i', is_signed = map.type[1] == 's';
    if (map.itemsize == 2 && !is_integer) {
        memcpy(&a, to, 2), memcpy(&b, from, 2);
        a = map.type[0] == 'b' ? bf16_bits(combine(change, bf16_value(a), bf16_value(b)))
                               : f16_bits(combine(change, f16_value(a), f16_value(b)));
        memcpy(to, &a, 2);
    } else if (map.itemsize == 4) {
        if (!is_integer) change_element<float>(to, from, change);
        else is_signed ? change_element<int>(to, from, change) : change_element<u32>(to, from, change);
    } else if (map.itemsize == 8) {
        if (!is_integer) change_element<double>(to, from, change);
        else is_signed ? change_element<long long>(to, from, change) : change_element<u64>(to, from, change);
    }
}

// TMA leaves out what lies outside of the tensor, in whole units of 16 bytes.
static void write_box(Operation& operation) {
    const Map& map = operation.map;
    const u8* from = operation.data.data();
    for_each_unit(operation, [&](u32, long x, u8* to) {
        const u8* unit = from;
        from += 16;
        if (!to || x < 0 || x >= long(map.shape[0])) return;
        const u64 bytes = std::min<u64>(16, map.end - reinterpret_cast<u64>(to));
        if (operation.kind == STORE) memcpy(to, unit, bytes);
        else
            for (u32 i = 0; i < bytes; i += map.itemsize) change_element(to + i, unit + i, map, operation.change);
    });
}

// Let the engine do one step: a load lands, a store reads its tile, or a store that has read writes memory.
static void complete_one() {
    size_t which = seed == 0 ? operations.size() - 1 : random_number() % operations.size();
    if (seed == 0)  // multicasts to other blocks come last
        for (size_t i = 0; i < operations.size(); ++i)
            if (operations[i].block == threads[operations[i].thread].block) which = i;
    Operation& operation = operations[which];
    ++effects;
    if (operation.kind != LOAD && !operation.read) {
        const u8* from = own_view(operation.block, operation.tile);
        operation.is_box ? read_box(operation) : operation.data.assign(from, from + operation.bytes);
        operation.read = true;
        return;
    }
    if (operation.is_box) {
        operation.kind == LOAD ? load_box(operation) : write_box(operation);
    } else if (operation.kind == LOAD) {
        const u8* from = operation.global         ? operation.global
                         : operation.data.empty() ? own_view(threads[operation.thread].block, operation.source)
                                                  : operation.data.data();
        memcpy(own_view(operation.block, operation.tile), from, operation.bytes);
    } else if (operation.kind == ADD) {
        for (u32 i = 0; i < operation.bytes; i += operation.map.itemsize)
            change_element(operation.global + i, &operation.data[i], operation.map, operation.change);
    } else {
        memcpy(operation.global, operation.data.data(), operation.bytes);
    }
    const Operation done = std::move(operation);
    operations.erase(operations.begin() + which);
    if (done.kind != LOAD) return;
    blocks[done.block].barriers[done.barrier].bytes -= done.bytes;
    if (!failure.empty()) return;
    complete_phase_if_due(done.block, done.barrier);
    if (!failure.empty()) failure = mark(done.where) + failure;
}

static u32 open_products;  // that some warp has not executed
static bool has_next_product(const WarpGroup& group, u32 warp);
static void execute_next_product(WarpGroup& group, u32 warp);

static bool acts_now(bool at_once) { return at_once || (seed > 2 && random_number() % patience == 0); }

static void engine_may_act() {
    while (!operations.empty() && acts_now(seed == 1 || seed == 2)) complete_one();
    if (seed == 0 || seed == 2 || !open_products) return;  // products wait
    for (auto& block : blocks)
        for (auto& group : block.warp_groups)
            for (u32 warp = 0; warp < 4; ++warp)
                while (has_next_product(group, warp) && acts_now(seed == 1)) execute_next_product(group, warp);
}

static std::string advice;  // about what works, but has no promise

static void require_signal(u32 block, u32 barrier, const char* what) {
    const Barrier& signalled = find_barrier(block, barrier);
    if (signalled.fenced) return;
    if (signalled.needs_fence)
        fail("%s names an mbarrier that the copy engine cannot see yet: fence_mbarrier_init is missing", what);
    if (advice.empty())
        advice = mark(find_caller(__builtin_frame_address(0))) + what +
                 " signals an mbarrier without fence.mbarrier_init after its initialisation. GPUs of today do without, "
                 "as long as a barrier of the block or the cluster follows; CUTLASS and NVIDIA's guide have a fence";
}

static u32 store_component() {
    if (!me().store_component) me().store_component = my_block().components++;
    return me().store_component;
}

// What a launch issued, in order, for checks that ask how a kernel reached its result: see trace() in __init__.py.
struct Event {
    u32 kind, block, bytes, pending;  // a Kind and its bytes, or PRODUCT and how many groups may still be running
};
constexpr u32 PRODUCT = 3;
static std::vector<Event> events;
static u64 steps;

static void note(u32 kind, u32 bytes, u32 pending) {
    const dim3 at = my_block().index;
    if (tracing) events.push_back({kind, at.x + gridDim.x * (at.y + gridDim.y * at.z), bytes, pending});
}

static void start(Operation operation) {
    const Where where = find_caller(__builtin_frame_address(0));
    note(operation.kind, operation.bytes, 0);
    ++me().calls;
    if (operation.kind != STORE) require_viewed(operation);
    operation.thread = current;
    operation.group = me().groups;
    if (operation.kind == LOAD) {
        Barrier& barrier = blocks[operation.block].barriers[operation.barrier];
        barrier.loaded = barrier.phase + 1, barrier.load = where;
        begin_load(operation, moment(blocks[operation.block].serial, barrier.component, barrier.phase + 1));
    } else {
        begin_store(operation, moment(my_block().serial, store_component(), me().groups + 1));
    }
    operation.where = where;
    operations.push_back(std::move(operation));
}

// Start an operation, a load once for each block of the cluster that `ctas` names; -1 names the tile's own block.
static void start_in(Operation operation, int ctas) {
    const char* what = operation.what;
    if (ctas < 0) return start(std::move(operation));
    for (u32 rank = 0; ctas >> rank; ++rank) {
        if (!(ctas >> rank & 1)) continue;
        if (rank >= blocks_per_cluster) fail("%s names block %u of a cluster of %u", what, rank, blocks_per_cluster);
        operation.block = first_of_cluster(me().block) + rank;
        if (has_ended(operation.block))
            fail("%s sends to block %u of its cluster, which has ended already", what, rank);
        if (operation.kind == LOAD) require_signal(operation.block, operation.barrier, what);
        start(operation);
    }
}

// `type` is that of a reduction's elements, as PTX calls it: u32, f16, bf16, b64 and so on.
void move_bytes(Kind kind, void* global, u32 tile, u32 bytes, u32 barrier, const char* what, const char* type, int ctas,
                const char* change) {
    const u64 address = reinterpret_cast<u64>(global);
    if (address % 16 || tile % 16 || bytes % 16 || !bytes)
        fail(
            "%s of %u bytes between global address ...%llx and shared address %u: a bulk copy moves whole units of 16 "
            "bytes between multiples of 16",
            what, bytes, address & 0xfff, tile);
    const u32 block = find_block(tile);
    if (kind != LOAD && block != me().block) fail("%s reads the shared memory of another block", what);
    if (kind == LOAD && find_block(barrier) != block)
        fail("%s signals an mbarrier of another block than its tile's", what);
    if (kind == LOAD) require_signal(block, barrier, what);
    require_inside(tile, bytes, what);
    if (const Region* region = find_region(address, bytes); !region || region->tensor < 0)
        fail("%s of %u bytes leaves the tensors that were passed to the kernel", what, bytes);
    Operation operation = {kind, block, tile, bytes, barrier, static_cast<u8*>(global)};
    operation.map.type[0] = !strncmp(type, "bf", 2) ? 'b' : *type == 'f' ? 'f' : 'i', operation.map.type[1] = *type;
    operation.map.itemsize = u8(atoi(type + strcspn(type, "123468")) / 8);
    operation.what = what, operation.span = bytes, operation.change = change;
    start_in(std::move(operation), ctas);
    engine_may_act();
}

void prefetch_bytes(const void* global, u32 bytes, const char* what) {
    const u64 address = reinterpret_cast<u64>(global);
    if (address % 16 || bytes % 16)
        fail("%s of %u bytes at ...%llx: both must be multiples of 16", what, bytes, address & 0xfff);
    if (const Region* region = find_region(address, bytes); !region || region->tensor < 0)
        fail("%s of %u bytes leaves the tensors that were passed to the kernel", what, bytes);
}

static void send(Operation operation, u32 destination, u32 barrier, const char* what) {
    operation.kind = LOAD;
    operation.block = find_block(destination);
    if (find_block(barrier) != operation.block)
        fail("%s signals an mbarrier of another block than its destination's", what);
    operation.tile = destination, operation.barrier = barrier, operation.span = operation.bytes, operation.what = what;
    require_signal(operation.block, barrier, what);
    require_inside(destination, operation.bytes, what);
    start(std::move(operation));
    engine_may_act();
}

void send_bytes(u32 destination, u32 tile, u32 bytes, u32 barrier, const char* what) {
    if (destination % 16 || tile % 16 || bytes % 16 || !bytes)
        fail("%s of %u bytes moves whole units of 16 bytes between multiples of 16", what, bytes);
    if (find_block(tile) != me().block) fail("%s reads the shared memory of another block", what);
    require_inside(tile, bytes, what);
    Operation operation = {};
    operation.source = tile, operation.bytes = bytes;
    send(std::move(operation), destination, barrier, what);
}

void send_value(u32 destination, const void* value, u32 bytes, u32 barrier, const char* what) {
    const u8* data = static_cast<const u8*>(value);
    Operation operation = {};
    operation.bytes = bytes;
    operation.data.assign(data, data + bytes);
    send(std::move(operation), destination, barrier, what);
}

void move_box(Kind kind, const void* map_argument, u32 dimensions, const int* corner, u32 tile, u32 barrier, int ctas,
              const char* what, const char* change) {
    Operation operation = {kind, me().block, tile, 0, barrier};
    Map& map = operation.map;
    memcpy(&map, map_argument, sizeof map);
    if (map.mark != MAP_MARK) fail("%s is given a tensor map that make_tensor_map has not made", what);
    if (map.dimensions != dimensions) fail("%s is given a tensor map of %u dimensions", what, u32(map.dimensions));
    if (kind != LOAD && tile >> 24 && (tile >> 24) - 1 != me().block)
        fail("%s reads the shared memory of another block", what);
    if (tile % 128) fail("%s at shared address %u: a tile must lie at a multiple of 128 bytes", what, tile);
    if (long(corner[0]) * map.itemsize % 16)
        fail("%s starts at x = %d, within a unit of 16 bytes: on a GPU this is an illegal instruction", what,
             corner[0]);
    u32 rows = 1;
    for (u32 d = 1; d < dimensions; ++d) rows *= map.box[d];
    const u32 row_bytes = map.box[0] * map.itemsize;
    require_inside(tile & 0xffffff, u64(rows) * std::max<u32>(row_bytes, map.swizzle), what);
    operation.span = rows * std::max<u32>(row_bytes, map.swizzle);
    operation.is_box = true;
    operation.bytes = rows * row_bytes;  // a box counts in full, also where it lies outside of the tensor
    std::copy(corner, corner + dimensions, operation.corner);
    if (kind != LOAD && (map.type[0] == 'i' && map.itemsize < 4 && kind == ADD))
        fail("%s cannot add integers of %u bytes", what, u32(map.itemsize));
    operation.what = what, operation.change = change;
    for (u32 d = 0; d < dimensions && hint.empty(); ++d)
        if (corner[d] >= long(map.shape[d]) || corner[d] + long(map.box[d]) <= 0)
            note_hint(find_caller(__builtin_frame_address(0)),
                      text("moves a box that lies wholly outside of the tensor: it starts at %d of %u elements in "
                           "dimension %u",
                           corner[d], map.shape[d], d));
    const u32 home = find_block(tile);
    if (kind == LOAD && find_block(barrier) != home)
        fail("%s signals an mbarrier of another block than its tile's, which the emulator does not know", what);
    operation.tile = tile, operation.barrier = barrier;
    start_in(std::move(operation), ctas < 0 ? 1 << rank_of(home) : ctas);
    engine_may_act();
}

void commit_stores() {
    for (auto& operation : operations)
        if (operation.kind != LOAD && operation.thread == current) operation.committed = true;
    ++me().groups;
}

void wait_for_reads(u32 pending) {
    const u32 thread = current, groups = me().groups;
    wait_until(
        [=] {
            return std::none_of(operations.begin(), operations.end(), [=](auto& operation) {
                return operation.kind != LOAD && operation.thread == thread && operation.committed && !operation.read &&
                       operation.group + pending < groups;
            });
        },
        [] { return "for the copy engine to read the tiles of its stores"; });
    if (groups > pending) me().stores_waited = std::max(me().stores_waited, groups - pending);
    if (me().store_component) close_reads(me().store_component, me().stores_waited);
}

// ---- cp.async: each thread's copy lands when the thread waits for it, the latest moment that PTX allows

void copy_async(u32 tile, const void* source, u32 bytes, u32 source_bytes) {
    const u64 from = reinterpret_cast<u64>(source);
    if (bytes != 4 && bytes != 8 && bytes != 16) fail("cp_async copies 4, 8 or 16 bytes, not %u", bytes);
    if (tile % bytes || from % bytes)
        fail("cp_async of %u bytes from global address ...%llx to shared address %u: both must be multiples of %u",
             bytes, from & 0xfff, tile, bytes);
    if (source_bytes > bytes) fail("cp_async of %u bytes reads %u", bytes, source_bytes);
    require_inside(tile, bytes, "cp_async");
    CpAsync copy = {{}, tile, bytes, me().copy_groups, find_caller(__builtin_frame_address(0))};
    if (source_bytes) {
        access(from, source_bytes, false, false, __builtin_frame_address(0));
        memcpy(copy.data, source, source_bytes);
    }
    record_shared(tile, bytes, false, "cp_async");
    me().copies.push_back(copy);
}

void commit_copies() { ++me().copy_groups; }

void wait_for_copies(u32 pending) {
    auto& copies = me().copies;
    size_t kept = 0;
    for (auto& copy : copies) {
        if (copy.group + pending >= me().copy_groups) {
            copies[kept++] = copy;
            continue;
        }
        record_shared(copy.tile, copy.bytes, true, "cp_async", &copy.where);
        memcpy(own_view(me().block, copy.tile), copy.data, copy.bytes);
    }
    copies.resize(kept);
}

void wait_for_stores(u32 pending) {
    const u32 thread = current, groups = me().groups;
    wait_until(
        [=] {
            return std::none_of(operations.begin(), operations.end(), [=](auto& operation) {
                return operation.kind != LOAD && operation.thread == thread && operation.committed &&
                       operation.group + pending < groups;
            });
        },
        [] { return "for the copy engine to end its stores"; });
    wait_for_reads(pending);
}

// ---- wgmma

void fence_products() { me().fenced = true; }

static u32 wrap(u32 address) { return address < shared_bytes ? address : address % shared_bytes; }

// Return where 16 bytes of one row of a matrix lie in shared memory; `unit` is 0 or 1.
//
// A descriptor holds, in units of 16 bytes, the address (bits 0-13), the offset from one core matrix of 8 x 16 bytes to
// the next along K (bits 16-29, used only without a swizzle), and that to the next eight rows (bits 32-45). Bits 62-63
// hold the swizzle. Rows of a swizzled tile lie one swizzle apart.
static u32 unit_address(u64 descriptor, u32 row, u32 unit) {
    constexpr u32 SWIZZLES[] = {0, 128, 64, 32};
    const u32 swizzle = SWIZZLES[descriptor >> 62], base = u32(descriptor & 0x3fff) * 16;
    const u32 along_k = u32(descriptor >> 16 & 0x3fff) * 16, along_rows = u32(descriptor >> 32 & 0x3fff) * 16;
    const u32 address =
        base + row / 8 * along_rows + row % 8 * (swizzle ? swizzle : 16) + unit * (swizzle ? 16 : along_k);
    return wrap(place_in_swizzle(address, swizzle));
}

// The rows of a transposed matrix run along M or N, with k from one to the next. Eight rows of one swizzle (16 bytes
// without one) are a core matrix. The first offset leads to the next core matrix along M or N and the second one along
// K, or the other way round without a swizzle.
static u32 element_address(u64 descriptor, u32 row, u32 k) {
    constexpr u32 SWIZZLES[] = {0, 128, 64, 32};
    const u32 swizzle = SWIZZLES[descriptor >> 62], base = u32(descriptor & 0x3fff) * 16;
    const u32 along_k = u32(descriptor >> 16 & 0x3fff) * 16, along_rows = u32(descriptor >> 32 & 0x3fff) * 16;
    const u32 span = swizzle ? swizzle / 2 : 8, outer = row / span, inner = row % span * 2;
    const u32 address = base + outer * (swizzle ? along_k : along_rows) + k / 8 * (swizzle ? along_rows : along_k) +
                        k % 8 * span * 2 + inner;
    return wrap(place_in_swizzle(address, swizzle));
}

static void read_row(u32 block, u64 descriptor, u32 row, Elements elements, bool transposed, float (&values)[32]) {
    if (transposed) {
        for (u32 k = 0; k < 16; ++k) {
            const u8* bytes = own_view(block, element_address(descriptor, row, k));
            values[k] = element_value(elements, bytes[0] | bytes[1] << 8);
        }
        return;
    }
    const u32 size = element_bytes(elements), count = 16 / size;
    for (u32 unit = 0; unit < 2; ++unit) {
        const u8* bytes = own_view(block, unit_address(descriptor, row, unit));
        if (elements == BF16)
            for (u32 i = 0; i < 8; ++i) values[unit * 8 + i] = bf16_value(bytes[2 * i] | bytes[2 * i + 1] << 8);
        for (u32 i = 0; i < count && elements != BF16; ++i) {
            u32 element = 0;
            memcpy(&element, bytes + size * i, size);
            values[unit * count + i] = element_value(elements, element);
        }
    }
}

// Read one row of a warp's part of A from registers. Register 0 holds 4 bytes of row lane / 4 from byte 4 (lane % 4) on,
// register 1 of eight rows below, 2 and 3 of the second 16 bytes.
static void read_row(const Product& product, u32 warp, u32 row, float (&values)[32]) {
    const u32 size = element_bytes(product.kind.a), count = 4 / size;
    for (u32 part = 0; part < 8; ++part) {
        const u32 word = product.a_registers[32 * warp + row % 8 * 4 + part % 4][row / 8 + part / 4 * 2];
        for (u32 i = 0; i < count; ++i) values[part * count + i] = element_value(product.kind.a, word >> 8 * size * i);
    }
}

static bool has_next_product(const WarpGroup& group, u32 warp) {
    const u32 index = group.next[warp] - group.removed;
    return index < group.products.size() && group.products[index]->issued[warp] == 32;
}

#if defined(__x86_64__)
__attribute__((target_clones("avx2", "default")))
#endif
static void multiply(const float (&a)[16][32], const float (&b)[32][256], float (&sums)[16][256], u32 width,
                     u32 depth) {
    for (u32 r = 0; r < 16; ++r) {
        std::fill_n(sums[r], width, 0.0f);
        for (u32 k = 0; k < depth; ++k)
            for (u32 column = 0; column < width; ++column) sums[r][column] += a[r][k] * b[k][column];
    }
}

// Carry out one warp's part of its next product. tilelab/include/wgmma.cuh draws which sums a thread holds.
static void execute_next_product(WarpGroup& group, u32 warp) {
    const std::shared_ptr<Product> product = group.products[group.next[warp]++ - group.removed];
    product->executed |= 1u << warp;
    while (!group.products.empty() && group.products.front()->executed == 15) {
        group.products.pop_front();
        ++group.removed, --open_products;
    }
    const ProductKind& kind = product->kind;
    const u32 depth = 32 / element_bytes(kind.a), width = kind.width;
    static float a[16][32], b[32][256], row[32], sums[16][256];
    for (u32 r = 0; r < 16; ++r)
        if (product->a_in_registers) read_row(*product, warp, r, a[r]);
        else read_row(group.block, product->a, 16 * warp + r, kind.a, kind.a_transposed, a[r]);
    for (u32 column = 0; column < width; ++column) {
        read_row(group.block, product->b, column, kind.b, kind.b_transposed, row);
        for (u32 k = 0; k < depth; ++k) b[k][column] = row[k];
    }
    multiply(a, b, sums, width, depth);
    const float scale = float(kind.a_scale * kind.b_scale);
    for (u32 lane = 0; lane < 32; ++lane) {
        const u32 t = 32 * warp + lane;
        u32* d = threads[group.first_thread + t].accumulators[product->d[t]].values.data();
        for (u32 i = 0; i < width / 2; ++i) {
            const float sum = scale * sums[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2];
            if (kind.sums == F32_SUMS) {
                d[i] = __float_as_uint(product->accumulate ? __uint_as_float(d[i]) + sum : sum);
            } else if (kind.sums == S32_SUMS) {
                d[i] = u32(int(sum)) + (product->accumulate ? d[i] : 0);
            } else {
                const u32 shift = i % 2 * 16, half = d[i / 2] >> shift;
                const u32 rounded = f16_bits(product->accumulate ? f16_value(half & 0xffff) + sum : sum);
                d[i / 2] = (d[i / 2] & ~(0xffffu << shift)) | rounded << shift;
            }
        }
    }
}

static WarpGroup& my_warp_group() { return my_block().warp_groups[my_number() / 128]; }

static void require_descriptor(u64 descriptor, u32 rows, bool transposed, const char* name) {
    const u32 base = u32(descriptor & 0x3fff) * 16, along_rows = u32(descriptor >> 32 & 0x3fff) * 16;
    if (!transposed && base + u64(rows / 8 - 1) * along_rows + 128 > shared_bytes)
        fail("the descriptor of %s, of %u rows from shared address %u on, leaves shared memory", name, rows, base);
    if (descriptor >> 49 & 7) fail("the descriptor of %s has a base offset, which the emulator does not know", name);
    const u32 repeats = descriptor >> 62 ? 2048u >> (descriptor >> 62) : 16;  // bytes: then a swizzle begins anew
    if (base % repeats / 128)
        fail(
            "the descriptor of %s begins at shared address %u, in row %u of a swizzle that begins anew every %u bytes: "
            "the tile must lie at a multiple of that",
            name, base, base % repeats / 128, repeats);
}

// The first register is the name of the accumulators.
void multiply(const ProductKind& kind, u32* const* d, const u32* a_registers, u64 a, u64 b, bool accumulate) {
    const u32 registers = kind.width / (kind.sums == F16_SUMS ? 4 : 2);
    Thread& thread = me();
    if (my_number() / 128 >= my_block().warp_groups.size())
        fail("calls wgmma, which needs a warp group of 128 threads");
    WarpGroup& group = my_warp_group();
    if (!thread.accumulators.count(*d) && !thread.fenced) {
        const auto before = thread.returned.find(*d);
        bool is_kept = accumulate && before != thread.returned.end();
        for (u32 i = 0; i < registers && is_kept; ++i) is_kept = before->second[i] == *d[i];
        if (!is_kept) fail("wgmma_fence() is missing between other uses of d and wgmma");
    }
    if (!a_registers) require_descriptor(a, 64, kind.a_transposed, "A");
    require_descriptor(b, kind.width, kind.b_transposed, "B");

    const u32 index = thread.products++ - group.removed;
    if (index == group.products.size()) {
        group.products.push_back(std::make_shared<Product>()), ++open_products;
        Product& product = *group.products.back();
        product.kind = kind, product.a = a, product.b = b;
        product.accumulate = accumulate, product.a_in_registers = a_registers;
        product.where = find_caller(__builtin_frame_address(0));
    }
    const std::shared_ptr<Product> product = group.products[index];
    if (product->a != a || product->b != b || product->kind.width != kind.width || product->accumulate != accumulate)
        fail("the threads of one warp group give wgmma different operands");
    product->d[my_number() % 128] = *d;
    if (a_registers) std::copy(a_registers, a_registers + 4, product->a_registers[my_number() % 128]);
    const u32 warp = my_number() / 32 % 4, lane = lane_number();
    if (!thread.product_component) {
        if (!group.component) group.component = my_block().components++;
        thread.product_component = group.component;
    }
    ++effects;
    if (++product->issued[warp] == 32) {
        const u64 at = moment(my_block().serial, thread.product_component, thread.product_groups + 1);
        if (!a_registers) add_read({a, 16 * warp, 16, kind.a_transposed}, at);
        add_read({b, 0, kind.width, kind.b_transposed}, at);
    }
    if (!a_registers) begin_read({a, 16 * warp + lane / 2, 1, kind.a_transposed});
    begin_read({b, lane % kind.width, 1, kind.b_transposed});  // each lane must know that the tiles are there
    for (u32 row = lane + 32; row < kind.width; row += 32) begin_read({b, row, 1, kind.b_transposed});

    if (my_number() % 128 == 0)
        note(PRODUCT, 0, thread.issued.empty() ? 0 : thread.product_groups - thread.issued.front().group);

    Accumulators& own = thread.accumulators[*d];
    if (!own.uses++) {
        own.registers.assign(d, d + registers);
        for (u32 i = 0; i < registers; ++i) {
            own.values.push_back(*d[i]);
            *d[i] = __float_as_uint(NAN);
        }
    }
    if (own.values.size() != registers) fail("uses one d for products of different widths without a wait in between");
    thread.issued.push_back({product, thread.product_groups, *d});
    engine_may_act();
}

void commit_products() { ++me().product_groups; }

void wait_for_products(u32 pending) {
    meet(WAIT, 0xffffffff, 0);
    Thread& thread = me();
    if (thread.product_groups <= pending) return;
    const u32 limit = thread.product_groups - pending;
    wait_until(  // PTX: commit_group makes one group per warp group, so what one warp has waited for is done for all
        [&thread, limit] {
            return std::all_of(thread.issued.begin(), thread.issued.end(), [=](auto& each) {
                const auto& issued = each.product->issued;
                return each.group >= limit ||
                       std::all_of(std::begin(issued), std::end(issued), [](u32 lanes) { return lanes == 32; });
            });
        },
        [] { return "in wgmma_wait() for the other threads of its warp group to issue the same wgmma"; });
    size_t done = 0;
    for (; done < thread.issued.size() && thread.issued[done].group < limit; ++done) {
        const Issued& each = thread.issued[done];
        for (u32 warp = 0; warp < 4; ++warp)
            while (!(each.product->executed >> warp & 1)) execute_next_product(my_warp_group(), warp);
        Accumulators& own = thread.accumulators[each.d];
        if (--own.uses) continue;
        for (size_t i = 0; i < own.values.size(); ++i) *own.registers[i] = own.values[i];
        thread.returned[each.d] = std::move(own.values);
        thread.accumulators.erase(each.d);
        thread.fenced = false;
    }
    thread.issued.erase(thread.issued.begin(), thread.issued.begin() + done);
    thread.products_waited = std::max(thread.products_waited, limit);
    if (lane_number() == 31 && thread.product_component) close_reads(thread.product_component, limit);
    if (seed > 2 && random_number() % 4 == 0) yield();
}

void change_registers(u32 count) {
    if (count % 8 || count < 24 || count > 256) fail("setmaxnreg takes 24, 32, ... or 256; it gets %u", count);
    Thread& thread = me();
    ++thread.register_changes;
    if (my_number() % 128) return;  // the first thread of a warp group stands for all
    const auto sum = [&thread, &block = my_block(), count] {
        u32 sum = count - thread.registers;
        for (auto& group : block.warp_groups) sum += threads[group.first_thread].registers;
        return sum;
    };
    wait_until(
        [&sum] { return sum() <= 512; },
        [&sum] {
            return text(
                "in setmaxnreg: the warp groups would have %u registers per thread in sum, and an SM has 512 for "
                "a warp group of 128 threads",
                sum());
        });
    thread.registers = count;
}

// ---- stmatrix: tilelab/include/tma.cuh describes which lane holds what

void store_matrices(u32 address, std::initializer_list<u32> rows, bool transposed) {
    const Votes votes = meet("stmatrix", 0xffffffff, address);
    if (votes.filled != 0xffffffff) fail("stmatrix needs all 32 lanes of the warp");
    const u32 lane = lane_number();
    for (u32 matrix = 0; matrix < rows.size(); ++matrix)
        for (u32 half = 0; half < 2; ++half) {
            const u32 row = lane / 4, column = lane % 4 * 2 + half, element = rows.begin()[matrix] >> 16 * half;
            const u32 line = u32(votes.slots[matrix * 8 + (transposed ? column : row)]);
            u8* const unit = find_shared(line, 16, "a row of stmatrix");
            if (transposed) record_shared(line + 2 * row, 2, true, "stmatrix");
            else if (!half) record_shared(line + 2 * column, 4, true, "stmatrix");
            memcpy(unit + 2 * (transposed ? row : column), &element, 2);
        }
}

// ---- running

static void switch_to_scheduler() {
    me().frame = __builtin_frame_address(0);
    if (unsettled.bytes) settle();
    require_in_step();
    if (!_setjmp(coroutines[current].resume)) _longjmp(scheduler, 1);
}

static void run_thread() {
    for (;;) {
        kernel(arguments);
        if (unsettled.bytes) settle();
        require_in_step();
        wait_for_copies(0);
        ++effects;
        if (!me().issued.empty())
            fail_at(me().issued[0].product->where, "ends before wgmma_wait has waited for all of its products");
        me().finished = true;
        --my_block().live;
        coroutines[current].is_idle = true;
        switch_to_scheduler();
    }
}

static void start_coroutine(Coroutine& coroutine) {
    static ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = coroutine.stack;
    context.uc_stack.ss_size = STACK_BYTES;
    context.uc_link = nullptr;
    makecontext(&context, run_thread, 0);
    setcontext(&context);
}

static void add_coroutine() {
    // An overflow is caught in the addresses below the stack. There are so many that a large array does not jump over.
    void* memory = mmap(nullptr, GUARD_BYTES + STACK_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    u8* stack = static_cast<u8*>(memory) + GUARD_BYTES;
    mprotect(stack, STACK_BYTES, PROT_READ | PROT_WRITE);
    coroutines.emplace_back();
    coroutines.back().stack = stack;
}

// Run the current thread until it waits or ends.
static void run_current() {
    Coroutine& coroutine = coroutines[current];
    if (_setjmp(scheduler)) return;
    const bool begins = !me().started;
    me().started = true;
    if (!begins || coroutine.is_idle) {
        coroutine.is_idle = false;
        _longjmp(coroutine.resume, 1);
    }
    start_coroutine(coroutine);
}

static std::string find_unfinished(u32 number) {
    const std::string where =
        text("block %s ended while the copy engine ", name_index(blocks[number].index, gridDim).c_str());
    for (auto& operation : operations) {
        if (operation.block == number && operation.kind == LOAD)
            return mark(operation.where) + where + "was still writing its shared memory";
        if (operation.block == number && !operation.read)
            return mark(operation.where) + where + "had not yet read its shared memory" +
                   (operation.committed ? "" : ": a store was not committed with bulk_commit");
        const bool is_sent = !operation.global && !operation.is_box && operation.data.empty();
        if (operation.kind == LOAD && is_sent && threads[operation.thread].block == number)
            return mark(operation.where) + where + "was still sending its tile to another block";
    }
    for (auto& [address, barrier] : blocks[number].barriers)
        if (barrier.loaded > barrier.waited)
            return mark(barrier.load) + where +
                   text(
                       "may still write its shared memory: nobody has waited for the last load that the "
                       "mbarrier at shared address %u counts",
                       address);
    for (auto& group : blocks[number].warp_groups) {
        for (u32 i = 1; i < 128; ++i)
            if (threads[group.first_thread + i].register_changes != threads[group.first_thread].register_changes)
                return text(
                    "block %s ended, and some threads of a warp group have not executed the setmaxnreg of the "
                    "others: all of its warps must",
                    name_index(blocks[number].index, gridDim).c_str());
        if (!group.products.empty())
            return mark(group.products[0]->where) +
                   text("block %s ended, and some warps of a warp group have not issued the wgmma of the others",
                        name_index(blocks[number].index, gridDim).c_str());
    }
    return "";
}

static void thread_has_ended() {
    Block& block = blocks[me().block];
    for (auto& [name, meeting] : block.named)
        if (name == 0) release_meeting(meeting, block.live, block);
    const u32 warp = my_number() / 32;
    for (auto at = block.meetings.lower_bound({warp, 0}); at != block.meetings.end() && at->first.first == warp; ++at)
        if (at->second.arrived) release_meeting(at->second, count_lanes(block, warp, at->first.second), block);
    release_cluster(first_of_cluster(me().block));
    if (!block.live) failure = find_unfinished(me().block);
}

// Say what the threads wait for: up to two mbarriers, or what the first thread waits for.
static std::string describe_deadlock() {
    std::string said, first_reason;
    for (bool for_barrier : {true, false})
        for (auto& thread : threads) {
            if (thread.finished || !thread.wait.test || thread.waits_for_barrier != for_barrier) continue;
            const std::string reason = thread.wait.describe(thread.wait.words);
            if (reason == first_reason) continue;
            if (!said.empty()) return for_barrier ? said + "; " + place(thread) + " waits for ever " + reason : said;
            first_reason = reason;
            said = place(thread) + " waits for ever " + reason;
        }
    return said;
}

enum Progress { NOTHING, POLLED, RAN };  // no thread could run; those that could only poll; one has got further
static u64 seen_effects, idle_switches;  // switches of threads since anything changed

static void refresh_regions() {
    Cell* cells = blocks[loaded].cells;
    const u64 begins[] = {reinterpret_cast<u64>(static_begin), reinterpret_cast<u64>(dynamic_shared)};
    const u64 since = cluster_moment(loaded);
    Cell* const dynamic_cells = cells ? cells + dynamic_base / 4 : nullptr;
    regions[0] = {begins[0], begins[0] + static_bytes, cells, -1, since};
    regions[1] = {begins[1], begins[1] + shared_bytes - dynamic_base, dynamic_cells, -1, since};
    for (auto& region : recent)
        if (region.tensor < 0) region = Region();
}

// Return MOST_SHARED bytes and some more, for the shared memory of a block that begins.
static u8* random_bytes() {
    static std::vector<u32> words;
    while (words.size() * 4 < 2 * MOST_SHARED) words.push_back(random_number());
    return reinterpret_cast<u8*>(&words[random_number() % 16384]);
}

template <typename T>
static T& begin_anew(T& value) {  // without a copy
    value.~T();
    return *new (&value) T();
}

static void start_cluster(u32 slot, dim3 index) {
    const u32 count = blockDim.x * blockDim.y * blockDim.z, first_block = slot * blocks_per_cluster;
    patience = 2u << random_number() % 6;
    clusters[slot] = {true};
    for (u32 b = first_block; b < first_block + blocks_per_cluster; ++b) {
        Cell* const cells = blocks[b].cells;
        std::vector<u8> memory = std::move(blocks[b].memory);
        Block& block = begin_anew(blocks[b]);
        block.memory = std::move(memory);
        block.cells = cells ? cells : take_cells(shared_bytes);
        block.index = {index.x + rank_of(b), index.y, index.z};
        block.serial = ++last_serial;
        serial_blocks.push_back(block.index);
        block.components = count;
        block.fenced.assign(count, 0);
        block.first_thread = b * count;
        block.live = count;
        for (u32 warp = 0; warp < (count + 31) / 32; ++warp) block.lags.push_back(random_number() % 4 == 0);
        for (u32 group = 0; group < count / 128; ++group)
            block.warp_groups.push_back({b, block.first_thread + 128 * group});
        block.memory.resize(shared_bytes + 128);
        if (b == loaded) copy_shared(random_bytes(), false), refresh_regions();
        else memcpy(block.memory.data(), random_bytes(), block.memory.size());
        for (u32 i = 0; i < count; ++i) {
            Thread& thread = begin_anew(threads[block.first_thread + i]);
            thread.block = b;
            thread.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
        }
    }
}

// Say what goes on for ever: a loop in which nothing changes.
static std::string describe_idle_loop(bool others_wait) {
    const std::string who = place(me());
    if (!me().yielded)
        return who + " waits " + me().wait.describe(me().wait.words) +
               " again and again, and nothing changes: a loop does not end";
    return who + " polls memory that nobody changes" +
           (others_wait ? text(": blocks that have not begun cannot, because the %zu that run fill the GPU",
                               clusters.size() * blocks_per_cluster)
                        : "");
}

// Let each thread of a warp that can run do so, until it waits or polls.
static Progress run_warp(const Block& block, u32 first, u32 count) {
    Progress progress = NOTHING;
    const u32 begin = seed > 2 ? random_number() % count : 0;
    for (u32 step = 0; step < count; ++step) {
        current = block.first_thread + first + (begin + step) % count;
        if (me().finished || !me().wait.is_over()) continue;
        load_block(me().block);
        running = {reinterpret_cast<u64>(coroutines[current].stack), moment(me(), 0) >> 30 << 30};
        me().wait = {};
        me().yielded = false;
        threadIdx = me().index;
        blockIdx = block.index;
        run_current();
        if (is_interrupted) failure = "\3";
        if (!failure.empty()) return RAN;
        if (!me().yielded) progress = RAN;
        else if (!progress) progress = POLLED;
        if (me().finished) thread_has_ended();
        if (effects != seen_effects) seen_effects = effects, idle_switches = 0, ticks = 0;
        else if (++idle_switches > 20000 * std::min<u64>(threads.size(), 2048)) failure = describe_idle_loop(false);
        if (!failure.empty()) return RAN;
    }
    return progress;
}

// Let the warps of a block run. Warps that lag behind run seldom, or if they `must`.
static Progress run_block(const Block& block, u32 count, bool must) {
    Progress progress = NOTHING;
    const u32 warps = (count + 31) / 32, begin = seed > 2 ? random_number() % warps : 0;
    for (u32 step = 0; step < warps; ++step) {
        const u32 warp = seed == 1 ? warps - 1 - step : (begin + step) % warps;
        if (seed > 2 && !must && block.lags[warp] && random_number() % 16) continue;
        for (;;) {
            const Progress made = run_warp(block, 32 * warp, std::min(32u, count - 32 * warp));
            progress = std::max(progress, made);
            if (!failure.empty()) return progress;
            if (made != RAN || seed > 2) break;
        }
    }
    return progress;
}

static Progress run_blocks(u32 count, bool must) {
    const u32 size = u32(blocks.size()), begin = seed > 2 ? random_number() % size : 0;
    Progress progress = NOTHING;
    for (u32 step = 0; step < size; ++step) {
        const u32 b = seed == 1 ? size - 1 - step : (begin + step) % size;
        if (has_ended(b)) continue;
        for (;;) {
            const Progress made = run_block(blocks[b], count, must);
            progress = std::max(progress, made);
            if (!failure.empty()) return progress;
            if (made != RAN || has_ended(b) || (seed > 2 && random_number() % 2)) break;
        }
    }
    return progress;
}

// Run the clusters of a grid, in an order that the seed gives. Up to `most` can be resident at once, as on a GPU. More
// than a few are only when a block polls memory that nobody changes: it may wait for a block that has not begun.
static void run_grid(u32 most) {
    const u32 count = blockDim.x * blockDim.y * blockDim.z;
    const u32 across = gridDim.x / blocks_per_cluster, total = across * gridDim.y * gridDim.z;
    std::vector<u32> order(total);
    for (u32 i = 0; i < total; ++i) order[i] = seed == 1 ? total - 1 - i : i;
    if (seed > 2)
        for (u32 i = total; i > 1; --i) std::swap(order[i - 1], order[random_number() % i]);
    const bool interleaves = seed > 1 && shared_bytes <= 32 << 10 && count * blocks_per_cluster <= 512;
    u32 wanted = interleaves ? 2 : 1, next = 0, running = 0;
    for (;;) {
        for (u32 slot = 0; running < wanted && next < total; ++slot) {
            if (slot == clusters.size()) {
                clusters.emplace_back();
                blocks.resize(blocks.size() + blocks_per_cluster);
                threads.resize(threads.size() + count * blocks_per_cluster);
                while (coroutines.size() < threads.size()) add_coroutine();
            }
            if (clusters[slot].is_running) continue;
            const u32 at = order[next++];
            start_cluster(slot, {at % across * blocks_per_cluster, at / across % gridDim.y, at / across / gridDim.y});
            ++running;
        }
        if (!running) break;
        Progress progress = run_blocks(count, false);
        if (failure.empty() && progress != RAN) progress = std::max(progress, run_blocks(count, true));
        for (u32 slot = 0; slot < clusters.size() && failure.empty(); ++slot) {
            const u32 first = slot * blocks_per_cluster;
            if (!clusters[slot].is_running || count_live(first)) continue;
            const auto is_of_cluster = [&](auto& each) {
                return threads[each.thread].block / blocks_per_cluster == slot;
            };
            while (std::any_of(operations.begin(), operations.end(), is_of_cluster)) complete_one();
            clusters[slot].is_running = false;
            --running;
            progress = RAN;
        }
        if (!failure.empty()) return;
        if (progress == RAN) continue;
        if (!operations.empty()) {
            complete_one();
        } else if (progress == NOTHING && let_polls_fail()) {
            continue;
        } else if (progress == NOTHING) {
            failure = describe_deadlock();
        } else if (idle_switches > 8 * threads.size() && next < total) {
            if (running < most) wanted = running + 1, idle_switches = 0;
            else if (idle_switches > 100 * threads.size()) failure = describe_idle_loop(true);
        }
        if (!failure.empty()) return;
    }
    while (!operations.empty() && failure.empty()) complete_one();
}

}  // namespace emulator

// Return what printf has printed since the last call.
extern "C" const char* take_printed() {
    static std::string said;
    said.swap(emulator::printed);
    emulator::printed.clear();
    return said.c_str();
}
// Return what should be better in the launches since the last call, although they are right.
extern "C" const char* take_advice() {
    static std::string said;
    said.swap(emulator::advice);
    emulator::advice.clear();
    return said.c_str();
}
// Return what the last launch did that is allowed, but may be why a result is wrong.
extern "C" const char* take_hint() {
    static std::string said;
    said.swap(emulator::hint);
    emulator::hint.clear();
    return said.c_str();
}
#include "hooks.h"

// The compiler's option -fsanitize-coverage=trace-pc makes a kernel call this at the start of each basic block.
extern "C" void __sanitizer_cov_trace_pc() { ++emulator::steps; }

extern "C" void start_trace() {
    emulator::tracing = true;
    emulator::steps = 0;
    emulator::events.clear();
}

// Return the events since start_trace, `count` of them, and the basic blocks that a kernel has executed.
extern "C" const emulator::Event* end_trace(u64* count, u64* steps) {
    emulator::tracing = false;
    *count = emulator::events.size();
    *steps = emulator::steps;
    return emulator::events.data();
}

// Return how many bytes of a tensor the threads of the last launch have read, without copies.
extern "C" u64 count_read_bytes(const char* name) {
    u64 sum = 0;
    for (size_t i = 0; i < emulator::tensor_names.size(); ++i)
        if (emulator::tensor_names[i] == name) sum += emulator::read_bytes[i];
    return sum;
}

// Run a kernel, whose code and variables lie between three addresses. `ranges` holds the first and the last address of
// each tensor, `count` of them. Up to `most_resident` clusters run at once. No thread runs for more than `most_ticks`
// tenths of a second without changing anything. Return "", "\3" after Ctrl-C, or what the kernel did wrong.
extern "C" const char* run_emulated(void (*kernel)(void**), const u8* code_begin, const u8* code_end,
                                    const u8* image_end, void** arguments, const u32* grid, const u32* block,
                                    u32 cluster, u8* static_begin, u8* static_end, u32 dynamic_bytes,
                                    u32 dynamic_alignment, const u64* ranges, const char** names, u32 count,
                                    u32 most_resident, u32 seed, u32 most_ticks) {
    using namespace emulator;
    static std::string said;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    emulator::kernel = kernel, emulator::arguments = arguments;
    emulator::code_begin = code_begin, emulator::code_end = code_end, emulator::image_end = image_end;
    emulator::most_ticks = int(most_ticks);
    emulator::seed = seed, random_state = seed;
    emulator::static_begin = static_begin;
    static_bytes = u32(static_end - static_begin);
    dynamic_base = (static_bytes + dynamic_alignment - 1) / dynamic_alignment * dynamic_alignment;
    shared_bytes = dynamic_base + dynamic_bytes;
    blocks_per_cluster = cluster;
    failure.clear(), hint.clear();
    operations.clear(), clusters.clear(), blocks.clear(), threads.clear();
    const u32 most_blocks = most_resident * cluster;
    clusters.reserve(most_resident), blocks.reserve(most_blocks);  // references to them stay valid
    threads.reserve(most_blocks * block[0] * block[1] * block[2]);
    loaded = ~0u, ticks = 0, idle_switches = 0, open_products = 0;
    prepare_regions(ranges, names, count, grid[0] * grid[1] * grid[2]);
    is_running = true;
    {
        const CatchSignals guard;
        run_grid(most_resident);
    }
    is_running = false;
    forget_recent();
    said = failure;
    return said.c_str();
}
