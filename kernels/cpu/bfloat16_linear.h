// Linear layers in bf16 on processors with AVX512_BF16; kernels/bfloat16_linear_cpu.py packs their weights.
//
// Sums are kept in fp32, and a result is rounded once. Each output is summed in the order of the pairs of inputs, so
// no row's bits depend on the other rows.
#pragma once

#include "linear.h"

#if defined(__AVX512BF16__)

#include <memory>

// Two adjacent inputs, or their weights. An odd number of inputs ends with a zero.
typedef uint32_t Pair __attribute__((may_alias, aligned(2)));

// The rows and panels that are multiplied together: their sums take 24 of the 32 registers.
constexpr long PAIR_ROWS = 12, PAIR_PANELS = 2;

// The pairs that are multiplied at a time: their part of the panels stays in the first cache.
constexpr long PAIR_DEPTH = 128;

// The rows of x that pass a panels' part at a time: their inputs stay in the second cache.
constexpr long PAIR_BLOCK_TILES = 20, PAIR_BLOCK_ROWS = PAIR_BLOCK_TILES * PAIR_ROWS;

// The pairs of x that take less time to pack than waking the threads.
constexpr long FEW_PAIRS = 8 << 10;

// totals [ROWS, PANELS, PANEL] += x [depth, ROWS] @ panels [PANELS, depth, PANEL], of pairs; reads the panels'
// elements `ahead` into the caches, unless that is 0.
template <long ROWS, long PANELS>
inline void multiply_pairs(const Pair *x, const Pair *panels, long panel_stride, long depth, float *totals, long ahead) {
    __m512 sums[ROWS][PANELS];
    for (long i = 0; i < ROWS; i++)
        for (long n = 0; n < PANELS; n++) sums[i][n] = load(totals + (i * PANELS + n) * PANEL);
    for (long k = 0; k < depth; k++) {
        __m512bh weights[PANELS];
        for (long n = 0; n < PANELS; n++) {
            const Pair *part = panels + n * panel_stride + k * PANEL;
            weights[n] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(part));
            if (ahead) __builtin_prefetch(part + ahead * PANEL);
        }
        for (long i = 0; i < ROWS; i++) {
            const __m512bh input = reinterpret_cast<__m512bh>(_mm512_set1_epi32(x[k * ROWS + i]));
            for (long n = 0; n < PANELS; n++) sums[i][n] = _mm512_dpbf16_ps(sums[i][n], weights[n], input);
        }
    }
    for (long i = 0; i < ROWS; i++)
        for (long n = 0; n < PANELS; n++) store(totals + (i * PANELS + n) * PANEL, sums[i][n]);
}

// Rows in tiles of nearly equal size, each [pairs, rows of the tile].
struct PairTiles {
    const Pair *pairs;
    long num_rows, depth, num_tiles;

    PairTiles(long num_rows, long depth)
        : pairs(nullptr), num_rows(num_rows), depth(depth), num_tiles((num_rows + PAIR_ROWS - 1) / PAIR_ROWS) {}

    long first(long tile) const { return tile * num_rows / num_tiles; }
    long size(long tile) const { return first(tile + 1) - first(tile); }
    const Pair *at(long tile) const { return pairs + first(tile) * depth; }
};

// One tile of x [num_rows, in].
inline void pack_tile(const bf16 *x, long num_rows, long in_features, Pair *packed) {
    for (long i = 0; i < num_rows; i++) {
        const bf16 *row = x + i * in_features;
        for (long k = 0; k < in_features / 2; k++) packed[k * num_rows + i] = reinterpret_cast<const Pair *>(row)[k];
        if (in_features % 2) packed[in_features / 2 * num_rows + i] = row[in_features - 1].bits;
    }
}

// totals [rows of the tiles, PANELS, PANEL] += the tiles' rows @ panels.
template <long PANELS>
inline void multiply_block(const PairTiles &x, long tile, long end, const Pair *panels, float *totals) {
    const long first = x.first(tile);
    for (long k = 0; k < x.depth; k += PAIR_DEPTH) {
        const long depth = k + PAIR_DEPTH < x.depth ? PAIR_DEPTH : x.depth - k;
        for (long i = tile; i < end; i++)
            with_num_rows<PAIR_ROWS>(x.size(i), [&](auto rows) {
                multiply_pairs<rows.value, PANELS>(x.at(i) + k * rows.value, panels + k * PANEL, x.depth * PANEL, depth,
                                                   totals + (x.first(i) - first) * PANELS * PANEL, i == tile ? depth : 0);
            });
    }
}

inline void store_sums(float *y, Vector sums, long count) {
    if (count == PANEL) store(y, sums);
    else memcpy(y, &sums, count * sizeof(float));
}

inline void store_sums(bf16 *y, Vector sums, long count) {
    const __m256bh rounded = _mm512_cvtneps_pbh(sums);
    memcpy(y, &rounded, count * sizeof(bf16));
}

// y [rows of the tiles, columns of the panels] = x @ panels + bias.
template <long PANELS, typename Y>
inline void linear_block(const PairTiles &x, long tile, long end, const Pair *panels, const float *bias, Y *y,
                         long y_stride, long columns) {
    alignas(64) float totals[PAIR_BLOCK_ROWS * PANELS * PANEL];
    float start[PANELS * PANEL] = {};
    const long num_rows = x.first(end) - x.first(tile);
    if (bias) memcpy(start, bias, columns * sizeof(float));
    for (long i = 0; i < num_rows; i++) memcpy(totals + i * PANELS * PANEL, start, sizeof start);
    multiply_block<PANELS>(x, tile, end, panels, totals);
    for (long i = 0; i < num_rows; i++)
        for (long n = 0; n < PANELS; n++) {
            const long count = columns - n * PANEL < PANEL ? columns - n * PANEL : PANEL;
            store_sums(y + i * y_stride + n * PANEL, load(totals + (i * PANELS + n) * PANEL), count);
        }
}

// y [num_rows, out] = x [num_rows, in] @ weight.T + bias [out]; the bias may be null.
// weight [ceil(out / PANEL), ceil(in / 2), PANEL, 2].
template <typename Y>
void linear_half(const bf16 *x, const bf16 *weight, const float *bias, Y *y, long num_rows, long in_features,
                 long out_features, long num_threads) {
    PairTiles tiles(num_rows, (in_features + 1) / 2);
    std::unique_ptr<uint32_t[]> packed;
    if (num_rows == 1 && in_features % 2 == 0) {
        tiles.pairs = reinterpret_cast<const Pair *>(x);
    } else {
        packed.reset(new uint32_t[num_rows * tiles.depth]);
        tiles.pairs = packed.get();
        share(tiles.num_tiles, num_rows * tiles.depth < FEW_PAIRS ? 1 : num_threads, [&](long tile) {
            const long first = tiles.first(tile);
            pack_tile(x + first * in_features, tiles.size(tile), in_features, packed.get() + first * tiles.depth);
        });
    }
    const long num_panels = (out_features + PANEL - 1) / PANEL, num_groups = (num_panels + PAIR_PANELS - 1) / PAIR_PANELS;
    const long num_blocks = (tiles.num_tiles + PAIR_BLOCK_TILES - 1) / PAIR_BLOCK_TILES;
    share(num_blocks * num_groups, num_threads, [&](long index) {
        const long tile = index / num_groups * PAIR_BLOCK_TILES, panel = index % num_groups * PAIR_PANELS;
        const long end = tile + PAIR_BLOCK_TILES < tiles.num_tiles ? tile + PAIR_BLOCK_TILES : tiles.num_tiles;
        const long column = panel * PANEL, columns = out_features - column;
        const Pair *panels = reinterpret_cast<const Pair *>(weight) + panel * tiles.depth * PANEL;
        const float *start = bias ? bias + column : nullptr;
        Y *to = y + tiles.first(tile) * out_features + column;
        if (columns <= PANEL) linear_block<1>(tiles, tile, end, panels, start, to, out_features, columns);
        else
            linear_block<2>(tiles, tile, end, panels, start, to, out_features, columns < 2 * PANEL ? columns : 2 * PANEL);
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
