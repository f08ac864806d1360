// Mamba's selective scan; kernels/selective_scan.py defines it.
//
// A thread takes some channels of a sequence through all of its rows, with their states in its cache.
#pragma once

#include "threads.h"
#include "vector.h"

struct SelectiveScan {
    const long *bounds;   // [num_sequences + 1]
    const long *sources;  // [num_sequences]
    const float *states;  // [num_states, num_channels, size]
    const float *rates;   // [num_channels, size]
    const float *steps;   // [num_rows, num_channels]
    const float *skip;    // [num_channels], or null
    float *out;           // [num_rows, num_channels]
    float *after;         // [num_sequences, num_channels, size]
    long num_sequences, num_channels, size;
    long x_stride, gate_stride, b_stride, c_stride;  // from a row to the next
    long num_threads;
};

// The channels that a thread takes at a time.
constexpr long CHANNELS = 64;

// The state of one channel after a row, and what the row reads from it.
template <typename T>
float scan_channel(float *state, const float *rates, float step, float added, const T *b, const T *c, long size) {
    Vector read = {};
    each_vector(size, [&](long i, auto some) {
        const Vector decay = exp(some.load(rates + i) * step);
        const Vector x = multiply_add(decay, some.load(state + i), some.load(b + i) * added);
        some.store(state + i, x);
        read = multiply_add(x, some.load(c + i), read);
    });
    return sum(read);
}

template <typename T>
void scan_channels(const SelectiveScan &task, const T *x, const T *gate, const T *b, const T *c, long sequence, long first) {
    const long left = task.num_channels - first, count = left < CHANNELS ? left : CHANNELS, size = task.size;
    const float *before = task.states + (task.sources[sequence] * task.num_channels + first) * size;
    float *state = task.after + (sequence * task.num_channels + first) * size;
    memcpy(state, before, count * size * sizeof(float));
    for (long row = task.bounds[sequence]; row < task.bounds[sequence + 1]; row++) {
        const float *step = task.steps + row * task.num_channels + first;
        float *out = task.out + row * task.num_channels + first;
        float inputs[CHANNELS];
        each_vector(count, [&](long i, auto some) {
            some.store(inputs + i, some.load(x + row * task.x_stride + first + i));
        });
        for (long i = 0; i < count; i++)
            out[i] = scan_channel(state + i * size, task.rates + (first + i) * size, step[i], step[i] * inputs[i],
                                  b + row * task.b_stride, c + row * task.c_stride, size);
        each_vector(count, [&](long i, auto some) {
            Vector result = some.load(out + i);
            if (task.skip) result = multiply_add(some.load(task.skip + first + i), some.load(inputs + i), result);
            if (gate) {
                const Vector z = some.load(gate + row * task.gate_stride + first + i);
                result = result * (z / (exp(-z) + 1.0f));
            }
            some.store(out + i, result);
        });
    }
}

template <typename T> void selective_scan(const SelectiveScan &task, const T *x, const T *gate, const T *b, const T *c) {
    const long num_parts = (task.num_channels + CHANNELS - 1) / CHANNELS;
    share(task.num_sequences * num_parts, task.num_threads, [&](long index) {
        scan_channels(task, x, gate, b, c, index / num_parts, index % num_parts * CHANNELS);
    });
}

#define SELECTIVE_SCAN(T, NAME)                                                                                        \
    extern "C" void NAME(const SelectiveScan *task, const T *x, const T *gate, const T *b, const T *c) {                \
        selective_scan(*task, x, gate, b, c);                                                                          \
    }
SELECTIVE_SCAN(float, selective_scan_float32)
SELECTIVE_SCAN(bf16, selective_scan_bfloat16)
