// The loop of the `cpp` provider: a functor over any plan, in parallel chunks that follow torch's threads. A row is
// taken a block at a time, which stays in the first cache: elements that do not lie as numbers of the compute type, one
// beside the other, are brought there and back. So an op is compiled for two types, not for four of any stride.
#pragma once

#include <algorithm>
#include <type_traits>

#include "columns.h"
#include "plan.h"
#include "torch_shim.h"

namespace relu2ir {

constexpr int64_t CPU_GRAIN = 32768;  // elements below which a second thread costs more than it gives
constexpr int64_t CPU_BLOCK = 512;    // elements: 2 KB an operand

// Columns [first, last) of one row.
template <class F, class T>
void run_columns(T* const (&row)[F::inputs + F::outputs], const int64_t (&strides)[F::inputs + F::outputs],
                 int64_t first, int64_t last, const double* params) {
  using C = Compute<T>;
  constexpr int N = F::inputs + F::outputs;
  static const auto apply = best_apply_all<F, C>();
  static const Columns<T>& moves = columns<T>();
  C buffers[N][CPU_BLOCK];
  C* at[N];
  bool lies[N], all_lie = true;
  for (int k = 0; k < N; ++k) {
    lies[k] = std::is_same_v<T, C> && strides[k] == 1;
    all_lie = all_lie && (lies[k] || F::uniform(k));
    at[k] = buffers[k];
    if (F::uniform(k)) *at[k] = load(*row[k]);
  }
  const int64_t block = all_lie ? last - first : CPU_BLOCK;
  for (int64_t begin = first; begin < last; begin += block) {
    const int64_t count = std::min(block, last - begin);
    for (int k = 0; k < N; ++k) {
      if (lies[k] && !F::uniform(k)) {
        at[k] = reinterpret_cast<C*>(row[k] + begin);
      } else if (k < F::inputs && !F::uniform(k)) {
        moves.gather(row[k] + begin * strides[k], strides[k], count, at[k]);
      }
    }
    apply(at, at + F::inputs, count, params);
    for (int k = F::inputs; k < N; ++k) {
      if (!lies[k]) moves.scatter(at[k], count, row[k] + begin * strides[k], strides[k]);
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
    run_columns<F>(data, strides, first, last, params);
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
