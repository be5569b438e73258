// The one operand model of every loop, on the host and on the device. A part of a tensor (the tensor itself, a half of
// its last dimension, every second element of it) is a strided operand over the op's logical sizes. A plan orders the
// dimensions by the strides, merges those that lie alike in all operands, and leaves rows of columns:
//   flat   one row, all strides 1          dense tensors, whatever their order of dimensions
//   rows   all column strides 1            slices, halves, broadcast rows (a row stride of 0)
// Pairs count as such where their tensor does: both parts, whose own strides are 2, are read together.
//   other  any strides                     stepped, expanded, transposed against each other
// A vector is an operand whose strides are 0 but for the last; a scalar has none and is loaded once, apart.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "scalar.h"

namespace relu2ir {

constexpr int MAX_DIMS = 16;
constexpr int VECTOR_BYTES = 16;

// As in relu2ir/spec.py, in its order.
enum class Layout { plain, halves, pairs, vector, scalar };

constexpr bool is_packed(Layout layout) { return layout == Layout::halves || layout == Layout::pairs; }
constexpr bool is_broadcast(Layout layout) { return layout == Layout::vector || layout == Layout::scalar; }
constexpr int parts_of(Layout layout) { return is_packed(layout) ? 2 : 1; }

// Strides are in elements. `data` may be null when only the shape matters.
struct View {
  char* data = nullptr;
  int dims = 0;
  int64_t sizes[MAX_DIMS] = {};
  int64_t strides[MAX_DIMS] = {};
};

inline int64_t count(const View& view) {
  int64_t product = 1;
  for (int d = 0; d < view.dims; ++d) product *= view.sizes[d];
  return product;
}

inline View part_of(const View& whole, Layout layout, int index, int64_t item_bytes) {
  View part = whole;
  if (!is_packed(layout)) return part;
  const int last = whole.dims - 1;
  part.sizes[last] /= 2;
  int64_t step = whole.strides[last];
  if (layout == Layout::halves) {
    step *= part.sizes[last];
  } else {
    part.strides[last] *= 2;
  }
  if (part.data) part.data += index * step * item_bytes;
  return part;
}

// Whether a vector or a scalar can serve operands of the sizes of `like`.
inline bool is_broadcast_to(const View& whole, Layout layout, const View& like) {
  if (layout == Layout::vector) return whole.dims == 1 && like.dims > 0 && whole.sizes[0] == like.sizes[like.dims - 1];
  return whole.dims == 0 || (whole.dims == 1 && whole.sizes[0] == 1 && like.dims > 0);
}

// It as an operand of those sizes: each row, or each element, is the same.
inline View broadcast_to(const View& whole, Layout layout, const View& like) {
  View spread = like;
  spread.data = whole.data;
  std::fill(spread.strides, spread.strides + like.dims, 0);
  if (layout == Layout::vector) spread.strides[like.dims - 1] = whole.strides[0];
  return spread;
}

// Whether the elements fill their span without gap or overlap, in some order of dimensions. An empty view does.
inline bool is_dense(const View& view) {
  int left = 0;
  for (int d = 0; d < view.dims; ++d) {
    if (view.sizes[d] == 0) return true;
    left += view.sizes[d] > 1;
  }
  // Each stride must be the product of the sizes found before it. From the last dimension on, a contiguous view takes
  // one round; another order takes one more for each step back.
  for (int64_t span = 1; left > 0;) {
    const int before = left;
    for (int d = view.dims - 1; d >= 0; --d) {
      if (view.sizes[d] > 1 && view.strides[d] == span) {
        span *= view.sizes[d];
        --left;
      }
    }
    if (left == before) return false;
  }
  return true;
}

// The strides that torch.empty_like gives to a tensor like `like`: its own when it is dense, otherwise dense ones in
// the order of its strides. A stride of 0 leaves a dimension where it stands; of equal strides the smaller size is inner.
inline void dense_strides(const View& like, int64_t* strides) {
  if (is_dense(like)) {
    for (int d = 0; d < like.dims; ++d) strides[d] = like.strides[d];
    return;
  }
  int order[MAX_DIMS];  // dimensions, inner first
  for (int i = 0; i < like.dims; ++i) {
    order[i] = like.dims - 1 - i;
    for (int moving = i, other = i - 1; other >= 0; --other) {
      const int64_t stride = like.strides[order[moving]], below = like.strides[order[other]];
      const bool tied = stride == below && like.sizes[order[other]] <= like.sizes[order[moving]];
      if (stride == 0 || below == 0 || tied) continue;
      if (below < stride) break;
      std::swap(order[other], order[moving]);
      moving = other;
    }
  }
  int64_t stride = 1;
  for (int i = 0; i < like.dims; ++i) {
    strides[order[i]] = stride;
    if (like.sizes[order[i]] > 1) stride *= like.sizes[order[i]];
  }
}

template <int N>
struct Plan {
  int dims = 1;  // at least 1; the last one is the columns, those before it make the rows
  int64_t rows = 1, columns = 1;
  int64_t sizes[MAX_DIMS];
  char* data[N];
  int64_t strides[N][MAX_DIMS];
  bool unit = true;     // columns follow each other: every stride is 1, of a pair's parts 2
  bool aligned = true;  // every row of every operand begins on a vector's boundary

  bool flat() const { return dims == 1 && unit; }

  RELU2IR_HD int64_t column_stride(int operand) const { return strides[operand][dims - 1]; }

  // Where `row` begins in each operand, in elements. At most one dimension of rows needs no division.
  template <class Index>
  RELU2IR_HD void row_offsets(Index row, int64_t (&offsets)[N]) const {
    for (int k = 0; k < N; ++k) offsets[k] = 0;
    for (int d = dims - 2; d > 0; --d) {
      const Index outer = row / static_cast<Index>(sizes[d]);
      const int64_t at = row - outer * static_cast<Index>(sizes[d]);
      for (int k = 0; k < N; ++k) offsets[k] += at * strides[k][d];
      row = outer;
    }
    if (dims > 1) {
      for (int k = 0; k < N; ++k) offsets[k] += static_cast<int64_t>(row) * strides[k][0];
    }
  }
};

// Plans a pass of `F` over `operands`, which agree in sizes; the last one is an output, so its strides differ from each
// other. A uniform input, whose strides are all 0, never stands in the way of merging, nor of vectors.
template <class F, int N>
Plan<N> plan_over(const View (&operands)[N], int64_t item_bytes) {
  Plan<N> plan;
  const View& last = operands[N - 1];
  int order[MAX_DIMS];  // dimensions that matter, outer first
  int kept = 0;
  for (int d = 0; d < last.dims; ++d) {
    if (last.sizes[d] == 1) continue;
    int at = kept++;
    for (; at > 0 && last.strides[order[at - 1]] < last.strides[d]; --at) order[at] = order[at - 1];
    order[at] = d;
  }
  plan.dims = 0;
  for (int i = 0; i < kept; ++i) {
    const int d = order[i];
    bool merges = plan.dims > 0;
    for (int k = 0; merges && k < N; ++k) {
      merges = plan.strides[k][plan.dims - 1] == operands[k].strides[d] * last.sizes[d];
    }
    if (merges) {
      plan.sizes[plan.dims - 1] *= last.sizes[d];
    } else {
      plan.sizes[plan.dims++] = last.sizes[d];
    }
    for (int k = 0; k < N; ++k) plan.strides[k][plan.dims - 1] = operands[k].strides[d];
  }
  if (plan.dims == 0) {  // one element
    plan.dims = 1;
    plan.sizes[0] = 1;
    for (int k = 0; k < N; ++k) plan.strides[k][0] = 1;
  }
  for (int d = 0; d < plan.dims - 1; ++d) plan.rows *= plan.sizes[d];
  plan.columns = plan.sizes[plan.dims - 1];
  for (int k = 0; k < N; ++k) {
    plan.data[k] = operands[k].data;
    if (F::uniform(k)) continue;
    const bool second = k > 0 && F::paired(k - 1);
    if (plan.column_stride(k) != (F::paired(k) || second ? 2 : 1)) plan.unit = false;
    if (second) {  // beside the first, unless the columns of the plan are another dimension than the pairs'
      if (operands[k].data != operands[k - 1].data + item_bytes) plan.unit = false;
      continue;
    }
    if (reinterpret_cast<uintptr_t>(operands[k].data) % VECTOR_BYTES != 0) plan.aligned = false;
    for (int d = 0; d < plan.dims - 1; ++d) {
      if (plan.strides[k][d] * item_bytes % VECTOR_BYTES != 0) plan.aligned = false;
    }
  }
  return plan;
}

}  // namespace relu2ir
