// nvcuda::wmma for the emulator: a fragment holds equal shares of a matrix in an order of our own, which PTX leaves open.
#pragma once
#include <type_traits>

#include "cuda_bf16.h"
#include "cuda_fp16.h"

namespace nvcuda {
namespace wmma {

struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
namespace precision {
struct tf32;
}
enum layout_t { mem_row_major, mem_col_major };

template <int M, int N, int K, typename T>
constexpr bool is_shape() {
    constexpr bool wide = K == 16 && ((M == 16 && N == 16) || (M == 32 && N == 8) || (M == 8 && N == 32));
    if (std::is_same_v<T, precision::tf32>) return M == 16 && N == 16 && K == 8;
    if (std::is_same_v<T, double>) return M == 8 && N == 8 && K == 4;
    if (std::is_same_v<T, float>) return wide || (M == 16 && N == 16 && K == 8);
    return wide;
}

template <typename T>
struct Element {
    typedef T type;
};
template <>
struct Element<precision::tf32> {
    typedef float type;
};

template <typename Use, int M, int N, int K, typename T, typename Layout = void>
struct fragment {
    static_assert(is_shape<M, N, K, T>(), "the emulator knows no wmma fragments of this shape and type");
    static constexpr int ROWS = std::is_same_v<Use, matrix_b> ? K : M, COLUMNS = std::is_same_v<Use, matrix_a> ? K : N;
    static constexpr int OWN = ROWS * COLUMNS / 32;
    typedef typename Element<T>::type element_type;
    // As on a GPU, each element of a 16-bit operand is there twice.
    static constexpr int COPIES = sizeof(element_type) == 2 && !std::is_same_v<Use, accumulator> ? 2 : 1;
    static constexpr int num_elements = OWN * COPIES, num_storage_elements = num_elements;
    typedef element_type storage_element_type;
    element_type x[num_elements];
};

template <typename Fragment>
void fill_fragment(Fragment& to, const typename Fragment::element_type& value) {
    for (auto& each : to.x) each = value;
}
inline float __float_to_tf32(float value) {
    u32 bits = __float_as_uint(value);
    bits += 0x1000;  // to the nearest, ties away from zero
    return __uint_as_float(bits & ~0x1fffu);
}

// Wait for the warp, whose lanes all name the same matrix.
UNCHECKED inline void meet_for(const char* what, const void* pointer, u32 stride_bytes) {
    const auto votes = emulator::meet(what, ~0u, u64(pointer));
    for (u32 lane = 0; lane < 32; ++lane)
        if (votes.filled != ~0u || votes.slots[lane] != u64(pointer))
            emulator::fail("%s is not called by all lanes of the warp with one pointer", what);
    if (u64(pointer) % 32) emulator::fail("%s takes a matrix that is aligned to 32 bytes; this one is not", what);
    if (stride_bytes % 16)
        emulator::fail("%s takes a stride of a multiple of 16 bytes; this one has %u", what, stride_bytes);
}

template <typename Use, int M, int N, int K, typename T, typename Layout, typename Given>
void load_fragment(fragment<Use, M, N, K, T, Layout>& to, const Given* from, u32 stride, bool by_rows) {
    typedef fragment<Use, M, N, K, T, Layout> F;
    meet_for("load_matrix_sync()", from, stride * sizeof(Given));
    for (int i = 0; i < F::OWN; ++i) {
        const int place = int(emulator::lane_number()) * F::OWN + i, row = place / F::COLUMNS,
                  column = place % F::COLUMNS;
        to.x[i] = from[by_rows ? row * stride + column : column * stride + row];
        if (F::COPIES == 2) to.x[i + F::OWN] = to.x[i];
    }
}
template <typename Use, int M, int N, int K, typename T, typename Layout, typename Given>
void load_matrix_sync(fragment<Use, M, N, K, T, Layout>& to, const Given* from, u32 stride) {
    static_assert(!std::is_same_v<Layout, void>, "an accumulator needs mem_row_major or mem_col_major");
    load_fragment(to, from, stride, std::is_same_v<Layout, row_major>);
}
template <int M, int N, int K, typename T, typename Given>
void load_matrix_sync(fragment<accumulator, M, N, K, T>& to, const Given* from, u32 stride, layout_t layout) {
    load_fragment(to, from, stride, layout == mem_row_major);
}
template <int M, int N, int K, typename T, typename Given>
void store_matrix_sync(Given* to, const fragment<accumulator, M, N, K, T>& from, u32 stride, layout_t layout) {
    meet_for("store_matrix_sync()", to, stride * sizeof(Given));
    for (int i = 0; i < M * N / 32; ++i) {
        const int place = int(emulator::lane_number()) * (M * N / 32) + i, row = place / N, column = place % N;
        to[layout == mem_row_major ? row * stride + column : column * stride + row] = from.x[i];
    }
}

template <typename T>
float wide(const T& value) {
    return float(value);
}
inline double wide(double value) { return value; }
inline int wide(signed char value) { return value; }
inline int wide(u8 value) { return value; }
inline int wide(int value) { return value; }
// Exchange a fragment among the lanes, as numbers to compute with.
template <typename Fragment, typename Number>
UNCHECKED void collect(const Fragment& from, Number* all) {
    Number own[Fragment::OWN];
    for (int i = 0; i < Fragment::OWN; ++i) own[i] = wide(from.x[i]);
    memcpy(all, emulator::exchange("mma_sync()", own, sizeof own), 32 * sizeof own);
}
template <int M, int N, int K, typename D, typename T, typename C, typename LayoutA, typename LayoutB>
UNCHECKED void mma_sync(fragment<accumulator, M, N, K, D>& d, const fragment<matrix_a, M, N, K, T, LayoutA>& a,
                        const fragment<matrix_b, M, N, K, T, LayoutB>& b, const fragment<accumulator, M, N, K, C>& c) {
    decltype(wide(a.x[0])) left[M * K], right[K * N];
    collect(a, left);
    collect(b, right);
    for (int i = 0; i < M * N / 32; ++i) {
        const int place = int(emulator::lane_number()) * (M * N / 32) + i, row = place / N, column = place % N;
        auto sum = left[row * K] * right[column];
        for (int k = 1; k < K; ++k) sum += left[row * K + k] * right[k * N + column];
        d.x[i] = D(sum + wide(c.x[i]));
    }
}

}  // namespace wmma
}  // namespace nvcuda
