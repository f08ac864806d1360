// Products whose instruction sums several elements in each lane of 32 bits: pairs of bf16, fours of int8.
//
// An output is summed in the order of the lanes, so no row's bits depend on the other rows.
#pragma once

#include "linear.h"

#if defined(__AVX512F__)

// The elements of one lane, of an input or of a weight.
typedef uint32_t Lane __attribute__((may_alias, aligned(1)));

// The lanes that are multiplied at a time: their part of a panel stays in the first cache.
constexpr long LANE_DEPTH = DEPTH / 2;

// How many lanes before its use a line of a panel is read into the second cache, and into the first, if it is used once.
constexpr long FAR = LANE_DEPTH, NEAR = 32;

// totals [ROWS, PANEL] += x [depth, ROWS] @ panel [depth, PANEL], of lanes. Calls read_ahead(lane) for each.
template <typename Lanes, long ROWS, typename ReadAhead>
inline void multiply_lanes(const Lane *x, const Lane *panel, long depth, typename Lanes::Sum *totals, const ReadAhead &read_ahead) {
    typename Lanes::Sums sums[ROWS];
// Without these, GCC keeps the sums in memory before and after the loop.
#pragma GCC unroll 32
    for (long i = 0; i < ROWS; i++) memcpy(&sums[i], totals + i * PANEL, sizeof sums[i]);
    for (long k = 0; k < depth; k++) {
        read_ahead(k);
        const __m512i weights = _mm512_loadu_si512(panel + k * PANEL);
#pragma GCC unroll 32
        for (long i = 0; i < ROWS; i++) sums[i] = Lanes::add_products(sums[i], weights, _mm512_set1_epi32(x[k * ROWS + i]));
    }
#pragma GCC unroll 32
    for (long i = 0; i < ROWS; i++) memcpy(totals + i * PANEL, &sums[i], sizeof sums[i]);
}

// totals [num_rows, PANEL] += x @ panel [num_lanes, PANEL]; x is in tiles of `each_tile`: [num_lanes, rows of the tile].
template <typename Lanes>
inline void multiply_lane_panel(const Lane *x, const Lane *panel, typename Lanes::Sum *totals, long num_rows, long num_lanes) {
    if (num_rows <= Lanes::TILE)
        return with_num_rows<Lanes::TILE>(num_rows, [&](auto rows) {
            multiply_lanes<Lanes, rows.value>(x, panel, num_lanes, totals, [&](long lane) {
                __builtin_prefetch(panel + (lane + FAR) * PANEL, 0, 2);
                __builtin_prefetch(panel + (lane + NEAR) * PANEL);
            });
        });
    // Each tile reads its share of the next part.
    const long next_step = sizeof(Lane) * PANEL / ((num_rows + Lanes::TILE - 1) / Lanes::TILE);
    // With many tiles, the second cache has a part that is twice as large, and sums are read and written half as often.
    const long most = num_rows > 2 * Lanes::TILE ? 2 * LANE_DEPTH : LANE_DEPTH;
    for (long k = 0; k < num_lanes; k += most) {
        const long depth = k + most < num_lanes ? most : num_lanes - k;
        const char *next = reinterpret_cast<const char *>(panel + (k + depth) * PANEL);
        each_tile<Lanes::TILE>(num_rows, [&](long first, auto rows) {
            multiply_lanes<Lanes, rows.value>(x + first * num_lanes + k * rows.value, panel + k * PANEL, depth, totals + first * PANEL,
                                              [&](long lane) { __builtin_prefetch(next + lane * next_step); });
            next += depth * next_step;
        });
    }
}

// Rows [num_rows, num_lanes] in blocks of BLOCK_ROWS rows, and each block in tiles of `each_tile`. lanes(row) are whole but
// for the last one, which last(row) reads.
template <typename Lanes, typename Row, typename Last>
void pack_lanes(long num_rows, long num_lanes, Lane *packed, long num_threads, const Row &lanes, const Last &last) {
    const long num_blocks = (num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS, num_parts = (num_lanes + LANE_DEPTH - 1) / LANE_DEPTH;
    share(num_blocks * num_parts, num_rows * num_lanes < PIECE_ELEMENTS ? 1 : num_threads, [&](long index) {
        const long row = index / num_parts * BLOCK_ROWS, start = index % num_parts * LANE_DEPTH;
        const long end = start + LANE_DEPTH < num_lanes ? start + LANE_DEPTH : num_lanes;
        each_tile<Lanes::TILE>(row + BLOCK_ROWS < num_rows ? BLOCK_ROWS : num_rows - row, [&](long first, auto rows) {
            const long from = row + first;
            Lane *tile = packed + from * num_lanes;
            for (long i = 0; i < rows.value; i++) {
                const Lane *own = lanes(from + i);
#pragma GCC unroll 8
                for (long k = start; k < end - 1; k++) tile[k * rows.value + i] = own[k];
                tile[(end - 1) * rows.value + i] = end < num_lanes ? own[end - 1] : last(from + i);
            }
        });
    });
}

#endif
