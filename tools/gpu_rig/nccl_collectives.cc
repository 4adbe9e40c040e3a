// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Collectives of the custom place "cuda_rig" over NCCL: the functions that paddle.distributed calls with
// PADDLE_DISTRI_BACKEND=xccl.
//
// NCCL is loaded on the first use, so the plug-in is built and loaded without it. The environment variable RIG_NCCL names the
// library; the default is libnccl.so.2. Its types are declared in this file as in NCCL 2.10 and later.
//
// Collectives without arithmetic move bytes, so they support every data type. float8 has no C_DataType; Paddle rejects it before
// the call.
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "device.h"

namespace {

struct UniqueId {
  char bytes[128];
};
using Comm = struct ncclComm*;
enum Type { kInt8, kUint8, kInt32, kUint32, kInt64, kUint64, kFloat16, kFloat32, kFloat64, kBfloat16 };
enum Operation { kSum, kProd, kMax, kMin, kAvg };

template <typename... Arguments>
C_Status Fail(const char* format, Arguments... arguments) {
  std::fprintf(stderr, "cuda_rig: ");
  std::fprintf(stderr, format, arguments...);
  std::fprintf(stderr, "\n");
  return C_ERROR;
}

// ---- the library

void* Library() {
  static void* const library = [] {
    const char* named = std::getenv("RIG_NCCL");
    void* found = dlopen(named ? named : "libnccl.so.2", RTLD_NOW);
    if (!found) Fail("collectives need NCCL (RIG_NCCL names the library): %s", dlerror());
    return found;
  }();
  return library;
}

// A function of the library; null, with a message, if the library lacks it.
template <typename Function>
Function* Find(const char* name) {
  if (!Library()) return nullptr;
  void* found = dlsym(Library(), name);
  if (!found) Fail("this NCCL has no %s", name);
  return reinterpret_cast<Function*>(found);
}

template <typename Function, typename... Arguments>
C_Status Call(const char* name, Function* function, Arguments... arguments) {
  if (!function) return C_ERROR;
  const int status = function(arguments...);
  if (status == 0) return C_SUCCESS;
  static auto* const text = Find<const char*(int)>("ncclGetErrorString");
  return Fail("%s: %s", name, text ? text(status) : "unknown error");
}

// Calls NCCL's function of that name and type.
#define NCCL(name, type, ...)                        \
  [&] {                                              \
    static auto* const function = Find<type>(#name); \
    return Call(#name, function, ##__VA_ARGS__);     \
  }()
#define RIG_TRY(call) \
  if (const C_Status rig_status = (call); rig_status != C_SUCCESS) return rig_status

using Copying = int(const void*, void*, size_t, int, Comm, cudaStream_t);
using Reducing = int(const void*, void*, size_t, int, int, Comm, cudaStream_t);
using Rooted = int(const void*, void*, size_t, int, int, Comm, cudaStream_t);
using RootedReducing = int(const void*, void*, size_t, int, int, int, Comm, cudaStream_t);
using Sending = int(const void*, size_t, int, int, Comm, cudaStream_t);
using Receiving = int(void*, size_t, int, int, Comm, cudaStream_t);
using Grouping = int();

// ---- conversion of Paddle's types to NCCL's

Comm Communicator(C_CCLComm comm) { return reinterpret_cast<Comm>(comm); }
cudaStream_t Stream(C_Stream stream) { return reinterpret_cast<cudaStream_t>(stream); }

C_Status Bytes(size_t count, C_DataType type, size_t* bytes) {
  switch (type) {
    case BOOL:
    case UINT8:
    case INT8:
      *bytes = count;
      return C_SUCCESS;
    case UINT16:
    case INT16:
    case FLOAT16:
    case BFLOAT16:
      *bytes = count * 2;
      return C_SUCCESS;
    case UINT32:
    case INT32:
    case FLOAT32:
      *bytes = count * 4;
      return C_SUCCESS;
    case UINT64:
    case INT64:
    case FLOAT64:
    case COMPLEX64:
      *bytes = count * 8;
      return C_SUCCESS;
    case COMPLEX128:
      *bytes = count * 16;
      return C_SUCCESS;
    default:
      return Fail("no collective takes C_DataType %d", type);
  }
}

C_Status TypeToReduce(C_DataType type, Type* out) {
  switch (type) {
    case INT8:
      *out = kInt8;
      return C_SUCCESS;
    case BOOL:
    case UINT8:
      *out = kUint8;
      return C_SUCCESS;
    case INT32:
      *out = kInt32;
      return C_SUCCESS;
    case UINT32:
      *out = kUint32;
      return C_SUCCESS;
    case INT64:
      *out = kInt64;
      return C_SUCCESS;
    case UINT64:
      *out = kUint64;
      return C_SUCCESS;
    case FLOAT16:
      *out = kFloat16;
      return C_SUCCESS;
    case FLOAT32:
      *out = kFloat32;
      return C_SUCCESS;
    case FLOAT64:
      *out = kFloat64;
      return C_SUCCESS;
    case BFLOAT16:
      *out = kBfloat16;
      return C_SUCCESS;
    default:
      return Fail("NCCL reduces no C_DataType %d", type);
  }
}

C_Status OperationOf(C_CCLReduceOp op, Operation* out) {
  switch (op) {
    case SUM:
      *out = kSum;
      return C_SUCCESS;
    case PRODUCT:
      *out = kProd;
      return C_SUCCESS;
    case MAX:
      *out = kMax;
      return C_SUCCESS;
    case MIN:
      *out = kMin;
      return C_SUCCESS;
    case AVG:
      *out = kAvg;
      return C_SUCCESS;
    default:
      return Fail("no reduction %d", op);
  }
}

// ---- communicators

C_Status CommName(C_CCLComm, char* name) {
  std::strcpy(name, "nccl");
  return C_SUCCESS;
}

C_Status UniqueIdSize(size_t* size) {
  *size = sizeof(UniqueId);
  return C_SUCCESS;
}

C_Status GetUniqueId(C_CCLRootId* id) {
  UniqueId made;
  RIG_TRY(NCCL(ncclGetUniqueId, int(UniqueId*), &made));
  std::memcpy(id->data, &made, sizeof made);
  return C_SUCCESS;
}

// Creates a communicator on the current device, which Paddle has set.
C_Status InitRank(size_t ranks, C_CCLRootId* id, size_t rank, C_CCLComm* comm) {
  UniqueId shared;
  std::memcpy(&shared, id->data, sizeof shared);
  Comm made = nullptr;
  RIG_TRY(NCCL(ncclCommInitRank, int(Comm*, int, UniqueId, int), &made, static_cast<int>(ranks), shared, static_cast<int>(rank)));
  *comm = reinterpret_cast<C_CCLComm>(made);
  return C_SUCCESS;
}

C_Status Destroy(C_CCLComm comm) { return NCCL(ncclCommDestroy, int(Comm), Communicator(comm)); }

// ---- collectives

C_Status AllReduce(void* in, void* out, size_t count, C_DataType type, C_CCLReduceOp op, C_CCLComm comm, C_Stream stream) {
  Type to_reduce;
  Operation operation;
  RIG_TRY(TypeToReduce(type, &to_reduce));
  RIG_TRY(OperationOf(op, &operation));
  return NCCL(ncclAllReduce, Reducing, in, out, count, to_reduce, operation, Communicator(comm), Stream(stream));
}

C_Status Reduce(void* in, void* out, size_t count, C_DataType type, C_CCLReduceOp op, size_t root, C_CCLComm comm,
                C_Stream stream) {
  Type to_reduce;
  Operation operation;
  RIG_TRY(TypeToReduce(type, &to_reduce));
  RIG_TRY(OperationOf(op, &operation));
  return NCCL(ncclReduce, RootedReducing, in, out, count, to_reduce, operation, static_cast<int>(root), Communicator(comm),
              Stream(stream));
}

C_Status ReduceScatter(void* in, void* out, size_t count, C_DataType type, C_CCLReduceOp op, C_CCLComm comm, C_Stream stream) {
  Type to_reduce;
  Operation operation;
  RIG_TRY(TypeToReduce(type, &to_reduce));
  RIG_TRY(OperationOf(op, &operation));
  return NCCL(ncclReduceScatter, Reducing, in, out, count, to_reduce, operation, Communicator(comm), Stream(stream));
}

C_Status Broadcast(void* buffer, size_t count, C_DataType type, size_t root, C_CCLComm comm, C_Stream stream) {
  size_t bytes;
  RIG_TRY(Bytes(count, type, &bytes));
  return NCCL(ncclBroadcast, Rooted, buffer, buffer, bytes, kUint8, static_cast<int>(root), Communicator(comm), Stream(stream));
}

C_Status AllGather(void* in, void* out, size_t count, C_DataType type, C_CCLComm comm, C_Stream stream) {
  size_t bytes;
  RIG_TRY(Bytes(count, type, &bytes));
  return NCCL(ncclAllGather, Copying, in, out, bytes, kUint8, Communicator(comm), Stream(stream));
}

C_Status SendBytes(const void* buffer, size_t bytes, size_t to, C_CCLComm comm, C_Stream stream) {
  return NCCL(ncclSend, Sending, buffer, bytes, kUint8, static_cast<int>(to), Communicator(comm), Stream(stream));
}

C_Status ReceiveBytes(void* buffer, size_t bytes, size_t from, C_CCLComm comm, C_Stream stream) {
  return NCCL(ncclRecv, Receiving, buffer, bytes, kUint8, static_cast<int>(from), Communicator(comm), Stream(stream));
}

C_Status Send(void* buffer, size_t count, C_DataType type, size_t to, C_CCLComm comm, C_Stream stream) {
  size_t bytes;
  RIG_TRY(Bytes(count, type, &bytes));
  return SendBytes(buffer, bytes, to, comm, stream);
}

C_Status Receive(void* buffer, size_t count, C_DataType type, size_t from, C_CCLComm comm, C_Stream stream) {
  size_t bytes;
  RIG_TRY(Bytes(count, type, &bytes));
  return ReceiveBytes(buffer, bytes, from, comm, stream);
}

C_Status GroupStart() { return NCCL(ncclGroupStart, Grouping); }
C_Status GroupEnd() { return NCCL(ncclGroupEnd, Grouping); }

C_Status ExchangeWith(size_t peer, const void* in, size_t in_bytes, void* out, size_t out_bytes, C_CCLComm comm,
                      C_Stream stream) {
  if (in_bytes > 0) RIG_TRY(SendBytes(in, in_bytes, peer, comm, stream));
  if (out_bytes > 0) RIG_TRY(ReceiveBytes(out, out_bytes, peer, comm, stream));
  return C_SUCCESS;
}

// Empty parts are not sent; both sides know their sizes. A rank copies its own part.
C_Status AllToAll(const void** in, const size_t* in_counts, const C_DataType* in_types, void** out, const size_t* out_counts,
                  const C_DataType* out_types, size_t rank, size_t ranks, C_CCLComm comm, C_Stream stream) {
  C_Status status = GroupStart();
  if (status != C_SUCCESS) return status;
  for (size_t peer = 0; peer < ranks && status == C_SUCCESS; ++peer) {
    size_t in_bytes, out_bytes;
    status = Bytes(in_counts[peer], in_types[peer], &in_bytes);
    if (status == C_SUCCESS) status = Bytes(out_counts[peer], out_types[peer], &out_bytes);
    if (status != C_SUCCESS) break;
    if (peer != rank) {
      status = ExchangeWith(peer, in[peer], in_bytes, out[peer], out_bytes, comm, stream);
    } else if (in_bytes != out_bytes) {
      status = Fail("all_to_all: rank %zu sends itself %zu bytes and receives %zu", rank, in_bytes, out_bytes);
    } else if (in_bytes > 0) {
      const cudaError_t copied = cudaMemcpyAsync(out[rank], in[rank], in_bytes, cudaMemcpyDeviceToDevice, Stream(stream));
      if (copied != cudaSuccess) status = Fail("cudaMemcpyAsync: %s", cudaGetErrorString(copied));
    }
  }
  const C_Status ended = GroupEnd();  // also after an error: otherwise the next call would be part of the group
  return status == C_SUCCESS ? ended : status;
}

}  // namespace

namespace rig {

void SetCollectives(C_DeviceInterface* device) {
  device->xccl_get_comm_name = CommName;
  device->xccl_get_unique_id_size = UniqueIdSize;
  device->xccl_get_unique_id = GetUniqueId;
  device->xccl_comm_init_rank = InitRank;
  device->xccl_destroy_comm = Destroy;
  device->xccl_all_reduce = AllReduce;
  device->xccl_broadcast = Broadcast;
  device->xccl_reduce = Reduce;
  device->xccl_all_gather = AllGather;
  device->xccl_reduce_scatter = ReduceScatter;
  device->xccl_group_start = GroupStart;
  device->xccl_group_end = GroupEnd;
  device->xccl_send = Send;
  device->xccl_recv = Receive;
  device->xccl_all_to_all = AllToAll;
}

}  // namespace rig
