// RMSNorm of rows; kernels/rms_norm.py defines it.
#pragma once

#include "threads.h"
#include "vector.h"

// NormForm of kernels/rms_norm.py.
enum NormForm { ROUNDED_FIRST = 1, ROUNDED_LAST = 2, OFFSET = 3 };

template <typename T>
void rms_norm_row(const T *x, const T *weight, T *out, long size, float eps, long form) {
    Vector squares = {};
    each_vector(size, [&](long i, auto some) {
        const Vector elements = some.load(x + i);
        squares = multiply_add(elements, elements, squares);
    });
    const float scale = 1.0f / __builtin_sqrtf(sum(squares) / size + eps);
    each_vector(size, [&](long i, auto some) {
        Vector normalized = some.load(x + i) * scale;
        if (weight) {
            const Vector factor = some.load(weight + i);
            if (form == ROUNDED_FIRST)
                normalized = rounded(x, normalized) * factor;
            else
                normalized = normalized * (form == OFFSET ? factor + 1.0f : factor);
        }
        some.store(out + i, normalized);
    });
}

// x, out [num_rows, size]; weight [size] or null.
template <typename T>
void rms_norm(const T *x, const T *weight, T *out, long num_rows, long size, float eps, long form, long num_threads) {
    share_rows(num_rows, size, num_threads,
               [&](long row) { rms_norm_row(x + row * size, weight, out + row * size, size, eps, form); });
}

#define RMS_NORM(T, NAME)                                                                                              \
    extern "C" void NAME(const T *x, const T *weight, T *out, long num_rows, long size, float eps, long form,           \
                         long num_threads) {                                                                           \
        rms_norm(x, weight, out, num_rows, size, eps, form, num_threads);                                              \
    }
RMS_NORM(float, rms_norm_float32)
RMS_NORM(bf16, rms_norm_bfloat16)
