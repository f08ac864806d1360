// Quantized weights as they lie in memory; kernels/quantized_linear_cpu.py packs them.
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

// Floats of these float16s.
inline Vector as_floats(Halves halves) {
#if defined(__AVX512F__)
    return _mm512_maskz_cvtph_ps(ALL, (__m256i)halves);
#elif defined(__F16C__)
    return _mm256_cvtph_ps((__m128i)halves);
#else
    const Bits bits = __builtin_convertvector(halves, Bits);
    // The exponent counts from -15, a float's from -127.
    const Vector size = as_floats((bits & 0x7fff) << 13) * 0x1p112f;
    Bits signed_bits;
    memcpy(&signed_bits, &size, sizeof size);
    return as_floats(signed_bits | (bits & 0x8000) << 16);
#endif
}

inline Vector load(const half *from) {
    Halves halves;
    memcpy(&halves, from, sizeof halves);
    return as_floats(halves);
}

inline Vector load(const int8_t *from) {
    typedef int8_t Bytes __attribute__((vector_size(WIDTH)));
    Bytes bytes;
    memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, Integers), Vector);
}

// The i-th vector of numbers of this kind.
inline Vector load(const void *numbers, Kind kind, long i) {
    switch (kind) {
    case FLOAT32: return load(static_cast<const float *>(numbers) + i * WIDTH);
    case BFLOAT16: return load(static_cast<const bf16 *>(numbers) + i * WIDTH);
    case FLOAT16: return load(static_cast<const half *>(numbers) + i * WIDTH);
    case INT8: return load(static_cast<const int8_t *>(numbers) + i * WIDTH);
    default: return Vector{};
    }
}

// Adjacent inputs of an output share a word: two codes of eight bits, or four of four bits, which
// lie in the order 0, 2, 1, 3. So each byte holds every other code, and inputs side by side are
// in bytes side by side.
typedef uint16_t Word;

struct QuantizedPanels {
    const Word *codes;           // [panels, ceil(in / codes in a word), PANEL]
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

// Calls work(index, group, first, depth) for the inputs in pieces of at most SIZE, each of one group.
template <long SIZE, typename Work> inline void each_piece(const QuantizedPanels &weight, const Work &work) {
    long index = 0;
    for (long group = 0; group < weight.num_groups; group++) {
        const long last = (group + 1) * weight.group, end = last < weight.in_features ? last : weight.in_features;
        for (long k = group * weight.group; k < end; k += SIZE) work(index++, group, k, k + SIZE < end ? SIZE : end - k);
    }
}
