// Attention over pages of codes of 4 or 2 bits; kernels/kv_groups.py defines them.
//
// A block's numbers are made for one key/value head at a time, in memory that stays in a core's caches, and all queries that
// read the block together use them.
#pragma once

#include "attention.h"

typedef uint8_t Bytes __attribute__((vector_size(WIDTH)));

// As Python passes it. num_groups: of a value's channels; 0: these are keys.
struct GroupedMemory {
    const uint8_t *codes;  // [num_blocks, block_size x bits / 8, num_heads, dim]
    const bf16 *steps;     // keys: [num_blocks, 2, num_heads, dim]; values: [num_blocks, 2, block_size, num_heads, num_groups]
    const void *opened;    // [open slots, block_size, num_heads, dim]
    long num_blocks, dim, bits, num_groups;
};

// Ids from num_blocks on are the slots of open blocks. Groups of channels are whole vectors.
template <typename T> struct GroupedPages {
    const GroupedMemory memory;
    const long num_heads, block_size, stride, num_numbers;

    GroupedPages(const GroupedMemory &memory, const AttentionLayer &layer)
        : memory(memory), num_heads(layer.num_kv_heads), block_size(layer.block_size), stride(memory.dim),
          num_numbers(layer.block_size * memory.dim) {}

    const float *block(long id, long head, float *numbers) const {
        if (id >= memory.num_blocks)
            copy_open(id - memory.num_blocks, head, numbers);
        else if (memory.num_groups)
            make_values(id, head, numbers);
        else
            make_keys(id, head, numbers);
        return numbers;
    }

    void copy_open(long slot, long head, float *numbers) const {
        const T *from = static_cast<const T *>(memory.opened) + (slot * block_size * num_heads + head) * stride;
        for (long token = 0; token < block_size; token++)
            for (long d = 0; d < stride; d += WIDTH)
                store(numbers + token * stride + d, load(from + token * num_heads * stride + d));
    }

    void make_keys(long id, long head, float *numbers) const {
        const bf16 *steps = memory.steps + (id * 2 * num_heads + head) * stride, *lowest = steps + num_heads * stride;
        for (long d = 0; d < stride; d += WIDTH) {
            const Vector step = load(steps + d), least = load(lowest + d);
            for (long row = 0; row < num_rows(); row++)
                each_token(id, head, row, d, [&](long token, Vector codes) {
                    store(numbers + token * stride + d, rounded(static_cast<const T *>(nullptr), multiply_add(codes, step, least)));
                });
        }
    }

    void make_values(long id, long head, float *numbers) const {
        const long num_groups = memory.num_groups, group_size = stride / num_groups;
        const bf16 *steps = memory.steps + (id * 2 * block_size * num_heads + head) * num_groups;
        const bf16 *lowest = steps + block_size * num_heads * num_groups;
        for (long row = 0; row < num_rows(); row++)
            for (long d = 0; d < stride; d += WIDTH)
                each_token(id, head, row, d, [&](long token, Vector codes) {
                    const long at = token * num_heads * num_groups + d / group_size;
                    const Vector number = multiply_add(codes, filled(number_of(steps[at])), filled(number_of(lowest[at])));
                    store(numbers + token * stride + d, rounded(static_cast<const T *>(nullptr), number));
                });
    }

    long num_rows() const { return block_size * memory.bits / 8; }

    // Calls work(token, codes) for the tokens whose codes share bytes, with those of the elements from d on.
    template <typename Work> void each_token(long id, long head, long row, long d, const Work &work) const {
        Bytes bytes;
        memcpy(&bytes, memory.codes + ((id * num_rows() + row) * num_heads + head) * stride + d, sizeof bytes);
        Integers packed = __builtin_convertvector(bytes, Integers);
        for (long token = row; token < block_size; token += num_rows(), packed >>= memory.bits)
            work(token, __builtin_convertvector(packed & ((1 << memory.bits) - 1), Vector));
    }

    static float number_of(bf16 x) {
        const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
        float number;
        memcpy(&number, &bits, sizeof number);
        return number;
    }
};

#define ATTEND_GROUPS(T, NAME)                                                                                         \
    extern "C" void NAME(const AttentionGroup *group, const AttentionLayer *layer, const T *q,                          \
                         const GroupedMemory *keys, const GroupedMemory *values, T *out) {                             \
        attend(*group, *layer, q, GroupedPages<T>(*keys, *layer), GroupedPages<T>(*values, *layer), out);              \
    }
ATTEND_GROUPS(float, attend_groups_float32)
ATTEND_GROUPS(bf16, attend_groups_bfloat16)
