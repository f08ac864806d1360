// Linear layers in fp32; kernels/linear_cpu.py packs their weights.
//
// Each output is summed in the order of the inputs, so no row's bits depend on the other rows.
#pragma once

#include "products.h"
#include "threads.h"
#include "vector.h"

// The weight's rows, which are the columns of the result, lie in panels of so many: one vector of
// AVX-512, two of AVX, four of NEON. A panel [in, PANEL] has the elements of one input side by side.
constexpr long PANEL = 16, PANEL_VECTORS = PANEL / WIDTH;

// The rows of x that are multiplied together: as many as have their sums and addresses in registers.
#if defined(__AVX512F__)
constexpr long TILE_ROWS = 8;
#else
constexpr long TILE_ROWS = 6;
#endif

// The inputs that are multiplied at a time: their part of a panel stays in the first cache.
constexpr long DEPTH = 256;

// The rows of x that pass a panel's part at a time: their inputs stay in the second cache.
constexpr long BLOCK_ROWS = 96;

// totals [ROWS, PANEL] += x [ROWS, depth] @ panel [depth, PANEL]; reads `next` into the caches.
template <long ROWS, typename T>
inline void multiply_tile(const float *x, long x_stride, const T *panel, long depth, float *totals, const char *next,
                          long next_step) {
    Vector sums[ROWS][PANEL_VECTORS];
    for (long i = 0; i < ROWS; i++)
        for (long n = 0; n < PANEL_VECTORS; n++) sums[i][n] = load(totals + i * PANEL + n * WIDTH);
    for (long k = 0; k < depth; k++) {
        __builtin_prefetch(next + k * next_step);
        Vector weights[PANEL_VECTORS];
        for (long n = 0; n < PANEL_VECTORS; n++) weights[n] = load(panel + k * PANEL + n * WIDTH);
        for (long i = 0; i < ROWS; i++) {
            const Vector input = filled(x[i * x_stride + k]);
            for (long n = 0; n < PANEL_VECTORS; n++) sums[i][n] = multiply_add(input, weights[n], sums[i][n]);
        }
    }
    for (long i = 0; i < ROWS; i++)
        for (long n = 0; n < PANEL_VECTORS; n++) store(totals + i * PANEL + n * WIDTH, sums[i][n]);
}

// Calls work(NumRows) with num_rows, which is at most MOST.
template <long MOST, typename Work> inline void with_num_rows(long num_rows, const Work &work) {
    if constexpr (MOST > 1)
        if (num_rows < MOST) return with_num_rows<MOST - 1>(num_rows, work);
    work(NumRows<MOST>{});
}

// Calls work(first row, NumRows) for tiles of nearly equal size, of at most MOST rows.
template <long MOST, typename Work> inline void each_tile(long num_rows, const Work &work) {
    const long num_tiles = (num_rows + MOST - 1) / MOST;
    for (long tile = 0; tile < num_tiles; tile++) {
        const long first = tile * num_rows / num_tiles, end = (tile + 1) * num_rows / num_tiles;
        with_num_rows<MOST>(end - first, [&](auto rows) { work(first, rows); });
    }
}

// multiply_tile for any number of rows. Only the first tile reads `next`.
template <typename T>
inline void multiply_part(const float *x, long x_stride, const T *panel, long depth, float *totals, long num_rows,
                          const char *next, long next_step) {
    each_tile<TILE_ROWS>(num_rows, [&](long first, auto rows) {
        multiply_tile<rows.value>(x + first * x_stride, x_stride, panel, depth, totals + first * PANEL, next, next_step);
        next_step = 0;
    });
}

// fp32 elements as they are.
inline const float *widened(const float *panel, long, float *) { return panel; }

// bf16 elements as fp32, in the buffer.
inline const float *widened(const bf16 *panel, long size, float *buffer) {
    for (long i = 0; i < size; i += WIDTH) store(buffer + i, load(panel + i));
    return buffer;
}

// totals [num_rows, PANEL] += x [num_rows, in] @ panel [in, PANEL].
template <typename T>
void multiply_panel(const float *x, const T *panel, float *totals, long num_rows, long in_features) {
    alignas(64) float buffer[DEPTH * PANEL];
    for (long k = 0; k < in_features; k += DEPTH) {
        const long depth = k + DEPTH < in_features ? DEPTH : in_features - k;
        const T *part = panel + k * PANEL;
        const char *next = reinterpret_cast<const char *>(part + depth * PANEL);
        const long next_step = PANEL * sizeof(T);
        if (num_rows <= TILE_ROWS)
            multiply_part(x + k, in_features, part, depth, totals, num_rows, next, next_step);
        else
            multiply_part(x + k, in_features, widened(part, depth * PANEL, buffer), depth, totals, num_rows, next, next_step);
    }
}

// The sums of one row of a panel, of which y has the first `columns`.
inline void store_sums(const float *sums, float *y, long columns) {
    if (columns == PANEL)
        memcpy(y, sums, PANEL * sizeof(float));
    else
        memcpy(y, sums, columns * sizeof(float));
}

inline void store_sums(const float *sums, bf16 *y, long columns) {
    bf16 row[PANEL];
    for (long i = 0; i < PANEL; i += WIDTH) {
#if defined(__AVX512BF16__)
        const __m256bh rounded = _mm512_cvtneps_pbh(load(sums + i));
        memcpy(row + i, &rounded, sizeof rounded);
#else
        store(row + i, load(sums + i));
#endif
    }
    if (columns == PANEL)
        memcpy(y, row, sizeof row);
    else
        memcpy(y, row, columns * sizeof(bf16));
}

// A row's results that lie in a line of the caches: threads that write to one line wait for each other.
constexpr long LINE_BYTES = 64;

// The adjacent panels that a thread takes at a time, at most: while it multiplies one, it reads the next into the caches.
constexpr long MOST_PANELS = 8;

// Few enough that the last threads wait for little, and whole lines of results.
inline long panels_at_a_time(long num_panels, long num_threads, long line_panels) {
    const long wanted = num_panels / (4 * num_threads) / line_panels * line_panels;
    return wanted < line_panels ? line_panels : wanted < MOST_PANELS ? wanted : MOST_PANELS;
}

// y [num_rows, out] = x [num_rows, in] @ weight.T + bias [out]; the bias may be null.
// multiply(row, panel, totals, num_rows) adds the products of the rows from `row` on and a panel, by its number.
template <typename Y, typename Multiply>
void each_panel(const float *bias, Y *y, long num_rows, long out_features, long num_threads, const Multiply &multiply) {
    const long num_panels = (out_features + PANEL - 1) / PANEL;
    const long run = panels_at_a_time(num_panels, num_threads, LINE_BYTES / (PANEL * sizeof(Y)));
    const long num_runs = (num_panels + run - 1) / run;
    const long num_blocks = (num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    auto one = [&](long row, long panel) {
        const long rows = row + BLOCK_ROWS < num_rows ? BLOCK_ROWS : num_rows - row, column = panel * PANEL;
        const long columns = column + PANEL < out_features ? PANEL : out_features - column;
        alignas(64) float totals[BLOCK_ROWS * PANEL];
        float start[PANEL] = {};
        if (bias) memcpy(start, bias + column, columns * sizeof(float));
        for (long i = 0; i < rows; i++) memcpy(totals + i * PANEL, start, sizeof start);
        multiply(row, panel, totals, rows);
        for (long i = 0; i < rows; i++) store_sums(totals + i * PANEL, y + (row + i) * out_features + column, columns);
    };
    share(num_blocks * num_runs, num_threads, [&](long index) {
        const long row = index / num_runs * BLOCK_ROWS, first = index % num_runs * run;
        for (long panel = first; panel < first + run && panel < num_panels; panel++) one(row, panel);
    });
}

// weight [ceil(out / PANEL), in, PANEL].
template <typename T>
void linear(const float *x, const T *weight, const float *bias, float *y, long num_rows, long in_features,
            long out_features, long num_threads) {
    each_panel(bias, y, num_rows, out_features, num_threads, [&](long row, long panel, float *totals, long count) {
        multiply_panel(x + row * in_features, weight + panel * PANEL * in_features, totals, count, in_features);
    });
}

#define LINEAR(T, NAME)                                                                                                \
    extern "C" void NAME(const float *x, const T *weight, const float *bias, float *y, long num_rows, long in_features, \
                         long out_features, long num_threads) {                                                        \
        linear(x, weight, bias, y, num_rows, in_features, out_features, num_threads);                                  \
    }
LINEAR(float, linear_float32)
LINEAR(bf16, linear_bfloat16)
