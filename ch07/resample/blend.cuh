// The precise blend: result = (u left + w right) / (u + w), with u = end - target and w = target - begin.
//
// The plain way, w = (target - begin) / (end - begin) and left + w (right - left), rounds four times. Where the two
// rows nearly cancel, what is left of the result is mostly these errors. Here the result is off by little more than
// half a unit in its last place, because of three habits:
//
// 1. A difference of two floats is kept as a pair, near + rest, which is exact (subtract). So u and w have no error.
// 2. A product is rounded by one fused multiply-add and what it lost is computed by another (blend). For elements of
//    4 bytes double does both.
// 3. One power of two scales u, w and 1 / (u + w), so that no product leaves the range of a float (weigh).
//
// The includer defines ELEMENT and ROW_BYTES.
#pragma once
#include "elements.cuh"
#include "ptx.cuh"

// `left` and `right` are byte offsets from the batch's first row. u + u_rest and w + w_rest are the exact differences
// of times, and `inverse` is 1 / (u + w).
struct alignas(16) Weights {
    u32 left, right;
    float u, u_rest, w, w_rest, inverse, inverse_rest;
};

// The difference later - earlier equals near + rest exactly (Knuth's TwoSum).
__device__ __forceinline__ void subtract(float later, float earlier, float& near, float& rest) {
    near = later - earlier;
    const float back = near - later;
    rest = (later - (near - back)) - (earlier + back);
}

__device__ __forceinline__ Weights weigh(const float* times, int sources, int index, float target) {
    const int next = min(index + 1, sources - 1);
    const float begin = times[index], end = times[next];
    // At a source time, or outside all source times, one row is the result. So equal times never divide by zero.
    if (target >= end) return {next * ROW_BYTES, next * ROW_BYTES, 1, 0, 0, 0, 1, 0};
    if (target <= begin) return {index * ROW_BYTES, index * ROW_BYTES, 1, 0, 0, 0, 1, 0};
    Weights weights = {index * ROW_BYTES, next * ROW_BYTES};
    subtract(end, target, weights.u, weights.u_rest);
    subtract(target, begin, weights.w, weights.w_rest);
    // Scale end - begin to between a half and one: the exponent bits of the scale are the complement of its own.
    const float scale = __uint_as_float(0x7e800000u - (__float_as_uint(end - begin) & 0x7f800000u));
    weights.u *= scale, weights.u_rest *= scale, weights.w *= scale, weights.w_rest *= scale;
    if constexpr (sizeof(ELEMENT) == 4) {
        const double inverse = 1.0 / ((static_cast<double>(end) - begin) * scale);
        weights.inverse = static_cast<float>(inverse);
        weights.inverse_rest = static_cast<float>(inverse - weights.inverse);
    } else {
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(weights.inverse) : "f"((end - begin) * scale));
    }
    return weights;
}

// The error is little more than half a unit in the last place, unless the rows cancel to less than 2^-40 of themselves
// (2^-28 for 4-byte elements). EXACT says that u and w are exact floats, so both rests are zero; they mostly are.
template <bool EXACT>
__device__ __forceinline__ float blend(const Weights& weights, float left, float right) {
    if constexpr (sizeof(ELEMENT) == 4) {
        const double u = static_cast<double>(weights.u) + weights.u_rest;
        const double w = static_cast<double>(weights.w) + weights.w_rest;
        const double inverse = static_cast<double>(weights.inverse) + weights.inverse_rest;
        return static_cast<float>(fma(w, static_cast<double>(right), u * left) * inverse);
    } else {
        const float product = weights.w * right;
        float lost = fmaf(weights.w, right, -product);  // exactly what rounding the product has lost
        if constexpr (!EXACT) lost = fmaf(weights.u_rest, left, fmaf(weights.w_rest, right, lost));
        return (fmaf(weights.u, left, product) + lost) * weights.inverse;
    }
}

template <bool EXACT, int BYTES>
__device__ __forceinline__ Pack<ELEMENT, BYTES> blend_pack(const Weights& weights, const Pack<ELEMENT, BYTES>& left,
                                                           const Pack<ELEMENT, BYTES>& right) {
    Pack<ELEMENT, BYTES> result;
    constexpr int STEP = sizeof(ELEMENT) == 2 && BYTES > 2 ? 2 : 1;  // two halves are rounded by one instruction
#pragma unroll
    for (int i = 0; i < left.COUNT; i += STEP)
        result.set(i, blend<EXACT>(weights, left[i], right[i]),
                   STEP == 2 ? blend<EXACT>(weights, left[i + 1], right[i + 1]) : 0);
    return result;
}

template <int BYTES>
__device__ __forceinline__ void store_blend(const Weights& weights, const Pack<ELEMENT, BYTES>& left,
                                            const Pack<ELEMENT, BYTES>& right, u8* out) {
    if (sizeof(ELEMENT) == 2 && weights.u_rest == 0 && weights.w_rest == 0)
        store(out, blend_pack<true>(weights, left, right));
    else store(out, blend_pack<false>(weights, left, right));
}
