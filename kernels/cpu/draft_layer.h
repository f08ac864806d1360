// The decoder layer and output head of an EAGLE head in one call; kernels/draft_layer.py defines it.
//
// A pass of one row multiplies little, so that calling each of its operations takes longer than computing it.
#pragma once

#include <memory>

#include "attention.h"
#include "gated_activation.h"
#include "matrix.h"
#include "rms_norm.h"
#include "rotary.h"

struct DraftLayer {
    Matrix qkv, o, gate_up, down, output_head;
    const float *input_norm, *feature_norm, *mlp_norm, *output_norm;  // [size]
    long size, norms_before_residual;
    float eps;
};

// The rows of a pass, and its results.
struct DraftPass {
    const float *embedded, *features;  // [num_rows, size]
    const float *cos, *sin;            // [num_rows, dim]
    const long *slots;                 // [num_rows]: where the cache gets their keys and values
    const long *kept;                  // [num_kept]: the rows that the output head reads
    long num_rows, num_kept;
    float *states;  // [num_kept, size]
    float *logits;  // [num_kept, draft vocabulary]
};

// y += x, of so many numbers.
inline void add(const float *x, float *y, long size) {
    for (long i = 0; i < size; i++) y[i] += x[i];
}

// `group`: of all rows. keys and values are pages.
extern "C" void draft_layer_float32(const DraftLayer *layer, const AttentionLayer *attention, const AttentionGroup *group,
                                    const DraftPass *pass, float *keys, float *values) {
    const long num_rows = pass->num_rows, size = layer->size, num_threads = group->num_threads, dim = attention->dim;
    const long num_heads = attention->num_heads, num_kv_heads = attention->num_kv_heads;
    const long width = (num_heads + 2 * num_kv_heads) * dim, kv_size = num_kv_heads * dim;
    const long inner = layer->down.in_features, last = pass->num_kept;
    auto numbers = [](long count) { return std::unique_ptr<float[]>(new float[count]); };

    const auto x = numbers(num_rows * size), normed = numbers(num_rows * size), pairs = numbers(num_rows * 2 * size);
    for (long row = 0; row < num_rows; row++) {
        float *pair = &pairs[row * 2 * size];
        const float *features = pass->features + row * size;
        rms_norm_row(pass->embedded + row * size, layer->input_norm, pair, size, layer->eps, ROUNDED_FIRST);
        rms_norm_row(features, layer->feature_norm, pair + size, size, layer->eps, ROUNDED_FIRST);
        memcpy(&x[row * size], layer->norms_before_residual ? pair + size : features, size * sizeof(float));
    }

    const auto qkv = numbers(num_rows * width), q = numbers(num_rows * num_heads * dim);
    const auto attended = numbers(num_rows * num_heads * dim);
    multiply(layer->qkv, pairs.get(), qkv.get(), num_rows, num_threads);
    for (long row = 0; row < num_rows; row++) {
        const float *projected = &qkv[row * width], *cos = pass->cos + row * dim, *sin = pass->sin + row * dim;
        rotate(projected, cos, sin, &q[row * num_heads * dim], num_heads, dim, dim);
        rotate(projected + num_heads * dim, cos, sin, keys + pass->slots[row] * kv_size, num_kv_heads, dim, dim);
        memcpy(values + pass->slots[row] * kv_size, projected + num_heads * dim + kv_size, kv_size * sizeof(float));
    }
    attend_float32(group, attention, q.get(), keys, values, attended.get());
    multiply(layer->o, attended.get(), normed.get(), num_rows, num_threads);
    add(normed.get(), x.get(), num_rows * size);

    // Nothing reads the other rows any more.
    const auto gate_up = numbers(last * 2 * inner), gated = numbers(last * inner);
    for (long i = 0; i < last; i++) {
        memcpy(pass->states + i * size, &x[pass->kept[i] * size], size * sizeof(float));
        rms_norm_row(pass->states + i * size, layer->mlp_norm, &normed[i * size], size, layer->eps, ROUNDED_FIRST);
    }
    multiply(layer->gate_up, normed.get(), gate_up.get(), last, num_threads);
    gated_activation(gate_up.get(), &gate_up[inner], gated.get(), last, inner, 2 * inner, 2 * inner, SILU, num_threads);
    multiply(layer->down, gated.get(), normed.get(), last, num_threads);
    add(normed.get(), pass->states, last * size);
    for (long i = 0; i < last; i++)
        rms_norm_row(pass->states + i * size, layer->output_norm, &normed[i * size], size, layer->eps, ROUNDED_FIRST);
    multiply(layer->output_head, normed.get(), pass->logits, last, num_threads);
}
