// The gated activation of an MLP; kernels/gated_activation.py defines it.
#pragma once

#include "threads.h"
#include "vector.h"

// Activation of kernels/gated_activation.py.
enum Activation { SILU = 1, GELU_TANH = 2 };

inline Vector activate(Vector x, long activation) {
    // GELU's 0.5 (1 + tanh(u)) is the logistic function of 2u.
    const Vector u = activation == SILU ? x : 1.5957691216f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exp(-u));
}

// gate, up [num_rows, size] with these strides; out dense.
template <typename T>
void gated_activation(const T *gate, const T *up, T *out, long num_rows, long size, long gate_stride, long up_stride,
                      long activation, long num_threads) {
    share_rows(num_rows, size, num_threads, [&](long row) {
        const T *gates = gate + row * gate_stride, *factors = up + row * up_stride;
        each_vector(size, [&](long i, auto some) {
            const Vector activated = rounded(gate, activate(some.load(gates + i), activation));
            some.store(out + row * size + i, activated * some.load(factors + i));
        });
    });
}

#define GATED_ACTIVATION(T, NAME)                                                                                      \
    extern "C" void NAME(const T *gate, const T *up, T *out, long num_rows, long size, long gate_stride,                \
                         long up_stride, long activation, long num_threads) {                                          \
        gated_activation(gate, up, out, num_rows, size, gate_stride, up_stride, activation, num_threads);              \
    }
GATED_ACTIVATION(float, gated_activation_float32)
GATED_ACTIVATION(bf16, gated_activation_bfloat16)
