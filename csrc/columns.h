// What a loop on the CPU is made of: one op over contiguous numbers of the compute type, and the two passes that bring
// elements of any type and stride there and back. Each exists for the plain instruction set and, on x86-64, once more
// for AVX2: chosen when it runs, as a wheel is built for neither. AVX-512 would add a third copy for no byte fewer.
#pragma once

#include "elementary.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__CUDACC__) && !defined(__HIP__)
#define RELU2IR_AVX2 __attribute__((target("avx2,fma,f16c"), flatten))
#endif

namespace relu2ir {

inline bool has_avx2() {
#ifdef RELU2IR_AVX2
  static const bool found = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                            __builtin_cpu_supports("f16c");
  return found;
#else
  return false;
#endif
}

// `count` elements, `stride` apart on the side of T, into or out of the compute type.
template <class T>
struct Columns {
  void (*gather)(const T* from, int64_t stride, int64_t count, Compute<T>* to);
  void (*scatter)(const Compute<T>* from, int64_t count, T* to, int64_t stride);
};

template <class T>
const Columns<T>& columns();  // in columns.cpp, for the four element types

// A uniform input is one number, the others are `count`; an output may be an input's memory.
template <class F, class M, class C>
inline void apply_all(const C* const* in, C* const* out, int64_t count, const double* params) {
  const C* from[F::inputs];
  C* to[F::outputs];
  C once[F::inputs];
  for (int k = 0; k < F::inputs; ++k) {
    from[k] = in[k];
    if (F::uniform(k)) once[k] = *in[k];
  }
  for (int k = 0; k < F::outputs; ++k) to[k] = out[k];
  double held[F::params + 1];  // no store can change these, so the loop reads them once
  for (int k = 0; k < F::params; ++k) held[k] = params[k];
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC ivdep
#endif
  for (int64_t i = 0; i < count; ++i) {
    C x[F::inputs], y[F::outputs];
    for (int k = 0; k < F::inputs; ++k) x[k] = F::uniform(k) ? once[k] : from[k][i];
    F::template apply<M>(x, y, held);
    for (int k = 0; k < F::outputs; ++k) to[k][i] = y[k];
  }
}

#ifdef RELU2IR_AVX2
template <class F, class C>
RELU2IR_AVX2 void apply_all_avx2(const C* const* in, C* const* out, int64_t count, const double* params) {
  apply_all<F, Elementary<true>>(in, out, count, params);
}
#endif

template <class F, class C>
auto best_apply_all() {
#ifdef RELU2IR_AVX2
  if (has_avx2()) return &apply_all_avx2<F, C>;
#endif
  return &apply_all<F, Elementary<false>, C>;
}

}  // namespace relu2ir
