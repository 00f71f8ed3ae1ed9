// Groups of threads, for the emulator: blocks, tiles of a warp, lanes that are together, clusters, and grids of one block.
#pragma once

namespace cooperative_groups {

class thread_block {
  public:
    static void sync() { emulator::block_barrier(0, 0, "in thread_block::sync()"); }
    static u32 thread_rank() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
    static u32 size() { return blockDim.x * blockDim.y * blockDim.z; }
    static u32 num_threads() { return size(); }
    static dim3 group_index() { return blockIdx; }
    static dim3 thread_index() { return threadIdx; }
    static dim3 group_dim() { return blockDim; }
    static dim3 dim_threads() { return blockDim; }
};
inline thread_block this_thread_block() { return {}; }

// Lanes of one warp. A rank counts the lanes of the mask.
class lanes {
  protected:
    u32 mask = 0;
    lanes(u32 mask) : mask(mask) {}
    int lane_of(u32 rank) const {
        for (u32 lane = 0; lane < 32; ++lane)
            if ((mask >> lane & 1) && !rank--) return int(lane);
        return -1;
    }
    template <typename T>
    T read(const char* what, T value, long rank) const {
        const bool inside = rank >= 0 && rank < long(size());
        return emulator::shuffle(what, mask, value, inside ? lane_of(u32(rank)) : int(emulator::lane_number()), 32);
    }
    u32 compact(u32 bits) const {
        u32 result = 0;
        for (u32 rank = 0; rank < size(); ++rank) result |= (bits >> lane_of(rank) & 1) << rank;
        return result;
    }

  public:
    u32 emulated_mask() const { return mask; }
    void sync() const { emulator::meet("the sync() of a group", mask, 0); }
    u32 size() const { return u32(__popc(mask)); }
    u32 num_threads() const { return size(); }
    u32 thread_rank() const { return u32(__popc(mask & ((1u << emulator::lane_number()) - 1))); }
    template <typename T>
    T shfl(T value, int rank) const {
        return read("a group's shfl()", value, rank & (size() & (size() - 1) ? -1 : int(size()) - 1));
    }
    template <typename T>
    T shfl_up(T value, u32 by) const {
        return read("a group's shfl_up()", value, long(thread_rank()) - by);
    }
    template <typename T>
    T shfl_down(T value, u32 by) const {
        return read("a group's shfl_down()", value, long(thread_rank()) + by);
    }
    int any(int value) const { return emulator::vote("a group's any()", mask, value) != 0; }
    int all(int value) const { return emulator::vote("a group's all()", mask, !value) == 0; }
    u32 ballot(int value) const { return compact(emulator::vote("a group's ballot()", mask, value)); }
    template <typename T>
    u32 match_any(T value) const {
        return compact(emulator::match("a group's match_any()", mask, value));
    }
};

template <u32 SIZE, typename Parent = void>
class thread_block_tile : public lanes {
    static_assert(SIZE <= 32 && (SIZE & (SIZE - 1)) == 0, "the emulator knows tiles of up to 32 threads");

  public:
    thread_block_tile() : lanes((SIZE == 32 ? ~0u : (1u << SIZE % 32) - 1) << emulator::lane_number() / SIZE * SIZE) {}
    template <typename Other>
    thread_block_tile(const thread_block_tile<SIZE, Other>&) : thread_block_tile() {}
    static constexpr u32 size() { return SIZE; }
    static constexpr u32 num_threads() { return SIZE; }
    u32 meta_group_rank() const { return thread_block::thread_rank() / SIZE; }
    u32 meta_group_size() const { return (thread_block::size() + SIZE - 1) / SIZE; }
    template <typename T>
    T shfl_xor(T value, u32 lanes) const {
        return read("a group's shfl_xor()", value, long(thread_rank() ^ lanes));
    }
};
template <u32 SIZE, typename Parent>
thread_block_tile<SIZE, Parent> tiled_partition(const Parent&) {
    return {};
}

class coalesced_group : public lanes {
  public:
    explicit coalesced_group(u32 mask) : lanes(mask) {}
    u32 meta_group_rank() const { return 0; }
    u32 meta_group_size() const { return 1; }
};
inline coalesced_group coalesced_threads() { return coalesced_group(emulator::active_lanes()); }

// Any of these groups
class thread_group {
    u32 mask;  // 0: the block

  public:
    thread_group(const thread_block&) : mask(0) {}
    thread_group(const lanes& group) : mask(group.emulated_mask()) {}
    void sync() const { mask ? coalesced_group(mask).sync() : thread_block::sync(); }
    u32 size() const { return mask ? u32(__popc(mask)) : thread_block::size(); }
    u32 num_threads() const { return size(); }
    u32 thread_rank() const { return mask ? coalesced_group(mask).thread_rank() : thread_block::thread_rank(); }
};
inline thread_group tiled_partition(const thread_group& parent, u32 size) {
    if (parent.size() < size || size > 32) emulator::fail("takes tiles of %u threads from %u", size, parent.size());
    const u32 ones = size == 32 ? ~0u : (1u << size) - 1;
    return coalesced_group(ones << emulator::lane_number() / size * size);
}
template <typename Group>
void sync(const Group& group) {
    group.sync();
}

class cluster_group {
  public:
    static void sync() {
        emulator::arrive_at_cluster();
        emulator::wait_for_cluster();
    }
    static void barrier_arrive() { emulator::arrive_at_cluster(); }
    static void barrier_wait() { emulator::wait_for_cluster(); }
    static u32 block_rank() { return emulator::rank_in_cluster(); }
    static u32 num_blocks() { return emulator::cluster_size(); }
    static dim3 dim_blocks() { return dim3(emulator::cluster_size()); }
    static dim3 block_index() { return dim3(emulator::rank_in_cluster(), 0, 0); }
    static u32 num_threads() { return num_blocks() * thread_block::size(); }
    static u32 size() { return num_threads(); }
    static u32 thread_rank() { return block_rank() * thread_block::size() + thread_block::thread_rank(); }
    template <typename T>
    static T* map_shared_rank(T* pointer, u32 rank) {
        if (rank == block_rank()) return pointer;
        const u32 address = emulator::cluster_address(emulator::address_of(pointer), rank);
        return reinterpret_cast<T*>(emulator::find_shared(address, 1, "map_shared_rank()"));
    }
};
inline cluster_group this_cluster() { return {}; }

class grid_group {
  public:
    static bool is_valid() { return true; }
    static void sync() {
        if (gridDim.x * gridDim.y * gridDim.z != 1)
            emulator::fail(
                "calls grid.sync() in a grid of %llu blocks, which the emulator does not know: launch one block",
                num_blocks());
        thread_block::sync();
    }
    static u64 num_blocks() { return u64(gridDim.x) * gridDim.y * gridDim.z; }
    static u64 block_rank() { return blockIdx.x + gridDim.x * (blockIdx.y + u64(gridDim.y) * blockIdx.z); }
    static u64 num_threads() { return num_blocks() * thread_block::size(); }
    static u64 size() { return num_threads(); }
    static u64 thread_rank() { return block_rank() * thread_block::size() + thread_block::thread_rank(); }
    static dim3 group_dim() { return gridDim; }
    static dim3 dim_blocks() { return gridDim; }
    static dim3 block_index() { return blockIdx; }
};
inline grid_group this_grid() { return {}; }

#define OPERATION(NAME, EXPRESSION)                                       \
    template <typename T = void>                                          \
    struct NAME {                                                         \
        T operator()(const T& a, const T& b) const { return EXPRESSION; } \
    };                                                                    \
    template <>                                                           \
    struct NAME<void> {                                                   \
        template <typename T>                                             \
        T operator()(const T& a, const T& b) const {                      \
            return EXPRESSION;                                            \
        }                                                                 \
    };
OPERATION(plus, a + b)
OPERATION(less, b < a ? b : a)
OPERATION(greater, a < b ? b : a)
OPERATION(bit_and, a& b)
OPERATION(bit_or, a | b)
OPERATION(bit_xor, a ^ b)
#undef OPERATION

template <typename Group, typename T, typename Operation>
T reduce(const Group& group, T value, Operation operation) {
    return emulator::reduce_lanes("cooperative_groups::reduce()", group.emulated_mask(), value, operation);
}
template <typename Group, typename T, typename Operation = plus<T>>
T inclusive_scan(const Group& group, T value, Operation operation = {}) {
    for (u32 by = 1; by < group.size(); by *= 2) {
        const T other = group.shfl_up(value, by);
        if (group.thread_rank() >= by) value = operation(other, value);
    }
    return value;
}
template <typename Group, typename T, typename Operation = plus<T>>
T exclusive_scan(const Group& group, T value, Operation operation = {}) {
    const T before = group.shfl_up(inclusive_scan(group, value, operation), 1);
    return group.thread_rank() ? before : T{};
}

// Copies to shared memory land when the thread waits, the others at once.
template <typename Group, typename T, typename U>
void memcpy_async(const Group& group, T* to, const U* from, size_t bytes) {
    const size_t all = reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from) | bytes;
    const size_t unit = all % 16 == 0 ? 16 : all % 8 == 0 ? 8 : all % 4 == 0 ? 4 : 1;
    for (size_t i = group.thread_rank() * unit; i < bytes; i += group.size() * unit) {
        u8* const part = reinterpret_cast<u8*>(to) + i;
        const u8* const source = reinterpret_cast<const u8*>(from) + i;
        if (unit > 1 && emulator::is_shared(part) && emulator::is_in_tensor(source))
            emulator::copy_async(emulator::address_of(part), source, u32(unit), u32(unit));
        else memcpy(part, source, unit);
    }
    emulator::commit_copies();
}
template <u32 PENDING, typename Group>
void wait_prior(const Group& group) {
    emulator::wait_for_copies(PENDING);
    group.sync();
}
template <typename Group>
void wait(const Group& group) {
    wait_prior<0>(group);
}

}  // namespace cooperative_groups
