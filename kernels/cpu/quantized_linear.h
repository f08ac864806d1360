// Linear layers with quantized weights; kernels/quantized_linear_cpu.py packs them.
//
// Codes become fp32 numbers, whose products are summed for a group of inputs and then scaled. Sums are
// taken in one order, so no row's bits depend on the other rows.
#pragma once

#include "linear.h"

// The types of scales and zero points.
enum Kind : long { NONE, FLOAT32, BFLOAT16, FLOAT16, INT8 };

// float16: five bits of exponent. Of finite numbers only.
struct half {
    uint16_t bits;
};

#if defined(__AVX512F__)
// A mask of all elements: without one, GCC 12 warns of the vector that the others would come from.
constexpr __mmask16 ALL = 0xffff;
#endif

inline Vector as_floats(Bits bits) {
    Vector x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

inline Vector load(const half *from) {
    Halves halves;
    memcpy(&halves, from, sizeof halves);
    const Bits bits = __builtin_convertvector(halves, Bits);
    // The exponent counts from -15, a float's from -127.
    const Vector size = as_floats((bits & 0x7fff) << 13) * 0x1p112f;
    Bits signed_bits;
    memcpy(&signed_bits, &size, sizeof size);
    return as_floats(signed_bits | (bits & 0x8000) << 16);
}

inline Integers load_integers(const int8_t *from) {
#if defined(__AVX512F__)
    return (Integers)_mm512_maskz_cvtepi8_epi32(ALL, _mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
#elif defined(__AVX2__)
    return (Integers)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from)));
#else
    typedef int8_t Bytes __attribute__((vector_size(WIDTH)));
    Bytes bytes;
    memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, Integers);
#endif
}

// The i-th vector of numbers of this kind.
inline Vector load(const void *numbers, Kind kind, long i) {
    switch (kind) {
    case FLOAT32: return load(static_cast<const float *>(numbers) + i * WIDTH);
    case BFLOAT16: return load(static_cast<const bf16 *>(numbers) + i * WIDTH);
    case FLOAT16: return load(static_cast<const half *>(numbers) + i * WIDTH);
    case INT8: return __builtin_convertvector(load_integers(static_cast<const int8_t *>(numbers) + i * WIDTH), Vector);
    default: return Vector{};
    }
}

// Codes of eight bits: those of one input side by side, a byte each.
struct Int8Codes {
    static constexpr long INPUTS = 1;
    explicit Int8Codes(const float *) {}
    void values(const int8_t *codes, Vector *numbers) const {
        numbers[0] = __builtin_convertvector(load_integers(codes), Vector);
    }
};

// float8_e4m3fn: a sign, four bits of exponent, three of fraction. Of finite numbers only.
struct Fp8Codes {
    static constexpr long INPUTS = 1;
    explicit Fp8Codes(const float *) {}
    // With these bits a float16 is 2^-8 times the number: its exponent counts from -15, not from -7.
    void values(const int8_t *codes, Vector *numbers) const {
#if defined(__AVX512F__)
        const __m256i code = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(codes)));
        const __m256i size = _mm256_and_si256(_mm256_slli_epi16(code, 7), _mm256_set1_epi16(0x3f80));
        const __m256i sign = _mm256_and_si256(code, _mm256_set1_epi16(INT16_MIN));
        numbers[0] = _mm512_maskz_cvtph_ps(ALL, _mm256_or_si256(size, sign)) * 0x1p8f;
#elif defined(__AVX2__) && defined(__F16C__)
        const __m128i code = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(codes)));
        const __m128i size = _mm_and_si128(_mm_slli_epi16(code, 7), _mm_set1_epi16(0x3f80));
        const __m128i sign = _mm_and_si128(code, _mm_set1_epi16(INT16_MIN));
        numbers[0] = _mm256_cvtph_ps(_mm_or_si128(size, sign)) * 0x1p8f;
#else
        const Integers code = load_integers(codes);
        const Bits size = (Bits)(code & 0x7f) << 20, sign = (Bits)(code & INT32_MIN);
        const Vector number = as_floats(size) * 0x1p120f;
        Bits bits;
        memcpy(&bits, &number, sizeof bits);
        numbers[0] = as_floats(bits | sign);
#endif
    }
};

// Codes of four bits: a byte has those of two inputs, the first in its lower half.
struct Int4Codes {
    static constexpr long INPUTS = 2;
    explicit Int4Codes(const float *) {}
    void values(const int8_t *codes, Vector *numbers) const {
        const Integers both = load_integers(codes);
        numbers[0] = __builtin_convertvector(both << 28 >> 28, Vector);
        numbers[1] = __builtin_convertvector(both >> 4, Vector);
    }
};

// The same, as places in a table of 16 numbers.
struct Table4Codes {
    static constexpr long INPUTS = 2;
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
    void values(const int8_t *codes, Vector *numbers) const {
        const Integers both = load_integers(codes);
        numbers[0] = look_up(both & 15);
        numbers[1] = look_up(both >> 4 & 15);
    }
};

struct QuantizedPanels {
    const int8_t *codes;  // [panels, ceil(in / INPUTS), PANEL]
    const void *scales, *zeros;  // [panels, groups, PANEL]
    Kind scale_kind, zero_kind;
    long group, num_groups, in_features;
};

// What a group's codes are made numbers with, for the outputs of a panel.
struct Group {
    Vector scales[PANEL_VECTORS], zeros[PANEL_VECTORS];

    Group(const QuantizedPanels &weight, long panel, long index) {
        for (long n = 0; n < PANEL_VECTORS; n++) {
            const long i = (panel * weight.num_groups + index) * PANEL_VECTORS + n;
            scales[n] = load(weight.scales, weight.scale_kind, i);
            zeros[n] = load(weight.zeros, weight.zero_kind, i);
        }
    }
};

// Calls work(k, numbers [PANEL_VECTORS]) for each input k below depth, with its numbers of a panel
// before they are scaled.
template <bool HAS_ZEROS, typename Codes, typename Work>
inline void each_input(const Codes &type, const int8_t *codes, const Group &group, long depth, const Work &work) {
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
inline void multiply_codes(const float *x, long x_stride, const Codes &type, const int8_t *codes, const Group &group,
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
inline void multiply_numbers(const float *x, long x_stride, const Codes &type, const int8_t *codes, const Group &group,
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
    const long in_features = weight.in_features, num_lines = (in_features + INPUTS - 1) / INPUTS;
    const int8_t *codes = weight.codes + panel * num_lines * PANEL;
    for (long index = 0; index < weight.num_groups; index++) {
        const Group group(weight, panel, index);
        const long last = (index + 1) * weight.group, end = last < in_features ? last : in_features;
        for (long k = index * weight.group; k < end; k += DEPTH) {
            const long depth = k + DEPTH < end ? DEPTH : end - k;
            const int8_t *part = codes + k / INPUTS * PANEL;
            if (num_rows > TILE_ROWS)
                multiply_numbers<HAS_ZEROS>(x + k, in_features, type, part, group, depth, totals, num_rows);
            else
                with_num_rows<TILE_ROWS>(num_rows, [&](auto rows) {
                    multiply_codes<rows.value, HAS_ZEROS>(x + k, in_features, type, part, group, depth, totals);
                });
        }
    }
}

template <typename Codes>
void quantized_linear(const QuantizedPanels &weight, const float *table, const float *x, const float *bias, float *y,
                      long num_rows, long out_features, long num_threads) {
    const Codes type(table);
    each_panel(x, bias, y, num_rows, weight.in_features, out_features, num_threads,
               [&](const float *rows, long panel, float *totals, long count) {
                   if (weight.zero_kind == NONE)
                       multiply_quantized<false>(weight, type, rows, panel, totals, count);
                   else
                       multiply_quantized<true>(weight, type, rows, panel, totals, count);
               });
}

// weight: as QuantizedPanels; groups have an even number of inputs. table: 16 numbers, or null.
#define QUANTIZED_LINEAR(CODES, NAME)                                                                                  \
    extern "C" void NAME(const float *x, const int8_t *codes, const void *scales, long scale_kind, const void *zeros,  \
                         long zero_kind, const float *table, const float *bias, float *y, long num_rows,               \
                         long in_features, long out_features, long group, long num_threads) {                          \
        const QuantizedPanels weight{codes, scales, zeros, Kind(scale_kind), Kind(zero_kind), group,                   \
                                     (in_features + group - 1) / group, in_features};                                  \
        quantized_linear<CODES>(weight, table, x, bias, y, num_rows, out_features, num_threads);                       \
    }
QUANTIZED_LINEAR(Int8Codes, quantized_linear_int8)
QUANTIZED_LINEAR(Fp8Codes, quantized_linear_fp8)
QUANTIZED_LINEAR(Int4Codes, quantized_linear_int4)
QUANTIZED_LINEAR(Table4Codes, quantized_linear_table4)
