// A linear layer of any form that the library multiplies.
#pragma once

#include "bfloat16_linear.h"
#include "int8_linear.h"
#include "linear.h"
#include "quantized_linear.h"

// What a weight consists of.
enum MatrixForm : long { FLOAT_PANELS, BFLOAT_PANELS, INT8_PANELS, RAISED_PANELS };

struct Matrix {
    const void *weight;  // as linear_float32, linear_bfloat16, linear_half, quantized_linear_int8 or int8_linear take it
    const void *scales;  // of INT8_PANELS and RAISED_PANELS
    const float *bias;   // [out_features], or null
    long form, scale_kind, in_features, out_features, group;
};

#if defined(__AVX512VNNI__)
template <typename T> void multiply_raised(const Matrix &matrix, const T *x, T *y, long num_rows, long num_threads) {
    int8_linear(x, nullptr, static_cast<const uint8_t *>(matrix.weight), static_cast<const float *>(matrix.scales), matrix.bias,
                y, num_rows, matrix.in_features, matrix.out_features, num_threads);
}
#endif

// y [num_rows, out_features] = x [num_rows, in_features] @ weight.T + bias
inline void multiply(const Matrix &matrix, const float *x, float *y, long num_rows, long num_threads) {
    const long in_features = matrix.in_features, out_features = matrix.out_features;
#if defined(__AVX512VNNI__)
    if (matrix.form == RAISED_PANELS) return multiply_raised(matrix, x, y, num_rows, num_threads);
#endif
    if (matrix.form == FLOAT_PANELS)
        linear_float32(x, static_cast<const float *>(matrix.weight), matrix.bias, y, num_rows, in_features, out_features, num_threads);
    else if (matrix.form == BFLOAT_PANELS)
        linear_bfloat16(x, static_cast<const bf16 *>(matrix.weight), matrix.bias, y, num_rows, in_features, out_features, num_threads);
    else
        quantized_linear_int8(x, static_cast<const Word *>(matrix.weight), matrix.scales, matrix.scale_kind, nullptr, NONE,
                              nullptr, matrix.bias, y, num_rows, in_features, out_features, matrix.group, num_threads);
}

#if defined(__AVX512BF16__)
// The same in bf16, by linear_half or int8_linear.
inline void multiply(const Matrix &matrix, const bf16 *x, bf16 *y, long num_rows, long num_threads) {
#if defined(__AVX512VNNI__)
    if (matrix.form == RAISED_PANELS) return multiply_raised(matrix, x, y, num_rows, num_threads);
#endif
    linear_half(x, static_cast<const bf16 *>(matrix.weight), matrix.bias, y, num_rows, matrix.in_features, matrix.out_features,
                num_threads);
}
#endif
