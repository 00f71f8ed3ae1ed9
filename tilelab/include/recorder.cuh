// A hook for time stamps: who does what when, for the timeline view. Where RECORD is not defined, its functions are
// empty and leave no instruction behind. Include "wgmma.cuh" first.
//
// Where RECORD is defined, thread 0 of each warp group writes 8 bytes per stamp, a clock and a
// code, to a part of global memory that no other thread writes: one store, which nothing waits for.
#pragma once

enum Event { STARTED, TIMED, FREE, LOADED, ARRIVED, MULTIPLIED, STORED, ENDED };

#ifndef RECORD
struct Recording {};  // what the kernel gets to record into: nothing

// The state of a producer or a consumer in a ring, which can also record.
template <u32 SIZE>
struct RingState : Ring<SIZE> {
    __device__ __forceinline__ explicit RingState(const Recording&) {}
    __device__ __forceinline__ u32 read_clock() const { return 0; }
    __device__ __forceinline__ void record(Event, u32 step = 0, u32 stage = 0) {}
    __device__ __forceinline__ void record_at(u32 clock, Event, u32 step, u32 stage = 0) {}
    __device__ __forceinline__ void finish() {}
};
#else
constexpr u32 ALL_SMS = 0xFFFFFFFF;

struct Recording {
    uint2* stamps;
    u32 capacity;  // stamps that a warp group has room for
    u32 watched;   // the SM whose CTAs record, or ALL_SMS
};

// A stamp is the low half of the SM's clock and a code: the event in bits 0-2, the phase of the ring in bit 3, the
// stage in bits 4-7, and the step above. A stamp TIMED has the GPU's timer in nanoseconds instead of the clock.
template <u32 SIZE>
struct RingState : Ring<SIZE> {
    uint2* next;
    bool records;  // the same value in all lanes of a warp
    u32 writes;    // 1 in the lane that writes

    __device__ __forceinline__ explicit RingState(const Recording& recording) {
        u32 sm;
        asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
        const bool first_warp = threadIdx.x % 128 < 32;
        records = __any_sync(0xFFFFFFFFu, first_warp && (recording.watched == ALL_SMS || sm == recording.watched));
        writes = threadIdx.x % 32 == 0;
        next = recording.stamps + (blockIdx.x * (blockDim.x / 128) + threadIdx.x / 128) * recording.capacity;
        write_timer();
        record(STARTED);
    }
    __device__ __forceinline__ u32 read_clock() const {
        u32 clock;
        asm volatile("mov.u32 %0, %%clock;" : "=r"(clock)::"memory");
        return clock;
    }
    __device__ __forceinline__ void record(Event event, u32 step = 0, u32 stage = 0) {
        record_at(read_clock(), event, step, stage);
    }
    // Where others wait for the next instructions, the clock is read before them and the stamp is written after them.
    __device__ __forceinline__ void record_at(u32 clock, Event event, u32 step, u32 stage = 0) {
        write(clock, event | this->phase << 3 | stage << 4 | step << 8);
    }
    __device__ __forceinline__ void finish() {
        record(ENDED);
        write_timer();
    }

  private:
    // All lanes of a warp take the same branch. The store has a predicate, which does not split the warp either.
    __device__ __forceinline__ void write(u32 value, u32 code) {
        if (!records) return;
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p st.global.v2.u32 [%0], {%1, %2}; }" ::"l"(next),
                     "r"(value), "r"(code), "r"(writes)
                     : "memory");
        ++next;
    }
    __device__ __forceinline__ void write_timer() {
        u32 nanoseconds;
        asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(nanoseconds));
        write(nanoseconds, TIMED);
    }
};
#endif
