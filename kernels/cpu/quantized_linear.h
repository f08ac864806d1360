// Linear layers with quantized weights.
//
// int8 and int4 codes are multiplied as integers where the processor multiplies those faster than
// floats. All others become fp32 numbers, whose products are summed for a piece of the inputs and
// then scaled. Sums are taken in one order, so no row's bits depend on the other rows.
#pragma once

#include "quantized_weight.h"
#if defined(__AVX2__)
#include "integer_linear.h"
#endif

inline Halves load_words(const Word *words) {
    Halves halves;
    memcpy(&halves, words, sizeof halves);
    return halves;
}

struct Int8Codes {
    static constexpr long INPUTS = 2;
    explicit Int8Codes(const float *) {}
    void values(const Word *words, Vector *numbers) const {
        const Integers both = __builtin_convertvector(load_words(words), Integers);
        numbers[0] = __builtin_convertvector(both << 24 >> 24, Vector);
        numbers[1] = __builtin_convertvector(both << 16 >> 24, Vector);
    }
};

struct Int4Codes {
    static constexpr long INPUTS = 4;
    explicit Int4Codes(const float *) {}
    void values(const Word *words, Vector *numbers) const {
        const Integers all = __builtin_convertvector(load_words(words), Integers);
        numbers[0] = __builtin_convertvector(all << 28 >> 28, Vector);
        numbers[1] = __builtin_convertvector(all << 20 >> 28, Vector);
        numbers[2] = __builtin_convertvector(all << 24 >> 28, Vector);
        numbers[3] = __builtin_convertvector(all << 16 >> 28, Vector);
    }
};

// float8_e4m3fn: a sign, four bits of exponent, three of fraction. Of finite numbers only.
struct Fp8Codes {
    static constexpr long INPUTS = 2;
    explicit Fp8Codes(const float *) {}
    // With a code's bits a float16 is 2^-8 times the number: its exponent counts from -15, not from -7.
    void values(const Word *words, Vector *numbers) const {
        const Halves both = load_words(words);
        numbers[0] = as_floats((both << 7 & 0x3f80) | (both << 8 & 0x8000)) * 0x1p8f;
        numbers[1] = as_floats((both >> 1 & 0x3f80) | (both & 0x8000)) * 0x1p8f;
    }
};

// Codes of four bits as places in a table of 16 numbers.
struct Table4Codes {
    static constexpr long INPUTS = 4;
#if defined(__AVX512F__)
    Vector table;
    explicit Table4Codes(const float *numbers) : table(load(numbers)) {}
    Vector look_up(Integers places) const { return _mm512_maskz_permutexvar_ps(ALL, (__m512i)places, table); }
#elif defined(__AVX2__)
    Vector first, second;
    explicit Table4Codes(const float *numbers) : first(load(numbers)), second(load(numbers + WIDTH)) {}
    Vector look_up(Integers places) const {
        const Vector low = _mm256_permutevar8x32_ps(first, (__m256i)places);
        const Vector high = _mm256_permutevar8x32_ps(second, (__m256i)places);
        return places > 7 ? high : low;
    }
#else
    const float *table;
    explicit Table4Codes(const float *numbers) : table(numbers) {}
    Vector look_up(Integers places) const {
        Vector found;
        for (long i = 0; i < WIDTH; i++) found[i] = table[places[i]];
        return found;
    }
#endif
    void values(const Word *words, Vector *numbers) const {
        const Integers all = __builtin_convertvector(load_words(words), Integers);
        numbers[0] = look_up(all & 15);
        numbers[1] = look_up(all >> 8 & 15);
        numbers[2] = look_up(all >> 4 & 15);
        numbers[3] = look_up(all >> 12);
    }
};

// Calls work(k, numbers [PANEL_VECTORS]) for each input k below depth, with its numbers of a panel
// before they are scaled.
template <bool HAS_ZEROS, typename Codes, typename Work>
inline void each_input(const Codes &type, const Word *codes, const Group &group, long depth, const Work &work) {
    constexpr long INPUTS = Codes::INPUTS;
    for (long k = 0; k < depth; k += INPUTS) {
        Vector values[PANEL_VECTORS][INPUTS];
        for (long n = 0; n < PANEL_VECTORS; n++) type.values(codes + k / INPUTS * PANEL + n * WIDTH, values[n]);
        for (long i = 0; i < INPUTS; i++) {
            if (i > 0 && k + i >= depth) break;
            Vector numbers[PANEL_VECTORS];
            for (long n = 0; n < PANEL_VECTORS; n++) numbers[n] = HAS_ZEROS ? values[n][i] - group.zeros[n] : values[n][i];
            work(k + i, numbers);
        }
    }
}

// totals [ROWS, PANEL] += x [ROWS, depth] @ codes [depth, PANEL], which are of one group.
template <long ROWS, bool HAS_ZEROS, typename Codes>
inline void multiply_codes(const float *x, long x_stride, const Codes &type, const Word *codes, const Group &group,
                           long depth, float *totals) {
    Vector sums[ROWS][PANEL_VECTORS] = {};
    each_input<HAS_ZEROS>(type, codes, group, depth, [&](long k, const Vector *numbers) {
        for (long i = 0; i < ROWS; i++) {
            const Vector input = filled(x[i * x_stride + k]);
            for (long n = 0; n < PANEL_VECTORS; n++) sums[i][n] = multiply_add(input, numbers[n], sums[i][n]);
        }
    });
    for (long i = 0; i < ROWS; i++)
        for (long n = 0; n < PANEL_VECTORS; n++) {
            float *total = totals + i * PANEL + n * WIDTH;
            store(total, multiply_add(sums[i][n], group.scales[n], load(total)));
        }
}

// The same for more rows, by the same sums: the codes become numbers once.
template <bool HAS_ZEROS, typename Codes>
inline void multiply_numbers(const float *x, long x_stride, const Codes &type, const Word *codes, const Group &group,
                             long depth, float *totals, long num_rows) {
    alignas(64) float panel[DEPTH * PANEL], sums[BLOCK_ROWS * PANEL];
    each_input<HAS_ZEROS>(type, codes, group, depth, [&](long k, const Vector *numbers) {
        for (long n = 0; n < PANEL_VECTORS; n++) store(panel + k * PANEL + n * WIDTH, numbers[n]);
    });
    memset(sums, 0, num_rows * PANEL * sizeof(float));
    multiply_part(x, x_stride, panel, depth, sums, num_rows, reinterpret_cast<const char *>(panel), 0);
    for (long i = 0; i < num_rows * PANEL_VECTORS; i++) {
        float *total = totals + i * WIDTH;
        store(total, multiply_add(load(sums + i * WIDTH), group.scales[i % PANEL_VECTORS], load(total)));
    }
}

template <bool HAS_ZEROS, typename Codes>
void multiply_quantized(const QuantizedPanels &weight, const Codes &type, const float *x, long panel, float *totals,
                        long num_rows) {
    constexpr long INPUTS = Codes::INPUTS;
    const long in_features = weight.in_features;
    const Word *codes = weight.codes + panel * ((in_features + INPUTS - 1) / INPUTS) * PANEL;
    each_piece<DEPTH>(weight, [&](long, long group_index, long first, long depth) {
        const Group group(weight, panel, group_index);
        const Word *words = codes + first / INPUTS * PANEL;
        if (num_rows > TILE_ROWS)
            multiply_numbers<HAS_ZEROS>(x + first, in_features, type, words, group, depth, totals, num_rows);
        else
            with_num_rows<TILE_ROWS>(num_rows, [&](auto rows) {
                multiply_codes<rows.value, HAS_ZEROS>(x + first, in_features, type, words, group, depth, totals);
            });
    });
}

template <typename Codes>
void quantized_linear(const QuantizedPanels &weight, const float *table, const float *x, const float *bias, float *y,
                      long num_rows, long out_features, long num_threads) {
    const Codes type(table);
    each_panel(bias, y, num_rows, out_features, num_threads, [&](long row, long panel, float *totals, long count) {
        if (weight.zero_kind == NONE)
            multiply_quantized<false>(weight, type, x + row * weight.in_features, panel, totals, count);
        else
            multiply_quantized<true>(weight, type, x + row * weight.in_features, panel, totals, count);
    });
}

// weight: as QuantizedPanels; groups have a multiple of four inputs, but one alone has any number.
// table: 16 numbers, or null.
#define QUANTIZED_LINEAR(NAME, MULTIPLY)                                                                               \
    extern "C" void NAME(const float *x, const Word *codes, const void *scales, long scale_kind, const void *zeros,    \
                         long zero_kind, const float *table, const float *bias, float *y, long num_rows,               \
                         long in_features, long out_features, long group, long num_threads) {                          \
        const QuantizedPanels weight{codes, scales, zeros, Kind(scale_kind), Kind(zero_kind), group,                   \
                                     (in_features + group - 1) / group, in_features};                                  \
        MULTIPLY(weight, table, x, bias, y, num_rows, out_features, num_threads);                                      \
    }
#if defined(__AVX2__)
QUANTIZED_LINEAR(quantized_linear_int8, integer_linear<Int8Pairs>)
QUANTIZED_LINEAR(quantized_linear_int4, integer_linear<Int4Pairs>)
#else
QUANTIZED_LINEAR(quantized_linear_int8, quantized_linear<Int8Codes>)
QUANTIZED_LINEAR(quantized_linear_int4, quantized_linear<Int4Codes>)
#endif
QUANTIZED_LINEAR(quantized_linear_fp8, quantized_linear<Fp8Codes>)
QUANTIZED_LINEAR(quantized_linear_table4, quantized_linear<Table4Codes>)
