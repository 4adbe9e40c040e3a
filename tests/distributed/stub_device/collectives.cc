// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Collectives of the custom device "stub_rig" between processes of one host, over a Unix socket for each pair of ranks.
//
// A message says which collective it belongs to and how long it is, so that ranks which disagree fail instead of waiting for each
// other or taking wrong bytes. A call that waits reads whatever arrives, for any communicator, so nobody waits to be read: sends
// need no particular order. Ranks that both receive first do wait for ever, as they do everywhere.
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "device.h"

namespace {

[[noreturn]] void FailCall(const char* call) { throw std::runtime_error(std::string(call) + ": " + std::strerror(errno)); }

// ---- messages between two ranks

struct Peer {
  int fd = -1;
  bool open = true;
  std::vector<char> received;  // and not taken yet

  Peer() = default;
  Peer(const Peer&) = delete;
  ~Peer() {
    if (fd >= 0) close(fd);
  }
  void Read() {
    char part[1 << 16];
    while (open) {
      const ssize_t n = recv(fd, part, sizeof part, MSG_DONTWAIT);
      if (n > 0) {
        received.insert(received.end(), part, part + n);
      } else if (n == 0 || errno == ECONNRESET) {
        open = false;
      } else if (errno == EAGAIN) {
        return;
      } else if (errno != EINTR) {
        FailCall("recv");
      }
    }
  }
};

struct Comm {
  size_t rank = 0;
  std::vector<Peer> peers;  // by rank; the own is unused
};

std::mutex one_call_at_a_time;
std::set<Comm*> communicators;

// Until something has arrived from anyone, or the socket `writing` takes more.
void Wait(int writing = -1) {
  std::vector<pollfd> polled;
  for (const Comm* comm : communicators) {
    for (const Peer& peer : comm->peers) {
      const short events = POLLIN | (peer.fd == writing ? POLLOUT : 0);
      if (peer.fd >= 0 && (peer.open || peer.fd == writing)) polled.push_back({peer.fd, events, 0});
    }
  }
  if (poll(polled.data(), polled.size(), -1) < 0 && errno != EINTR) FailCall("poll");
  for (Comm* comm : communicators) {
    for (Peer& peer : comm->peers) {
      if (peer.fd >= 0) peer.Read();
    }
  }
}

struct Header {
  char call[16];
  uint64_t bytes;
};
Header MakeHeader(const char* call, size_t bytes) {
  Header header{{}, bytes};
  std::strncpy(header.call, call, sizeof header.call - 1);
  return header;
}

void Write(Comm* comm, size_t to, const void* data, size_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = send(comm->peers[to].fd, next, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n >= 0) {
      next += n, bytes -= n;
    } else if (errno == EAGAIN) {
      Wait(comm->peers[to].fd);
    } else if (errno != EINTR) {
      throw std::runtime_error("rank " + std::to_string(to) + " has ended");
    }
  }
}

void Take(Comm* comm, size_t from, void* data, size_t bytes) {
  Peer& peer = comm->peers[from];
  while (peer.received.size() < bytes) {
    if (!peer.open) throw std::runtime_error("rank " + std::to_string(from) + " has ended");
    Wait();
  }
  std::copy_n(peer.received.begin(), bytes, static_cast<char*>(data));
  peer.received.erase(peer.received.begin(), peer.received.begin() + bytes);
}

void SendTo(Comm* comm, size_t to, const char* call, const void* data, size_t bytes) {
  const Header header = MakeHeader(call, bytes);
  Write(comm, to, &header, sizeof header);
  Write(comm, to, data, bytes);
}

void ReceiveFrom(Comm* comm, size_t from, const char* call, void* data, size_t bytes) {
  Header header;
  Take(comm, from, &header, sizeof header);
  if (std::strcmp(header.call, call) != 0 || header.bytes != bytes) {
    throw std::runtime_error("expected " + std::to_string(bytes) + " bytes of " + call + " from rank " + std::to_string(from) +
                             ", got " + std::to_string(header.bytes) + " of " + header.call);
  }
  Take(comm, from, data, bytes);
}

// ---- data types and reductions

size_t Size(C_DataType type) {
  switch (type) {
    case BOOL:
    case UINT8:
    case INT8:
      return 1;
    case UINT16:
    case INT16:
    case FLOAT16:
    case BFLOAT16:
      return 2;
    case UINT32:
    case INT32:
    case FLOAT32:
      return 4;
    case UINT64:
    case INT64:
    case FLOAT64:
    case COMPLEX64:
      return 8;
    case COMPLEX128:
      return 16;
    default:
      throw std::runtime_error("no data type " + std::to_string(type));
  }
}

struct Bfloat16 {
  uint16_t bits;
  operator float() const {
    const uint32_t wide = uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
  Bfloat16& operator=(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    bits = value == value ? (wide + 0x7FFF + (wide >> 16 & 1)) >> 16 : 0x7FC0;
    return *this;
  }
};

// Ranks ascending; rounded once.
template <typename T, typename Sum = T>
void ReduceAs(const std::vector<const char*>& parts, void* out, size_t count, C_CCLReduceOp op) {
  for (size_t i = 0; i < count; ++i) {
    Sum sum = reinterpret_cast<const T*>(parts[0])[i];
    for (size_t p = 1; p < parts.size(); ++p) {
      const Sum next = reinterpret_cast<const T*>(parts[p])[i];
      sum = op == MAX ? std::max(sum, next) : op == MIN ? std::min(sum, next) : op == PRODUCT ? sum * next : sum + next;
    }
    static_cast<T*>(out)[i] = op == AVG ? sum / static_cast<Sum>(parts.size()) : sum;
  }
}

void ReduceParts(const std::vector<const char*>& parts, void* out, size_t count, C_DataType type, C_CCLReduceOp op) {
  switch (type) {
    case UINT8:
    case BOOL:
      return ReduceAs<uint8_t>(parts, out, count, op);
    case INT8:
      return ReduceAs<int8_t>(parts, out, count, op);
    case INT32:
      return ReduceAs<int32_t>(parts, out, count, op);
    case INT64:
      return ReduceAs<int64_t>(parts, out, count, op);
    case BFLOAT16:
      return ReduceAs<Bfloat16, float>(parts, out, count, op);
    case FLOAT16:
      return ReduceAs<_Float16, float>(parts, out, count, op);
    case FLOAT32:
      return ReduceAs<float>(parts, out, count, op);
    case FLOAT64:
      return ReduceAs<double>(parts, out, count, op);
    default:
      throw std::runtime_error("no reduction of data type " + std::to_string(type));
  }
}

// ---- the collectives

// Runs `work(comm)`; what it throws becomes a message and an error.
template <typename Work>
C_Status Call(const char* call, C_CCLComm handle, Work work) {
  const std::lock_guard<std::mutex> lock(one_call_at_a_time);
  Comm* comm = reinterpret_cast<Comm*>(handle);
  try {
    work(comm);
    return C_SUCCESS;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "stub_rig: %s: rank %zu: %s\n", call, comm ? comm->rank : 0, error.what());
    return C_ERROR;
  }
}

// To each rank its part of `in`, from each rank its part of `out`.
void Exchange(Comm* comm, const char* call, const std::vector<const char*>& in, const std::vector<size_t>& in_bytes,
              const std::vector<char*>& out, const std::vector<size_t>& out_bytes) {
  const size_t own = comm->rank, ranks = comm->peers.size();
  if (in_bytes[own] != out_bytes[own]) throw std::runtime_error("the part for itself has two sizes");
  for (size_t step = 1; step < ranks; ++step) {
    const size_t to = (own + step) % ranks;
    SendTo(comm, to, call, in[to], in_bytes[to]);
  }
  if (in_bytes[own] > 0) std::memmove(out[own], in[own], in_bytes[own]);
  for (size_t step = 1; step < ranks; ++step) {
    const size_t from = (own + ranks - step) % ranks;
    ReceiveFrom(comm, from, call, out[from], out_bytes[from]);
  }
}

// Every rank's `part`s, which lie `stride` bytes apart in `in` for the ranks they go to, reduced into `out`.
void ExchangeAndReduce(Comm* comm, const char* call, const void* in, size_t stride, void* out, size_t count, C_DataType type,
                       C_CCLReduceOp op) {
  const size_t ranks = comm->peers.size(), bytes = count * Size(type);
  std::vector<char> arrived(ranks * bytes);
  std::vector<const char*> parts(ranks), sent(ranks);
  std::vector<char*> received(ranks);
  for (size_t rank = 0; rank < ranks; ++rank) {
    sent[rank] = static_cast<const char*>(in) + rank * stride;
    parts[rank] = received[rank] = arrived.data() + rank * bytes;
  }
  const std::vector<size_t> sizes(ranks, bytes);
  Exchange(comm, call, sent, sizes, received, sizes);
  ReduceParts(parts, out, count, type, op);
}

C_Status AllReduce(void* in, void* out, size_t count, C_DataType type, C_CCLReduceOp op, C_CCLComm handle, C_Stream) {
  return Call("all_reduce", handle, [&](Comm* comm) { ExchangeAndReduce(comm, "all_reduce", in, 0, out, count, type, op); });
}

C_Status Reduce(void* in, void* out, size_t count, C_DataType type, C_CCLReduceOp op, size_t root, C_CCLComm handle, C_Stream) {
  return Call("reduce", handle, [&](Comm* comm) {
    const size_t ranks = comm->peers.size(), bytes = count * Size(type);
    if (comm->rank != root) return SendTo(comm, root, "reduce", in, bytes);
    std::vector<char> arrived(ranks * bytes);
    std::vector<const char*> parts(ranks);
    for (size_t rank = 0; rank < ranks; ++rank) {
      parts[rank] = rank == root ? static_cast<const char*>(in) : arrived.data() + rank * bytes;
      if (rank != root) ReceiveFrom(comm, rank, "reduce", arrived.data() + rank * bytes, bytes);
    }
    ReduceParts(parts, out, count, type, op);
  });
}

C_Status ReduceScatter(void* in, void* out, size_t count, C_DataType type, C_CCLReduceOp op, C_CCLComm handle, C_Stream) {
  return Call("reduce_scatter", handle,
              [&](Comm* comm) { ExchangeAndReduce(comm, "reduce_scatter", in, count * Size(type), out, count, type, op); });
}

C_Status Broadcast(void* buffer, size_t count, C_DataType type, size_t root, C_CCLComm handle, C_Stream) {
  return Call("broadcast", handle, [&](Comm* comm) {
    const size_t bytes = count * Size(type);
    if (comm->rank != root) return ReceiveFrom(comm, root, "broadcast", buffer, bytes);
    for (size_t rank = 0; rank < comm->peers.size(); ++rank) {
      if (rank != root) SendTo(comm, rank, "broadcast", buffer, bytes);
    }
  });
}

C_Status AllGather(void* in, void* out, size_t count, C_DataType type, C_CCLComm handle, C_Stream) {
  return Call("all_gather", handle, [&](Comm* comm) {
    const size_t ranks = comm->peers.size(), bytes = count * Size(type);
    const std::vector<const char*> sent(ranks, static_cast<const char*>(in));
    std::vector<char*> received(ranks);
    for (size_t rank = 0; rank < ranks; ++rank) received[rank] = static_cast<char*>(out) + rank * bytes;
    const std::vector<size_t> sizes(ranks, bytes);
    Exchange(comm, "all_gather", sent, sizes, received, sizes);
  });
}

C_Status AllToAll(const void** in, const size_t* in_counts, const C_DataType* in_types, void** out, const size_t* out_counts,
                  const C_DataType* out_types, size_t, size_t ranks, C_CCLComm handle, C_Stream) {
  return Call("all_to_all", handle, [&](Comm* comm) {
    std::vector<const char*> sent(ranks);
    std::vector<char*> received(ranks);
    std::vector<size_t> in_bytes(ranks), out_bytes(ranks);
    for (size_t rank = 0; rank < ranks; ++rank) {
      sent[rank] = static_cast<const char*>(in[rank]);
      received[rank] = static_cast<char*>(out[rank]);
      in_bytes[rank] = in_counts[rank] * Size(in_types[rank]);
      out_bytes[rank] = out_counts[rank] * Size(out_types[rank]);
    }
    Exchange(comm, "all_to_all", sent, in_bytes, received, out_bytes);
  });
}

C_Status Send(void* buffer, size_t count, C_DataType type, size_t to, C_CCLComm handle, C_Stream) {
  return Call("send", handle, [&](Comm* comm) { SendTo(comm, to, "send", buffer, count * Size(type)); });
}

C_Status Recv(void* buffer, size_t count, C_DataType type, size_t from, C_CCLComm handle, C_Stream) {
  return Call("recv", handle, [&](Comm* comm) { ReceiveFrom(comm, from, "send", buffer, count * Size(type)); });
}

// ---- communicators

constexpr size_t kIdBytes = 16;

C_Status CommName(C_CCLComm, char* name) {
  std::strcpy(name, "stub");
  return C_SUCCESS;
}

C_Status UniqueIdSize(size_t* size) {
  *size = kIdBytes;
  return C_SUCCESS;
}

C_Status GetUniqueId(C_CCLRootId* id) {
  return Call("get_unique_id", nullptr, [&](Comm*) {
    if (getrandom(id->data, kIdBytes, 0) != kIdBytes) FailCall("getrandom");
  });
}

// The name that a rank listens at; it is in no file system and goes when the socket does.
sockaddr_un Address(const C_CCLRootId* id, size_t rank) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  char* name = address.sun_path + 1;
  for (size_t i = 0; i < kIdBytes; ++i) name += std::sprintf(name, "%02x", static_cast<const unsigned char*>(id->data)[i]);
  std::sprintf(name, "-%zu", rank);
  return address;
}

int MakeSocket() {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) FailCall("socket");
  return fd;
}

// A rank calls those below it, and those above it call.
C_Status InitRank(size_t ranks, C_CCLRootId* id, size_t rank, C_CCLComm* out) {
  return Call("comm_init_rank", nullptr, [&](Comm*) {
    auto comm = std::make_unique<Comm>();
    comm->rank = rank;
    comm->peers = std::vector<Peer>(ranks);
    Peer listener;
    listener.fd = MakeSocket();
    sockaddr_un address = Address(id, rank);
    if (bind(listener.fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) FailCall("bind");
    if (listen(listener.fd, static_cast<int>(ranks)) != 0) FailCall("listen");
    for (size_t below = 0; below < rank; ++below) {
      const int fd = comm->peers[below].fd = MakeSocket();
      address = Address(id, below);
      while (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
        if (errno != ECONNREFUSED && errno != EINTR) FailCall("connect");
        usleep(1000);  // it does not listen yet
      }
      if (send(fd, &rank, sizeof rank, MSG_NOSIGNAL) != sizeof rank) FailCall("send");
    }
    for (size_t above = rank + 1; above < ranks; ++above) {
      const int fd = accept4(listener.fd, nullptr, nullptr, SOCK_CLOEXEC);
      if (fd < 0) FailCall("accept");
      size_t caller;
      if (recv(fd, &caller, sizeof caller, MSG_WAITALL) != sizeof caller) FailCall("recv");
      comm->peers.at(caller).fd = fd;
    }
    communicators.insert(comm.get());
    *out = reinterpret_cast<C_CCLComm>(comm.release());
  });
}

C_Status Destroy(C_CCLComm handle) {
  return Call("destroy_comm", handle, [](Comm* comm) {
    communicators.erase(comm);
    delete comm;
  });
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
  device->xccl_send = Send;
  device->xccl_recv = Recv;
  device->xccl_all_to_all = AllToAll;
}

}  // namespace rig
