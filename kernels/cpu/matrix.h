// A linear layer of any form that the library multiplies.
#pragma once

#include "bfloat16_linear.h"
#include "linear.h"
#include "quantized_linear.h"

// What a weight consists of.
enum MatrixForm : long { FLOAT_PANELS, BFLOAT_PANELS, INT8_PANELS };

struct Matrix {
    const void *weight;  // as linear_float32, linear_bfloat16, linear_half or quantized_linear_int8 take it
    const void *scales;  // of INT8_PANELS
    const float *bias;   // [out_features], or null
    long form, scale_kind, in_features, out_features, group;
};

// y [num_rows, out_features] = x [num_rows, in_features] @ weight.T + bias
inline void multiply(const Matrix &matrix, const float *x, float *y, long num_rows, long num_threads) {
    const long in_features = matrix.in_features, out_features = matrix.out_features;
    if (matrix.form == FLOAT_PANELS)
        linear_float32(x, static_cast<const float *>(matrix.weight), matrix.bias, y, num_rows, in_features, out_features, num_threads);
    else if (matrix.form == BFLOAT_PANELS)
        linear_bfloat16(x, static_cast<const bf16 *>(matrix.weight), matrix.bias, y, num_rows, in_features, out_features, num_threads);
    else
        quantized_linear_int8(x, static_cast<const Word *>(matrix.weight), matrix.scales, matrix.scale_kind, nullptr, NONE,
                              nullptr, matrix.bias, y, num_rows, in_features, out_features, matrix.group, num_threads);
}

#if defined(__AVX512BF16__)
// The same in bf16, whose form is that of linear_half.
inline void multiply(const Matrix &matrix, const bf16 *x, bf16 *y, long num_rows, long num_threads) {
    linear_half(x, static_cast<const bf16 *>(matrix.weight), matrix.bias, y, num_rows, matrix.in_features, matrix.out_features,
                num_threads);
}
#endif
