// Linear layers whose codes are integers: inputs are rounded to integers, too.
//
// The inputs of a piece become multiples of one power of two, which is chosen so that the largest
// takes 16 bits with its sign. An input's error is at most 2^-15 of the largest of its piece, and none
// where it has so few bits. A piece's products are summed without rounding: |sum| <= 128 * 2^15 * 2^7 = 2^29. No
// row's bits depend on the other rows.
#pragma once

#include <memory>

#include "quantized_weight.h"

// The inputs that have one power of two, at most.
constexpr long PIECE = 128;

// Two adjacent inputs or codes for each element of a vector of integers, the first in its lower half.
typedef int16_t Pairs __attribute__((vector_size(WIDTH * sizeof(int32_t))));

inline Pairs widened(const Word *words) {
#if defined(__AVX512F__)
    return (Pairs)_mm512_maskz_cvtepi8_epi16(0xffffffff, _mm256_loadu_si256(reinterpret_cast<const __m256i *>(words)));
#else
    return (Pairs)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(words)));
#endif
}

inline Integers add_products(Pairs a, Pairs b, Integers sums) {
#if defined(__AVX512VNNI__)
    return (Integers)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(__AVX512F__)
    return sums + (Integers)_mm512_maskz_madd_epi16(ALL, (__m512i)a, (__m512i)b);
#else
    return sums + (Integers)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}

// The codes of 2 * STEPS adjacent inputs; load() gives those of one step.
struct Int8Pairs {
    typedef Word Stored;
    static constexpr long STEPS = 1;
    static Pairs load(const Word *words, long) { return widened(words); }
    static void prefetch(const Word *words) { __builtin_prefetch(words + PIECE / 2 * PANEL); }
};

struct Int4Pairs {
    typedef Word Stored;
    static constexpr long STEPS = 2;
    static Pairs load(const Word *words, long step) {
        const Pairs both = widened(words);
        return step ? both >> 4 : both << 12 >> 12;
    }
    static void prefetch(const Word *words) { __builtin_prefetch(words + PIECE / 4 * PANEL); }
};

// Codes that were widened before.
struct WidePairs {
    typedef int32_t Stored;
    static constexpr long STEPS = 1;
    static Pairs load(const int32_t *wide, long) {
        Pairs pairs;
        memcpy(&pairs, wide, sizeof pairs);
        return pairs;
    }
    static void prefetch(const int32_t *) {}
};

inline float power_of_two(int32_t biased_exponent) {
    const int32_t bits = biased_exponent << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

// A piece of one row as integers. Whole vectors are written: zeros follow the last integer, until
// those of the next piece are written over them. An infinity or a NaN makes the scale a NaN.
inline void round_piece(const float *x, long depth, int16_t *integers, float *scale, float *integer_sum) {
    typedef int16_t Narrow __attribute__((vector_size(WIDTH * sizeof(int16_t))));
    Integers sums = {};
    // As a float has them: the exponents of the largest input, and of the last bit, which stays normal.
    const int32_t exponent = largest_bits(x, depth) >> 23, last = exponent > 15 ? exponent - 14 : 1;
    const Vector factor = filled(power_of_two(254 - last));
    each_vector(depth, [&](long k, auto some) {
        const Integers whole = rounded_integers(smaller(some.load(x + k) * factor, filled(INT16_MAX)));
        const Narrow narrow = __builtin_convertvector(whole, Narrow);
        memcpy(integers + k, &narrow, sizeof narrow);
        sums += whole;
    });
    *scale = exponent == 255 ? __builtin_nanf("") : power_of_two(last);
    *integer_sum = sum(sums);
}

// Rows as integers. An input is its integer times its piece's scale.
struct IntegerRows {
    long stride, num_pieces;
    std::unique_ptr<int16_t[]> integers;    // [num_rows, stride]; of a row's last piece, up to WIDTH - 1 zeros follow
    std::unique_ptr<float[]> scales, sums;  // [num_rows, num_pieces]; sums of the integers

    IntegerRows(const QuantizedPanels &weight, const float *x, long num_rows, long num_threads)
        : stride(((weight.in_features + WIDTH - 1) / WIDTH + 1) * WIDTH),
          num_pieces(weight.num_groups * ((weight.group + PIECE - 1) / PIECE)), integers(new int16_t[num_rows * stride]),
          scales(new float[num_rows * num_pieces]), sums(new float[num_rows * num_pieces]) {
        share_rows(num_rows, weight.in_features, num_threads, [&](long row) {
            each_piece<PIECE>(weight, [&](long index, long, long first, long depth) {
                const long i = row * num_pieces + index;
                round_piece(x + row * weight.in_features + first, depth, &integers[row * stride + first], &scales[i], &sums[i]);
            });
        });
    }
};

// A piece of some rows.
struct IntegerPiece {
    const int16_t *integers;
    const float *scales, *sums;
    long stride, num_pieces;

    IntegerPiece(const IntegerRows &rows, long row, long index, long first)
        : integers(&rows.integers[row * rows.stride + first]), scales(&rows.scales[row * rows.num_pieces + index]),
          sums(&rows.sums[row * rows.num_pieces + index]), stride(rows.stride), num_pieces(rows.num_pieces) {}

    void skip(long num_rows) {
        integers += num_rows * stride;
        scales += num_rows * num_pieces;
        sums += num_rows * num_pieces;
    }
};

// totals [ROWS, PANEL] += x [ROWS, depth] @ codes [depth, PANEL]; reads later codes into the caches.
template <long ROWS, bool HAS_ZEROS, typename Codes>
inline void multiply_integers(const IntegerPiece &x, const typename Codes::Stored *codes, const Group &group, long depth,
                              float *totals) {
    Integers sums[ROWS][PANEL_VECTORS] = {};
    for (long k = 0; k < depth; k += 2 * Codes::STEPS, codes += PANEL) {
        Codes::prefetch(codes);
        for (long step = 0; step < Codes::STEPS; step++) {
            Pairs pairs[PANEL_VECTORS];
            for (long n = 0; n < PANEL_VECTORS; n++) pairs[n] = Codes::load(codes + n * WIDTH, step);
            for (long i = 0; i < ROWS; i++) {
                int32_t both;
                memcpy(&both, x.integers + i * x.stride + k + 2 * step, sizeof both);
                const Pairs input = (Pairs)(both - Integers{});
                for (long n = 0; n < PANEL_VECTORS; n++) sums[i][n] = add_products(pairs[n], input, sums[i][n]);
            }
        }
    }
    for (long i = 0; i < ROWS; i++)
        for (long n = 0; n < PANEL_VECTORS; n++) {
            Vector sum = __builtin_convertvector(sums[i][n], Vector);
            if (HAS_ZEROS) sum = multiply_add(group.zeros[n], filled(-x.sums[i * x.num_pieces]), sum);
            float *total = totals + i * PANEL + n * WIDTH;
            store(total, multiply_add(sum * filled(x.scales[i * x.num_pieces]), group.scales[n], load(total)));
        }
}

// The same for more rows, by the same sums: the codes are widened once.
template <bool HAS_ZEROS, typename Codes>
void multiply_widened(IntegerPiece x, const Word *codes, const Group &group, long depth, float *totals, long num_rows) {
    alignas(64) int32_t wide[PIECE / 2 * PANEL];
    for (long k = 0; k < depth; k += 2 * Codes::STEPS, codes += PANEL) {
        Codes::prefetch(codes);
        for (long step = 0; step < Codes::STEPS; step++)
            for (long n = 0; n < PANEL_VECTORS; n++) {
                const Pairs pairs = Codes::load(codes + n * WIDTH, step);
                memcpy(wide + (k / 2 + step) * PANEL + n * WIDTH, &pairs, sizeof pairs);
            }
    }
    const long num_tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
    for (long tile = 0; tile < num_tiles; tile++) {
        const long count = (tile + 1) * num_rows / num_tiles - tile * num_rows / num_tiles;
        with_num_rows<TILE_ROWS>(count, [&](auto rows) {
            multiply_integers<rows.value, HAS_ZEROS, WidePairs>(x, wide, group, depth, totals);
        });
        x.skip(count);
        totals += count * PANEL;
    }
}

template <bool HAS_ZEROS, typename Codes>
void multiply_rows(const QuantizedPanels &weight, const IntegerRows &x, long row, long panel, float *totals, long num_rows) {
    // Rows that widening the codes once does not make faster.
    constexpr long FEW_ROWS = 4, INPUTS = 2 * Codes::STEPS;
    const Word *codes = weight.codes + panel * ((weight.in_features + INPUTS - 1) / INPUTS) * PANEL;
    each_piece<PIECE>(weight, [&](long index, long group_index, long first, long depth) {
        const Group group(weight, panel, group_index);
        const IntegerPiece piece(x, row, index, first);
        const Word *words = codes + first / INPUTS * PANEL;
        if (num_rows > FEW_ROWS)
            multiply_widened<HAS_ZEROS, Codes>(piece, words, group, depth, totals, num_rows);
        else
            with_num_rows<FEW_ROWS>(num_rows, [&](auto rows) {
                multiply_integers<rows.value, HAS_ZEROS, Codes>(piece, words, group, depth, totals);
            });
    });
}

template <typename Codes>
void integer_linear(const QuantizedPanels &weight, const float *, const float *x, const float *bias, float *y,
                    long num_rows, long out_features, long num_threads) {
    const IntegerRows integers(weight, x, num_rows, num_threads);
    each_panel(bias, y, num_rows, out_features, num_threads, [&](long row, long panel, float *totals, long count) {
        if (weight.zero_kind == NONE)
            multiply_rows<false, Codes>(weight, integers, row, panel, totals, count);
        else
            multiply_rows<true, Codes>(weight, integers, row, panel, totals, count);
    });
}
