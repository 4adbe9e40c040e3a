// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// A compiler for the host builds them as loops of the host, for the rig without a GPU.
#include "device_loops.h"

#include <cmath>
#include <cstring>

#ifdef __CUDACC__
#define RIG_DEVICE __device__
#else
#define RIG_DEVICE
#endif

namespace rig {
namespace {

constexpr int kThreads = 256;

RIG_DEVICE float FromBits(uint32_t bits) {
#ifdef __CUDACC__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

RIG_DEVICE uint32_t Bits(float value) {
#ifdef __CUDACC__
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

RIG_DEVICE uint16_t RoundToBFloat16(float value) {
  const uint32_t bits = Bits(value);
  if (value != value) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// Value is float or int64_t.
template <typename Value>
RIG_DEVICE Value Load(const Array& array, int64_t place) {
  switch (array.type) {
    case Type::kFloat32:
      return static_cast<Value>(static_cast<const float*>(array.data)[place]);
    case Type::kBFloat16:
      return static_cast<Value>(FromBits(uint32_t{static_cast<const uint16_t*>(array.data)[place]} << 16));
    case Type::kInt32:
      return static_cast<Value>(static_cast<const int32_t*>(array.data)[place]);
    case Type::kInt64:
      return static_cast<Value>(static_cast<const int64_t*>(array.data)[place]);
  }
  return Value{};
}

template <typename Value>
RIG_DEVICE void Store(const Array& array, int64_t place, Value value) {
  switch (array.type) {
    case Type::kFloat32:
      static_cast<float*>(array.data)[place] = static_cast<float>(value);
      break;
    case Type::kBFloat16:
      static_cast<uint16_t*>(array.data)[place] = RoundToBFloat16(static_cast<float>(value));
      break;
    case Type::kInt32:
      static_cast<int32_t*>(array.data)[place] = static_cast<int32_t>(value);
      break;
    case Type::kInt64:
      static_cast<int64_t*>(array.data)[place] = static_cast<int64_t>(value);
      break;
  }
}

bool IsInteger(const Array& array) { return array.type == Type::kInt32 || array.type == Type::kInt64; }

// The threads of a CTA that share a row; a single one on the host.
struct Team {
  int lane, lanes;

  // Returns the reduction of the values of all threads to all of them.
  template <typename Value, typename Reduction>
  RIG_DEVICE Value Reduce(Value value, [[maybe_unused]] Reduction reduce) const {
#ifdef __CUDACC__
    __shared__ Value values[kThreads];
    __syncthreads();
    values[lane] = value;
    for (int half = lanes / 2; half > 0; half /= 2) {
      __syncthreads();
      if (lane < half) values[lane] = reduce(values[lane], values[lane + half]);
    }
    __syncthreads();
    return values[0];
#else
    return value;
#endif
  }
};

#ifdef __CUDACC__
template <typename Body>
__global__ void Loop(int64_t count, Body body) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) body(i);
}

template <typename Body>
__global__ void LoopOverRows(Body body) {
  body(int64_t{blockIdx.x}, Team{static_cast<int>(threadIdx.x), kThreads});
}

template <typename Body>
void ForEach(int64_t count, const Body& body, void* stream) {
  const auto blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
  Loop<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(count, body);
}

template <typename Body>
void ForEachRow(int64_t rows, const Body& body, void* stream) {
  LoopOverRows<<<static_cast<unsigned>(rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(body);
}
#else
template <typename Body>
void ForEach(int64_t count, const Body& body, void*) {
  for (int64_t i = 0; i < count; ++i) body(i);
}

template <typename Body>
void ForEachRow(int64_t rows, const Body& body, void*) {
  for (int64_t row = 0; row < rows; ++row) body(row, Team{0, 1});
}
#endif

template <typename Value>
struct MapBody {
  MapOp op;
  Array x, y, out;
  float factor, bias;

  RIG_DEVICE void operator()(int64_t i) const {
    int64_t of_x = 0, of_y = 0, of_out = 0;
    for (int axis = out.rank - 1; axis >= 0; --axis) {
      const int64_t at = i % out.sizes[axis];
      i /= out.sizes[axis];
      of_x += at * x.strides[axis];
      of_y += at * y.strides[axis];
      of_out += at * out.strides[axis];
    }
    const Value left = Load<Value>(x, of_x);
    switch (op) {
      case MapOp::kCopy:
        return Store(out, of_out, left);
      case MapOp::kAdd:
        return Store(out, of_out, left + Load<Value>(y, of_y));
      case MapOp::kSubtract:
        return Store(out, of_out, left - Load<Value>(y, of_y));
      case MapOp::kMultiply:
        return Store(out, of_out, left * Load<Value>(y, of_y));
      case MapOp::kScale:
        return Store(out, of_out, static_cast<Value>(static_cast<Value>(factor) * left + static_cast<Value>(bias)));
      case MapOp::kRsqrt:
        return Store(out, of_out, static_cast<Value>(1.0f / sqrtf(static_cast<float>(left))));
    }
  }
};

struct MeanBody {
  Array x, out;
  int64_t columns;

  RIG_DEVICE void operator()(int64_t row, Team team) const {
    float sum = 0.0f;
    for (int64_t i = team.lane; i < columns; i += team.lanes) sum += Load<float>(x, row * columns + i);
    sum = team.Reduce(sum, [](float a, float b) { return a + b; });
    if (team.lane == 0) Store(out, row, sum / static_cast<float>(columns));
  }
};

struct SoftmaxBody {
  Array x, out;
  int64_t columns;

  RIG_DEVICE void operator()(int64_t row, Team team) const {
    float largest = -INFINITY, sum = 0.0f;
    for (int64_t i = team.lane; i < columns; i += team.lanes) largest = fmaxf(largest, Load<float>(x, row * columns + i));
    largest = team.Reduce(largest, [](float a, float b) { return fmaxf(a, b); });
    for (int64_t i = team.lane; i < columns; i += team.lanes) sum += expf(Load<float>(x, row * columns + i) - largest);
    sum = team.Reduce(sum, [](float a, float b) { return a + b; });
    for (int64_t i = team.lane; i < columns; i += team.lanes) {
      Store(out, row * columns + i, expf(Load<float>(x, row * columns + i) - largest) / sum);
    }
  }
};

struct ArgmaxBody {
  struct Found {
    float value;
    int64_t place;
  };

  Array x, out;
  int64_t columns;

  RIG_DEVICE void operator()(int64_t row, Team team) const {
    const auto first_of_largest = [](Found a, Found b) {
      return b.value > a.value || (b.value == a.value && b.place < a.place) ? b : a;
    };
    Found found{-INFINITY, columns - 1};
    for (int64_t i = team.lane; i < columns; i += team.lanes) {
      found = first_of_largest(found, Found{Load<float>(x, row * columns + i), i});
    }
    found = team.Reduce(found, first_of_largest);
    if (team.lane == 0) Store(out, row, found.place);
  }
};

template <typename Value>
struct MoveBody {
  Array table, ids, out;
  int64_t width;
  bool scatters;

  RIG_DEVICE void operator()(int64_t i) const {
    const int64_t there = Load<int64_t>(ids, i / width) * width + i % width;
    Store(out, scatters ? there : i, Load<Value>(table, scatters ? i : there));
  }
};

struct SwiGluBody {
  Array x, out;
  int64_t width;

  RIG_DEVICE void operator()(int64_t i) const {
    const int64_t at = i / width * 2 * width + i % width;
    const float gate = Load<float>(x, at);
    Store(out, i, gate / (1.0f + expf(-gate)) * Load<float>(x, at + width));
  }
};

}  // namespace

void Map(MapOp op, const Array& x, const Array& y, const Array& out, float factor, float bias, void* stream) {
  if (IsInteger(x) && IsInteger(out)) {
    ForEach(out.size(), MapBody<int64_t>{op, x, y, out, factor, bias}, stream);
  } else {
    ForEach(out.size(), MapBody<float>{op, x, y, out, factor, bias}, stream);
  }
}

void MapRows(RowOp op, const Array& x, const Array& out, int64_t columns, void* stream) {
  const int64_t rows = x.size() / columns;
  if (op == RowOp::kMean) ForEachRow(rows, MeanBody{x, out, columns}, stream);
  if (op == RowOp::kSoftmax) ForEachRow(rows, SoftmaxBody{x, out, columns}, stream);
  if (op == RowOp::kArgmax) ForEachRow(rows, ArgmaxBody{x, out, columns}, stream);
}

void MoveRows(const Array& table, const Array& ids, const Array& out, int64_t count, int64_t width, bool scatters, void* stream) {
  if (IsInteger(out)) {
    ForEach(count * width, MoveBody<int64_t>{table, ids, out, width, scatters}, stream);
  } else {
    ForEach(count * width, MoveBody<float>{table, ids, out, width, scatters}, stream);
  }
}

void SwiGlu(const Array& x, const Array& out, int64_t width, void* stream) {
  ForEach(out.size(), SwiGluBody{x, out, width}, stream);
}

}  // namespace rig
