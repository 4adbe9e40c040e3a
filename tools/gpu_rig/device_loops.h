// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Plain loops over tensors on the device: the kernels of device_kernels.cc.
#pragma once

#include <cstdint>

namespace rig {

enum class Type { kFloat32, kBFloat16, kInt32, kInt64 };
enum class MapOp { kCopy, kAdd, kSubtract, kMultiply, kScale, kRsqrt };
enum class RowOp { kMean, kSoftmax, kArgmax };

constexpr int kMaxRank = 6;

// A tensor on the device. Strides are in elements; 0 repeats the elements of an axis.
struct Array {
  void* data;
  Type type;
  int rank;
  int64_t sizes[kMaxRank], strides[kMaxRank];

  int64_t size() const {
    int64_t product = 1;
    for (int axis = 0; axis < rank; ++axis) product *= sizes[axis];
    return product;
  }
};

// out = op(x, y) for each element; x and y have the sizes of out. kScale: factor * x + bias. Operators of one operand ignore y.
void Map(MapOp op, const Array& x, const Array& y, const Array& out, float factor, float bias, void* stream);

// One result for each row of `columns` contiguous elements of x, or as many as elements for kSoftmax.
void MapRows(RowOp op, const Array& x, const Array& out, int64_t columns, void* stream);

// Rows [count, width] of contiguous arrays: out[i] = table[ids[i]], or out[ids[i]] = table[i] if `scatters`.
void MoveRows(const Array& table, const Array& ids, const Array& out, int64_t count, int64_t width, bool scatters, void* stream);

// silu(x[:, :width]) * x[:, width:] of contiguous rows.
void SwiGlu(const Array& x, const Array& out, int64_t width, void* stream);

}  // namespace rig
