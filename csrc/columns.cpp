#include "columns.h"

#include <type_traits>

#ifdef RELU2IR_AVX2
#include <immintrin.h>
#endif

namespace relu2ir {
namespace {

// Strides 1 and 2 (a pair's part) as constants, so that the compiler vectorises them.
template <class Body>
inline void over(int64_t count, int64_t stride, Body body) {
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC ivdep
#endif
  for (int64_t i = 0; i < count; ++i) body(i, i * stride);
}

template <class Body>
inline void over_any(int64_t count, int64_t stride, Body body) {
  if (stride == 1) {
    over(count, 1, body);
  } else if (stride == 2) {
    over(count, 2, body);
  } else {
    over(count, stride, body);
  }
}

template <class T>
inline void gather(const T* from, int64_t stride, int64_t count, Compute<T>* to) {
  over_any(count, stride, [=](int64_t i, int64_t at) { to[i] = load(from[at]); });
}

template <class T>
inline void scatter(const Compute<T>* from, int64_t count, T* to, int64_t stride) {
  over_any(count, stride, [=](int64_t i, int64_t at) { to[at] = store<T>(from[i]); });
}

#ifdef RELU2IR_AVX2

// Half has instructions of its own, one for eight elements, which the compiler does not find.
template <class T>
RELU2IR_AVX2 void gather_avx2(const T* from, int64_t stride, int64_t count, Compute<T>* to) {
  int64_t done = 0;
  if constexpr (std::is_same_v<T, Half>) {
    for (; stride == 1 && done + 8 <= count; done += 8) {
      const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + done));
      _mm256_storeu_ps(to + done, _mm256_cvtph_ps(half));
    }
  }
  gather(from + done * stride, stride, count - done, to + done);
}

template <class T>
RELU2IR_AVX2 void scatter_avx2(const Compute<T>* from, int64_t count, T* to, int64_t stride) {
  int64_t done = 0;
  if constexpr (std::is_same_v<T, Half>) {
    for (; stride == 1 && done + 8 <= count; done += 8) {
      const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(from + done), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + done), half);
    }
  }
  scatter(from + done, count - done, to + done * stride, stride);
}

#endif

}  // namespace

template <class T>
const Columns<T>& columns() {
#ifdef RELU2IR_AVX2
  static constexpr Columns<T> avx2 = {gather_avx2<T>, scatter_avx2<T>};
  if (has_avx2()) return avx2;
#endif
  static constexpr Columns<T> plain = {gather<T>, scatter<T>};
  return plain;
}

template const Columns<Half>& columns<Half>();
template const Columns<BFloat16>& columns<BFloat16>();
template const Columns<float>& columns<float>();
template const Columns<double>& columns<double>();

}  // namespace relu2ir
