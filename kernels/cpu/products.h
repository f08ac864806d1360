// Products of a few rows: parts of attention and of LoRA.
//
// A row's sums are taken in one order, however many rows are computed together.
#pragma once

#include "vector.h"

// out [ROWS, COLUMNS] = the products of rows of a [ROWS, size] and rows of b [COLUMNS, size].
template <long ROWS, long COLUMNS, typename A, typename B>
inline void dot_products(const A *a, long a_stride, const B *b, long b_stride, long size, float *out, long out_stride) {
    Vector totals[ROWS][COLUMNS] = {};
    each_vector(size, [&](long k, auto some) {
        Vector rows[ROWS];
        for (long i = 0; i < ROWS; i++) rows[i] = some.load(a + i * a_stride + k);
        for (long j = 0; j < COLUMNS; j++) {
            const Vector column = some.load(b + j * b_stride + k);
            for (long i = 0; i < ROWS; i++) totals[i][j] = multiply_add(rows[i], column, totals[i][j]);
        }
    });
    for (long i = 0; i < ROWS; i++)
        for (long j = 0; j < COLUMNS; j++) out[i * out_stride + j] = sum(totals[i][j]);
}

// The same for any number of columns.
template <long ROWS, typename A, typename B>
inline void dot_products(const A *a, long a_stride, const B *b, long b_stride, long size, float *out, long out_stride,
                         long num_columns) {
    long j = 0;
    for (; j + 4 <= num_columns; j += 4)
        dot_products<ROWS, 4>(a, a_stride, b + j * b_stride, b_stride, size, out + j, out_stride);
    for (; j < num_columns; j++)
        dot_products<ROWS, 1>(a, a_stride, b + j * b_stride, b_stride, size, out + j, out_stride);
}

// For some vectors of each row: y [ROWS, n] = scales [ROWS] * y + weights [ROWS, count] @ b [count, n].
template <long ROWS, long VECTORS, typename T, typename B, typename Some>
inline void add_products(T *y, long y_stride, const float *scales, const float *weights, long weights_stride,
                         const B *b, long b_stride, long count, Some some) {
    Vector totals[ROWS][VECTORS];
    for (long i = 0; i < ROWS; i++)
        for (long n = 0; n < VECTORS; n++) totals[i][n] = some.load(y + i * y_stride + n * WIDTH) * scales[i];
    for (long k = 0; k < count; k++)
        for (long n = 0; n < VECTORS; n++) {
            const Vector each = some.load(b + k * b_stride + n * WIDTH);
            for (long i = 0; i < ROWS; i++) totals[i][n] = multiply_add(filled(weights[i * weights_stride + k]), each, totals[i][n]);
        }
    for (long i = 0; i < ROWS; i++)
        for (long n = 0; n < VECTORS; n++) some.store(y + i * y_stride + n * WIDTH, totals[i][n]);
}

// The same for rows of any size n.
template <long ROWS, typename T, typename B>
inline void add_products(T *y, long y_stride, const float *scales, const float *weights, long weights_stride,
                         const B *b, long b_stride, long count, long size) {
    constexpr long VECTORS = 4;
    long n = 0;
    for (; n + VECTORS * WIDTH <= size; n += VECTORS * WIDTH)
        add_products<ROWS, VECTORS>(y + n, y_stride, scales, weights, weights_stride, b + n, b_stride, count, Whole{});
    each_vector(size - n, [&](long i, auto some) {
        add_products<ROWS, 1>(y + n + i, y_stride, scales, weights, weights_stride, b + n + i, b_stride, count, some);
    });
}

// Calls work(first, NumRows) for pairs of rows, and for the last one alone if their number is odd.
template <long COUNT> struct NumRows {
    static constexpr long value = COUNT;
};

template <typename Work> inline void each_pair(long num_rows, const Work &work) {
    long i = 0;
    for (; i + 2 <= num_rows; i += 2) work(i, NumRows<2>{});
    if (i < num_rows) work(i, NumRows<1>{});
}
