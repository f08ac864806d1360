// Recurrences of layers with a matrix as state; kernels/recurrence.py defines them.
//
// A thread keeps some columns of one head's state in its cache and goes through all rows of a
// sequence. A row changes the state once: what it adds is added when the next row reads the state.
#pragma once

#include "threads.h"
#include "vector.h"

struct Recurrence {
    const long *bounds;      // [num_sequences + 1]
    const long *sources;     // [num_sequences]
    const float *states;     // [num_states, num_heads, key_dim, value_dim]
    const float *log_decay;  // [num_rows, num_heads], or [num_rows, num_heads, key_dim]
    const float *beta;       // [num_rows, num_heads]
    const float *skip;       // [num_heads], or null
    float *out;              // [num_rows, num_heads, value_dim]
    float *after;            // [num_sequences, num_heads, key_dim, value_dim]
    long num_sequences, num_heads, num_key_heads, key_dim, value_dim;
    long q_stride, k_stride, v_stride;  // from a row to the next
    long decays_keys, is_delta, is_normalized, num_threads;
    float scale;
};

// The columns of a state that a thread takes at a time: whole vectors of any processor.
constexpr long COLUMNS = 32;
constexpr long NUM_VECTORS = COLUMNS / WIDTH;
constexpr float NORM_EPS = 1e-6f;

// One head's keys and queries of a row, as the state meets them.
struct RowKeys {
    float *k, *q, *decay;  // [key_dim]
    float overlap;         // q · k
};

template <typename T> void read_keys(const Recurrence &task, const T *q, const T *k, long row, long head, RowKeys &keys) {
    const long dim = task.key_dim, key_head = head / (task.num_heads / task.num_key_heads), at = row * task.num_heads + head;
    q += row * task.q_stride + key_head * dim;
    k += row * task.k_stride + key_head * dim;
    Vector q_squares = {}, k_squares = {}, products = {};
    each_vector(dim, [&](long i, auto some) {
        const Vector a = some.load(q + i), b = some.load(k + i);
        some.store(keys.q + i, a);
        some.store(keys.k + i, b);
        q_squares = multiply_add(a, a, q_squares);
        k_squares = multiply_add(b, b, k_squares);
        products = multiply_add(a, b, products);
    });
    float q_scale = task.scale, k_scale = 1.0f;
    if (task.is_normalized) {
        q_scale /= __builtin_sqrtf(sum(q_squares) + NORM_EPS);
        k_scale /= __builtin_sqrtf(sum(k_squares) + NORM_EPS);
    }
    keys.overlap = sum(products) * q_scale * k_scale;
    const float *decay = task.log_decay + (task.decays_keys ? at * dim : at);
    const Vector shared = exp(filled(*decay));
    each_vector(dim, [&](long i, auto some) {
        some.store(keys.q + i, some.load(keys.q + i) * q_scale);
        some.store(keys.k + i, some.load(keys.k + i) * k_scale);
        some.store(keys.decay + i, task.decays_keys ? exp(some.load(decay + i)) : shared);
    });
}

// Adds what the row before left to add, lets the state decay, and reads it with the row's key and query.
template <bool IS_DELTA>
void step_state(float *state, long key_dim, const float *last_k, const Vector *added, const RowKeys &keys, Vector *predicted, Vector *read) {
    Vector by_key[NUM_VECTORS] = {}, by_query[NUM_VECTORS] = {};
    for (long i = 0; i < key_dim; i++, state += COLUMNS) {
        const Vector last = filled(last_k[i]), decay = filled(keys.decay[i]), k = filled(keys.k[i]), q = filled(keys.q[i]);
        for (long j = 0; j < NUM_VECTORS; j++) {
            const Vector x = multiply_add(last, added[j], load(state + j * WIDTH)) * decay;
            store(state + j * WIDTH, x);
            if (IS_DELTA) by_key[j] = multiply_add(k, x, by_key[j]);
            by_query[j] = multiply_add(q, x, by_query[j]);
        }
    }
    for (long j = 0; j < NUM_VECTORS; j++) predicted[j] = by_key[j], read[j] = by_query[j];
}

template <bool IS_DELTA, typename T>
void recur_columns(const Recurrence &task, const T *q, const T *k, const T *v, long sequence, long head, long column) {
    const long key_dim = task.key_dim, value_dim = task.value_dim;
    const long count = value_dim - column < COLUMNS ? value_dim - column : COLUMNS;
    const long size = count * sizeof(float);
    float state[key_dim * COLUMNS], memory[4 * key_dim] = {}, values[COLUMNS] = {};
    const float *before = task.states + (task.sources[sequence] * task.num_heads + head) * key_dim * value_dim + column;
    if (count < COLUMNS) memset(state, 0, sizeof state);
    for (long i = 0; i < key_dim; i++) memcpy(state + i * COLUMNS, before + i * value_dim, size);
    float *last_k = memory;
    RowKeys keys = {memory + key_dim, memory + 2 * key_dim, memory + 3 * key_dim, 0.0f};
    Vector added[NUM_VECTORS] = {}, predicted[NUM_VECTORS], read[NUM_VECTORS];
    for (long row = task.bounds[sequence]; row < task.bounds[sequence + 1]; row++) {
        const long at = row * task.num_heads + head;
        read_keys(task, q, k, row, head, keys);
        step_state<IS_DELTA>(state, key_dim, last_k, added, keys, predicted, read);
        const T *value = v + row * task.v_stride + head * value_dim + column;
        each_vector(count, [&](long i, auto some) { some.store(values + i, some.load(value + i)); });
        const float skip = task.skip ? task.skip[head] : 0.0f;
        float result[COLUMNS];
        for (long j = 0; j < NUM_VECTORS; j++) {
            const Vector x = load(values + j * WIDTH);
            added[j] = (IS_DELTA ? x - predicted[j] : x) * task.beta[at];
            store(result + j * WIDTH, multiply_add(added[j], filled(keys.overlap), read[j]) + x * skip);
        }
        memcpy(task.out + at * value_dim + column, result, size);
        float *other = last_k;
        last_k = keys.k;
        keys.k = other;
    }
    float *after = task.after + (sequence * task.num_heads + head) * key_dim * value_dim + column;
    for (long i = 0; i < key_dim; i++) {
        float *vectors = state + i * COLUMNS;
        for (long j = 0; j < NUM_VECTORS; j++)
            store(vectors + j * WIDTH, multiply_add(filled(last_k[i]), added[j], load(vectors + j * WIDTH)));
        memcpy(after + i * value_dim, vectors, size);
    }
}

template <typename T> void recur(const Recurrence &task, const T *q, const T *k, const T *v) {
    const long num_parts = (task.value_dim + COLUMNS - 1) / COLUMNS;
    share(task.num_sequences * task.num_heads * num_parts, task.num_threads, [&](long index) {
        const long column = index % num_parts * COLUMNS, head = index / num_parts % task.num_heads;
        const long sequence = index / num_parts / task.num_heads;
        if (task.is_delta)
            recur_columns<true>(task, q, k, v, sequence, head, column);
        else
            recur_columns<false>(task, q, k, v, sequence, head, column);
    });
}

#define RECUR(T, NAME)                                                                                                 \
    extern "C" void NAME(const Recurrence *task, const T *q, const T *k, const T *v) { recur(*task, q, k, v); }
RECUR(float, recur_float32)
RECUR(bf16, recur_bfloat16)
