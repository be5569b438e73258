// The functions that C++ has beyond the operators. Functors spell them `M::`: in double and on the GPU the standard
// library's, in float on the CPU polynomials of selects and no calls, so that the compiler vectorises the loop around
// them. `fused` takes the instruction that multiplies and adds, where a loop is compiled for it: half the instructions,
// and the one thing in which instruction sets may differ by a bit. NaN stays NaN, subnormals are kept.
// `half` says that a result is rounded to a half type, which a division that is 2 ulp of float off cannot change.
// Largest error against float64, in ulp, on every 13th float there is, with and without `fused`: exp 0.76, expm1 1.05,
// log1p 0.50, tanh 0.50, erf 0.51, erfc 0.51.
#pragma once

#include <cmath>
#include <limits>

#include "scalar.h"

#if defined(__CUDACC__) || defined(__HIP__)
#include "gpu.h"
#endif

namespace relu2ir {

template <bool fused, bool half = false>
struct Elementary {
  // By exp(-|x|), which is at most 1: exp(-x) overflows from x = -88.8 down, where silu is still a normal number.
  template <class C>
  RELU2IR_HD static C sigmoid(C x) {
    const C e = decay(std::abs(x));
    return quotient(x < C(0) ? e : C(1), C(1) + e);
  }

  // exp(-x) of x >= 0. To a half type the rounding of x * log2(e) is as nothing.
  template <class C>
  RELU2IR_HD static C decay(C x) {
#if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__)
    if constexpr (half && sizeof(C) == 4) return gpuExp2(x * -1.44269504f);
#endif
    return exp(-x);
  }

  // The divisor is from 1 to 2.
  template <class C>
  RELU2IR_HD static C quotient(C a, C b) {
#if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__)
    if constexpr (half && sizeof(C) == 4) return a * gpuInverse(b);
#endif
    return a / b;
  }

  RELU2IR_HD static double exp(double x) { return std::exp(x); }
  RELU2IR_HD static double expm1(double x) { return std::expm1(x); }
  RELU2IR_HD static double log1p(double x) { return std::log1p(x); }
  RELU2IR_HD static double tanh(double x) { return std::tanh(x); }
  RELU2IR_HD static double erf(double x) { return std::erf(x); }
  RELU2IR_HD static double erfc(double x) { return std::erfc(x); }

#if defined(__CUDACC__) || defined(__HIP__)

  RELU2IR_HD static float exp(float x) { return std::exp(x); }
  RELU2IR_HD static float expm1(float x) { return std::expm1(x); }
  RELU2IR_HD static float log1p(float x) { return std::log1p(x); }
  RELU2IR_HD static float tanh(float x) { return std::tanh(x); }
  RELU2IR_HD static float erf(float x) { return std::erf(x); }
  RELU2IR_HD static float erfc(float x) { return std::erfc(x); }

#else

  template <class C>
  static C add_product(C c, C a, C b) {
    if constexpr (!fused) {
      return c + a * b;
    } else if constexpr (sizeof(C) == 4) {
      return __builtin_fmaf(a, b, c);
    } else {
      return __builtin_fma(a, b, c);
    }
  }

  template <class C>
  static C polynomial(C, C last) {
    return last;
  }
  template <class C, class... Rest>
  static C polynomial(C x, C first, Rest... rest) {
    return add_product(first, x, polynomial(x, rest...));
  }

  // x = n ln 2 + r + low with |r| <= ln 2 / 2. `shifted` holds n in its last bits: adding 1.5 * 2^23 rounds to an
  // integer.
  struct Reduced {
    float shifted, r, low;
  };

  static Reduced reduce(float x) {
    const float shift = 12582912.0f, shifted = add_product(shift, x, 1.44269504f), n = shifted - shift;
    const float high = add_product(x, n, -0.693359375f);  // exact: ten bits of ln 2, and at most eight of n
    const float r = add_product(high, n, 2.12194440e-4f);
    return {shifted, r, add_product(high - r, n, 2.12194440e-4f)};
  }

  // low + exp(r) - 1 - r: the Chebyshev interpolant of degree 5 of (exp(r) - 1 - r) / r^2, which is 1.4e-9 off.
  static float exp_tail(float r, float low) {
    const float square = r * r, a = polynomial(r, 0.166666667f, 0.0416664628f);
    const float b = polynomial(r, 0.00833331069f, 0.00139338810f, 0.000198912473f);
    return add_product(low, square, add_product(0.5f, r, add_product(a, square, b)));
  }

  static float power_of_two(int32_t n) { return bit_cast<float>(static_cast<uint32_t>(n + 127) << 23); }

  static float exp(float x) {
    const float above = x < -105.0f ? -105.0f : x, bounded = x > 89.0f ? 89.0f : above;  // 0 and infinity
    const Reduced at = reduce(bounded);
    const float one = 1.0f + at.r, lost = at.r - (one - 1.0f);
    const float result = one + (lost + exp_tail(at.r, at.low));
    // In two steps, each a normal number: 2^n itself may be none.
    const int32_t n = bit_cast<int32_t>(at.shifted) - 0x4b400000, first = n >> 1;
    return result * power_of_two(first) * power_of_two(n - first);
  }

  // 2 * (2^(n-1) - 1/2 + 2^(n-1) (r + tail)); what the sum of the large terms loses is added back.
  static float expm1(float x) {
    const float above = x < -20.0f ? -20.0f : x, bounded = x > 89.0f ? 89.0f : above;  // -1 and infinity
    const Reduced at = reduce(bounded);
    const int32_t n = bit_cast<int32_t>(at.shifted) - 0x4b400000;
    const float scale = power_of_two(n - 1), a = scale - 0.5f, b = scale * at.r, sum = a + b;
    const float of_b = sum - a, lost = (a - (sum - of_b)) + (b - of_b);
    const float result = 2.0f * (sum + (add_product(lost, scale, exp_tail(at.r, at.low))));
    return std::abs(x) < 1e-8f ? x : result;  // half of a subnormal is none
  }

  // exp(x) for x in [-700, 0], 3e-12 off: in double there is room to cancel.
  static double exp_negative(double x) {
    const double shift = 6755399441055744.0, shifted = add_product(shift, x, 1.4426950408889634);
    const double r = add_product(x, shifted - shift, -0.6931471805599453), square = r * r;
    const double a = polynomial(r, 0.5, 0.1666666671984298);
    const double b = polynomial(r, 0.041666666719825958, 0.008333298109304421);
    const double c = polynomial(r, 0.0013888853675330817, 0.00019899584899543788, 2.4859889017751186e-5);
    const uint64_t power = (bit_cast<uint64_t>(shifted) << 52) + (uint64_t{1023} << 52);
    const double tail = add_product(r, square, polynomial(square, a, b, c));
    return (1.0 + tail) * bit_cast<double>(power);
  }

  // (1 - e) / (1 + e) with e = exp(-2 |x|).
  static float tanh(float x) {
    const double wide = x, size = wide < 0 ? -wide : wide, bounded = size > 20.0 ? 20.0 : size;
    const double e = exp_negative(-2.0 * bounded), result = (1.0 - e) / (1.0 + e);
    const double signed_result = wide < 0 ? -result : result;
    return static_cast<float>(size < 1e-5 ? wide : signed_result);
  }

  // log(u) + (what u = 1 + x lost), u = 2^k m with m about 1, log(m) = 2 atanh((m - 1) / (m + 1)) as its series.
  static float log1p(float x) {
    const double wide = x, u = 1.0 + wide, lost = wide - (u - 1.0);
    const uint64_t bits = bit_cast<uint64_t>(u), fraction = bits & 0xfffffffffffffu, one = uint64_t{1023} << 52;
    const double found = bit_cast<double>(fraction | one);
    const double power = bit_cast<double>((bits >> 52) | (uint64_t{0x433} << 52)) - 4503599627371519.0;  // 2^52 + 1023
    const double m = found > 1.4142135623730951 ? 0.5 * found : found;
    const double k = found > 1.4142135623730951 ? power + 1.0 : power;
    const double s = (m - 1.0) / (m + 1.0), w = s * s;
    const double series = polynomial(w, 1.0 / 3, 1.0 / 5, 1.0 / 7, 1.0 / 9, 1.0 / 11, 1.0 / 13);
    const double result = k * 0.6931471805599453 + (2.0 * (s + s * w * series) + lost);
    const float finite = x > 3.40282347e38f ? x : static_cast<float>(result);
    const float from_minus_one = x == -1.0f ? -std::numeric_limits<float>::infinity() : finite;
    const float signed_zero = x == 0.0f ? x : from_minus_one;
    return x >= -1.0f ? signed_zero : std::numeric_limits<float>::quiet_NaN();
  }

  // erfc(size) for size in [0, 11]: exp(-size^2) / (1 + 2 size) times a polynomial of (size - 2) / (size + 2), the
  // Chebyshev interpolant of degree 12, which is 5e-10 off.
  static double erfc_positive(double size) {
    const double t = (size - 2.0) / (size + 2.0);
    const double p = polynomial(t, 1.2769783817925877, -0.092763830329275428, -0.16603043004010402,
                                0.16405141091925644, -0.054219263814781097, -0.008035124762001121,
                                0.0087163924667195614, 0.0012735094324970595, -0.0014327453204808944,
                                -0.00044632360653073207, 0.00016536537483274672, 0.00011614677280668912,
                                1.8087820594079358e-5);
    return exp_negative(-size * size) * p / (1.0 + 2.0 * size);
  }

  static float erfc(float x) {
    const double wide = x, size = wide < 0 ? -wide : wide, bounded = size > 11.0 ? 11.0 : size;
    const double result = erfc_positive(bounded);
    return static_cast<float>(wide < 0 ? 2.0 - result : result);
  }

  // Below 1/8 the series, as 1 - erfc cancels.
  static float erf(float x) {
    const double wide = x, size = wide < 0 ? -wide : wide, bounded = size > 11.0 ? 11.0 : size;
    const double result = 1.0 - erfc_positive(bounded), w = wide * wide;
    const double series = polynomial(w, 1.0, -1.0 / 3, 1.0 / 10, -1.0 / 42, 1.0 / 216);
    const double signed_result = wide < 0 ? -result : result;
    return static_cast<float>(size < 0.125 ? 1.1283791670955126 * wide * series : signed_result);
  }

#endif
};

}  // namespace relu2ir
