// A decoder layer in one call; engine/model/decoder_layers.py says which layers have this form.
//
// Every operation and every rounding is that of the separate calls, so that the result has their bits. Of a step of few rows they
// take longer to call than to compute.
#pragma once

#include <time.h>

#include <cstdlib>

#include "attention_bf16.h"
#include "gated_activation.h"
#include "lora.h"
#include "matrix.h"
#include "rms_norm.h"
#include "rotary.h"

// The layer's linear layers, in the order of their products.
enum LayerLinear { QKV, O, GATE_UP, DOWN, NUM_LINEARS };

struct RmsNorm {
    const void *weight;  // [size]
    long form;           // NormForm; 0: there is no norm
    float eps;
};

struct DecoderLayer {
    Matrix linears[NUM_LINEARS];
    RmsNorm input_norm, query_norm, key_norm, o_norm, mlp_norm, down_norm;  // those of o and down: of their results
    long size, activation;
};

// The rows of a step.
struct DecoderRows {
    const void *cos, *sin;        // [num_rows, dim]
    const long *slots;            // [num_rows]: where the cache gets their keys and values
    const long *kept;             // [num_kept], ascending: of the last layer's result only these rows are read
    const AttentionGroup *groups; // of all rows
    long num_groups, num_rows, num_kept, num_threads;
    const int *adapter_rows;      // as LoraTokens.rows; null: no adapter changes the layer
    const void *adapters;         // what the adapters' tables point into
    long max_rank;
    double *seconds;              // by LayerWork, which are added to; null: not measured
};

enum LayerWork { PRODUCTS, LORA, ATTENTION, OTHERS };

// Gives the time since the last call to a kind of work.
struct LayerClock {
    double *seconds, since;

    static double now() {
        timespec time;
        clock_gettime(CLOCK_MONOTONIC, &time);
        return time.tv_sec + time.tv_nsec * 1e-9;
    }
    explicit LayerClock(double *seconds) : seconds(seconds), since(seconds ? now() : 0) {}
    void give(LayerWork work) {
        if (!seconds) return;
        const double end = now();
        seconds[work] += end - since;
        since = end;
    }
};

// Memory that all calls of a thread use again: the system zeroes fresh pages.
struct LayerMemory {
    char *bytes = nullptr;
    long size = 0, used = 0;

    ~LayerMemory() { free(bytes); }
    void begin(long wanted) {
        used = 0;
        if (wanted <= size) return;
        free(bytes);
        bytes = static_cast<char *>(aligned_alloc(64, wanted));
        size = wanted;
    }
    static long whole_lines(long num_bytes) { return (num_bytes + 63) / 64 * 64; }
    template <typename T> T *take(long count) {
        T *taken = reinterpret_cast<T *>(bytes + used);
        used += whole_lines(count * sizeof(T));
        return taken;
    }
};

inline void attend_pages(const AttentionGroup &group, const AttentionLayer &layer, const float *q, const float *keys, const float *values,
                   float *out) {
    attend_float32(&group, &layer, q, keys, values, out);
}

inline void attend_pages(const AttentionGroup &group, const AttentionLayer &layer, const bf16 *q, const bf16 *keys, const bf16 *values,
                   bf16 *out) {
    attend_bfloat16(&group, &layer, q, keys, values, out);
}

template <typename T> void normalize(const RmsNorm &norm, const T *x, T *out, long size) {
    rms_norm_row(x, static_cast<const T *>(norm.weight), out, size, norm.eps, norm.form);
}

// sum [size] = a + b, rounded to an element.
template <typename T> void add_rows(const T *a, const T *b, T *sum, long size) {
    each_vector(size, [&](long i, auto some) { some.store(sum + i, some.load(a + i) + some.load(b + i)); });
}

// x, out [num_rows, size], which may be the same. keys and values are pages. loras: by LayerLinear; null: as adapter_rows.
// leaves_out: only the kept rows of out are computed.
template <typename T>
void decoder_layer(const DecoderLayer &layer, const AttentionLayer &attention, const DecoderRows &rows, const T *x, T *out,
                   T *keys, T *values, const LoraProjection *const *loras, bool leaves_out) {
    static thread_local LayerMemory memory;
    const long num_rows = rows.num_rows, num_threads = rows.num_threads, size = layer.size, dim = attention.dim;
    const long num_heads = attention.num_heads, num_kv_heads = attention.num_kv_heads, kv_size = num_kv_heads * dim;
    const long width = num_heads * dim + 2 * kv_size, inner = layer.linears[DOWN].in_features;
    long max_ranks = 0;
    if (rows.adapter_rows)
        for (long i = 0; i < NUM_LINEARS; i++)
            if (loras[i]->num_slices * rows.max_rank > max_ranks) max_ranks = loras[i]->num_slices * rows.max_rank;
    const long numbers[] = {size, width, num_heads * dim, num_heads * dim, size, size, 2 * inner, inner};
    long wanted = LayerMemory::whole_lines(num_rows * max_ranks * sizeof(float)) + LayerMemory::whole_lines(num_rows * sizeof(int));
    for (long count : numbers) wanted += LayerMemory::whole_lines(num_rows * count * sizeof(T));
    memory.begin(wanted);
    float *hidden = memory.take<float>(num_rows * max_ranks);
    int *kept_adapter_rows = memory.take<int>(num_rows);
    auto taken = [&](long count) { return memory.take<T>(num_rows * count); };
    T *normed = taken(size), *qkv = taken(width), *q = taken(num_heads * dim), *attended = taken(num_heads * dim);
    T *added = taken(size), *residual = taken(size), *gate_up = taken(2 * inner), *gated = taken(inner);

    LayerClock clock(rows.seconds);
    const int *adapter_rows = rows.adapter_rows;
    long num_left = num_rows;  // the rows that are computed
    auto project = [&](LayerLinear index, const T *input, T *result) {
        const Matrix &matrix = layer.linears[index];
        multiply(matrix, input, result, num_left, num_threads);
        clock.give(PRODUCTS);
        if (!adapter_rows) return;
        const LoraProjection &lora = *loras[index];
        const LoraTokens tokens{adapter_rows, hidden, num_left, rows.max_rank * lora.num_slices,
                                matrix.in_features, matrix.out_features, num_threads};
        add_lora(lora, tokens, static_cast<const T *>(rows.adapters), input, result);
        clock.give(LORA);
    };

    share_rows(num_rows, size, num_threads, [&](long i) { normalize(layer.input_norm, x + i * size, normed + i * size, size); });
    clock.give(OTHERS);
    project(QKV, normed, qkv);
    share_rows(num_rows, width, num_threads, [&](long i) {
        T *query = qkv + i * width, *key = query + num_heads * dim;
        const T *cos = static_cast<const T *>(rows.cos) + i * dim, *sin = static_cast<const T *>(rows.sin) + i * dim;
        if (layer.query_norm.form)
            for (long head = 0; head < num_heads; head++) normalize(layer.query_norm, query + head * dim, query + head * dim, dim);
        if (layer.key_norm.form)
            for (long head = 0; head < num_kv_heads; head++) normalize(layer.key_norm, key + head * dim, key + head * dim, dim);
        rotate(query, cos, sin, q + i * num_heads * dim, num_heads, dim, dim);
        rotate(key, cos, sin, keys + rows.slots[i] * kv_size, num_kv_heads, dim, dim);
        memcpy(values + rows.slots[i] * kv_size, key + kv_size, kv_size * sizeof(T));
    });
    clock.give(OTHERS);
    for (long i = 0; i < rows.num_groups; i++)
        attend_pages(rows.groups[i], attention, q, keys, values, attended);
    clock.give(ATTENTION);
    auto place = [&](long i) { return leaves_out ? rows.kept[i] : i; };
    if (leaves_out) {
        num_left = rows.num_kept;
        for (long i = 0; i < num_left; i++) {
            memmove(attended + i * num_heads * dim, attended + place(i) * num_heads * dim, num_heads * dim * sizeof(T));
            if (adapter_rows) kept_adapter_rows[i] = adapter_rows[place(i)];
        }
        if (adapter_rows) adapter_rows = kept_adapter_rows;
    }
    project(O, attended, added);
    share_rows(num_left, size, num_threads, [&](long i) {
        if (layer.o_norm.form) normalize(layer.o_norm, added + i * size, added + i * size, size);
        add_rows(x + place(i) * size, added + i * size, residual + i * size, size);
        normalize(layer.mlp_norm, residual + i * size, normed + i * size, size);
    });
    clock.give(OTHERS);
    project(GATE_UP, normed, gate_up);
    gated_activation(gate_up, gate_up + inner, gated, num_left, inner, 2 * inner, 2 * inner, layer.activation, num_threads);
    clock.give(OTHERS);
    project(DOWN, gated, added);
    share_rows(num_left, size, num_threads, [&](long i) {
        if (layer.down_norm.form) normalize(layer.down_norm, added + i * size, added + i * size, size);
        add_rows(residual + i * size, added + i * size, out + place(i) * size, size);
    });
    clock.give(OTHERS);
}

#define DECODER_LAYER(T, NAME)                                                                                         \
    extern "C" void NAME(const DecoderLayer *layer, const AttentionLayer *attention, const DecoderRows *rows, const T *x,    \
                         T *out, T *keys, T *values, const LoraProjection *const *loras, bool leaves_out) {            \
        decoder_layer(*layer, *attention, *rows, x, out, keys, values, loras, leaves_out);                             \
    }
DECODER_LAYER(float, decoder_layer_float32)
#if defined(__AVX512BF16__)
DECODER_LAYER(bf16, decoder_layer_bfloat16)
#endif
