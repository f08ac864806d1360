// Rotary position embedding; kernels/rotary.py defines it.
#pragma once

#include "threads.h"
#include "vector.h"

// One token's heads: x [num_heads, dim] in steps of head_stride, out dense; cos, sin [dim].
template <typename T>
void rotate(const T *x, const T *cos, const T *sin, T *out, long num_heads, long head_stride, long dim) {
    const long half = dim / 2;
    auto product = [&](Vector a, Vector b) { return rounded(x, a * b); };
    for (long head = 0; head < num_heads; head++, x += head_stride, out += dim)
        each_vector(half, [&](long i, auto some) {
            const Vector first = some.load(x + i), second = some.load(x + half + i);
            some.store(out + i, product(first, some.load(cos + i)) - product(second, some.load(sin + i)));
            some.store(out + half + i,
                       product(second, some.load(cos + half + i)) + product(first, some.load(sin + half + i)));
        });
}

// x [num_tokens, num_heads, dim] with these strides; out dense; cos, sin [num_tokens, dim].
template <typename T>
void rotary(const T *x, const T *cos, const T *sin, T *out, long num_tokens, long num_heads, long dim,
            long token_stride, long head_stride, long num_threads) {
    share_rows(num_tokens, num_heads * dim, num_threads, [&](long token) {
        rotate(x + token * token_stride, cos + token * dim, sin + token * dim, out + token * num_heads * dim,
               num_heads, head_stride, dim);
    });
}

#define ROTARY(T, NAME)                                                                                                \
    extern "C" void NAME(const T *x, const T *cos, const T *sin, T *out, long num_tokens, long num_heads, long dim,     \
                         long token_stride, long head_stride, long num_threads) {                                      \
        rotary(x, cos, sin, out, num_tokens, num_heads, dim, token_stride, head_stride, num_threads);                  \
    }
ROTARY(float, rotary_float32)
ROTARY(bf16, rotary_bfloat16)
