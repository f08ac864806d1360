// Linear layers in bf16 on processors with AVX512_BF16; kernels/bfloat16_linear_cpu.py packs their weights.
//
// Sums are kept in fp32, and a result is rounded once. Each output is summed in the order of the pairs of inputs, so
// no row's bits depend on the other rows.
#pragma once

#include "linear.h"

#if defined(__AVX512BF16__)

#include <memory>

// Two adjacent inputs, or their weights; an odd number of inputs ends with a zero.
typedef uint32_t Pair __attribute__((may_alias, aligned(2)));

// The rows of x that are multiplied together: one instruction a row and panel needs many sums in flight, and a panel
// is read once for as many.
constexpr long PAIR_ROWS = 24;

// The pairs that are multiplied at a time.
constexpr long PAIR_DEPTH = DEPTH / 2;

// totals [ROWS, PANEL] += x [depth, ROWS] @ panel [depth, PANEL], of pairs; reads `next` into the caches.
template <long ROWS>
inline void multiply_pairs(const Pair *x, const Pair *panel, long depth, float *totals, const char *next, long next_step) {
    __m512 sums[ROWS];
// Without these, GCC keeps the sums in memory before and after the loop.
#pragma GCC unroll 32
    for (long i = 0; i < ROWS; i++) sums[i] = load(totals + i * PANEL);
    for (long k = 0; k < depth; k++) {
        __builtin_prefetch(next + k * next_step);
        const __m512bh weights = reinterpret_cast<__m512bh>(_mm512_loadu_si512(panel + k * PANEL));
#pragma GCC unroll 32
        for (long i = 0; i < ROWS; i++)
            sums[i] = _mm512_dpbf16_ps(sums[i], weights, reinterpret_cast<__m512bh>(_mm512_set1_epi32(x[k * ROWS + i])));
    }
#pragma GCC unroll 32
    for (long i = 0; i < ROWS; i++) store(totals + i * PANEL, sums[i]);
}

// totals [num_rows, PANEL] += x @ panel [pairs, PANEL]; x is in tiles of `each_tile`: [pairs, rows of the tile].
inline void multiply_pair_panel(const Pair *x, const Pair *panel, float *totals, long num_rows, long num_pairs) {
    // Each tile reads its share of the next part.
    const long next_step = sizeof(Pair) * PANEL / ((num_rows + PAIR_ROWS - 1) / PAIR_ROWS);
    for (long k = 0; k < num_pairs; k += PAIR_DEPTH) {
        const long depth = k + PAIR_DEPTH < num_pairs ? PAIR_DEPTH : num_pairs - k;
        const char *next = reinterpret_cast<const char *>(panel + (k + depth) * PANEL);
        each_tile<PAIR_ROWS>(num_rows, [&](long first, auto rows) {
            multiply_pairs<rows.value>(x + first * num_pairs + k * rows.value, panel + k * PANEL, depth,
                                       totals + first * PANEL, next, next_step);
            next += depth * next_step;
        });
    }
}

// Some pairs, from `start` on, of rows of x [num_rows, in] as a tile [pairs, num_rows].
inline void pack_pairs(const bf16 *x, long num_rows, long in_features, long start, long end, Pair *packed) {
    const long num_whole = end <= in_features / 2 ? end : in_features / 2;
    for (long i = 0; i < num_rows; i++) {
        const bf16 *row = x + i * in_features;
        for (long k = start; k < num_whole; k++) packed[k * num_rows + i] = reinterpret_cast<const Pair *>(row)[k];
        if (num_whole < end) packed[num_whole * num_rows + i] = row[in_features - 1].bits;
    }
}

// x [num_rows, in] in blocks of BLOCK_ROWS rows, and each block in tiles of `each_tile`.
inline void pack_inputs(const bf16 *x, long num_rows, long in_features, long num_pairs, Pair *packed, long num_threads) {
    const long num_blocks = (num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS, num_parts = (num_pairs + PAIR_DEPTH - 1) / PAIR_DEPTH;
    share(num_blocks * num_parts, num_rows * num_pairs < PIECE_ELEMENTS ? 1 : num_threads, [&](long index) {
        const long row = index / num_parts * BLOCK_ROWS, start = index % num_parts * PAIR_DEPTH;
        const long end = start + PAIR_DEPTH < num_pairs ? start + PAIR_DEPTH : num_pairs;
        each_tile<PAIR_ROWS>(row + BLOCK_ROWS < num_rows ? BLOCK_ROWS : num_rows - row, [&](long first, auto rows) {
            const long from = row + first;
            pack_pairs(x + from * in_features, rows.value, in_features, start, end, packed + from * num_pairs);
        });
    });
}

inline void store_sums(const float *sums, bf16 *y, long columns) {
    const __m256bh rounded = _mm512_cvtneps_pbh(load(sums));
    if (columns == PANEL)
        memcpy(y, &rounded, sizeof rounded);
    else
        memcpy(y, &rounded, columns * sizeof(bf16));
}

// y [num_rows, out] = x [num_rows, in] @ weight.T + bias [out]; the bias may be null.
// weight [ceil(out / PANEL), ceil(in / 2), PANEL, 2], with zeros where it has no values.
template <typename Y>
void linear_half(const bf16 *x, const bf16 *weight, const float *bias, Y *y, long num_rows, long in_features,
                 long out_features, long num_threads) {
    const long num_pairs = (in_features + 1) / 2;
    const Pair *inputs = reinterpret_cast<const Pair *>(x), *panels = reinterpret_cast<const Pair *>(weight);
    std::unique_ptr<uint32_t[]> packed;
    if (num_rows > 1 || in_features % 2) {  // otherwise x is a tile already
        packed.reset(new uint32_t[num_rows * num_pairs]);
        pack_inputs(x, num_rows, in_features, num_pairs, packed.get(), num_threads);
        inputs = packed.get();
    }
    each_panel(bias, y, num_rows, out_features, num_threads, [&](long row, long panel, float *totals, long count) {
        multiply_pair_panel(inputs + row * num_pairs, panels + panel * num_pairs * PANEL, totals, count, num_pairs);
    });
}

#define LINEAR_HALF(Y, NAME)                                                                                           \
    extern "C" void NAME(const bf16 *x, const bf16 *weight, const float *bias, Y *y, long num_rows, long in_features,  \
                         long out_features, long num_threads) {                                                        \
        linear_half(x, weight, bias, y, num_rows, in_features, out_features, num_threads);                             \
    }
LINEAR_HALF(float, linear_half_float32)
LINEAR_HALF(bf16, linear_half_bfloat16)

#endif
