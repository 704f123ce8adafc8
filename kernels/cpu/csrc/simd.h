// Eight floats at a time: AVX2 where the compiler was told to use it, plain vectors elsewhere. With
// AVX-512 as well: with as many lanes a row has the same bits in both.
//
// Every reduction over lanes has one fixed tree, and nothing is contracted or reassociated by the
// compiler, so that a row's result follows from the row alone.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace firsttoken {

constexpr int kLanes = 8;

typedef float F8 __attribute__((vector_size(32)));
typedef int32_t I8 __attribute__((vector_size(32)));

inline F8 load(const float* from) {
  F8 value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void store(float* to, F8 value) { std::memcpy(to, &value, sizeof value); }

inline F8 broadcast(float value) {
  return F8{value, value, value, value, value, value, value, value};
}

// The first `count` floats, then zeros; reads no further. 0 <= count <= 8.
inline F8 load_some(const float* from, int count) {
  F8 value = broadcast(0.0f);
  std::memcpy(&value, from, sizeof(float) * static_cast<size_t>(count));
  return value;
}

inline void store_some(float* to, F8 value, int count) {
  std::memcpy(to, &value, sizeof(float) * static_cast<size_t>(count));
}

// a * b + c; rounded once where the machine can.
inline F8 fma(F8 a, F8 b, F8 c) {
#if defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

inline F8 max(F8 a, F8 b) {
#if defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

inline F8 min(F8 a, F8 b) {
#if defined(__AVX2__)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

inline F8 abs(F8 a) {
  I8 bits;
  std::memcpy(&bits, &a, sizeof bits);
  bits &= 0x7FFFFFFF;
  std::memcpy(&a, &bits, sizeof bits);
  return a;
}

// Lanes i and i + 4, then i and i + 2, then the last two.
inline float sum(F8 a) {
  const float s0 = a[0] + a[4], s1 = a[1] + a[5], s2 = a[2] + a[6], s3 = a[3] + a[7];
  return (s0 + s2) + (s1 + s3);
}

inline float largest(F8 a) {
  const auto larger = [](float x, float y) { return x > y ? x : y; };
  return larger(larger(larger(a[0], a[4]), larger(a[1], a[5])),
                larger(larger(a[2], a[6]), larger(a[3], a[7])));
}

// To the nearest integer, ties to even.
inline I8 round_to_int(F8 a) {
#if defined(__AVX2__)
  return reinterpret_cast<I8>(_mm256_cvtps_epi32(a));
#else
  const F8 magic = broadcast(12582912.0f);  // 1.5 * 2^23: the sum has no bits below one
  const F8 shifted = a + magic;
  I8 bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  return bits - 0x4B400000;
#endif
}

inline F8 to_float(I8 a) { return __builtin_convertvector(a, F8); }

// e^a to within 2 ulp for a in [-87, 88]; 0 below -87.3 (e^-inf is 0), clamped above 88; NaN stays.
// Cody-Waite reduction by ln 2 and a minimax polynomial of degree 6, as in Cephes' expf.
inline F8 exp(F8 a) {
  const F8 lowest = broadcast(-87.3f);
  const I8 too_low = a < lowest;
  F8 x = min(broadcast(88.0f), max(lowest, a));  // of two operands a NaN wins as the second
  const I8 n = round_to_int(x * 1.44269504088896341f);
  const F8 n_float = to_float(n);
  x = fma(n_float, broadcast(-0.693359375f), x);
  x = fma(n_float, broadcast(2.12194440e-4f), x);
  F8 y = broadcast(1.9875691500e-4f);
  y = fma(y, x, broadcast(1.3981999507e-3f));
  y = fma(y, x, broadcast(8.3334519073e-3f));
  y = fma(y, x, broadcast(4.1665795894e-2f));
  y = fma(y, x, broadcast(1.6666665459e-1f));
  y = fma(y, x, broadcast(5.0000001201e-1f));
  y = fma(y, x * x, x + 1.0f);
  const I8 power_bits = (n + 127) << 23;
  F8 power;
  std::memcpy(&power, &power_bits, sizeof power);
  y *= power;
  I8 bits;
  std::memcpy(&bits, &y, sizeof bits);
  bits &= ~too_low;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

// IEEE half precision, round to nearest even; what is too large becomes infinite.
inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7FFFu;
  uint32_t bits = magnitude << 13;
  float value;
  if (magnitude >= 0x7C00u) {
    bits += (255u - 31u) << 23;
    std::memcpy(&value, &bits, sizeof value);
  } else {
    std::memcpy(&value, &bits, sizeof value);
    value *= 5.192296858534828e33f;  // 2^112: moves the exponent, and makes subnormals normal
  }
  std::memcpy(&bits, &value, sizeof bits);
  bits |= sign;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  bits &= 0x7FFFFFFFu;
  if (bits > 0x7F800000u) return sign | 0x7E00u;
  if (bits >= 0x477FF000u) return sign | 0x7C00u;
  if (bits < 0x38800000u) {  // a subnormal: adding 0.5 aligns its bits with the lowest ones
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof magnitude);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, sizeof bits);
    return sign | static_cast<uint16_t>(bits - 0x3F000000u);
  }
  bits += 0xFFFu + ((bits >> 13) & 1u) - (112u << 23);
  return sign | static_cast<uint16_t>(bits >> 13);
}

inline F8 load_half(const uint16_t* from) {
#if defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  F8 value;
  for (int lane = 0; lane < kLanes; ++lane) value[lane] = half_to_float(from[lane]);
  return value;
#endif
}

inline void store_half(uint16_t* to, F8 value) {
#if defined(__AVX2__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(value, 0));
#else
  for (int lane = 0; lane < kLanes; ++lane) to[lane] = float_to_half(value[lane]);
#endif
}

}  // namespace firsttoken
