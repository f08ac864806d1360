// Attention of a few query rows per sequence over a paged cache; kernels/attention.py defines it.
//
// The query heads that share a key/value head read it together. Where few such heads are left for the threads, they read it in
// parts. The softmax is computed block by block, as in FlashAttention (Dao et al. 2022), so a row's result depends on its own
// sequence alone.
#pragma once

#include "products.h"
#include "threads.h"

// The queries that read a block together: their state fits into a core's caches.
constexpr long MAX_QUERIES = 128;
// The fewest query heads of a key/value head that a thread of its own is worth.
constexpr long MIN_SHARED = 8;
constexpr float INFINITE = __builtin_inff();
// After every query: the position of a key that is on another branch.
constexpr long NEVER = __LONG_MAX__;
// Of AttentionGroup::hidden.
constexpr long WORD_BITS = 64;

struct AttentionGroup {
    const long *rows;             // [num_sequences, max_rows]: of the flat batch
    const long *positions;        // [num_sequences, max_rows]: places, in ascending order
    const long *block_tables;     // [num_sequences, max_blocks]
    const long *block_positions;  // [num_sequences, max_blocks], or null: nothing is skipped
    const unsigned long *hidden;  // [num_sequences, max_rows]: bit j: the token j places before is on another branch; or null
    long num_sequences, max_rows, max_blocks, num_threads;
};

// block_size, dim and value_dim are multiples of 16.
struct AttentionLayer {
    const float *sinks, *slopes;  // [num_heads], or null
    long num_heads, num_kv_heads, dim, value_dim, block_size;
    long value_stride;                // from one value to the next: dim, where values are parts of keys
    long token_stride, head_stride;   // of the queries
    long window, is_chunked;          // of AttentionWindow; window 0: a query sees all positions
    long num_sink_positions;
    float scale, softcap;             // softcap 0: none
};

// A query's softmax over the blocks so far.
struct Softmax {
    float largest, total;
};

// The first position that a query sees, without sinks.
inline long first_visible(const AttentionLayer &layer, long position) {
    if (!layer.window) return 0;
    return layer.is_chunked ? position / layer.window * layer.window : position - layer.window + 1;
}

// The place of a query's token, and which tokens before it are on other branches of its draft tree.
struct Branch {
    long place;
    unsigned long hidden;

    // Whether keys before the place `end` may be hidden. Keys before the furthest hidden one lie at their positions.
    bool reaches(long end) const { return hidden && end > place - (WORD_BITS - 1 - __builtin_clzl(hidden)); }

    long position() const { return place - __builtin_popcountl(hidden); }

    // The position of the key at a place; NEVER, if it is on another branch.
    long position_of(long key) const {
        const long back = place - key;
        if (back < 0) return NEVER;
        if (back >= WORD_BITS) return key;
        return hidden >> back & 1 ? NEVER : key - __builtin_popcountl(hidden >> back);
    }
};

inline Branch branch_of(const AttentionGroup &group, long row) {
    return {group.positions[row], group.hidden ? group.hidden[row] : 0};
}

// Turns the scores of a block, whose keys have the positions `key_at(j)`, into weights. Returns the factor
// of what was summed before. `slope`: of ALiBi, or 0.
template <typename Keys>
inline float weigh(const AttentionLayer &layer, float *scores, Softmax &softmax, Keys key_at, long position, float slope) {
    const long size = layer.block_size, first = first_visible(layer, position);
    if (layer.softcap)
        for (long j = 0; j < size; j++) scores[j] = layer.softcap * __builtin_tanhf(scores[j] / layer.softcap);
    if (layer.slopes)
        for (long j = 0; j < size; j++) scores[j] += slope * (float)(key_at(j) - position);
    float largest = softmax.largest;
    for (long j = 0; j < size; j++) {
        const long key = key_at(j);
        const bool is_near = key >= first || key < layer.num_sink_positions;
        scores[j] = key <= position && is_near ? scores[j] : -INFINITE;
        largest = scores[j] <= largest ? largest : scores[j];  // NaN becomes the largest
    }
    if (largest == -INFINITE) {  // it sees nothing yet
        memset(scores, 0, size * sizeof(float));
        return 1.0f;
    }
    Vector total = {};
    for (long j = 0; j < size; j += WIDTH) {
        const Vector weights = exp(load(scores + j) - largest);
        store(scores + j, weights);
        total += weights;
    }
    const float kept = exp(filled(softmax.largest - largest))[0];
    softmax = {largest, softmax.total * kept + sum(total)};
    return kept;
}

// Blocks of vectors, which are read in place.
template <typename T> struct PlainPages {
    static constexpr long num_numbers = 1;  // none are made
    const T *data;
    long vector_size, num_heads, block_size, stride;

    PlainPages(const T *data, long vector_size, const AttentionLayer &layer)
        : data(data), vector_size(vector_size), num_heads(layer.num_kv_heads), block_size(layer.block_size),
          stride(layer.num_kv_heads * vector_size) {}

    const T *block(long id, long head, float *) const { return data + (id * block_size * num_heads + head) * vector_size; }
};

// Some rows of one sequence, some of its key/value heads, and some of the query heads that share each.
struct Part {
    long sequence, first_row, num_rows, first_kv_head, num_kv_heads, first_shared, num_shared;
};

// `keys` and `values` are pages: `block(id, head, numbers)` is a block's first vector of one head, and `stride` the way to the next.
template <typename T, typename Pages>
void attend_part(const AttentionGroup &group, const AttentionLayer &layer, const T *q, const Pages &keys, const Pages &values,
                 T *out, const Part &part) {
    const long num_shared = part.num_shared, dim = layer.dim, value_dim = layer.value_dim;
    const long all_shared = layer.num_heads / layer.num_kv_heads, size = layer.block_size, per_head = part.num_rows * num_shared;
    const long count = per_head * part.num_kv_heads;
    const long first = part.sequence * group.max_rows + part.first_row, *rows = group.rows + first;
    // The queries by key/value head, then by row, then by the heads that share it.
    float queries[count * dim], sums[count * value_dim], scores[per_head * size], kept[per_head];
    float numbers[keys.num_numbers > values.num_numbers ? keys.num_numbers : values.num_numbers];
    Softmax softmaxes[count];
    Branch branches[part.num_rows];
    auto row_of = [&](long i) { return i % per_head / num_shared; };
    auto head_of = [&](long i) { return (part.first_kv_head + i / per_head) * all_shared + part.first_shared + i % num_shared; };
    memset(sums, 0, sizeof sums);
    for (long i = 0; i < count; i++) {
        const T *query = q + rows[row_of(i)] * layer.token_stride + head_of(i) * layer.head_stride;
        for (long d = 0; d < dim; d += WIDTH) store(queries + i * dim + d, load(query + d) * layer.scale);
        softmaxes[i] = layer.sinks ? Softmax{layer.sinks[head_of(i)], 1.0f} : Softmax{-INFINITE, 0.0f};
    }
    for (long row = 0; row < part.num_rows; row++) branches[row] = branch_of(group, first + row);
    const long last = group.positions[first + part.num_rows - 1];

    for (long index = 0; index < group.max_blocks; index++) {
        const long at = part.sequence * group.max_blocks + index;
        const long begin = group.block_positions ? group.block_positions[at] : index * size;
        if (begin > last) continue;
        const long num_keys = last - begin + 1 < size ? last - begin + 1 : size;
        for (long head = 0; head < part.num_kv_heads; head++) {
            const long of_head = head * per_head, id = group.block_tables[at];
            const auto *k = keys.block(id, part.first_kv_head + head, numbers);
            each_pair(per_head, [&](long i, auto num_rows) {
                dot_products<num_rows.value>(queries + (of_head + i) * dim, dim, k, keys.stride, dim, scores + i * size,
                                             size, size);
            });
            for (long i = 0; i < per_head; i++) {
                const Branch &branch = branches[row_of(i)];
                auto weigh_by = [&](auto key_at) {
                    return weigh(layer, scores + i * size, softmaxes[of_head + i], key_at, branch.position(),
                                 layer.slopes ? layer.slopes[head_of(of_head + i)] : 0.0f);
                };
                kept[i] = branch.reaches(begin + size) ? weigh_by([&](long j) { return branch.position_of(begin + j); })
                                                       : weigh_by([&](long j) { return begin + j; });
            }
            const auto *v = values.block(id, part.first_kv_head + head, numbers);
            each_pair(per_head, [&](long i, auto num_rows) {
                add_products<num_rows.value>(sums + (of_head + i) * value_dim, value_dim, kept + i, scores + i * size,
                                             size, v, values.stride, num_keys, value_dim);
            });
        }
    }
    for (long i = 0; i < count; i++) {
        T *result = out + (rows[row_of(i)] * layer.num_heads + head_of(i)) * value_dim;
        for (long d = 0; d < value_dim; d += WIDTH)
            store(result + d, load(sums + i * value_dim + d) / softmaxes[i].total);
    }
}

// Whole sequences, whose blocks are read from end to end, if they keep all threads busy and their queries' state fits; otherwise
// some heads at a time.
inline long heads_at_a_time(const AttentionGroup &group, const AttentionLayer &layer) {
    const long num_tasks = 2 * group.num_threads, num_shared = layer.num_heads / layer.num_kv_heads;
    long heads = layer.num_kv_heads * group.num_sequences / num_tasks;
    if (heads > layer.num_kv_heads) heads = layer.num_kv_heads;
    if (heads * num_shared * group.max_rows > MAX_QUERIES) heads = MAX_QUERIES / (num_shared * group.max_rows);
    return heads > 0 ? heads : 1;
}

// All query heads that share a key/value head, if they keep all threads busy together with those of
// other heads and sequences.
inline long shared_at_a_time(const AttentionGroup &group, const AttentionLayer &layer, long num_parts) {
    const long num_shared = layer.num_heads / layer.num_kv_heads, num_tasks = 2 * group.num_threads;
    const long num_pieces = (num_tasks + group.num_sequences * num_parts - 1) / (group.num_sequences * num_parts);
    const long shared = (num_shared + num_pieces - 1) / num_pieces;
    if (shared >= MIN_SHARED) return shared;
    return num_shared < MIN_SHARED ? num_shared : MIN_SHARED;
}

// Calls work(part) for parts of all sequences, shared among the threads. The last rows, which see most keys, come first.
template <typename Work> void each_part(const AttentionGroup &group, const AttentionLayer &layer, const Work &work) {
    const long num_shared = layer.num_heads / layer.num_kv_heads, heads = heads_at_a_time(group, layer);
    const long num_parts = (layer.num_kv_heads + heads - 1) / heads;
    const long some = heads > 1 ? num_shared : shared_at_a_time(group, layer, num_parts);
    const long num_pieces = (num_shared + some - 1) / some;
    const long most = MAX_QUERIES / (heads * some) > 0 ? MAX_QUERIES / (heads * some) : 1;
    const long num_tiles = (group.max_rows + most - 1) / most, at_a_time = (group.max_rows + num_tiles - 1) / num_tiles;
    const long per_tile = group.num_sequences * num_parts * num_pieces;
    share(num_tiles * per_tile, group.num_threads, [&](long index) {
        const long row = (num_tiles - 1 - index / per_tile) * at_a_time, rest = index % per_tile;
        const long sequence = rest / num_pieces / num_parts, *rows = group.rows + sequence * group.max_rows;
        long num_rows = 1;  // a padded row repeats the last one
        while (num_rows < group.max_rows && rows[num_rows] != rows[num_rows - 1]) num_rows++;
        if (row >= num_rows) return;
        const long head = rest / num_pieces % num_parts * heads, left = layer.num_kv_heads - head;
        const long shared = rest % num_pieces * some, left_shared = num_shared - shared;
        work(Part{sequence, row, num_rows - row < at_a_time ? num_rows - row : at_a_time, head, heads < left ? heads : left, shared,
                  some < left_shared ? some : left_shared});
    });
}

template <typename T, typename Pages>
void attend(const AttentionGroup &group, const AttentionLayer &layer, const T *q, const Pages &keys, const Pages &values, T *out) {
    each_part(group, layer, [&](const Part &part) { attend_part(group, layer, q, keys, values, out, part); });
}

#define ATTEND(T, NAME)                                                                                                \
    extern "C" void NAME(const AttentionGroup *group, const AttentionLayer *layer, const T *q, const T *keys,           \
                         const T *values, T *out) {                                                                    \
        attend(*group, *layer, q, PlainPages<T>(keys, layer->dim, *layer),                                             \
               PlainPages<T>(values, layer->value_stride, *layer), out);                                               \
    }
ATTEND(float, attend_float32)
