// Attention over bf16 pages of any number of rows, by products of pairs (AVX512_BF16); kernels/attention.py defines it.
//
// One instruction multiplies two elements of 16 keys, or the values of two keys in 16 channels. Keys are read in tiles of adjacent
// positions, which begin at multiples of their size, so a row's sums depend on its own sequence alone. Many queries read a tile that
// is packed for them, few arrange it in registers. Weights are rounded to bf16, and divided by the sum of the rounded ones.
#pragma once

#include "attention.h"

#if defined(__AVX512BF16__)

typedef __m512bh BfloatPairs;

// A unit is a vector of keys: a block is some units of adjacent positions.
constexpr long UNIT_KEYS = 16, TILE_UNITS = 4, TILE_KEYS = UNIT_KEYS * TILE_UNITS;
static_assert(UNIT_KEYS == WIDTH, "a unit's scores are one vector");
// The queries whose sums are in registers together with a packed tile's keys, and with those of a unit in a page.
constexpr long MAX_PACKED_QUERIES = 6, MAX_UNIT_QUERIES = 8;
constexpr float LOG2_E = 1.44269504f;

inline BfloatPairs load_pairs(const bf16 *from) { return (BfloatPairs)_mm512_loadu_si512(from); }

inline void store_pairs(bf16 *to, BfloatPairs pairs) { _mm512_storeu_si512(to, (__m512i)pairs); }

// Two elements, for all lanes.
inline BfloatPairs filled_pairs(const bf16 *from) {
    int32_t pair;
    memcpy(&pair, from, sizeof pair);
    return (BfloatPairs)_mm512_set1_epi32(pair);
}

// Elements of a cache line, which the caches get at a time.
constexpr long LINE = 32;

// Reads a line into the second cache: the first has no room for a tile that is not read yet.
inline void read_ahead(const bf16 *line) { __builtin_prefetch(line, 0, 2); }

// What a part reads of the pages: from one token to the next are so many elements.
struct Strides {
    long keys, values;
};

// A unit's keys and values of one head, and those to read into the caches meanwhile.
struct Unit {
    const bf16 *keys, *values, *next_keys, *next_values;
    long count;  // of its keys that are written; 0: no row sees it, and the table omits it
};

// GCC 12 warns of these functions without a mask.
inline __m512i unpack_low(__m512i a, __m512i b) { return _mm512_maskz_unpacklo_epi32(0xffff, a, b); }
inline __m512i unpack_high(__m512i a, __m512i b) { return _mm512_maskz_unpackhi_epi32(0xffff, a, b); }

// 8 elements of each of 4 keys.
inline __m512i load_four(const bf16 *from, long stride) {
    auto part = [&](long i) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(from + i * stride)); };
    __m512i keys = _mm512_maskz_broadcast_i32x4(0xffff, part(0));
    keys = _mm512_mask_broadcast_i32x4(keys, 0x00f0, part(1));
    keys = _mm512_mask_broadcast_i32x4(keys, 0x0f00, part(2));
    return _mm512_mask_broadcast_i32x4(keys, 0xf000, part(3));
}

// 4 pairs of each of a unit's keys, from the element d on.
inline void load_columns(const Unit &unit, long stride, long d, BfloatPairs *columns) {
    for (long i = 0; i < 4; i++) read_ahead(unit.next_keys + (d / 8 % 4 * 4 + i) * stride + d / LINE * LINE);
    __m512i rows[4];
    for (long i = 0; i < 4; i++) rows[i] = load_four(unit.keys + i * stride + d, 4 * stride);
    const __m512i low = unpack_low(rows[0], rows[1]), high = unpack_high(rows[0], rows[1]);
    const __m512i low2 = unpack_low(rows[2], rows[3]), high2 = unpack_high(rows[2], rows[3]);
    columns[0] = (BfloatPairs)_mm512_maskz_unpacklo_epi64(0xff, low, low2);
    columns[1] = (BfloatPairs)_mm512_maskz_unpackhi_epi64(0xff, low, low2);
    columns[2] = (BfloatPairs)_mm512_maskz_unpacklo_epi64(0xff, high, high2);
    columns[3] = (BfloatPairs)_mm512_maskz_unpackhi_epi64(0xff, high, high2);
}

// The values of a unit's keys `key` and the next one in the channels from d on. What is not written is zero.
inline BfloatPairs load_values(const Unit &unit, long stride, long key, long d) {
    alignas(64) static constexpr uint16_t INTERLEAVED[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                                             8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    read_ahead(unit.next_values + (key + d / WIDTH % 2) * stride + d / LINE * LINE);
    auto part = [&](long at) {
        if (at >= unit.count) return __m256i{};
        return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(unit.values + at * stride + d));
    };
    const __m512i both = _mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(part(key)), part(key + 1), 1);
    return (BfloatPairs)_mm512_maskz_permutexvar_epi16(0xffffffff, _mm512_load_si512(INTERLEAVED), both);
}

// Keys and values of one head in adjacent positions.
struct Tile {
    long begin, num_units;  // begin: its first position
    Unit units[TILE_UNITS];
    Strides strides;
    bf16 *keys;    // packed [TILE_UNITS, dim / 2, UNIT_KEYS, 2]; null: they are read from the pages
    bf16 *values;  // packed [TILE_KEYS / 2, value_dim, 2]; null with the keys
};

// Packs a tile in memory of TILE_KEYS x (dim + value_dim).
inline void pack(Tile &tile, long dim, long value_dim, bf16 *memory) {
    tile.keys = memory;
    tile.values = memory + TILE_KEYS * dim;
    for (long u = 0; u < tile.num_units; u++) {
        const Unit &unit = tile.units[u];
        for (long d = 0; d < dim && unit.count; d += 8) {
            BfloatPairs columns[4];
            load_columns(unit, tile.strides.keys, d, columns);
            for (long i = 0; i < 4; i++) store_pairs(tile.keys + (u * dim + d + 2 * i) * UNIT_KEYS, columns[i]);
        }
        for (long key = 0; key < UNIT_KEYS; key += 2)
            for (long d = 0; d < value_dim; d += WIDTH)
                store_pairs(tile.values + (u * UNIT_KEYS + key) * value_dim + 2 * d, load_values(unit, tile.strides.values, key, d));
    }
}

// scores [QUERIES, TILE_KEYS] of some units = queries [QUERIES, dim] @ packed keys.
template <long QUERIES, long UNITS>
inline void multiply_packed_keys(const bf16 *queries, long dim, const bf16 *keys, float *scores) {
    __m512 totals[QUERIES][UNITS] = {};
    for (long d = 0; d < dim; d += 2) {
        BfloatPairs columns[UNITS];
        for (long u = 0; u < UNITS; u++) columns[u] = load_pairs(keys + (u * dim + d) * UNIT_KEYS);
        for (long i = 0; i < QUERIES; i++) {
            const BfloatPairs query = filled_pairs(queries + i * dim + d);
            for (long u = 0; u < UNITS; u++) totals[i][u] = _mm512_dpbf16_ps(totals[i][u], query, columns[u]);
        }
    }
    for (long i = 0; i < QUERIES; i++)
        for (long u = 0; u < UNITS; u++) store(scores + i * TILE_KEYS + u * UNIT_KEYS, totals[i][u]);
}

// The same of one unit, whose keys are in its page.
template <long QUERIES>
inline void multiply_keys(const bf16 *queries, long dim, const Unit &unit, long stride, float *scores) {
    __m512 totals[QUERIES] = {};
    for (long d = 0; d < dim; d += 8) {
        BfloatPairs columns[4];
        load_columns(unit, stride, d, columns);
        for (long n = 0; n < 4; n++)
            for (long i = 0; i < QUERIES; i++)
                totals[i] = _mm512_dpbf16_ps(totals[i], filled_pairs(queries + i * dim + d + 2 * n), columns[n]);
    }
    for (long i = 0; i < QUERIES; i++) store(scores + i * TILE_KEYS, totals[i]);
}

// The scores of all the tile's units that are there.
template <long QUERIES> inline void multiply_tile_keys(const bf16 *queries, long dim, const Tile &tile, float *scores) {
    if constexpr (QUERIES <= MAX_PACKED_QUERIES)
        if (tile.keys && tile.num_units == TILE_UNITS)
            return multiply_packed_keys<QUERIES, TILE_UNITS>(queries, dim, tile.keys, scores);
    for (long u = 0; u < tile.num_units; u++, scores += UNIT_KEYS)
        if (tile.keys)
            multiply_packed_keys<QUERIES, 1>(queries, dim, tile.keys + u * UNIT_KEYS * dim, scores);
        else if (tile.units[u].count)
            multiply_keys<QUERIES>(queries, dim, tile.units[u], tile.strides.keys, scores);
}

// For some vectors of each row: sums [QUERIES, value_dim] = kept [QUERIES] * sums + weights [QUERIES, TILE_KEYS] @ values.
// value_at(u, key, n): the n-th vector of the values of two keys.
template <long QUERIES, long VECTORS, typename Values>
inline void add_values(float *sums, long value_dim, const float *kept, const bf16 *weights, const Tile &tile, const Values &value_at) {
    Vector totals[QUERIES][VECTORS];
    for (long i = 0; i < QUERIES; i++)
        for (long n = 0; n < VECTORS; n++) totals[i][n] = load(sums + i * value_dim + n * WIDTH) * kept[i];
    for (long u = 0; u < tile.num_units; u++)
        for (long key = 0; key < tile.units[u].count; key += 2) {
            BfloatPairs columns[VECTORS];
            for (long n = 0; n < VECTORS; n++) columns[n] = value_at(u, key, n);
            for (long i = 0; i < QUERIES; i++) {
                const BfloatPairs weight = filled_pairs(weights + i * TILE_KEYS + u * UNIT_KEYS + key);
                for (long n = 0; n < VECTORS; n++) totals[i][n] = _mm512_dpbf16_ps(totals[i][n], weight, columns[n]);
            }
        }
    for (long i = 0; i < QUERIES; i++)
        for (long n = 0; n < VECTORS; n++) store(sums + i * value_dim + n * WIDTH, totals[i][n]);
}

template <long QUERIES, long VECTORS>
inline void add_tile_values(float *sums, long value_dim, long d, const float *kept, const bf16 *weights, const Tile &tile) {
    if (tile.values)
        add_values<QUERIES, VECTORS>(sums + d, value_dim, kept, weights, tile, [&](long u, long key, long n) {
            return load_pairs(tile.values + (u * UNIT_KEYS + key) * value_dim + 2 * (d + n * WIDTH));
        });
    else
        add_values<QUERIES, VECTORS>(sums + d, value_dim, kept, weights, tile, [&](long u, long key, long n) {
            return load_values(tile.units[u], tile.strides.values, key, d + n * WIDTH);
        });
}

// 2 to the power of x, to 3e-6 of it; a NaN stays one.
inline Vector exp2(Vector x) {
    const Vector inside = x < -1000.0f ? filled(-1000.0f) : x, whole = _mm512_maskz_roundscale_ps(0xffff, inside, 0);
    const Vector fraction = inside - whole;
    Vector p = filled(9.5828528e-3f);
    const float coefficients[] = {5.5906425e-2f, 2.4024099e-1f, 6.9312419e-1f, 1.0f};
    for (float coefficient : coefficients) p = multiply_add(p, fraction, filled(coefficient));
    return _mm512_maskz_scalef_ps(0xffff, p, whole);
}

// Which keys of a unit a row sees, and their positions.
struct Seen {
    __mmask16 mask;
    Vector distances;  // from the row to the keys
};

// The first `count` of a unit's keys.
inline __mmask16 first_keys(long count) { return count <= 0 ? 0 : count < UNIT_KEYS ? (1 << count) - 1 : 0xffff; }

// A row of a sequence.
struct Row {
    Branch branch;
    long position;

    // Of the unit whose first key is at the place `begin`.
    Seen seen(const AttentionLayer &layer, long begin) const {
        const Vector lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        if (branch.reaches(begin + UNIT_KEYS)) return seen_in_tree(layer, begin);
        const long first = first_visible(layer, position) - begin, sinks = layer.num_sink_positions - begin;
        const __mmask16 is_near = ~first_keys(first) | first_keys(sinks);
        return {static_cast<__mmask16>(first_keys(position - begin + 1) & is_near), lanes + static_cast<float>(begin - position)};
    }

    Seen seen_in_tree(const AttentionLayer &layer, long begin) const {
        const long first = first_visible(layer, position);
        Seen seen = {};
        for (long j = 0; j < UNIT_KEYS; j++) {
            const long key = branch.position_of(begin + j);
            if (key == NEVER) continue;
            const bool is_near = key >= first || key < layer.num_sink_positions;
            seen.mask |= (key <= position && is_near) << j;
            seen.distances[j] = static_cast<float>(key - position);
        }
        return seen;
    }
};

inline float largest_of(Vector x) {
    float elements[WIDTH];
    store(elements, x);
    Quad most;
    memcpy(&most, elements, sizeof most);
    for (long i = 4; i < WIDTH; i += 4) {
        Quad part;
        memcpy(&part, elements + i, sizeof part);
        most = part > most ? part : most;
    }
    float largest = most[0];
    for (long i = 1; i < 4; i++) largest = most[i] > largest ? most[i] : largest;
    return largest;
}

inline Vector tanh(Vector x) { return 1.0f - 2.0f / (exp(x + x) + 1.0f); }

// The weights [TILE_KEYS] of a tile's scores, the largest of which is 1. Returns the factor of what was summed before. The softmax
// is one of powers of 2.
inline float weigh_tile(const AttentionLayer &layer, const float *scores, Softmax &softmax, const Row &row, const Tile &tile,
                        float slope, bf16 *weights) {
    Vector logits[TILE_UNITS], highest = filled(softmax.largest);
    for (long u = 0; u < tile.num_units; u++) {
        const Seen seen = row.seen(layer, tile.begin + u * UNIT_KEYS);
        Vector logit = load(scores + u * UNIT_KEYS) * (layer.softcap ? layer.scale / layer.softcap : layer.scale * LOG2_E);
        if (layer.softcap) logit = tanh(logit) * (layer.softcap * LOG2_E);
        if (slope) logit = multiply_add(seen.distances, filled(slope * LOG2_E), logit);
        logits[u] = _mm512_mask_blend_ps(seen.mask, filled(-INFINITE), logit);
        highest = larger(logits[u], highest);
    }
    const float largest = largest_of(highest);
    if (largest == -INFINITE) {  // it sees nothing yet
        memset(weights, 0, TILE_KEYS * sizeof(bf16));
        return 1.0f;
    }
    Vector total = {};
    for (long u = 0; u < tile.num_units; u++) {
        const __m256bh rounded = _mm512_cvtneps_pbh(exp2(logits[u] - largest));
        memcpy(weights + u * UNIT_KEYS, &rounded, sizeof rounded);
        total += load(weights + u * UNIT_KEYS);  // so the weights' sum is 1
    }
    const float kept = exp2(filled(softmax.largest - largest))[0];
    softmax = {largest, softmax.total * kept + sum(total)};
    return kept;
}

// A part's queries and sums, by key/value head, then by row, then by the heads that share it.
struct PartState {
    const AttentionLayer &layer;
    long per_head;  // queries
    const bf16 *queries;
    float *sums;
    Softmax *softmaxes;
    const Row *rows;      // of a head's queries
    const float *slopes;  // of all queries
};

// Attends QUERIES queries from `first` on, which have the same key/value head, to a tile.
template <long QUERIES> inline void attend_tile(const PartState &state, const Tile &tile, long first) {
    const AttentionLayer &layer = state.layer;
    const long value_dim = layer.value_dim;
    alignas(64) float scores[QUERIES * TILE_KEYS];
    alignas(64) bf16 weights[QUERIES * TILE_KEYS];
    float kept[QUERIES], *sums = state.sums + first * value_dim;
    multiply_tile_keys<QUERIES>(state.queries + first * layer.dim, layer.dim, tile, scores);
    for (long i = 0; i < QUERIES; i++)
        kept[i] = weigh_tile(layer, scores + i * TILE_KEYS, state.softmaxes[first + i], state.rows[(first + i) % state.per_head], tile,
                             state.slopes[first + i], weights + i * TILE_KEYS);
    constexpr long VECTORS = QUERIES <= MAX_PACKED_QUERIES ? 4 : 2;
    long d = 0;
    for (; d + VECTORS * WIDTH <= value_dim; d += VECTORS * WIDTH)
        add_tile_values<QUERIES, VECTORS>(sums, value_dim, d, kept, weights, tile);
    for (; d < value_dim; d += WIDTH) add_tile_values<QUERIES, 1>(sums, value_dim, d, kept, weights, tile);
}

// The same for any number of queries, in pieces of nearly equal size.
inline void attend_tile(const PartState &state, const Tile &tile, long first, long num_queries) {
    const long most = tile.keys ? MAX_PACKED_QUERIES : MAX_UNIT_QUERIES, num_pieces = (num_queries + most - 1) / most;
    for (long piece = 0; piece < num_pieces; piece++) {
        const long begin = piece * num_queries / num_pieces, end = (piece + 1) * num_queries / num_pieces;
        const long at = first + begin;
        switch (end - begin) {
            case 1: attend_tile<1>(state, tile, at); break;
            case 2: attend_tile<2>(state, tile, at); break;
            case 3: attend_tile<3>(state, tile, at); break;
            case 4: attend_tile<4>(state, tile, at); break;
            case 5: attend_tile<5>(state, tile, at); break;
            case 6: attend_tile<6>(state, tile, at); break;
            case 7: attend_tile<7>(state, tile, at); break;
            default: attend_tile<8>(state, tile, at);
        }
    }
}

// Where a tile's keys lie in a sequence's blocks.
struct Span {
    long begin, num_units;
    long slots[TILE_UNITS];  // of each unit's first key; -1: in a block that no row sees, and the table omits
};

// Calls work(span, next) for the tiles up to the position `last` that hold a block of the sequence.
template <typename Work>
void each_span(const AttentionGroup &group, long block_size, long sequence, long last, const Work &work) {
    const long units_per_block = block_size / UNIT_KEYS;
    Span before = {}, span = {};
    auto finish = [&] {
        if (before.num_units) work(before, span);
        before = span;
    };
    for (long unit = 0; unit < group.max_blocks * units_per_block; unit++) {
        const long index = unit / units_per_block, offset = unit % units_per_block * UNIT_KEYS;
        const long at = sequence * group.max_blocks + index;
        const long position = (group.block_positions ? group.block_positions[at] : index * block_size) + offset;
        if (position > last) continue;
        const long begin = position / TILE_KEYS * TILE_KEYS;
        if (span.num_units && begin != span.begin) {
            finish();
            span.num_units = 0;
        }
        span.begin = begin;
        while (span.num_units < (position - begin) / UNIT_KEYS) span.slots[span.num_units++] = -1;
        span.slots[span.num_units++] = group.block_tables[at] * block_size + offset;
    }
    finish();
    if (before.num_units) work(before, before);
}

// A layer's keys and values.
struct LayerPages {
    const AttentionLayer &layer;
    const bf16 *all_keys, *all_values;

    const bf16 *keys(long slot, long head) const { return all_keys + (slot * layer.num_kv_heads + head) * layer.dim; }
    const bf16 *values(long slot, long head) const { return all_values + (slot * layer.num_kv_heads + head) * layer.value_stride; }

    // One head's keys up to the position `last`, in pages. What is read into the caches meanwhile: the span and head after it.
    Tile tile(const Span &span, long head, const Span &next, long next_head, long last) const {
        const Strides strides{layer.num_kv_heads * layer.dim, layer.num_kv_heads * layer.value_stride};
        Tile tile{span.begin, span.num_units, {}, strides, nullptr, nullptr};
        for (long u = 0; u < span.num_units; u++) {
            const long slot = span.slots[u], left = last - span.begin - u * UNIT_KEYS + 1;
            if (slot < 0) continue;
            const long then = u < next.num_units && next.slots[u] >= 0 ? next.slots[u] : slot;
            tile.units[u] = {keys(slot, head), values(slot, head), keys(then, next_head), values(then, next_head),
                             left < UNIT_KEYS ? left : UNIT_KEYS};
        }
        return tile;
    }
};

inline void attend_part(const AttentionGroup &group, const LayerPages &pages, const bf16 *q, bf16 *out, const Part &part) {
    const AttentionLayer &layer = pages.layer;
    const long num_shared = part.num_shared, all_shared = layer.num_heads / layer.num_kv_heads, dim = layer.dim;
    const long value_dim = layer.value_dim, per_head = part.num_rows * num_shared, count = per_head * part.num_kv_heads;
    const long first_row = part.sequence * group.max_rows + part.first_row, *indices = group.rows + first_row;
    const bool is_packed = per_head > MAX_UNIT_QUERIES;
    alignas(64) bf16 queries[count * dim], packed[is_packed ? TILE_KEYS * (dim + value_dim) : 1];
    alignas(64) float sums[count * value_dim];
    float slopes[count];
    Softmax softmaxes[count];
    Row rows[per_head];
    auto index_of = [&](long i) { return indices[i % per_head / num_shared]; };
    auto head_of = [&](long i) { return (part.first_kv_head + i / per_head) * all_shared + part.first_shared + i % num_shared; };
    memset(sums, 0, sizeof sums);
    for (long i = 0; i < count; i++) {
        memcpy(queries + i * dim, q + index_of(i) * layer.token_stride + head_of(i) * layer.head_stride, dim * sizeof(bf16));
        softmaxes[i] = layer.sinks ? Softmax{layer.sinks[head_of(i)] * LOG2_E, 1.0f} : Softmax{-INFINITE, 0.0f};
        slopes[i] = layer.slopes ? layer.slopes[head_of(i)] : 0.0f;
    }
    long nearest = NEVER;
    for (long i = 0; i < per_head; i++) {
        const Branch branch = branch_of(group, first_row + i / num_shared);
        const long position = branch.position(), first = first_visible(layer, position);
        rows[i] = {branch, position};
        nearest = first < nearest ? first : nearest;
    }
    const long last = group.positions[first_row + part.num_rows - 1];

    const PartState state{layer, per_head, queries, sums, softmaxes, rows, slopes};
    each_span(group, layer.block_size, part.sequence, last, [&](const Span &span, const Span &next) {
        if (span.begin + TILE_KEYS <= nearest && span.begin >= layer.num_sink_positions) return;
        for (long head = 0; head < part.num_kv_heads; head++) {
            const bool is_last = head + 1 == part.num_kv_heads;
            Tile tile = pages.tile(span, part.first_kv_head + head, is_last ? next : span,
                                   part.first_kv_head + (is_last ? 0 : head + 1), last);
            if (is_packed) pack(tile, dim, value_dim, packed);
            attend_tile(state, tile, head * per_head, per_head);
        }
    });
    for (long i = 0; i < count; i++) {
        bf16 *result = out + (index_of(i) * layer.num_heads + head_of(i)) * value_dim;
        for (long d = 0; d < value_dim; d += WIDTH) store(result + d, load(sums + i * value_dim + d) / softmaxes[i].total);
    }
}

extern "C" void attend_bfloat16(const AttentionGroup *group, const AttentionLayer *layer, const bf16 *q, const bf16 *keys,
                                const bf16 *values, bf16 *out) {
    const LayerPages pages{*layer, keys, values};
    each_part(*group, *layer, [&](const Part &part) { attend_part(*group, pages, q, out, part); });
}

// The same, where it is faster for whole prompts than PyTorch: not on every processor.
extern "C" void attend_prompts_bfloat16(const AttentionGroup *group, const AttentionLayer *layer, const bf16 *q, const bf16 *keys,
                                        const bf16 *values, bf16 *out) {
    attend_bfloat16(group, layer, q, keys, values, out);
}

#else

ATTEND(bf16, attend_bfloat16)

#endif
