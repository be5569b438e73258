// The loop of the `cpp` provider: a functor over any plan, in parallel chunks that follow torch's threads.
#pragma once

#include <algorithm>

#include "plan.h"
#include "torch_shim.h"

namespace relu2ir {

constexpr int64_t CPU_GRAIN = 32768;  // elements below which a second thread costs more than it gives

// Columns [first, last) of one row. `unit` is a constant in each instance, so that the compiler vectorises it.
template <class F, class T, bool unit>
void run_columns(T* const (&row)[F::inputs + F::outputs], const int64_t (&strides)[F::inputs + F::outputs],
                 int64_t first, int64_t last, const double* params) {
  constexpr int N = F::inputs + F::outputs;
  T* at[N];
  for (int k = 0; k < N; ++k) at[k] = row[k];
  Compute<T> once[F::inputs];
  for (int k = 0; k < F::inputs; ++k) {
    if (F::uniform(k)) once[k] = load(*row[k]);
  }
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC ivdep
#endif
  for (int64_t column = first; column < last; ++column) {
    Compute<T> in[F::inputs], out[F::outputs];
    for (int k = 0; k < F::inputs; ++k) {
      in[k] = F::uniform(k) ? once[k] : load(at[k][unit ? column : column * strides[k]]);
    }
    F::apply(in, out, params);
    for (int k = 0; k < F::outputs; ++k) {
      at[F::inputs + k][unit ? column : column * strides[F::inputs + k]] = store<T>(out[k]);
    }
  }
}

// Elements [begin, end) of the plan, counted row by row.
template <class F, class T>
void run_elements(const Plan<F::inputs + F::outputs>& plan, const double* params, int64_t begin, int64_t end) {
  constexpr int N = F::inputs + F::outputs;
  const int64_t columns = plan.columns;
  int64_t strides[N];
  for (int k = 0; k < N; ++k) strides[k] = plan.column_stride(k);
  for (int64_t row = begin / columns; row * columns < end; ++row) {
    int64_t offsets[N];
    plan.row_offsets(row, offsets);
    T* data[N];
    for (int k = 0; k < N; ++k) data[k] = reinterpret_cast<T*>(plan.data[k]) + offsets[k];
    const int64_t first = std::max<int64_t>(begin - row * columns, 0), last = std::min(end - row * columns, columns);
    if (plan.unit) {
      run_columns<F, T, true>(data, strides, first, last, params);
    } else {
      run_columns<F, T, false>(data, strides, first, last, params);
    }
  }
}

template <class F>
void run_cpu(const Plan<F::inputs + F::outputs>& plan, Dtype dtype, const double* params) {
  struct Pass {
    const Plan<F::inputs + F::outputs>& plan;
    const double* params;
  } pass{plan, params};
  with_element(dtype, [&](auto element) {
    using T = decltype(element);
    const ParallelFunc chunk = [](int64_t begin, int64_t end, void* context) {
      const Pass& pass = *static_cast<const Pass*>(context);
      run_elements<F, T>(pass.plan, pass.params, begin, end);
    };
    torch_parallel_for(0, plan.rows * plan.columns, CPU_GRAIN, chunk, &pass);
  });
}

}  // namespace relu2ir
