// Vectors of floats in the processor's registers, and the element types that they are loaded from.
//
// Sums are kept in fp32. Vector extensions of GCC and Clang are used, so one source serves every
// instruction set: the compiler is told to use what the machine has.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr long WIDTH = 16;
#elif defined(__AVX__)
constexpr long WIDTH = 8;
#else
constexpr long WIDTH = 4;
#endif

typedef float Vector __attribute__((vector_size(WIDTH * sizeof(float))));
typedef int32_t Integers __attribute__((vector_size(WIDTH * sizeof(int32_t))));
typedef uint32_t Bits __attribute__((vector_size(WIDTH * sizeof(uint32_t))));
typedef uint16_t Halves __attribute__((vector_size(WIDTH * sizeof(uint16_t))));

typedef float Quad __attribute__((vector_size(4 * sizeof(float))));

// bfloat16: the upper half of a float.
struct bf16 {
    uint16_t bits;
};

inline Vector load(const float *from) {
    Vector x;
    memcpy(&x, from, sizeof x);
    return x;
}

inline void store(float *to, Vector x) { memcpy(to, &x, sizeof x); }

inline Vector load(const bf16 *from) {
    Halves halves;
    memcpy(&halves, from, sizeof halves);
    Bits bits = __builtin_convertvector(halves, Bits) << 16;
    Vector x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// Rounds to the nearest, ties to even; a NaN stays one.
inline Bits rounded_bits(Vector x) {
    Bits bits;
    memcpy(&bits, &x, sizeof bits);
    Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return x == x ? rounded : (Bits{} + 0x7fc0);
}

inline void store(bf16 *to, Vector x) {
    Halves halves = __builtin_convertvector(rounded_bits(x), Halves);
    memcpy(to, &halves, sizeof halves);
}

// x with the precision of an element.
inline Vector rounded(const float *, Vector x) { return x; }
inline Vector rounded(const bf16 *, Vector x) {
    Bits bits = rounded_bits(x) << 16;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// A whole vector of elements.
struct Whole {
    template <typename T> Vector load(const T *from) const { return ::load(from); }
    template <typename T> void store(T *to, Vector x) const { ::store(to, x); }
};

// The first `count` elements of a vector; the others are zeros.
struct Partial {
    long count;

    template <typename T> Vector load(const T *from) const {
        T elements[WIDTH] = {};
        memcpy(elements, from, count * sizeof(T));
        return ::load(elements);
    }
    template <typename T> void store(T *to, Vector x) const {
        T elements[WIDTH];
        ::store(elements, x);
        memcpy(to, elements, count * sizeof(T));
    }
};

// Calls work(i, vector) for the elements from each i on, in vectors of which the last may be partial.
template <typename Work> inline void each_vector(long size, const Work &work) {
    long i = 0;
    for (; i + WIDTH <= size; i += WIDTH) work(i, Whole{});
    if (i < size) work(i, Partial{size - i});
}

// a * b + c, in one rounding where the processor can. The compiler must not choose by itself where
// to do so (-ffp-contract=off): a row would depend on how many are computed together.
inline Vector multiply_add(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}

inline Vector filled(float x) { return x - Vector{}; }

inline float sum(Vector x) {
    float elements[WIDTH];
    store(elements, x);
    Quad total = {};
    for (long i = 0; i < WIDTH; i += 4) {
        Quad part;
        memcpy(&part, elements + i, sizeof part);
        total += part;
    }
    return (total[0] + total[1]) + (total[2] + total[3]);
}

inline int32_t sum(Integers x) {
    int32_t total = 0;
    for (long i = 0; i < WIDTH; i++) total += x[i];
    return total;
}

// The nearest integers, ties to even, of numbers whose size is below 2^22: adding 3 * 2^22 rounds, and the last bits of the
// float then hold the integer.
inline Integers rounded_integers(Vector x) { return (Integers)(x + 0x1.8p23f) - 0x4b400000; }

// The bits of the largest absolute value. They are ordered as the values are, with infinities and NaNs above all.
template <typename T> inline int32_t largest_bits(const T *x, long size) {
    Integers sizes = {};
    each_vector(size, [&](long i, auto some) {
        const Integers bits = (Integers)some.load(x + i) & INT32_MAX;
        sizes = bits > sizes ? bits : sizes;
    });
    int32_t largest = sizes[0];
    for (long i = 1; i < WIDTH; i++) largest = sizes[i] > largest ? sizes[i] : largest;
    return largest;
}

inline Vector smaller(Vector a, Vector b) { return a < b ? a : b; }
inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }

// e to the power of x, to 2e-7 of it; a NaN stays one, and 0 stands for what is below 1e-38.
// The power of a multiple of log(2), which is subtracted in two parts (Cody and Waite 1980), times
// the Taylor series of the rest up to its seventh power.
inline Vector exp(Vector x) {
    const Vector lowest = filled(-87.0f), highest = filled(88.3f);
    const Vector inside = larger(smaller(x, highest), lowest), scaled = inside * 1.44269504f;
    const Integers n = __builtin_convertvector(scaled + (scaled < 0.0f ? filled(-0.5f) : filled(0.5f)), Integers);
    const Vector whole = __builtin_convertvector(n, Vector);
    const Vector r = multiply_add(whole, filled(2.12194440e-4f), multiply_add(whole, filled(-0.693359375f), inside));
    Vector p = filled(1.0f / 5040);
    const float coefficients[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    for (float coefficient : coefficients) p = multiply_add(p, r, filled(coefficient));
    const Integers power = (n + 127) << 23;
    Vector factor;
    memcpy(&factor, &power, sizeof factor);
    Vector result = p * factor;
    result = x < lowest ? Vector{} : result;
    result = x > highest ? filled(__builtin_inff()) : result;
    return x == x ? result : x;
}

// The natural logarithm of numbers that are normal and positive, to 2e-7 of it.
// Of a power of 2 and a factor m between sqrt(1/2) and sqrt(2): log(m) = 2 atanh((m - 1) / (m + 1)),
// by the Taylor series up to the ninth power.
inline Vector log(Vector x) {
    Integers bits;
    memcpy(&bits, &x, sizeof bits);
    const Integers exponent = (bits - 0x3f3504f3) >> 23, rest = bits - (exponent << 23);
    Vector m;
    memcpy(&m, &rest, sizeof m);
    const Vector s = (m - 1.0f) / (m + 1.0f), squared = s * s, power = __builtin_convertvector(exponent, Vector);
    Vector p = filled(1.0f / 9);
    const float coefficients[] = {1.0f / 7, 1.0f / 5, 1.0f / 3};
    for (float coefficient : coefficients) p = multiply_add(p, squared, filled(coefficient));
    const Vector fraction = s + s, tail = multiply_add(fraction * squared, p, power * -2.12194440e-4f);
    return multiply_add(power, filled(0.693359375f), fraction + tail);
}
