// LoRA of the tokens of many adapters; kernels/lora_reference.py defines it.
//
// Matrices are read where they lie in the arena, once for a run of adjacent tokens of an adapter.
// First all tokens are multiplied by their A, then by their B, so that even one token keeps every
// thread busy. No token's bits depend on the others.
#pragma once

#include <memory>

#include "linear.h"

struct LoraProjection {
    const long *table;       // [num_rows, num_table_slices, 3]: a_offset, b_offset, rank
    const long *slice_outs;  // [num_slices]: out_features of the projection's slices
    long num_table_slices, first_slice, num_slices, in_features;
};

struct LoraTokens {
    const int *rows;  // [num_tokens]: each one's table row, -1 for the base model
    float *hidden;    // [num_tokens, max_ranks]: memory for their products with A
    long num_tokens, max_ranks, x_stride, y_stride, num_threads;
};

// Rows of A that a thread takes at a time.
constexpr long A_ROWS = 16;

// The inputs that they are multiplied with at a time: their part of A stays in the first cache.
template <typename T> constexpr long A_DEPTH = 1024 / sizeof(T);

// The fewest and the most columns of B that a thread takes at a time. Many are read faster; few keep more threads busy.
constexpr long LEAST_COLUMNS = 256, MOST_COLUMNS = 2048, PIECES_PER_THREAD = 4;

// Tokens that are multiplied together, by as many rows of A: their sums stay in registers.
constexpr long LORA_TILE = 4;

// The most tokens of a run.
constexpr long RUN_TOKENS = 64;

// Adjacent tokens of one adapter.
struct Run {
    long first, count;
    const long *slices;  // of the projection: a_offset, b_offset, rank each
    long ranks;          // of all slices together; their A matrices are adjacent
    long a_offset;
};

inline long find_runs(const LoraProjection &projection, const LoraTokens &tokens, Run *runs) {
    long num_runs = 0;
    for (long first = 0, end; first < tokens.num_tokens; first = end) {
        const long row = tokens.rows[first];
        for (end = first + 1; end < tokens.num_tokens && end < first + RUN_TOKENS && tokens.rows[end] == row;) end++;
        if (row < 0) continue;
        const long *slices = projection.table + (row * projection.num_table_slices + projection.first_slice) * 3;
        Run run{first, end - first, slices, 0, 0};
        for (long s = 0; s < projection.num_slices; s++) {
            if (!run.ranks) run.a_offset = slices[3 * s];
            run.ranks += slices[3 * s + 2];
        }
        if (run.ranks) runs[num_runs++] = run;
    }
    return num_runs;
}

// sums [ROWS, COLUMNS] += x [ROWS, size] @ a [COLUMNS, size].T, whose sums are still spread over a vector.
template <long ROWS, long COLUMNS, typename T>
inline void add_to_vectors(const T *x, long x_stride, const T *a, long a_stride, long size, Vector *sums) {
    Vector totals[ROWS][COLUMNS];
    for (long i = 0; i < ROWS; i++)
        for (long j = 0; j < COLUMNS; j++) totals[i][j] = sums[i * A_ROWS + j];
    each_vector(size, [&](long k, auto some) {
        Vector rows[ROWS];
        for (long i = 0; i < ROWS; i++) rows[i] = some.load(x + i * x_stride + k);
        for (long j = 0; j < COLUMNS; j++) {
            const Vector column = some.load(a + j * a_stride + k);
            for (long i = 0; i < ROWS; i++) totals[i][j] = multiply_add(rows[i], column, totals[i][j]);
        }
    });
    for (long i = 0; i < ROWS; i++)
        for (long j = 0; j < COLUMNS; j++) sums[i * A_ROWS + j] = totals[i][j];
}

#if defined(__AVX512BF16__)
// One instruction multiplies two adjacent elements.
template <long ROWS, long COLUMNS>
inline void add_to_vectors(const bf16 *x, long x_stride, const bf16 *a, long a_stride, long size, Vector *sums) {
    __m512 totals[ROWS][COLUMNS];
    for (long i = 0; i < ROWS; i++)
        for (long j = 0; j < COLUMNS; j++) totals[i][j] = reinterpret_cast<__m512>(sums[i * A_ROWS + j]);
    for (long k = 0; k < size; k += 2 * WIDTH) {
        const __mmask32 some = size - k < 2 * WIDTH ? (1u << (size - k)) - 1 : ~0u;
        auto pairs = [&](const bf16 *from) { return reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16(some, from)); };
        __m512bh rows[ROWS];
        for (long i = 0; i < ROWS; i++) rows[i] = pairs(x + i * x_stride + k);
        for (long j = 0; j < COLUMNS; j++) {
            const __m512bh column = pairs(a + j * a_stride + k);
            for (long i = 0; i < ROWS; i++) totals[i][j] = _mm512_dpbf16_ps(totals[i][j], rows[i], column);
        }
    }
    for (long i = 0; i < ROWS; i++)
        for (long j = 0; j < COLUMNS; j++) sums[i * A_ROWS + j] = reinterpret_cast<Vector>(totals[i][j]);
}
#endif

// hidden = x @ A.T for the rows of A from `begin` on, rounded to an element.
template <typename T>
void shrink(const LoraProjection &projection, const LoraTokens &tokens, const Run &run, const T *flat, const T *x, long begin) {
    const long count = run.ranks - begin < A_ROWS ? run.ranks - begin : A_ROWS, size = projection.in_features;
    const T *a = flat + run.a_offset + begin * size;
    x += run.first * tokens.x_stride;
    Vector sums[RUN_TOKENS * A_ROWS];
    for (long i = 0; i < run.count * A_ROWS; i++) sums[i] = Vector{};
    for (long k = 0; k < size; k += A_DEPTH<T>) {
        const long depth = size - k < A_DEPTH<T> ? size - k : A_DEPTH<T>;
        each_tile<LORA_TILE>(run.count, [&](long i, auto num_rows) {
            each_tile<LORA_TILE>(count, [&](long j, auto num_columns) {
                add_to_vectors<num_rows.value, num_columns.value>(x + i * tokens.x_stride + k, tokens.x_stride, a + j * size + k,
                                                                  size, depth, sums + i * A_ROWS + j);
            });
        });
    }
    float *hidden = tokens.hidden + run.first * tokens.max_ranks + begin;
    for (long i = 0; i < run.count; i++) {
        float *own = hidden + i * tokens.max_ranks;
        for (long j = 0; j < count; j++) own[j] = sum(sums[i * A_ROWS + j]);
        each_vector(count, [&](long j, auto some) { some.store(own + j, rounded(x, some.load(own + j))); });
    }
}

#if defined(__AVX512BF16__)
inline Vector first_of(long count, const bf16 *from) { return count < WIDTH ? Partial{count}.load(from) : load(from); }

inline void keep_first(long count, bf16 *to, Vector x) {
    if (count < WIDTH)
        Partial{count}.store(to, x);
    else
        store(to, x);
}

// y [ROWS, size] += hidden [ROWS, num_ranks] @ b [num_ranks, size], by products of pairs of ranks; hidden has elements' precision.
template <long ROWS>
inline void add_pairs(bf16 *y, long y_stride, const float *hidden, long hidden_stride, const bf16 *b, long b_stride, long num_ranks,
                      long size) {
    alignas(64) static constexpr uint16_t LOW[32] = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
                                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(LOW), high = _mm512_add_epi16(low, _mm512_set1_epi16(WIDTH));
    uint32_t weights[(num_ranks + 1) / 2][ROWS];
    for (long i = 0; i < ROWS; i++)
        for (long k = 0; k < num_ranks; k += 2) {
            const float *from = hidden + i * hidden_stride + k;
            uint32_t one, other = 0;
            memcpy(&one, from, sizeof one);
            if (k + 1 < num_ranks) memcpy(&other, from + 1, sizeof other);
            weights[k / 2][i] = one >> 16 | (other & 0xffff0000);
        }
    for (long n = 0; n < size; n += 2 * WIDTH) {
        const long left = size - n, counts[2] = {left < WIDTH ? left : WIDTH, left < 2 * WIDTH ? left - WIDTH : WIDTH};
        const __mmask32 some = left < 2 * WIDTH ? (1u << left) - 1 : ~0u;
        Vector totals[ROWS][2] = {};
        for (long i = 0; i < ROWS; i++)
            for (long half = 0; half < 2; half++)
                if (counts[half] > 0) totals[i][half] = first_of(counts[half], y + i * y_stride + n + half * WIDTH);
        for (long k = 0; k < num_ranks; k += 2) {
            const __m512i one = _mm512_maskz_loadu_epi16(some, b + k * b_stride + n);
            const __m512i other = _mm512_maskz_loadu_epi16(k + 1 < num_ranks ? some : 0, b + (k + 1) * b_stride + n);
            const __m512i pairs[2] = {_mm512_maskz_permutex2var_epi16(~0u, one, low, other),
                                      _mm512_maskz_permutex2var_epi16(~0u, one, high, other)};
            for (long i = 0; i < ROWS; i++) {
                const auto both = reinterpret_cast<__m512bh>(_mm512_set1_epi32(weights[k / 2][i]));
                for (long half = 0; half < 2; half++)
                    totals[i][half] = _mm512_dpbf16_ps(totals[i][half], reinterpret_cast<__m512bh>(pairs[half]), both);
            }
        }
        for (long i = 0; i < ROWS; i++)
            for (long half = 0; half < 2; half++)
                if (counts[half] > 0) keep_first(counts[half], y + i * y_stride + n + half * WIDTH, totals[i][half]);
    }
}
#endif

// y += hidden @ B for these columns of one slice, whose ranks begin at `rank`.
template <typename T>
void expand(const LoraTokens &tokens, const Run &run, const T *b, long b_stride, T *y, long rank, long num_ranks, long count) {
    float scales[LORA_TILE];
    for (float &scale : scales) scale = 1.0f;
    each_tile<LORA_TILE>(run.count, [&](long i, auto num_rows) {
#if defined(__AVX512BF16__)
        if constexpr (sizeof(T) == sizeof(bf16))
            return add_pairs<num_rows.value>(y + (run.first + i) * tokens.y_stride, tokens.y_stride,
                                             tokens.hidden + (run.first + i) * tokens.max_ranks + rank, tokens.max_ranks, b,
                                             b_stride, num_ranks, count);
#endif
        add_products<num_rows.value>(y + (run.first + i) * tokens.y_stride, tokens.y_stride, scales,
                                     tokens.hidden + (run.first + i) * tokens.max_ranks + rank, tokens.max_ranks, b,
                                     b_stride, num_ranks, count);
    });
}

template <typename T>
void expand_piece(const LoraProjection &projection, const LoraTokens &tokens, const Run &run, const T *flat, T *y,
                  long num_columns, long piece) {
    long rank = 0, column = 0;
    for (long s = 0; s < projection.num_slices; s++) {
        const long size = projection.slice_outs[s], num_pieces = (size + num_columns - 1) / num_columns;
        const long num_ranks = run.slices[3 * s + 2];
        if (piece < num_pieces) {
            const long begin = piece * num_columns, count = size - begin < num_columns ? size - begin : num_columns;
            if (num_ranks)
                expand(tokens, run, flat + run.slices[3 * s + 1] + begin, size, y + column + begin, rank, num_ranks, count);
            return;
        }
        piece -= num_pieces, rank += num_ranks, column += size;
    }
}

// How many columns of B a thread takes at a time, of so many in all: of whole cache lines.
inline long columns_of_pieces(long num_columns, long num_threads) {
    const long wanted = num_columns / (PIECES_PER_THREAD * num_threads) / LEAST_COLUMNS * LEAST_COLUMNS;
    return wanted < LEAST_COLUMNS ? LEAST_COLUMNS : wanted > MOST_COLUMNS ? MOST_COLUMNS : wanted;
}

template <typename T>
void add_lora(const LoraProjection &projection, const LoraTokens &tokens, const T *flat, const T *x, T *y) {
    const std::unique_ptr<Run[]> runs(new Run[tokens.num_tokens]);  // of a whole step: too many for a stack
    const long num_runs = find_runs(projection, tokens, runs.get());
    const long num_a_pieces = (tokens.max_ranks + A_ROWS - 1) / A_ROWS;
    share(num_runs * num_a_pieces, tokens.num_threads, [&](long index) {
        const Run &run = runs[index / num_a_pieces];
        const long begin = index % num_a_pieces * A_ROWS;
        if (begin < run.ranks) shrink(projection, tokens, run, flat, x, begin);
    });
    long size = 0, num_b_pieces = 0;
    for (long s = 0; s < projection.num_slices; s++) size += projection.slice_outs[s];
    const long num_columns = columns_of_pieces(num_runs * size, tokens.num_threads);
    for (long s = 0; s < projection.num_slices; s++) num_b_pieces += (projection.slice_outs[s] + num_columns - 1) / num_columns;
    share(num_runs * num_b_pieces, tokens.num_threads, [&](long index) {
        expand_piece(projection, tokens, runs[index / num_b_pieces], flat, y, num_columns, index % num_b_pieces);
    });
}

#define ADD_LORA(T, NAME)                                                                                              \
    extern "C" void NAME(const LoraProjection *projection, const T *flat, const T *x, T *y, const int *rows,            \
                         float *hidden, long num_tokens, long max_ranks, long x_stride, long y_stride,                 \
                         long num_threads) {                                                                           \
        add_lora(*projection, LoraTokens{rows, hidden, num_tokens, max_ranks, x_stride, y_stride, num_threads}, flat,   \
                 x, y);                                                                                                \
    }
ADD_LORA(float, add_lora_float32)
ADD_LORA(bf16, add_lora_bfloat16)
